"""The metrics a server exposes: its counters, and gauges that are computed when they are read."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from isthmus.features import clock
from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.serving.metrics.counters import Tally
from isthmus.serving.metrics.production import ProductionGauges
from isthmus.serving.metrics.spool import SpoolGauges
from isthmus.serving.redis.store import ViewRows
from isthmus.serving.state import DEPLOYMENT_STATES, State
from isthmus.serving.wire.errors import NotReadyError

NEWEST = "isthmus_view_newest_known_microseconds"
"""Internal gauge of the newest row that the workers have served; exposed under another name."""

HISTORY_SECONDS = 60.0

NO_OBJECTIVES: Mapping[str, float] = MappingProxyType({})


@dataclass(eq=False)
class Gauges(Collector):
    """The Prometheus collector of a server process.

    Attributes:
        latency_objective: objective for the p99 of answers, in seconds.
        freshness_objectives: maximum age of the newest row in seconds, by view name.
        history_objective: time in which pushed rows should reach the history, in seconds.
        production: gauges of production quality; None without a deployment file.
        spool: gauges of recorded answers not collected yet; None without recording.
        rows: state of each view in the online store when it was last read.
        earlier: freshness of views that a model reads under an earlier contract.
        ready: True if lookups could be answered at that time.
        lost: views that had lost rows at that time.
    """

    _counted: Tally
    _state: Callable[[], State]
    _now: Callable[[], int]
    latency_objective: float
    freshness_objectives: Mapping[str, float]
    history_objective: float = HISTORY_SECONDS
    production: ProductionGauges | None = None
    spool: SpoolGauges | None = None
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
        if self.spool is not None:
            yield from self.spool.collect()
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
        """Return the time of the newest current row, or of the newest row a model reads if that is earlier."""
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
