"""`PredictionService`: answers `/predict` and `/v2` with the deployed model or a model on trial."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from isthmus.features.errors import DamagedRowError, DataError, DependencyError, IsthmusError, RequestError
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.serving import log
from isthmus.serving.limits import Limits
from isthmus.serving.lookup.lookup import damage
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.predict.batches import Outputs
from isthmus.serving.predict.model import unanswered
from isthmus.serving.predict.tensors import flat
from isthmus.serving.recorder.columns import AnswerReader
from isthmus.serving.recorder.recorder import Recorder
from isthmus.serving.redis.store import Store
from isthmus.serving.rollout.trial import CandidateRun, ProbationRun, Trial
from isthmus.serving.state import AnyPredictor, State
from isthmus.serving.threads import BYTES, offload, start_task
from isthmus.serving.wire.inference import TensorRequest
from isthmus.serving.wire.messages import PredictRequest

T = TypeVar("T")

WAITING = 64
"""Maximum number of waiting requests for models on trial; more are dropped and counted."""

_Inputs = tuple[dict[str, list[Any]], Any, int]
"""Join keys, request fields or tensors, and the number of rows."""


@dataclass(frozen=True, slots=True)
class PredictCall:
    """A request for predictions, the state of the server on its arrival, and the version it names, if any."""

    state: State
    message: PredictRequest | TensorRequest
    body: bytes
    version: AnyPredictor | None = None


@dataclass(frozen=True, slots=True)
class _Stored:
    keys: Mapping[str, Sequence[Any]]
    fields: Any
    answers: Mapping[str, ViewAnswer]
    rows: int
    at: int


@dataclass(frozen=True, slots=True)
class Predicted:
    """Outputs of a predictor, its inputs, and the seconds the model took, including the wait for other requests."""

    outputs: Any
    stored: _Stored
    inputs: Any
    seconds: float

    @property
    def rows(self) -> int:
        return self.stored.rows

    @property
    def numbers(self) -> Outputs:
        return self.outputs if isinstance(self.outputs, np.ndarray) else flat(self.outputs)


def reader_for(
    recorder: Recorder | None, route: str, predictor: AnyPredictor, plan: LookupPlan | None = None
) -> AnswerReader | None:
    if recorder is None:
        return None
    deployment = predictor.model.deployment
    device = "" if deployment.device == "cpu" else f"/{deployment.device}"
    variant = f"{deployment.precision}/{deployment.threads}{device}"
    return recorder.reader(route, predictor.plan if plan is None else plan, deployment.digest, variant)


class PredictionService:
    """The predictions of a server process, by the deployed model or a model on trial.

    A canary or a deployment on probation may answer requests itself. Shadows, and runs that only compare latency, wait
    in a queue for `run_waiting`, which must run as a task.
    """

    def __init__(self, store: Store, limits: Limits, metrics: Metrics, now: Callable[[], int]) -> None:
        self._store, self._limits, self._metrics, self._now = store, limits, metrics, now
        self._waiting: asyncio.Queue[tuple[str, Callable[[], Awaitable[None]]]] = asyncio.Queue(WAITING)

    async def run_waiting(self) -> None:
        while True:
            role, work = await self._waiting.get()
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - no caller waits for this result
                log.warning(f"{role} failed", exception=type(error).__name__, at=log.place(error))

    def _enqueue(self, trial: Trial, role: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            self._waiting.put_nowait((role, work))
        except asyncio.QueueFull:
            trial.dropped += 1
            self._metrics.count_trial(trial, role, "dropped")

    async def predict(self, request: PredictCall) -> tuple[AnyPredictor, Predicted]:
        """Answer a request for predictions; return the predictor that answered, and its outputs.

        If the request names a version, that version answers. Otherwise the deployed model answers, or for a share of
        the requests a canary (a package on trial). If a canary fails or has no answer, the deployed model answers
        instead. If a deployment on probation (a new one, still watched) fails, the former model answers instead. Counts
        requests and failures. Too many failures end a trial. May queue a comparison of models for `run_waiting`, which
        runs after the response.

        Raises RequestError if the request does not fit the model, NotReadyError without a model, ContractMismatch if
        the model is outdated, and the errors of `stored`.
        """
        state = request.state
        if request.version is not None:
            return request.version, await self._predicted(request.version, request)
        if state.former is not None and (probation := state.probation) is not None:
            if probation.refused is None:
                return await self._on_probation(probation, state.predictor(), state.former, request)
            # The deployment file will change in a moment.
            return state.former, await self._predicted(state.former, request)
        deployed, run, candidate = state.predictor(), state.candidate_run, state.candidate
        inputs = await self._read(deployed, request)
        if run is None:
            return deployed, await self._run(deployed, await self._stored(deployed, inputs))
        if candidate is not None and run.picks(deployed.plan.keys, inputs[0], request.body):
            return await self._tried(run, candidate, deployed, request)
        stored = await self._stored(deployed, inputs)
        try:
            predicted = await self._run(deployed, stored)
        except IsthmusError:
            # The error is in the request, not in the model.
            raise
        except Exception:
            run.standby.count(stored.rows, None)
            self._metrics.count_trial(run, "deployed", "failed")
            raise
        run.standby.count(stored.rows, predicted.seconds)
        self._answered(run, "deployed", predicted.seconds)
        if candidate is not None and run.role == "shadow":
            self._enqueue(run, "shadow", partial(self._shadowed, run, candidate, request, predicted))
        return deployed, predicted

    async def _on_probation(
        self, run: ProbationRun, deployed: AnyPredictor, former: AnyPredictor, request: PredictCall
    ) -> tuple[AnyPredictor, Predicted]:
        answered, predicted = await self._tried(run, deployed, former, request)
        if answered is deployed and predicted.rows == 1 and run.begin():
            self._enqueue(run, "former", partial(self._timed, run, deployed, former, request))
        return answered, predicted

    async def _tried(
        self, run: Trial, tried: AnyPredictor, standby: AnyPredictor, request: PredictCall
    ) -> tuple[AnyPredictor, Predicted]:
        """Predict with the model on trial, `tried`. If it fails, return the answer of `standby` and count a failure.

        Nothing is counted if the standby fails too, or if the store caused the failure.
        """
        try:
            inputs = await self._read(tried, request)
        except RequestError as error:
            try:
                predicted = await self._predicted(standby, request)
            except Exception:
                if run.in_force:
                    raise error from None
                raise
            if run.in_force:
                # The deployed model defines the request format, so this is no failure: clients can adapt during
                # probation.
                self._metrics.count_trial(run, run.role, "refused")
                log.warning("only the former model accepts this", field=error.where)
            else:
                self._fail(run, predicted.rows, error)
            return standby, predicted
        try:
            stored = await self._stored(tried, inputs)
        except Exception:  # noqa: BLE001 - the standby may read other views, or succeed on a second try
            return standby, await self._predicted(standby, request)
        attempt = start_task(self._run(tried, stored))
        try:
            # Leave half of the time to the standby in case this model hangs.
            await asyncio.wait({attempt}, timeout=self._limits.deadline_seconds / 2)
            outcome = _outcome(attempt)
            if outcome is None or unanswered(outcome.numbers).any():
                instead = await self._standby_answer(run, attempt, standby, request)
                if instead is not None:
                    self._fail(run, stored.rows, attempt.exception() if attempt.done() else None)
                    return standby, instead
            predicted = await attempt
        finally:
            attempt.cancel()
        # During probation, both models are timed separately: see `_timed`.
        run.counts.count(0 if run.in_force else stored.rows, predicted.seconds)
        self._answered(run, run.role, predicted.seconds)
        run.judge()
        return tried, predicted

    async def _standby_answer(
        self, run: Trial, attempt: asyncio.Future[Predicted], standby: AnyPredictor, request: PredictCall
    ) -> Predicted | None:
        """Run the standby and return its answer, or None if `attempt` ends with an answer that is as good."""
        second = start_task(self._predicted(standby, request))
        try:
            await asyncio.wait({attempt, second}, return_when=asyncio.FIRST_COMPLETED)
            late = _outcome(attempt)
            if late is not None and not unanswered(late.numbers).any():
                return None
            instead = await second
        except Exception:
            if attempt.done() and (failure := attempt.exception()) is not None:
                if run.in_force:
                    raise failure from None
                raise
            return None
        finally:
            second.cancel()
        outcome = _outcome(attempt)
        return instead if outcome is None or _lost(outcome.numbers, instead.numbers) else None

    async def _read(self, predictor: AnyPredictor, request: PredictCall) -> _Inputs:
        return await offload(len(request.body) > BYTES, predictor.read, request.message, self._limits)

    async def _stored(self, predictor: AnyPredictor, inputs: _Inputs, *, counted: bool = True) -> _Stored:
        keys, fields, rows = inputs
        at = self._now()
        answers = await self.stored(predictor.plan, keys, rows, at, predictor.bits if counted else None)
        return _Stored(keys, fields, answers, rows, at)

    async def stored(
        self, plan: LookupPlan, keys: Mapping[str, Sequence[Any]], rows: int, at: int, bits: Mapping[str, bytes] | None
    ) -> Mapping[str, ViewAnswer]:
        """Read the stored features for a prediction from Redis, by view.

        `plan` says which views to read. Returns {} if there are none. `keys` has the join keys of `rows` rows. `at` is
        the time of the prediction in microseconds since 1970 UTC, which decides if a row is older than its view's ttl.
        `bits` is a bit mask per view of the features to count in the metrics, and None counts nothing. Raises DataError
        if a stored row is damaged, and the errors of `Store.read`, for example if Redis is too slow.
        """
        if not plan.views:
            return {}
        answers = await self._store.read(plan, keys, rows, at)
        if bits is not None:
            self._metrics.read(answers, bits)
        if problems := damage(answers):
            # Do not predict from values that may be wrong.
            if any(answer.foreign for answer in answers.values()):
                remedy = "delete those keys, run `isthmus materialize --full`, and keep the other program out"
                raise DataError("online rows", "; ".join(problems), remedy=remedy)
            raise DamagedRowError("online rows", "; ".join(problems), remedy="run `isthmus materialize --full`")
        return answers

    async def _run(self, predictor: AnyPredictor, stored: _Stored) -> Predicted:
        columns = predictor.inputs(stored.fields, stored.answers)
        began = time.perf_counter()
        with self._metrics.run(predictor.model.deployment.model, stored.rows):
            outputs = await predictor.batches.predict(columns, stored.rows)
        seconds = time.perf_counter() - began
        predictor.require(outputs, columns)
        return Predicted(outputs, stored, columns, seconds)

    async def _predicted(self, predictor: AnyPredictor, request: PredictCall) -> Predicted:
        return await self._run(predictor, await self._load(predictor, request))

    async def _load(self, predictor: AnyPredictor, request: PredictCall, *, counted: bool = True) -> _Stored:
        return await self._stored(predictor, await self._read(predictor, request), counted=counted)

    async def _shadowed(
        self, run: CandidateRun, candidate: AnyPredictor, request: PredictCall, answer: Predicted
    ) -> None:
        rows = answer.rows
        try:
            stored = await self._load(candidate, request, counted=False)
            shadow = await self._beside(candidate, stored, in_thread=True)
        except (DataError, DependencyError):
            # The store failed, not the model.
            raise
        except Exception:
            run.counts.count(rows, None)
            self._metrics.count_trial(run, "shadow", "failed")
            raise
        run.counts.count(rows, shadow.seconds)
        self._metrics.time_trial(run, "shadow", shadow.seconds)
        same = run.compare(answer.numbers, shadow.numbers)
        self._metrics.count_trial(run, "shadow", "answered" if same else "differing")

    async def _timed(
        self, run: ProbationRun, deployed: AnyPredictor, former: AnyPredictor, request: PredictCall
    ) -> None:
        """Time the deployed and the former model on one request, in alternating order, outside their queues."""
        began, taken = time.monotonic(), {}
        try:
            pair = [
                (predictor, await self._load(predictor, request, counted=False)) for predictor in (deployed, former)
            ]
            # Alternate the order, because the first run may be slower.
            for predictor, stored in pair if run.standby.requests % 2 else reversed(pair):
                try:
                    beside = await self._beside(predictor, stored, in_thread=not predictor.batches.quick)
                    taken[predictor] = beside.seconds
                except Exception:
                    if predictor is former:
                        run.standby.count(1, None)
                        self._metrics.count_trial(run, "former", "failed")
                    raise
        except RequestError:
            # The former model may not accept this request.
            return
        finally:
            run.end(time.monotonic() - began)
        run.counts.seconds.append(taken[deployed])
        run.standby.count(1, taken[former])
        self._answered(run, "former", taken[former])

    async def _beside(self, predictor: AnyPredictor, stored: _Stored, *, in_thread: bool) -> Predicted:
        columns = predictor.inputs(stored.fields, stored.answers)
        began = time.perf_counter()
        async with asyncio.timeout(self._limits.deadline_seconds):
            outputs = await predictor.batches.predict_now(columns, in_thread=in_thread)
        seconds = time.perf_counter() - began
        predictor.require(outputs, columns)
        return Predicted(outputs, stored, columns, seconds)

    def _answered(self, run: Trial, role: str, seconds: float) -> None:
        self._metrics.count_trial(run, role, "answered")
        self._metrics.time_trial(run, role, seconds)

    def _fail(self, run: Trial, rows: int, error: BaseException | None) -> None:
        """Count a failure of a model on trial; `error` is None if it was late or its answer was not a number."""
        run.counts.count(rows, None)
        self._metrics.count_trial(run, run.role, "failed")
        fields = {} if error is None else {"exception": type(error).__name__, "at": log.place(error)}
        log.warning(f"{run.role} model failed", **fields)
        run.judge()


def _outcome(attempt: asyncio.Future[Predicted]) -> Predicted | None:
    return attempt.result() if attempt.done() and attempt.exception() is None else None


def _lost(outputs: Outputs, standby: Outputs) -> bool:
    missing = unanswered(outputs)
    # Tensors of the two models may differ in size.
    return bool((missing & ~unanswered(standby)).any() if len(outputs) == len(standby) else missing.any())
