"""The metrics a server exposes: its counters, and gauges that are computed when they are read."""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from isthmus.features import clock
from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.production import PackageQuality, Production, Quality, production_file
from isthmus.features.projectstatus import StreamStatus
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.metrics.counters import Tally
from isthmus.serving.recorder.spool import SpoolBacklog, waiting
from isthmus.serving.redis.store import ViewRows
from isthmus.serving.state import DEPLOYMENT_STATES, State
from isthmus.serving.watchedfile import WatchedFile
from isthmus.serving.wire.errors import NotReadyError

NEWEST = "isthmus_view_newest_known_microseconds"
"""Internal gauge: when the newest row that the workers have served became known. Exposed under another name."""

HISTORY_SECONDS = 60.0

NO_OBJECTIVES: Mapping[str, float] = MappingProxyType({})


LONGEST = 120
"""Maximum characters in the name of a slice."""


class SpoolGauges:
    """Gauges of the spool folder, as last read. All workers of a server report the same values."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder, self._most = folder, most
        self._backlog = SpoolBacklog(0, None)

    def look(self) -> None:
        with suppress(OSError):
            self._backlog = waiting(self._folder)

    def collect(self) -> Iterator[Metric]:
        since = self._backlog.since
        yield GaugeMetricFamily(
            "isthmus_spool_bytes", "Size of recorded answers in the spool.", value=self._backlog.size
        )
        yield GaugeMetricFamily(
            "isthmus_spool_limit_bytes", "Size of the spool above which recorded answers are dropped.", value=self._most
        )
        yield GaugeMetricFamily(
            "isthmus_spool_waiting_seconds",
            "Time that recorded answers have been waiting to be collected, exact to a minute; 0 without any.",
            value=0.0 if since is None else max(time.time() - since, 0.0),
        )


class StreamGauges:
    """Gauges of the streams of a project, from the files that `isthmus stream` writes to its state folder."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._streams: Mapping[str, StreamStatus] = {}

    def look(self) -> None:
        self._streams = StreamStatus.read_all(self._state)

    def collect(self) -> Iterator[Metric]:
        lag = GaugeMetricFamily(
            "isthmus_stream_lag_events", "Events of a stream that are not read yet.", labels=["source", "partition"]
        )
        measures: list[tuple[GaugeMetricFamily, Callable[[StreamStatus], float]]] = [
            (_of_stream("age_seconds", "Time since `isthmus stream` has last written its state."),
             lambda each: max(time.time() - each.at / 1e6, 0.0)),
            (_of_stream("watermark_timestamp_seconds", "Time before which all events were expected to have been read."),
             lambda each: each.watermark / 1e6),
            (_of_stream("late_events", "Events that arrived after the watermark had passed their known time."),
             lambda each: each.late),
            (_of_stream("unreadable_events", "Events in the table of unreadable events."),
             lambda each: each.unreadable),
            (_of_stream("events_per_second", "Events read per second, over ten seconds."),
             lambda each: each.events_per_second),
        ]  # fmt: skip
        for source, stream in self._streams.items():
            for partition, events in stream.lag.items():
                lag.add_metric([source, partition], events)
            for family, value in measures:
                family.add_metric([source], value(stream))
        if self._streams:
            yield from (lag, *(family for family, _ in measures))


def _of_stream(name: str, documentation: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"isthmus_stream_{name}", documentation, labels=["source"])


class ProductionGauges:
    """Gauges of the deployed package's quality, from its file if there is one. Call `look` before `collect`."""

    def __init__(self, deployment: Path) -> None:
        self._state = deployment.parent
        self._file: WatchedFile[Production] | None = None

    def look(self, model: str) -> None:
        path = production_file(self._state, model)
        if self._file is None or self._file.path != path:
            self._file = WatchedFile(path, Production.loads)
        if self._file.changed():
            self._file.load()

    def collect(self, deployment: Deployment) -> Iterator[Metric]:
        file, model = self._file, deployment.model
        if file is None or not isinstance(file.content, Production) or file.content.model != model:
            return
        production = file.content
        age = GaugeMetricFamily(
            "isthmus_production_age_seconds", "Time since production quality was last measured.", labels=["model"]
        )
        if (written := file.written) is not None:
            age.add_metric([model], max(time.time() - written, 0.0))
        yield age
        package = production.of(deployment.digest, deployment.precision) or production.of(deployment.digest)
        if package is None:
            return
        yield from _quality(model, package)
        yield from _slices(model, package)
        yield from _drift(model, package)
        broken = GaugeMetricFamily(
            "isthmus_production_bound_broken", "1 if a bound on production quality is broken.",
            labels=["model", "metric"],
        )  # fmt: skip
        # The bounds apply to the package that was deployed at the time of the measurement.
        if production.packages[0] == package:
            for bound in production.bounds:
                broken.add_metric([model, bound.measure], bound.broken)
        yield broken


