"""The metrics of a server in Prometheus's text formats. Every label has few values, and counters are cached."""

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.types import Scope

from isthmus.features.clock import Status
from isthmus.features.errors import RequestError
from isthmus.features.online.plan import ViewAnswer
from isthmus.features.profiles import OBJECTIVE_MS
from isthmus.serving.deadlines import REFUSAL, waits
from isthmus.serving.metrics.counters import BUCKETS, Memo, Tally
from isthmus.serving.metrics.gauges import HISTORY_SECONDS, NEWEST, NO_OBJECTIVES, Gauges
from isthmus.serving.rollout.trial import Trial
from isthmus.serving.state import State
from isthmus.serving.wire.encode import LABELS
from isthmus.serving.wire.inference import INFER, UNMEASURED, DurationStatistic, ModelStatistics
from isthmus.serving.wire.messages import LatencyState

WRITE_SECONDS = 1.0
"""Seconds between two writes of a worker's counts; a killed worker loses at most this much."""

_ANSWERS = ("/get-online-features", "/predict", *INFER)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_NOT_THERE = (int(Status.EXPIRED), int(Status.NOT_FOUND), int(Status.DAMAGED))

_WHERE = ("memory", "disk", "defect")
"""Labels for dropped records: the memory was full, the disk was full or failed, or there is a bug."""


