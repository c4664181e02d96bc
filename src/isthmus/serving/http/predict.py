"""Answers of `/predict`: by the deployed model, or by the candidate beside it."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from isthmus.features.errors import DamagedRowError, IsthmusError
from isthmus.features.online.plan import ViewAnswer
from isthmus.features.values.columns import Values
from isthmus.serving.http.shadow import Shadow
from isthmus.serving.limits import Limits
from isthmus.serving.log import place
from isthmus.serving.lookup.lookup import damage
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.predict.batches import Outputs
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.redis.store import Store
from isthmus.serving.rollout.candidate import TOLERANCE, CandidateRun
from isthmus.serving.state import State
from isthmus.serving.threads import BYTES, VALUES, offload
from isthmus.serving.wire.messages import CandidateState, PredictRequest, RoleCounts

_Inputs = tuple[dict[str, list[Any]], dict[str, Values], int]
"""Join keys, request fields and the number of rows."""


@dataclass(frozen=True, slots=True)
class PredictCall:
    """A request for predictions, the state it is answered from, and its body."""

    state: State
    message: PredictRequest
    body: bytes


@dataclass(frozen=True, slots=True)
class _Predicted:
    """Outputs, the answers of the views, and how many seconds the model ran."""

    outputs: Outputs
    answers: Mapping[str, ViewAnswer]
    seconds: float


class Predictions:
    """The predictions of a server process."""

    def __init__(self, store: Store, limits: Limits, metrics: Metrics, now: Callable[[], int]) -> None:
        self._store, self._limits, self._metrics, self._now = store, limits, metrics, now
        self.shadow = Shadow(metrics)

    async def answer(self, request: PredictCall) -> tuple[bytes, str]:
        """The JSON answer, and the hash of the contract it is under. No request fails because a candidate does."""
        state = request.state
        deployed, run, candidate = state.predictor(), state.candidate_run, state.candidate
        inputs = await self._read(deployed, request)
        if run is None:
            return await _encoded(deployed, await self._predicted(deployed, inputs))
        keys, _, rows = inputs
        failed = False
        if candidate is not None and run.picks(deployed.plan.keys, keys, request.body):
            try:
                # The rest of the time is for the deployed model, if the candidate hangs.
                async with asyncio.timeout(self._limits.deadline_seconds / 2):
                    predicted = await self._predicted(candidate, await self._read(candidate, request))
            except Exception as error:  # noqa: BLE001 - whatever it is, the deployed model answers
                failed = True
                structlog.get_logger().warning("candidate failed", exception=type(error).__name__, at=place(error))
            else:
                self._count(run, "canary", rows, predicted.seconds)
                return await _encoded(candidate, predicted)
        try:
            predicted = await self._predicted(deployed, inputs)
        except IsthmusError:
            # The request or the store is to blame, and neither model.
            raise
        except Exception:
            self._count(run, "deployed", rows, None)
            raise
        if failed:
            self._count(run, "canary", rows, None)
        else:
            self._count(run, "deployed", rows, predicted.seconds)
        answer = await _encoded(deployed, predicted)
        if candidate is not None and run.role == "shadow":
            self.shadow.enqueue(run, partial(self._shadow_outputs, run, candidate, request), predicted.outputs)
        return answer

    async def _read(self, predictor: Predictor, request: PredictCall) -> _Inputs:
        message, large = request.message, len(request.body) > BYTES
        return await offload(large, predictor.read, message.entities, message.request, self._limits)

    async def _predicted(self, predictor: Predictor, inputs: _Inputs) -> _Predicted:
        keys, fields, rows = inputs
        answers: Mapping[str, ViewAnswer] = {}
        if predictor.plan.views:
            answers = await self._store.read(predictor.plan, keys, rows, self._now())
            if problems := damage(answers):
                # No prediction is made of a value that may be another.
                raise DamagedRowError("online rows", "; ".join(problems), remedy="run `isthmus materialize --full`")
            self._metrics.read(answers, predictor.bits)
        columns = predictor.inputs(fields, answers)
        began = time.perf_counter()
        with self._metrics.run(predictor.model.deployment.model, rows):
            outputs = await predictor.batches.predict(columns, rows)
        seconds = time.perf_counter() - began
        predictor.require(outputs, columns)
        return _Predicted(outputs, answers, seconds)

    async def _shadow_outputs(self, run: CandidateRun, candidate: Predictor, request: PredictCall) -> Outputs:
        """The outputs of a shadow, computed in a thread: requests do not wait for it."""
        rows = 1
        try:
            keys, fields, rows = await self._read(candidate, request)
            read = candidate.plan.views
            answers = await self._store.read(candidate.plan, keys, rows, self._now()) if read else {}
            inputs = candidate.inputs(fields, answers)
            began = time.perf_counter()
            outputs = await asyncio.to_thread(candidate.model.predict, inputs)
            seconds = time.perf_counter() - began
            candidate.require(outputs, inputs)
        except Exception:
            self._count(run, "shadow", rows, None)
            raise
        run.counts.count(rows, seconds)
        self._metrics.time_candidate(run, seconds, "shadow")
        return outputs

    def _count(self, run: CandidateRun, role: str, rows: int, seconds: float | None) -> None:
        counts = run.deployed if role == "deployed" else run.counts
        counts.count(rows, seconds)
        self._metrics.count_candidate(run, "failed" if seconds is None else "answered", role)
        if seconds is not None:
            self._metrics.time_candidate(run, seconds, role)
        if role == "canary":
            run.judge()


def candidate_state(run: CandidateRun) -> CandidateState:
    """A candidate as `/models` shows it."""
    deployment = run.candidate.deployment
    return CandidateState(
        package=deployment.digest,
        contract=deployment.contract,
        precision=deployment.precision,
        role=run.role,
        share=run.candidate.share,
        deployed_at=deployment.deployed_at,
        deployed=RoleCounts(run.deployed.requests, run.deployed.failures, run.deployed.p99_ms),
        tried=RoleCounts(run.counts.requests, run.counts.failures, run.counts.p99_ms),
        compared=run.compared,
        differing=run.differing,
        worst=run.worst if math.isfinite(run.worst) else "Infinity",
        tolerance=TOLERANCE,
        dropped=run.dropped,
        refused=run.refused,
    )


async def _encoded(predictor: Predictor, predicted: _Predicted) -> tuple[bytes, str]:
    outputs = predicted.outputs
    body = await offload(len(outputs) > VALUES, predictor.encode, outputs, predicted.answers)
    return body, predictor.contract.hash
