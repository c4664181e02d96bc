"""Answers of `/predict`: by the deployed model, or while a candidate is on trial by one of the two."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from isthmus.features.errors import IsthmusError
from isthmus.features.online.plan import ViewAnswer
from isthmus.features.values.columns import Values
from isthmus.serving.http.shadow import Shadow
from isthmus.serving.limits import Limits
from isthmus.serving.log import place
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.predict.batches import Outputs
from isthmus.serving.predict.predictor import Predictor
from isthmus.serving.redis.store import Store
from isthmus.serving.rollout.candidate import TOLERANCE, Trial
from isthmus.serving.state import State
from isthmus.serving.threads import BYTES, VALUES, offload
from isthmus.serving.wire.messages import CandidateState, PredictRequest, RoleCounts

_Given = tuple[dict[str, list[Any]], dict[str, Values], int]
"""Join keys, request fields and the number of rows."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A request for predictions, the state it is answered from, and its body."""

    state: State
    asked: PredictRequest
    body: bytes


@dataclass(frozen=True, slots=True)
class _Predicted:
    """Outputs, what the views had to say, and how many seconds the model ran."""

    outputs: Outputs
    answers: Mapping[str, ViewAnswer]
    seconds: float


class Predictions:
    """What one process predicts.

    Args:
        store: where the features are.
        limits: what a request may ask.
        metrics: what is counted.
        now: the present time in microseconds since 1970 UTC.
    """

    def __init__(self, store: Store, limits: Limits, metrics: Metrics, now: Callable[[], int]) -> None:
        self._store, self._limits, self._metrics, self._now = store, limits, metrics, now
        self.shadow = Shadow(metrics)

    async def answer(self, asking: Asking) -> bytes:
        """The JSON answer. No request fails because a candidate does.

        Raises:
            IsthmusError: what was asked, the store or the state does not allow one.
        """
        state = asking.state
        first, trial, candidate = state.predictor(), state.trial, state.candidate
        given = await self._given(first, asking)
        if trial is None:
            return await _encoded(first, await self._predicted(first, given))
        keys, _, rows = given
        failed = False
        if candidate is not None and trial.takes(first.plan.keys, keys, asking.body):
            try:
                # The other half of the time is for the deployed model, if this one hangs.
                async with asyncio.timeout(self._limits.deadline_seconds / 2):
                    found = await self._predicted(candidate, await self._given(candidate, asking))
            except Exception as error:  # noqa: BLE001 - whatever it is, the deployed model is asked
                failed = True
                structlog.get_logger().warning("candidate failed", exception=type(error).__name__, at=place(error))
            else:
                self._count(trial, "canary", rows, found.seconds)
                return await _encoded(candidate, found)
        try:
            found = await self._predicted(first, given)
        except IsthmusError:
            # What was asked, or the store: neither of the two is to blame.
            raise
        except Exception:
            self._count(trial, "deployed", rows, None)
            raise
        if failed:
            self._count(trial, "canary", rows, None)
        else:
            self._count(trial, "deployed", rows, found.seconds)
        body = await _encoded(first, found)
        if candidate is not None and trial.role == "shadow":
            self.shadow.ask(trial, partial(self._shadowed, trial, candidate, asking), found.outputs)
        return body

    async def _given(self, predictor: Predictor, asking: Asking) -> _Given:
        asked, join_keys = asking.asked, asking.state.join_keys
        large = len(asking.body) > BYTES
        return await offload(large, predictor.read, asked.entities, asked.request, join_keys, self._limits)

    async def _predicted(self, predictor: Predictor, given: _Given) -> _Predicted:
        keys, fields, rows = given
        answers: Mapping[str, ViewAnswer] = {}
        if predictor.plan.views:
            answers = await self._store.read(predictor.plan, keys, rows, self._now())
            self._metrics.read(answers, predictor.bits)
        inputs = predictor.inputs(fields, answers)
        began = time.perf_counter()
        with self._metrics.run(predictor.model.deployment.model, rows):
            outputs = await predictor.batches.predict(inputs, rows)
        seconds = time.perf_counter() - began
        predictor.require(outputs, inputs)
        return _Predicted(outputs, answers, seconds)

    async def _shadowed(self, trial: Trial, candidate: Predictor, asking: Asking) -> Outputs:
        """The outputs of a shadow, which are made in a thread: requests do not wait for it."""
        rows = 1
        try:
            keys, fields, rows = await self._given(candidate, asking)
            read = candidate.plan.views
            answers = await self._store.read(candidate.plan, keys, rows, self._now()) if read else {}
            inputs = candidate.inputs(fields, answers)
            began = time.perf_counter()
            outputs = await asyncio.to_thread(candidate.model.predict, inputs)
            seconds = time.perf_counter() - began
            candidate.require(outputs, inputs)
        except Exception:
            self._count(trial, "shadow", rows, None)
            raise
        trial.tried.count(rows, seconds)
        self._metrics.timed(trial, seconds, "shadow")
        return outputs

    def _count(self, trial: Trial, role: str, rows: int, seconds: float | None) -> None:
        counts = trial.first if role == "deployed" else trial.tried
        counts.count(rows, seconds)
        self._metrics.tried(trial, "failed" if seconds is None else "answered", role)
        if seconds is not None:
            self._metrics.timed(trial, seconds, role)
        if role == "canary":
            trial.judge()


def told(trial: Trial) -> CandidateState:
    """What `/models` says of a candidate."""
    deployment = trial.candidate.deployment
    return CandidateState(
        package=deployment.digest,
        contract=deployment.contract,
        precision=deployment.precision,
        role=trial.role,
        share=trial.candidate.share,
        deployed_at=deployment.deployed_at,
        deployed=RoleCounts(trial.first.requests, trial.first.failures, trial.first.p99_ms),
        tried=RoleCounts(trial.tried.requests, trial.tried.failures, trial.tried.p99_ms),
        compared=trial.compared,
        differing=trial.differing,
        worst=trial.worst if math.isfinite(trial.worst) else "Infinity",
        tolerance=TOLERANCE,
        dropped=trial.dropped,
        refused=trial.refused,
    )


async def _encoded(predictor: Predictor, found: _Predicted) -> bytes:
    return await offload(len(found.outputs) > VALUES, predictor.encode, found.outputs, found.answers)