class Metrics:
    """The metrics of a process, or with `folder` of all workers that share it; `share` must then run as a task."""

    def __init__(
        self, state: Callable[[], State], now: Callable[[], int], folder: Path | None = None,
        objective_ms: float = OBJECTIVE_MS, freshness_objectives: Mapping[str, float] = NO_OBJECTIVES,
        history_objective: float = HISTORY_SECONDS,
    ) -> None:  # fmt: skip
        self._tally = Tally(folder)
        # The objective is a bucket bound, so the number of slower answers is exact.
        self.bounds = tuple(sorted({*BUCKETS, objective_ms / 1000}))
        self._series = _Series(self._tally, self.bounds)
        self._in_flight = self._series.in_flight.number()
        self._first_answer = self._series.first_answer.number()
        self.gauges = Gauges(self._tally, state, now, objective_ms / 1000, freshness_objectives, history_objective)
        self._exposed = CollectorRegistry()
        self._exposed.register(self.gauges)
        self._outcomes = Memo(partial(_Outcome, self._series))
        self._views = Memo(partial(_View, self._series))
        self._models = Memo(partial(_Runs, self._series))
        # Start counters at 0: Prometheus does not see the first event of a counter that starts with it.
        for number in (self._series.recorded.number(), *map(self._series.unrecorded.number, _WHERE)):
            number.value = 0.0

    async def share(self) -> None:
        while True:
            self._tally.write()
            await asyncio.sleep(WRITE_SECONDS)

    def answered(self) -> list[int]:
        return [*map(sum, zip(*(self._series.request_seconds.counts(route, "2xx") for route in _ANSWERS), strict=True))]

    def close(self) -> None:
        self._tally.close()

    def begin(self) -> None:
        waits.set([])
        self._in_flight.value += 1

    def end(self, path: str, scope: Scope, status: int, seconds: float) -> None:
        """Count a request that has ended, after `begin`. `path` is its route, or a placeholder for an unknown path.

        `scope` is the ASGI scope of the request. `status` is the HTTP status, or 0 if the client disconnected.
        `seconds` is the duration.
        """
        self._in_flight.value -= 1
        self._outcomes[path, scope["method"], status].count(seconds, waits.get())
        if status and (refusal := scope.get(REFUSAL)) is not None:
            self._series.errors.number(path, refusal).value += 1
        if not self._first_answer.value and 200 <= status < 300:
            self._first_answer.value = _age_of_the_process()

    def read(self, answers: Mapping[str, ViewAnswer], bits: Mapping[str, bytes]) -> None:
        for name, answer in answers.items():
            self._views[name].count(answer, bits[name])

    @contextmanager
    def run(self, model: str, rows: int) -> Iterator[None]:
        runs = self._models[model]
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            # A wrong request or a cancellation is not a failure of the model.
            runs.failures.value += isinstance(error, Exception) and not isinstance(error, RequestError)
            runs.failed_seconds.observe(time.perf_counter() - start)
            runs.failed_rows.value += rows
            raise
        finally:
            runs.seconds.observe(time.perf_counter() - start)
            runs.rows.value += rows
            runs.last.value = time.time()

    def statistics(self, model: str) -> ModelStatistics:
        """Return the counts of a model of all workers, up to a second old. Runs that gave no outputs count as failed.

        The counters are not read at one moment, so `success` may include a run that `fail` does not yet have.
        """
        _ = self._models[model]
        found: dict[str, float] = defaultdict(float)
        for metric in self._tally.collect():
            for sample in metric.samples:
                if sample.labels.get("model") == model and "role" not in sample.labels:
                    found[sample.name.removeprefix("isthmus_")] = sample.value
        runs, failed = (found[f"{name}_duration_seconds_count"] for name in ("model", "failed_run"))
        seconds, lost = (found[f"{name}_duration_seconds_sum"] for name in ("model", "failed_run"))
        return ModelStatistics(
            name=model,
            last_inference=int(1000 * found["model_last_run_timestamp_seconds"]),
            inference_count=int(found["model_rows_total"] - found["failed_rows_total"]),
            execution_count=int(runs - failed),
            inference_stats={
                "success": DurationStatistic(int(runs - failed), int(1e9 * (seconds - lost))),
                "fail": DurationStatistic(int(failed), int(1e9 * lost)),
                **dict.fromkeys(UNMEASURED, DurationStatistic()),
            },
        )

    def count_trial(self, trial: Trial, role: str, outcome: str) -> None:
        self._series.trial_requests.number(trial.deployment.model, role, outcome).value += 1

    def time_trial(self, trial: Trial, role: str, seconds: float) -> None:
        self._series.trial_seconds.seconds(trial.deployment.model, role).observe(seconds)

    def count_recorded(self, answers: int) -> None:
        self._series.recorded.number().value += answers

    def count_unrecorded(self, why: str, answers: int) -> None:
        self._series.unrecorded.number(why).value += answers

    def latency(self) -> dict[str, LatencyState]:
        measured = self._tally.quantiles("isthmus_request_duration_seconds", "route", 0.5, 0.99)
        runs = self._tally.quantiles("isthmus_model_duration_seconds", "model", 0.5, 0.99)
        measured |= {f"runs of {model}": quantiles for model, quantiles in runs.items()}
        return {
            name: LatencyState(count, *(round(seconds * 1e3, 4) for seconds in quantiles))
            for name, (count, quantiles) in measured.items()
        }

    def exposition(self, accept: str) -> tuple[bytes, str]:
        # Exclude the request for the metrics: other workers would show it long after its answer.
        self._in_flight.value -= 1
        for name in self.gauges.views():
            # Start counters at 0: Prometheus does not see the first event of a counter that starts with it.
            self._views[name]
        try:
            if "application/openmetrics-text" in accept:
                body: bytes = openmetrics.generate_latest(self._exposed)  # type: ignore[no-untyped-call]
                return body, openmetrics.CONTENT_TYPE_LATEST
            return generate_latest(self._exposed), CONTENT_TYPE_PLAIN_0_0_4
        finally:
            self._in_flight.value += 1


