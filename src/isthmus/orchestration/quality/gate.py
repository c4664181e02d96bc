"""The gate before both stores: rows that break their view's expectations are not written."""

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
    """Raise GateFailed with every broken expectation.

    `part` has the days of the rows if earlier days may already be written.
    """
    if broken := [str(finding) for finding in findings if not finding.passed]:
        scope = "" if part is None else f"of {part}, "
        remedy = f"fix the transform, its sources or the expectation; {scope}nothing was written"
        raise failure("build", broken, remedy)


def require_online(project: Project, offline: OfflineStore, histories: Mapping[str, ViewHistory]) -> None:
    """Check the expectations of tables before they are served.

    A build of a range checks only its own days, and rows that were fresh when written may be too old today.

    Raises:
        GateFailed: an expectation is broken; the message has all of them.
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
    """Check a view's expectations; with `part`, only the expectations on single rows."""
    expectations = project.definitions.views[view].expectations
    if part:
        expectations = [expectation for expectation in expectations if isinstance(expectation, BY_ROW)]
    if not expectations or data is None:
        return []
    contract = project.definitions.contract.views[view]
    return check(contract, expectations, data, now=project.now(), references=references(project, contract))


def failure(where: str, wrong: Sequence[str], remedy: str) -> GateFailed:
    """Build one error for all problems, one sentence each."""
    if len(wrong) == 1:
        return GateFailed(where, wrong[0], remedy=remedy)
    problems = f"{len(wrong)} problems" + "".join(f"\n  - {sentence}" for sentence in wrong)
    return GateFailed(where, problems, remedy=remedy)
