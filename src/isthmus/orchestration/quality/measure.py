"""Statistics of the offline tables, their expectations, and their drift (`isthmus features quality`)."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from isthmus.features import clock
from isthmus.features.errors import RequestError
from isthmus.features.offline.history import ViewHistory
from isthmus.features.progress import Progress, silent
from isthmus.features.quality.drift import LEAST, Drift, Thresholds, drift, windows
from isthmus.features.quality.statistics import FORMAT, ViewStatistics, view_statistics
from isthmus.features.quality.validation import Finding, ReferenceStatistics
from isthmus.orchestration.frames import view_names
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality import gate
from isthmus.orchestration.quality.baseline import references


class ViewDrift(msgspec.Struct, frozen=True, kw_only=True):
    """Drift of a view's new rows from the rows that its table had at a distillation's latest training set.

    `name` is the distillation's name. New rows have event times after `after` and up to `until`, in microseconds since
    1970 UTC; `until` None means no limit. With fewer than 100 new rows, `judged` is False: differences may be chance.
    """

    name: str
    training_set: str
    after: int
    until: int | None
    rows: int
    features: dict[str, Drift]

    @property
    def judged(self) -> bool:
        return self.rows >= LEAST


class ViewQuality(msgspec.Struct, frozen=True, kw_only=True):
    statistics: ViewStatistics
    findings: list[Finding]
    drift: list[ViewDrift]


class QualityReport(msgspec.Struct, frozen=True, kw_only=True):
    views: dict[str, ViewQuality]
    thresholds: Thresholds
    format: int = FORMAT

    @property
    def passed(self) -> bool:
        return not self.broken() and not self.drifted()

    def broken(self) -> list[Finding]:
        return [finding for view in self.views.values() for finding in view.findings if not finding.passed]

    def drifted(self) -> list[str]:
        return [
            f"view {name}, feature {feature}: {_measures(drift)} of {drift.rows} rows after training set "
            f"{drifts.training_set} of {drifts.name}"
            for name, view in self.views.items()
            for drifts in view.drift
            for feature, drift in drifts.features.items()
            if drift.exceeded
        ]

    def as_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {"passed": self.passed, **plain}


def quality(
    project: Project,
    views: Sequence[str] | None = None,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    drift: bool = True,
    progress: Progress = silent,
) -> QualityReport:
    """Measure the offline tables of views (default: all), and return statistics, results of expectations, and drift.

    Writes nothing. Broken expectations and drift are only reported; `require_quality` raises an error for them. With
    `drift`, compares new rows with the rows that the table had at each distillation's latest training set. New rows
    have event times after `since` (default: the last event time of that training set) and at most `until` (default: no
    limit). Times without a zone are UTC.

    Raises RequestError for an unknown view, or if `since` is not before `until`. Raises ContractMismatch if the
    definitions are not applied or a table has another contract. Raises DataError if a table is missing, or a table or
    statistics are damaged.
    """
    after, end = (None if time is None else clock.micros(time if time.tzinfo else time.replace(tzinfo=UTC))
                  for time in (since, until))  # fmt: skip
    if after is not None and end is not None and after >= end:
        raise RequestError("quality", f"since {since} is not before until {until}", expected="a window of time")
    contract = project.applied()
    names = view_names(project, views)
    offline = project.offline_store()
    report = {}
    for n, name in enumerate(names):
        progress(f"measuring {name}", n / len(names))
        history = offline.history(contract.views[name])
        with offline.reading(history.view.table):
            report[name] = ViewQuality(
                statistics=view_statistics(history.view, history.data, history.version, history.fingerprint),
                drift=[_drift(history, then, after, end) for then in references(project, history.view) if drift],
                findings=gate.findings(project, name, history.data),
            )
    progress("all views are measured", 1.0)
    return QualityReport(views=report, thresholds=Thresholds())


def require_quality(report: QualityReport) -> None:
    if wrong := [*map(str, report.broken()), *report.drifted()]:
        raise gate.gate_error("quality", wrong, "check the rows and their sources; if the world has changed, run "
                           "`isthmus features training-set`")  # fmt: skip


def _drift(history: ViewHistory, reference: ReferenceStatistics, after: int | None, until: int | None) -> ViewDrift:
    begin = reference.last if after is None else after
    new = view_statistics(history.view, history.data, history.version, "", after=begin, until=until)
    before = reference.features
    compared = {
        name: drift(before[name], feature) for name, feature in new.features.items() if name in before and new.rows
    }
    exceeded = [column for column in history.view.fields if column.name in compared and compared[column.name].exceeded]
    if exceeded and new.last is not None:
        # Only for exceeded features, since this reads the history of the reference again.
        usual = windows(exceeded, history.data, min(reference.last, begin), new.last - begin)
        for name, parts in usual.items():
            compared[name] = drift(before[name], new.features[name], windows=parts)
    return ViewDrift(name=reference.name, training_set=reference.training_set, after=begin, until=until,
                     rows=new.rows, features=compared)  # fmt: skip


def _measures(drift: Drift) -> str:
    values = {"psi": drift.psi, "ks": drift.ks, "wasserstein": drift.wasserstein}
    exceeded = ", ".join(f"{name} {values[name]:.3g}" for name in drift.exceeded if values[name] is not None)
    return exceeded + (f", unseen {', '.join(drift.unseen)}" if drift.unseen else "")