@dataclass(eq=False)
class Gauges(Collector):
    """The Prometheus collector of a server process. Set `rows`, `earlier`, `ready` and `lost` before each exposition.

    Attributes:
        latency_objective: objective for the p99 of answers, in seconds.
        freshness_objectives: maximum age of the newest row in seconds, by view name.
        history_objective: time in which pushed rows should reach the history, in seconds.
        rows: state in the online store of each view of the current contract.
        earlier: state of each view definition of an earlier contract that a model still reads.
        ready: True if lookups could be answered.
        lost: names of views that have lost rows.
    """

    _counted: Tally
    _state: Callable[[], State]
    _now: Callable[[], int]
    latency_objective: float
    freshness_objectives: Mapping[str, float]
    history_objective: float = HISTORY_SECONDS
    production: ProductionGauges | None = None
    spool: SpoolGauges | None = None
    streams: StreamGauges | None = None
    rows: Mapping[str, ViewRows] = field(default_factory=dict)
    earlier: Mapping[str, ViewRows] = field(default_factory=dict)
    ready: bool = False
    lost: Collection[str] = ()

    def views(self) -> Collection[str]:
        contract = self._contract()
        return () if contract is None else contract.views

    def collect(self) -> Iterable[Metric]:
        families = {family.name: family for family in self._counted.collect()}
        served = families.pop(NEWEST, None)
        newest = (
            {sample.labels["view"]: int(sample.value) for sample in served.samples if sample.value} if served else {}
        )
        for family in self._computed(newest):
            families[family.name] = family
        return [families[name] for name in sorted(families)]

    def _computed(self, served: Mapping[str, int]) -> Iterator[Metric]:
        contract = self._contract()
        yield GaugeMetricFamily(
            "isthmus_ready",
            "1 if lookups can be answered: a contract is loaded, the online store answers, and it has lost no rows "
            "or `missing` is null.",
            value=contract is not None and self.ready,
        )
        yield GaugeMetricFamily(
            "isthmus_latency_objective_seconds", "The objective for the p99 of answers.", value=self.latency_objective
        )
        yield GaugeMetricFamily(
            "isthmus_history_objective_seconds", "Time in which pushed rows should reach the history of their view.",
            value=self.history_objective,
        )  # fmt: skip
        for part in (self.spool, self.streams):
            if part is not None:
                yield from part.collect()
        if contract is None:
            return
        yield from self._freshness(contract, served)
        yield from self._waiting(contract)
        yield from self._deployed(contract)

    def _freshness(self, contract: Contract, served: Mapping[str, int]) -> Iterator[Metric]:
        newest = GaugeMetricFamily(
            "isthmus_view_newest_known_timestamp_seconds",
            "Time when the newest row of a view became known: in its table, by a push, or in an answer of this server.",
            labels=["view"],
        )
        age = GaugeMetricFamily(
            "isthmus_view_freshness_seconds",
            "Age of the newest row of a view: the present (or the time fixed in the settings) minus the time when the "
            "row became known. Absent for a view without rows, without times, or with lost rows. If a model still "
            "reads rows of an earlier contract, the older row counts.",
            labels=["view"],
        )
        objective = GaugeMetricFamily(
            "isthmus_view_freshness_objective_seconds", "Maximum age of the newest row of a view.",
            labels=["view"],
        )  # fmt: skip
        lost = GaugeMetricFamily(
            "isthmus_view_lost_rows", "1 if the online store has lost rows of a view; /status has the reason.",
            labels=["view"],
        )  # fmt: skip
        earlier = {view.name: view for view in self._state().earlier_views}
        for name in dict.fromkeys([*contract.views, *earlier]):
            known = self._known(contract.views.get(name), served.get(name), earlier.get(name))
            lost.add_metric([name], name in self.lost)
            if known is not None and name not in self.lost:
                newest.add_metric([name], known / 1e6)
                age.add_metric([name], (self._now() - known) / 1e6)
            if name in self.freshness_objectives:
                objective.add_metric([name], self.freshness_objectives[name])
        yield from (newest, age, objective, lost)

    def _waiting(self, contract: Contract) -> Iterator[Metric]:
        rows = GaugeMetricFamily(
            "isthmus_view_waiting_rows", "Pushed rows in the online store waiting for the history of a view.",
            labels=["view"],
        )  # fmt: skip
        age = GaugeMetricFamily(
            "isthmus_view_waiting_seconds",
            "Seconds that the oldest of these rows has been waiting for the history, by the clock of the "
            "online store; 0 without waiting rows.",
            labels=["view"],
        )
        for name in contract.views:
            if name in self.rows:
                backlog = self.rows[name].backlog
                rows.add_metric([name], backlog.rows)
                seconds = 0.0 if backlog.since is None else max(0.0, (clock.now() - backlog.since) / 1e6)
                age.add_metric([name], seconds)
        yield from (rows, age)

    def _known(self, view: ViewContract | None, served: int | None, earlier: ViewContract | None) -> int | None:
        """Return the time (microseconds) when the newest row of a view became known; None if unknown.

        If a model still reads the view's `earlier` definition and its newest row is older, return that time.
        """
        current = [served] if view is not None else []
        if view is not None and view.name in self.rows:
            current.append(self.rows[view.name].newest(view))
        before = self.earlier[earlier.name].newest(earlier) if earlier and earlier.name in self.earlier else None
        latest = max((time for time in current if time is not None), default=None)
        return min((time for time in (latest, before) if time is not None), default=None)

    def _deployed(self, contract: Contract) -> Iterator[Metric]:
        state = self._state()
        deployment = state.model.deployment if state.model else None
        info = {
            "project": contract.project,
            "contract": contract.hash,
            "model": deployment.model if deployment else "",
            "package": deployment.digest if deployment else "",
        }
        yield InfoMetricFamily("isthmus_contract", "The contract, model and package in use.", info)
        if deployment is not None:
            states = GaugeMetricFamily(
                "isthmus_deployment_state",
                "1 for the state of a deployment: settled, on probation, on probation without a way back, or restored "
                "by a server that has undone another one; /models has the reason.",
                labels=["model", "state"],
            )
            for name in DEPLOYMENT_STATES:
                states.add_metric([deployment.model, name], name == state.deployment_state)
            yield states
            if self.production is not None:
                yield from self.production.collect(deployment)
        if state.candidate_run is not None:
            given_up = GaugeMetricFamily(
                "isthmus_candidate_given_up", "1 if the candidate was given up; /models has the reason.",
                labels=["model"],
            )  # fmt: skip
            refused = state.candidate_run.refused is not None
            given_up.add_metric([state.candidate_run.candidate.deployment.model], refused)
            yield given_up

    def _contract(self) -> Contract | None:
        try:
            return self._state().contract
        except NotReadyError:
            return None


