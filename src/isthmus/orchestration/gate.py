"""The gate before the offline tables: rows that break what their view promises are not written."""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.dataset as ds

from isthmus.features.days import Days
from isthmus.features.errors import GateFailed
from isthmus.features.findings import Finding, by_row, check
from isthmus.orchestration.project import Project
from isthmus.orchestration.reference import references


def require(found: Sequence[Finding], part: Days | None = None) -> None:
    """Refuses rows that are about to be written if they break what their views promise.

    Args:
        found: what was found.
        part: the days of the rows, where those of others may have been written before; None if nothing was.

    Raises:
        GateFailed: they do; every expectation that is broken is named.
    """
    if broken := [str(finding) for finding in found if not finding.passed]:
        kept = "nothing was written" if part is None else f"of {part}, nothing was written"
        raise failure("build", broken, f"correct the transform, its sources or the expectation; {kept}")


def findings(project: Project, view: str, data: pa.Table | ds.Dataset | None, *, part: bool = False) -> list[Finding]:
    """What a view promises, held against rows.

    Args:
        project: the project.
        view: the view.
        data: the rows; None if there is none.
        part: whether they are not all rows of the view: then only what each row must hold counts.
    """
    promised = [one for one in project.definitions.views[view].expectations if not part or by_row(one)]
    if not promised or data is None:
        return []
    contract = project.definitions.contract.views[view]
    return check(contract, promised, data, now=project.now(), references=references(project, contract))


def failure(where: str, wrong: Sequence[str], remedy: str) -> GateFailed:
    """One error for everything that is wrong, a sentence each."""
    if len(wrong) == 1:
        return GateFailed(where, wrong[0], remedy=remedy)
    found = f"{len(wrong)} things do not hold" + "".join(f"\n  - {sentence}" for sentence in wrong)
    return GateFailed(where, found, remedy=remedy)
