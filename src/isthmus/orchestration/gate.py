"""The gate before the offline tables: rows that break what their view promises are not written."""

from collections.abc import Mapping, Sequence

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
        raise failure(
            "build", [*map(str, broken)], "correct the transform, its sources or the expectation; nothing was written"
        )


def findings(project: Project, view: str, data: pa.Table | ds.Dataset) -> list[Finding]:
    """What a view promises, held against rows."""
    promised = project.definitions.views[view].expectations
    contract = project.definitions.contract.views[view]
    known = references(project, contract) if promised else []
    return check(contract, promised, data, now=project.now(), references=known)


def failure(where: str, wrong: Sequence[str], remedy: str) -> GateFailed:
    """One error for everything that is wrong, a sentence each."""
    if len(wrong) == 1:
        return GateFailed(where, wrong[0], remedy=remedy)
    found = f"{len(wrong)} things do not hold" + "".join(f"\n  - {sentence}" for sentence in wrong)
    return GateFailed(where, found, remedy=remedy)
