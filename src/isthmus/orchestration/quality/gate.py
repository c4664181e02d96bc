"""The gate before both stores: rows that break what their view promises are written to neither."""

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.dataset as ds

from isthmus.features.days import Days
from isthmus.features.errors import GateFailed
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.quality.validation import Finding, by_row, check
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality.baseline import references


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


def require_online(project: Project, offline: OfflineStore, histories: Mapping[str, ViewHistory]) -> None:
    """Refuses tables that are about to be served if they do not hold what their views promise.

    A build of a range sees some days only, and what was fresh when it was written may be old today.

    Args:
        project: the project.
        offline: where the tables are.
        histories: view to its table.

    Raises:
        GateFailed: they do not; every expectation that is broken is named.
        DataError: a table is damaged.
    """
    broken: list[str] = []
    for name, history in histories.items():
        with offline.reading(history.view.table):
            broken += [str(finding) for finding in findings(project, name, history.data) if not finding.passed]
    if broken:
        remedy = "see `isthmus quality`; correct what is in the table, or the expectation; nothing was written"
        raise failure("materialize", broken, remedy)


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
