"""What a shadow is asked: after the answer went out, never more than a few at a time, and never at its expense."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from isthmus.serving.log import place
from isthmus.serving.metrics.metrics import Metrics
from isthmus.serving.predict.model import Float32
from isthmus.serving.rollout.candidate import Trial

WAITING = 64
"""Requests that wait for a shadow; those beyond are dropped, and counted."""


@dataclass(frozen=True, slots=True)
class _Asked:
    trial: Trial
    predict: Callable[[], Awaitable[Float32]]
    first: Float32


class Shadow:
    """The requests that wait for a shadow, in one process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._waiting: asyncio.Queue[_Asked] = asyncio.Queue(WAITING)

    def ask(self, trial: Trial, predict: Callable[[], Awaitable[Float32]], first: Float32) -> None:
        """Has a shadow asked, later, what the deployed model has answered.

        Args:
            trial: the shadow, and what is counted of it.
            predict: asks it.
            first: the answer, shape (n,).
        """
        try:
            self._waiting.put_nowait(_Asked(trial, predict, first))
        except asyncio.QueueFull:
            trial.dropped += 1
            self._metrics.tried(trial, "dropped", "shadow")

    async def run(self) -> None:
        """Asks and compares until it is canceled."""
        while True:
            asked = await self._waiting.get()
            trial = asked.trial
            try:
                output = await asked.predict()
            except Exception as error:  # noqa: BLE001 - whatever it is, nobody waits for this answer
                structlog.get_logger().warning("shadow failed", exception=type(error).__name__, at=place(error))
                continue
            same = trial.compare(asked.first, output)
            self._metrics.tried(trial, "answered" if same else "differing", "shadow")