class _Series:
    def __init__(self, tally: Tally, bounds: tuple[float, ...]) -> None:
        self.requests = tally.counter("isthmus_requests_total", "Requests answered.", "route", "method", "status")
        self.request_seconds = tally.histogram(
            "isthmus_request_duration_seconds", "Time from a request to the end of its answer.", "route",
            "status_class", bounds=bounds,
        )  # fmt: skip
        self.store_seconds = tally.histogram(
            "isthmus_store_duration_seconds", "Time a request waits for the online store.", "route"
        )
        self.serving_seconds = tally.histogram(
            "isthmus_serving_duration_seconds", "Time of a request without waiting for the online store.", "route"
        )
        self.errors = tally.counter(
            "isthmus_errors_total", "Requests refused, by the class of the error.", "route", "error"
        )
        self.in_flight = tally.gauge(
            "isthmus_requests_in_flight", "Requests in progress, without the request for the metrics.",
            merge="livesum",
        )  # fmt: skip
        self.first_answer = tally.gauge(
            "isthmus_first_answer_seconds",
            "Time from the start of the process to its first successful answer; 0 before that. Slowest worker.",
            merge="livemax",
        )  # fmt: skip
        self.view_values = tally.counter(
            "isthmus_view_values_total",
            "Values answered from a view, one per row and requested feature, by status.",
            "view", "status",
        )  # fmt: skip
        # Expose a time, since an age would stop growing without traffic. Merge only live workers, since rows that ended
        # workers served may have been removed.
        self.newest = tally.gauge(NEWEST, "Newest known time served.", "view", merge="livemax")
        self.model_seconds = tally.histogram(
            "isthmus_model_duration_seconds", "Time of a run of a model over its rows.", "model"
        )
        self.model_rows = tally.counter("isthmus_model_rows_total", "Rows that a model was run over.", "model")
        self.failures = tally.counter("isthmus_prediction_failures_total", "Runs of a model that failed.", "model")
        self.failed_seconds = tally.histogram(
            "isthmus_failed_run_duration_seconds",
            "Time of a run without outputs: it failed, was canceled, or the request was wrong.", "model", bounds=(),
        )  # fmt: skip
        self.failed_rows = tally.counter("isthmus_failed_rows_total", "Rows of runs without outputs.", "model")
        self.last_run = tally.gauge(
            "isthmus_model_last_run_timestamp_seconds", "Time of the last run of a model; 0 before it.", "model",
            merge="max",
        )  # fmt: skip
        self.recorded = tally.counter("isthmus_recorded_answers_total", "Answers that were recorded.")
        self.unrecorded = tally.counter(
            "isthmus_dropped_answers_total", "Answers whose record was dropped, by the place without room.", "where"
        )
        self.trial_requests = tally.counter(
            "isthmus_trial_predictions_total",
            "Requests to a model on trial (canary, shadow, deployed on probation), and to the model next to it.",
            "model", "role", "outcome",
        )  # fmt: skip
        self.trial_seconds = tally.histogram(
            "isthmus_trial_duration_seconds", "Time of a run of either model of a trial over its rows.", "model", "role"
        )


class _Outcome:
    def __init__(self, series: _Series, key: tuple[str, str, int]) -> None:
        route, sent, status = key
        method = sent if sent in _METHODS else "other"
        self._requests = series.requests.number(route, method, str(status) if status else "none")
        self._duration = series.request_seconds.seconds(route, f"{status // 100}xx" if status else "none")
        self._serving = series.serving_seconds.seconds(route)
        self._store = series.store_seconds
        self._route = route

    def count(self, seconds: float, waits: list[float]) -> None:
        self._requests.value += 1
        self._duration.observe(seconds)
        if waits:
            wait = sum(waits)
            # Create the histogram only here: a route that never waits should not have one.
            self._store.seconds(self._route).observe(wait)
            seconds -= wait
        self._serving.observe(seconds)


class _View:
    def __init__(self, series: _Series, name: str) -> None:
        self._values = [series.view_values.number(name, label) for label in LABELS]
        self._newest = series.newest.number(name)

    def count(self, answer: ViewAnswer, bits: bytes) -> None:
        features = int.from_bytes(bits, "little").bit_count()
        nulls = answer.columns.nulls(bits)
        self._values[Status.PRESENT].value += len(answer.status) * features - nulls
        if nulls:
            # A missing row is null in every feature; other nulls are in existing rows. `bytes.count` on the status
            # bytes is faster than `np.bincount` up to a hundred rows.
            codes = answer.status.tobytes()
            for status in _NOT_THERE:
                if count := codes.count(status) * features:
                    self._values[status].value += count
                    nulls -= count
            self._values[Status.NULL].value += nulls
        # `argmax` takes a quarter of the time of `max` for a few rows.
        if answer.known.item(answer.known.argmax()) > self._newest.value:
            # This may be a row from the future, which was not served.
            served = answer.known[answer.status < Status.NOT_FOUND]
            self._newest.value = max(self._newest.value, float(served.max(initial=0)))


class _Runs:
    def __init__(self, series: _Series, model: str) -> None:
        self.seconds = series.model_seconds.seconds(model)
        self.rows = series.model_rows.number(model)
        self.failures = series.failures.number(model)
        self.failed_seconds = series.failed_seconds.seconds(model)
        self.failed_rows = series.failed_rows.number(model)
        self.last = series.last_run.number(model)


def _age_of_the_process() -> float:
    """Return the seconds since this process started. See proc(5): field 22 of `stat`, in clock ticks since boot."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
