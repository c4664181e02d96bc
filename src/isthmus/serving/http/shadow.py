"""Run a shadow or former model after the answer was sent, with a limited queue."""

import asyncio
from collections.abc import Awaitable, Callable

from isthmus.serving import log
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.rollout.trial import Trial

_Work = Callable[[], Awaitable[None]]

WAITING = 64
"""Maximum number of waiting requests; more are dropped and counted."""


class Shadow:
    """The queue of requests for a shadow or former model in one process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: asyncio.Queue[tuple[str, _Work]] = asyncio.Queue(WAITING)

    def enqueue(self, trial: Trial, role: str, work: _Work) -> None:
        """Queue a run of a model on trial; drop and count it if the queue is full."""
        try:
            self._waiting.put_nowait((role, work))
        except asyncio.QueueFull:
            trial.dropped += 1
            self._metrics.count_trial(trial, role, "dropped")

    async def run(self) -> None:
        while True:
            role, work = await self._waiting.get()
            try:
                await work()
            except Exception as error:  # noqa: BLE001 - no caller waits for this result
                log.warning(f"{role} failed", exception=type(error).__name__, at=log.place(error))
