"""What a server exposes: what it has counted, and the gauges that are computed when somebody reads them."""

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
"""The gauge of the newest row that the workers have served, which is not exposed under this name."""

HISTORY_SECONDS = 60.0

NO_OBJECTIVES: Mapping[str, float] = MappingProxyType({})


@dataclass(eq=False)
class Gauges(Collector):
    """The collector of a server process.

    Attributes:
        latency_objective: for the p99 of answers, in seconds.
        freshness_objectives: view name to the age that its newest row may have, in seconds.
        history_objective: within what time pushed rows shall be in the history, in seconds.
        production: those of production quality; None without a deployment file.
        spool: those of recorded answers that wait to be collected; None where none are recorded.
        rows: what the online store had of each view when it was read last.
        earlier: the same of views that a model reads as they were under an earlier contract.
        ready: whether it could answer lookups then.
        lost: the views whose rows it had lost.
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
        """The names of the deployed views."""
        contract = self._contract()
        return () if contract is None else contract.views

    def collect(self) -> Iterable[Metric]:
        """Every metric, by name."""
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
            "Whether lookups can be answered: there is a contract, the online store answers, and it has lost no rows, "
            "or `missing` is null.",
            value=contract is not None and self.ready,
        )
        yield GaugeMetricFamily(
            "isthmus_latency_objective_seconds", "The objective for the p99 of answers.", value=self.latency_objective
        )
        yield GaugeMetricFamily(
            "isthmus_history_objective_seconds", "Within what time pushed rows shall be in the history of their view.",
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
            "When the newest row of a view became known: in its table, by a push, or in an answer of this server.",
            labels=["view"],
        )
        age = GaugeMetricFamily(
            "isthmus_view_freshness_seconds",
            "Age of the newest row of a view: the present time, which is that of the settings if they fix one, less "
            "the time the row was known. A view without rows, without times, or with lost rows has none. Where a model "
            "still reads the rows of an earlier contract, the older of both counts.",
            labels=["view"],
        )
        objective = GaugeMetricFamily(
            "isthmus_view_freshness_objective_seconds", "The age that the newest row of a view may have.",
            labels=["view"],
        )  # fmt: skip
        lost = GaugeMetricFamily(
            "isthmus_view_lost_rows", "Whether the online store has lost rows of a view; /status says why.",
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
            "isthmus_view_waiting_rows", "Pushed rows that wait in the online store for the history of a view.",
            labels=["view"],
        )  # fmt: skip
        age = GaugeMetricFamily(
            "isthmus_view_waiting_seconds",
            "For how long the first of the pushed rows has waited for the history of a view, by the clock of the "
            "online store; 0 if none waits.",
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
        """When the newest current row became known or, if that was earlier, the newest of those that a model reads."""
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
        yield InfoMetricFamily("isthmus_contract", "What is served.", info)
        if deployment is not None:
            states = GaugeMetricFamily(
                "isthmus_deployment_state",
                "1 for what holds of a deployment: settled, on probation, on probation without a way back, or put in "
                "force by a server that has undone another; /models says why.",
                labels=["model", "state"],
            )
            for name in DEPLOYMENT_STATES:
                states.add_metric([deployment.model, name], name == state.deployment_state)
            yield states
            if self.production is not None:
                yield from self.production.collect(deployment)
        if state.candidate_run is not None:
            given_up = GaugeMetricFamily(
                "isthmus_candidate_given_up", "Whether the candidate beside a model was given up; /models says why.",
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
