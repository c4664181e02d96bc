"""Checks before rows are written to the offline tables, Redis or snapshots: broken expectations stop the write."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from isthmus.features.days import Days
from isthmus.features.definition.expectations import BY_ROW
from isthmus.features.errors import GateFailed
from isthmus.features.offline.dayfiles import DayTarget
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.quality.validation import Finding, check
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality.baseline import references
from isthmus.transforms.views import executorbuild


def require(findings: Sequence[Finding], part: Days | None = None) -> None:
    if broken := [str(finding) for finding in findings if not finding.passed]:
        scope = "" if part is None else f"of {part}, "
        remedy = f"fix the transform, its sources or the expectation; {scope}nothing was written"
        raise gate_error("build", broken, remedy)


def require_online(
    project: Project,
    offline: OfflineStore,
    histories: Mapping[str, ViewHistory],
    where: str = "materialize",
    spark: Any = None,
) -> None:
    """Check all expectations of views before their rows go to Redis or to devices. Raise GateFailed if any is broken.

    The error lists all broken expectations. `histories` has the offline table of each view by name. `where` names the
    caller's step in the message. If `spark` is an engine's session, an executor reads the tables.
    """
    # The check when a table is built is not enough: a build of a range checks only its own days, and rows may have
    # become too old since.
    broken: list[str] = []
    for name, history in histories.items():
        rows, run = history.data, check
        if spark is not None:
            options, rows = offline.storage_options or {}, [(file, None) for file in history.files]
            target = DayTarget(offline.root, options, history.view, {}, (), None, project.now())
            run = partial(executorbuild.check_files, spark, target)
        with offline.reading(history.view.table):
            broken += [str(each) for each in findings(project, name, rows, check=run) if not each.passed]
    if broken:
        remedy = "run `isthmus features quality`, then fix the rows or the expectation; nothing was written"
        raise gate_error(where, broken, remedy)


def findings(
    project: Project, view: str, data: Any, *, part: bool = False, check: Callable[..., list[Finding]] = check
) -> list[Finding]:
    """Check the expectations of a view on rows of its table, and return the results, passed or broken.

    `data` has the rows, as a table or dataset, or whatever `check` takes in the place of one; the result is empty if it
    is None. Set `part` if `data` covers only some days of the table:
    then only expectations on single rows are checked. To raise an error for broken expectations, pass the result to
    `require`. Raises DataError if the saved statistics of a training set cannot be read.
    """
    expectations = project.definitions.views[view].expectations
    if part:
        expectations = [expectation for expectation in expectations if isinstance(expectation, BY_ROW)]
    if not expectations or data is None:
        return []
    contract = project.definitions.contract.views[view]
    return check(contract, expectations, data, now=project.now(), references=references(project, contract))


def gate_error(where: str, wrong: Sequence[str], remedy: str) -> GateFailed:
    if len(wrong) == 1:
        return GateFailed(where, wrong[0], remedy=remedy)
    problems = f"{len(wrong)} problems" + "".join(f"\n  - {sentence}" for sentence in wrong)
    return GateFailed(where, problems, remedy=remedy)
