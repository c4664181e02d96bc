"""Checks before rows are written to the offline tables, Redis or snapshots: broken expectations stop the write."""

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.dataset as ds

from isthmus.features.days import Days
from isthmus.features.definition.expectations import BY_ROW
from isthmus.features.errors import GateFailed
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.quality.validation import Finding, check
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality.baseline import references


def require(findings: Sequence[Finding], part: Days | None = None) -> None:
    """Raise GateFailed if a finding is a broken expectation; the message lists all of them.

    Set `part` if only these days were checked: the message then says that nothing of these days was written, because
    earlier days may be.
    """
    if broken := [str(finding) for finding in findings if not finding.passed]:
        scope = "" if part is None else f"of {part}, "
        remedy = f"fix the transform, its sources or the expectation; {scope}nothing was written"
        raise failure("build", broken, remedy)


def require_online(project: Project, offline: OfflineStore, histories: Mapping[str, ViewHistory]) -> None:
    """Check all expectations of offline tables again, before their rows go to Redis or to devices.

    The check when a table is built is not enough: a build of a range checks only its own days, and rows that were fresh
    when written may be too old now.

    Raises:
        GateFailed: expectations are broken; the message lists all of them.
        DataError: a table is damaged.
    """
    broken: list[str] = []
    for name, history in histories.items():
        with offline.reading(history.view.table):
            broken += [str(finding) for finding in findings(project, name, history.data) if not finding.passed]
    if broken:
        remedy = "run `isthmus features quality`, then fix the rows or the expectation; nothing was written"
        raise failure("materialize", broken, remedy)


def findings(project: Project, view: str, data: pa.Table | ds.Dataset | None, *, part: bool = False) -> list[Finding]:
    """Return a finding for each expectation of a view, whether it holds or not. Raises no error for broken ones.

    `data` are rows of the view; None gives no findings. Set `part` if they are only some days of the table: then only
    expectations that apply to single rows are checked.
    """
    expectations = project.definitions.views[view].expectations
    if part:
        expectations = [expectation for expectation in expectations if isinstance(expectation, BY_ROW)]
    if not expectations or data is None:
        return []
    contract = project.definitions.contract.views[view]
    return check(contract, expectations, data, now=project.now(), references=references(project, contract))


def failure(where: str, wrong: Sequence[str], remedy: str) -> GateFailed:
    """Return, but do not raise, one error that lists the sentences in `wrong`."""
    if len(wrong) == 1:
        return GateFailed(where, wrong[0], remedy=remedy)
    problems = f"{len(wrong)} problems" + "".join(f"\n  - {sentence}" for sentence in wrong)
    return GateFailed(where, problems, remedy=remedy)
