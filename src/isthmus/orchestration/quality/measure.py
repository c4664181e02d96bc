"""`quality`: statistics of the offline tables, what their views promise, and how far they have drifted."""

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
    """New rows of a view, in (after, until] by event time in microseconds, against a training set of a distillation.

    `features` is empty without new rows.
    """

    name: str
    training_set: str
    after: int
    until: int | None
    rows: int
    features: dict[str, Drift]

    @property
    def judged(self) -> bool:
        """Whether there are enough new rows to call a difference a drift."""
        return self.rows >= LEAST


class ViewQuality(msgspec.Struct, frozen=True, kw_only=True):
    """A view: statistics of all its rows, its expectations, and the drift from each training set."""

    statistics: ViewStatistics
    findings: list[Finding]
    drift: list[ViewDrift]


class QualityReport(msgspec.Struct, frozen=True, kw_only=True):
    """The quality of views, and the thresholds of a drift."""

    views: dict[str, ViewQuality]
    thresholds: Thresholds
    format: int = FORMAT

    @property
    def passed(self) -> bool:
        """Whether every expectation holds and no feature has drifted."""
        return not self.broken() and not self.drifted()

    def broken(self) -> list[Finding]:
        """The expectations that do not hold."""
        return [finding for view in self.views.values() for finding in view.findings if not finding.passed]

    def drifted(self) -> list[str]:
        """A sentence for each feature that has drifted."""
        return [
            f"view {name}, feature {feature}: {_measures(drift)} of {drift.rows} rows after training set "
            f"{drifts.training_set} of {drifts.name}"
            for name, view in self.views.items()
            for drifts in view.drift
            for feature, drift in drifts.features.items()
            if drift.exceeded
        ]

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable form."""
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
    """Measures the offline tables of views, by default all.

    New rows, which are compared with the training set in use if `drift`, have event times after `since` up to `until`;
    by default all after that training set. Times without a zone are UTC.

    Raises:
        RequestError: the times are in the wrong order.
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
    """Raises GateFailed with every broken expectation and every drift."""
    if wrong := [*map(str, report.broken()), *report.drifted()]:
        raise gate.failure("quality", wrong, "look at the rows, then at their sources; if this is the world's "
                           "doing, make a new training set")  # fmt: skip


def _drift(history: ViewHistory, reference: ReferenceStatistics, after: int | None, until: int | None) -> ViewDrift:
    begin = reference.last if after is None else after
    new = view_statistics(history.view, history.data, history.version, "", after=begin, until=until)
    before = reference.features
    compared = {
        name: drift(before[name], feature) for name, feature in new.features.items() if name in before and new.rows
    }
    exceeded = [column for column in history.view.fields if column.name in compared and compared[column.name].exceeded]
    if exceeded and new.last is not None:
        # Only where something stands out: this reads the history of the reference again.
        usual = windows(exceeded, history.data, min(reference.last, begin), new.last - begin)
        for name, parts in usual.items():
            compared[name] = drift(before[name], new.features[name], windows=parts)
    return ViewDrift(name=reference.name, training_set=reference.training_set, after=begin, until=until,
                     rows=new.rows, features=compared)  # fmt: skip


def _measures(drift: Drift) -> str:
    values = {"psi": drift.psi, "ks": drift.ks, "wasserstein": drift.wasserstein}
    exceeded = ", ".join(f"{name} {values[name]:.3g}" for name in drift.exceeded if values[name] is not None)
    return exceeded + (f", unseen {', '.join(drift.unseen)}" if drift.unseen else "")
