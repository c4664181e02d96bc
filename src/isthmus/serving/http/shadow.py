"""Requests to a shadow: after the answer went out, never more than a few at a time, and never at its expense."""

import asyncio
from collections.abc import Awaitable, Callable

from isthmus.serving import log
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.predict.model import Float32
from isthmus.serving.rollout.candidate import CandidateRun

_Predict = Callable[[], Awaitable[Float32]]

WAITING = 64
"""Requests that wait for a shadow; more are dropped, and counted."""


class Shadow:
    """The requests that wait for a shadow, in one process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: asyncio.Queue[tuple[CandidateRun, _Predict, Float32]] = asyncio.Queue(WAITING)

    def enqueue(self, run: CandidateRun, predict: _Predict, answer: Float32) -> None:
        """Has a shadow predict, later, what the deployed model has answered."""
        try:
            self._waiting.put_nowait((run, predict, answer))
        except asyncio.QueueFull:
            run.dropped += 1
            self._metrics.count_candidate(run, "dropped", "shadow")

    async def run(self) -> None:
        """Predicts and compares until it is canceled."""
        while True:
            run, predict, answer = await self._waiting.get()
            try:
                output = await predict()
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody waits for this answer
                log.warning("shadow failed", exception=type(error).__name__, at=log.place(error))
                continue
            same = run.compare(answer, output)
            self._metrics.count_candidate(run, "answered" if same else "differing", "shadow")
