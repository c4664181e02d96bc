"""The gate before the offline tables: rows that break what their view promises are not written."""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.dataset as ds

from isthmus.features.errors import GateFailed
from isthmus.features.findings import Finding, check
from isthmus.orchestration.project import Project
from isthmus.orchestration.reference import references


def require_expectations(project: Project, rows: Mapping[str, pa.Table | ds.Dataset]) -> None:
    """Holds the rows that are about to become the tables of views against their expectations.

    Raises:
        GateFailed: some break one; every such expectation is named.
    """
    broken = [finding for view, data in rows.items() for finding in findings(project, view, data) if not finding.passed]
    if broken:
        raise failure("build", broken, "correct the transform, its sources or the expectation; nothing was written")


def findings(project: Project, view: str, data: pa.Table | ds.Dataset) -> list[Finding]:
    """What a view promises, held against rows."""
    promised = project.definitions.views[view].expectations
    contract = project.definitions.contract.views[view]
    known = references(project, contract) if promised else []
    return check(contract, promised, data, now=project.now(), references=known)


def failure(where: str, broken: list[Finding], remedy: str) -> GateFailed:
    """One error for all broken expectations."""
    if len(broken) == 1:
        return GateFailed(where, str(broken[0]), remedy=remedy)
    found = f"{len(broken)} expectations are broken" + "".join(f"\n  - {finding}" for finding in broken)
    return GateFailed(where, found, remedy=remedy)