def _quality(model: str, package: PackageQuality) -> Iterator[Metric]:
    periods: dict[str, Quality] = {"all": package}
    if week := next((week for week in reversed(package.weeks) if week.rows), None):
        periods["week"] = week
    yield from _measured(
        model, "isthmus_production", "period", periods,
        "A quality metric of the deployed package, from labeled answers: all, or the newest week with any.",
    )  # fmt: skip


def _slices(model: str, package: PackageQuality) -> Iterator[Metric]:
    # Slice names contain text from requests, so limit their length.
    parts = {
        (name if len(name := part.name) <= LONGEST else f"{name[: LONGEST - 1]}…"): part
        for part in package.slices[::-1]
    }
    yield from _measured(
        model, "isthmus_production_slice", "slice", parts,
        "A quality metric of one of the worst slices of the deployed package's labeled answers.",
    )  # fmt: skip


def _measured(model: str, prefix: str, label: str, parts: Mapping[str, Quality], text: str) -> Iterator[Metric]:
    labels = ["model", "metric", label]
    value = GaugeMetricFamily(f"{prefix}_quality", text, labels=labels)
    low = GaugeMetricFamily(f"{prefix}_quality_low", "Lower end of its 95 % interval.", labels=labels)
    high = GaugeMetricFamily(f"{prefix}_quality_high", "Upper end of its 95 % interval.", labels=labels)
    answers = GaugeMetricFamily(f"{prefix}_answers", "Rows that were answered.", labels=["model", label])
    rows = GaugeMetricFamily(
        f"{prefix}_rows", "Answered rows with known labels, each label once.", labels=["model", label]
    )
    for name, part in parts.items():
        answers.add_metric([model, name], part.answers)
        rows.add_metric([model, name], part.rows)
        for metric, measure in part.measures.items():
            value.add_metric([model, metric, name], measure.value)
            if measure.low is not None and measure.high is not None:
                low.add_metric([model, metric, name], measure.low)
                high.add_metric([model, metric, name], measure.high)
    yield from (value, low, high, answers, rows)


def _drift(model: str, package: PackageQuality) -> Iterator[Metric]:
    index = GaugeMetricFamily(
        "isthmus_production_drift",
        "Population stability index of the served values of an input, or of the scores, against the training set.",
        labels=["model", "input"],
    )
    drifted = GaugeMetricFamily(
        "isthmus_production_drifted", "1 if the drift exceeds threshold, chance and usual variation.",
        labels=["model", "input"],
    )  # fmt: skip
    for drift in package.drift:
        index.add_metric([model, drift.name], drift.psi)
        drifted.add_metric([model, drift.name], bool(drift.exceeded))
    yield from (index, drifted)
