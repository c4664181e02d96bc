"""A model on trial beside another model, which stands by: what is counted of both, and when it is given up."""

import math
from collections import deque
from dataclasses import dataclass, field

from isthmus.serving.deployment.record import Deployment

LEAST = 200
"""Predictions of a single row, of each model, before their p99 is compared."""

FAILURES = 3
"""Failed predictions before their share is compared."""

WINDOW = 1000
"""Requests of the model on trial after which failures are counted anew, and seconds if both have `LEAST`."""

_EVERY = 50
"""Requests of the model on trial between two looks at p99."""


@dataclass(eq=False)
class Counts:
    """The requests that a model got, the failures among them, and the seconds of its latest runs over a single row.

    Of all those runs since seconds are counted, `runs`, as many as `slow` were beyond the objective.
    """

    objective_ms: float
    requests: int = 0
    failures: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    runs: int = 0
    slow: int = 0
    _from: tuple[int, int] = 0, 0

    def count(self, rows: int, seconds: float | None) -> None:
        """A request was answered after so many seconds of its model, or not: None."""
        self.requests += 1
        if seconds is None:
            self.failures += 1
        elif rows == 1:
            self.seconds.append(seconds)
            self.runs += 1
            self.slow += seconds * 1000 > self.objective_ms

    @property
    def window(self) -> tuple[int, int]:
        """Requests and failures since the window was opened."""
        return self.requests - self._from[0], self.failures - self._from[1]

    def reopen(self) -> None:
        """Opens the next window, for failures."""
        self._from = self.requests, self.failures

    def clear(self) -> None:
        """Counts seconds anew."""
        self.seconds.clear()
        self.runs = self.slow = 0

    @property
    def p99_ms(self) -> float | None:
        """99th percentile of a run over a single row, by nearest rank; None if there was no run."""
        ordered = sorted(self.seconds)
        return ordered[math.ceil(0.99 * len(ordered)) - 1] * 1000 if ordered else None


class Trial:
    """A model on trial in a worker.

    Attributes:
        role: what it is, and `standby_role` what the model beside it is.
        in_force: whether it is the deployed model, whose errors are those of the request if the standby fails, too.
        counts: what it has done, and `standby` what the model beside it has done meanwhile.
        dropped: requests that a model did not get after their answers, because too many waited.
        refused: why it gets no more requests; None while it does.
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
        """Gives the model up if it fails more often than the standby, or is slower than it may be."""
        if self.refused is not None:
            return
        (requests, failures), (others, failed) = self.counts.window, self.standby.window
        if failures >= FAILURES and failures * max(others, 1) > failed * requests:
            self.refused = (
                f"{failures:,} of {requests:,} of its predictions failed, and {failed:,} of {others:,} of those of "
                f"the {self.standby_role} model"
            )
        elif requests % _EVERY == 0 and self._timed:
            self._judge_latency()
        if requests >= WINDOW:
            # Large shares, and requests of many rows, time few runs of either model: those stay until there are enough.
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
                f"the p99 of its predictions of one row is {own:.3g} ms, above the objective of "
                f"{self._objective_ms:g} ms, and that of the {self.standby_role} model is {other:.3g} ms"
            )

    def _slower(self, own: float, other: float) -> bool:
        """Whether the p99 of the model, in milliseconds, is beyond what it may be, and that of the standby is not."""
        return own > self._objective_ms >= other
