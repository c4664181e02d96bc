"""Requests to a shadow or a former model: after the answer went out, a few at a time, and never at its expense."""

import asyncio
from collections.abc import Awaitable, Callable

from isthmus.serving import log
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.rollout.trial import Trial

_Work = Callable[[], Awaitable[None]]

WAITING = 64
"""Requests that wait; more are dropped, and counted."""


class Shadow:
    """The requests that wait for a shadow, or for a former model, in one process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: asyncio.Queue[tuple[str, _Work]] = asyncio.Queue(WAITING)

    def enqueue(self, trial: Trial, role: str, work: _Work) -> None:
        """Has a model of a trial do, later, what the deployed model has done."""
        try:
            self._waiting.put_nowait((role, work))
        except asyncio.QueueFull:
            trial.dropped += 1
            self._metrics.count_trial(trial, role, "dropped")

    async def run(self) -> None:
        """Works until it is canceled."""
        while True:
            role, work = await self._waiting.get()
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody waits for this answer
                log.warning(f"{role} failed", exception=type(error).__name__, at=log.place(error))
