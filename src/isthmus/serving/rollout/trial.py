"""A model on trial next to a standby model: what is counted of both, and when the trial fails."""

import math
from collections import deque
from dataclasses import dataclass, field

from isthmus.serving.deployment.record import Deployment

LEAST = 200
"""Single-row predictions of each model before their p99 is compared."""

FAILURES = 3
"""Failed predictions before their share is compared."""

WINDOW = 1000
"""Requests in a window. After it, failures are counted anew, and latencies too if both models have `LEAST`."""

_EVERY = 50
"""Requests between two checks of the p99."""


@dataclass(eq=False)
class Counts:
    """Requests and failures of a model, and seconds of its latest single-row runs.

    `runs` counts all single-row runs since the last `clear`; `slow` counts those slower than the objective.
    """

    objective_ms: float
    requests: int = 0
    failures: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    runs: int = 0
    slow: int = 0
    _from: tuple[int, int] = 0, 0

    def count(self, rows: int, seconds: float | None) -> None:
        """Count a request, and a failure if `seconds` is None.

        The seconds are kept only for requests of a single row.
        """
        self.requests += 1
        if seconds is None:
            self.failures += 1
        elif rows == 1:
            self.seconds.append(seconds)
            self.runs += 1
            self.slow += seconds * 1000 > self.objective_ms

    @property
    def window(self) -> tuple[int, int]:
        """Requests and failures in the current window."""
        return self.requests - self._from[0], self.failures - self._from[1]

    def reopen(self) -> None:
        self._from = self.requests, self.failures

    def clear(self) -> None:
        self.seconds.clear()
        self.runs = self.slow = 0

    @property
    def p99_ms(self) -> float | None:
        """99th percentile of single-row runs by nearest rank, in milliseconds; None without runs."""
        ordered = sorted(self.seconds)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] * 1000 if ordered else None


class Trial:
    """A model on trial in a worker.

    Attributes:
        role: name of its role, such as "canary".
        standby_role: name of the other model's role.
        in_force: True if it is the deployed model. Its error is then returned if the standby fails too.
        counts: counts of the model on trial.
        standby: counts of the other model.
        dropped: comparison runs skipped because too many were waiting.
        refused: reason it gets no more requests, or None.
    """

    role: str
    standby_role: str
    in_force: bool

    def __init__(self, deployment: Deployment, objective_ms: float) -> None:
        self.deployment = deployment
        self.counts, self.standby = Counts(objective_ms), Counts(objective_ms)
        self.dropped = 0
        self.refused: str | None = None
        self._objective_ms = objective_ms

    def judge(self) -> None:
        """Give the model up if it fails more often than the standby, or if it is too slow."""
        if self.refused is not None:
            return
        (requests, failures), (standby_requests, standby_failures) = self.counts.window, self.standby.window
        if failures >= FAILURES and failures * max(standby_requests, 1) > standby_failures * requests:
            self.refused = (
                f"{failures:,} of {requests:,} predictions failed, compared with {standby_failures:,} of "
                f"{standby_requests:,} for the {self.standby_role} model"
            )
        elif requests % _EVERY == 0 and self._timed:
            self._judge_latency()
        if requests >= WINDOW:
            # Small shares and multi-row requests give few timed runs: keep those until there are enough.
            timed = self._timed
            for counts in (self.standby, self.counts):
                counts.reopen()
                if timed:
                    counts.clear()

    @property
    def _timed(self) -> bool:
        return min(len(self.counts.seconds), len(self.standby.seconds)) >= LEAST

    def _judge_latency(self) -> None:
        own, other = self.counts.p99_ms, self.standby.p99_ms
        if own is not None and other is not None and self._slower(own, other):
            self.refused = (
                f"the p99 for one row is {own:.3g} ms, above the objective of {self._objective_ms:g} ms, while the "
                f"{self.standby_role} model has {other:.3g} ms"
            )

    def _slower(self, own: float, other: float) -> bool:
        """Compare the p99 of both models in milliseconds: True if only the model on trial exceeds the objective."""
        return own > self._objective_ms >= other
