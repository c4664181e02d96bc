"""Slows down training for the servers on its machine step by step, and speeds it up again; results stay the same.

A degree says how much training gives way. Degree 0 is a low priority, and degree 1 the lowest. Each further degree uses
fewer cores, down to one; the last is a pause. The degree never falls from 1 to 0: at the lowest priority, training
still gets all idle time, and on Linux only a privileged user may raise a priority.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from isthmus.distill.throttle.priority import Priority
from isthmus.features.latency import WINDOW_SECONDS, WRITE_SECONDS, Latency
from isthmus.features.progress import Progress

LOWEST = 1
"""Degree at which the process has the lowest priority."""
LOOK_SECONDS = 1.0
SETTLE_SECONDS = WINDOW_SECONDS + WRITE_SECONDS
"""Seconds until a new degree shows in the latency of servers."""
SHORTEST_SECONDS, LONGEST_SECONDS = 30.0, 960.0
"""Seconds that the p99 must meet its objective before the degree falls: at first, and after repeated failures."""
STARVED_SECONDS = 600.0
"""Seconds of almost continuous pauses after which training warns."""
_NAP_SECONDS, _REPORT_SECONDS = 0.1, 60.0


@dataclass(frozen=True)
class Policy:
    """Decides how much training gives way to servers, as a degree from 0 (low priority) to a pause.

    Times are seconds of any clock. Each change returns a new object.

    Attributes:
        changed: time of the last change of the degree.
        strained: time when the p99 was last above its objective, or the degree changed.
        hold: seconds that the p99 must meet its objective before the degree falls.
        recovering: True if the last change lowered the degree.
    """

    degree: int = 0
    changed: float = -SETTLE_SECONDS
    strained: float = 0.0
    hold: float = SHORTEST_SECONDS
    recovering: bool = False

    def next(self, strained: bool, now: float, deepest: int) -> "Policy":
        if strained:
            settles = not self.recovering and now - self.changed < SETTLE_SECONDS
            if settles or self.degree == deepest:
                return replace(self, strained=now)
            # The degree fell too early, so hold longer the next time.
            hold = min(2 * self.hold, LONGEST_SECONDS) if self.recovering else self.hold
            return Policy(self.degree + 1, now, now, hold)
        if now - self.strained < self.hold:
            return self
        if self.degree > LOWEST:
            return Policy(self.degree - 1, now, now, self.hold, recovering=True)
        return replace(self, hold=SHORTEST_SECONDS, recovering=False)


class Throttle:
    """Gives way to servers on this machine: changes priority and cores of this process, and says when to pause.

    Call `update` between two steps, `pause` if `update` returns True, and `end` at the end, which undoes the changes.
    `latency` returns None without a server. The process first gives up the cores beyond `threads`. With `pauses=False`
    it never pauses. `slowed` and `paused` are seconds on fewer cores and in pauses, earlier runs included.
    """

    def __init__(
        self, latency: Callable[[], Latency | None], report: Callable[[str], None], threads: int, *,
        pauses: bool = True, slowed: float = 0.0, paused: float = 0.0,
    ) -> None:  # fmt: skip
        self._latency, self._report = latency, report
        self._priority, self._beside = Priority(), False
        self._cores = [self._priority.cores] * 2
        while self._cores[-1] > 1:
            self._cores.append(max(1, min(self._cores[-1], threads) // 2))
        self._deepest = len(self._cores) if pauses else len(self._cores) - 1
        # Look immediately, since the first step may take long.
        self._policy, self._looked = Policy(), time.monotonic() - LOOK_SECONDS
        self.slowed, self.paused = slowed, paused
        self._free, self._warned = (self._looked, paused), False

    @property
    def pausing(self) -> bool:
        return self._policy.degree == len(self._cores)

    def update(self) -> bool:
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return self.pausing
        since, self._looked = now - self._looked, now
        before = self._policy
        if self.pausing:
            self.paused += since
        elif before.degree > LOWEST:
            self.slowed += since
        latency = self._latency()
        if latency is not None and not self._beside:
            self._beside = True
            self._apply()
        strained = latency is not None and latency.strained
        self._policy = before.next(strained, now, self._deepest)
        if self._policy.degree != before.degree:
            self._apply()
            change = f"gives way to serving ({latency})" if strained else "takes back what serving does not need"
            self._report(f"{change}: {self._shown()}")
        self._warn_if_starved(now, latency)
        return self.pausing

    def pause(self, ended: Sequence[int]) -> float:
        before, reported = self.paused, time.monotonic()
        self._looked = reported  # time since the decision to pause was work
        while self.update() and not ended:
            time.sleep(_NAP_SECONDS)
            if self._looked - reported >= _REPORT_SECONDS:
                reported = self._looked
                self._report(f"gives way to serving: paused for {self.paused - before:,.0f} s")
        return self.paused - before

    def end(self) -> None:
        self._priority.restore()

    def _apply(self) -> None:
        # A paused process uses no core; with full priority it resumes without delay.
        degree = 0 if self.pausing else self._policy.degree
        self._priority.lower(self._cores[degree], idle=degree >= LOWEST)

    def _shown(self) -> str:
        degree, (most, *_) = self._policy.degree, self._cores
        if self.pausing:
            return "paused"
        if degree > LOWEST and most > 1:
            return f"{self._cores[degree]} of {most} cores"
        return "lowest priority"

    def _warn_if_starved(self, now: float, latency: Latency | None) -> None:
        if self._policy.degree <= LOWEST:
            self._free = now, self.paused
        began, paused = self._free
        if not self._warned and now - began >= STARVED_SECONDS and self.paused - paused >= 0.9 * (now - began):
            self._warned = True
            text = (
                f"training starves: it has been paused for serving for {(now - began) / 60:.0f} minutes ({latency}); "
                "raise server.latency_objective_ms and restart the API, train on another machine, or set "
                "profiles.training.give_way = false"
            )
            self._report(text)
            warnings.warn(text, RuntimeWarning, stacklevel=2)


@contextmanager
def throttled(
    latency: Callable[[], Latency | None] | None, progress: Progress, threads: int, paused: Callable[[float], None]
) -> Iterator[Progress]:
    """Slow down or pause work, such as computing a teacher's outputs, while servers on this machine need it.

    Yields a function to call in place of `progress`: each call also lowers the priority, or pauses, if needed. At the
    end, the process gets back its cores, and its priority if this user may raise it.

    Args:
        latency: returns the recent latency of the servers on this machine, or None if no server runs. Pass None instead
            of a function to never slow down.
        progress: called with a text and the finished share.
        threads: number of threads of the work; the process first gives up the cores beyond it.
        paused: called with the seconds of each pause.
    """
    if latency is None:
        yield progress
        return
    share = 0.0

    def look(text: str, done: float) -> None:
        nonlocal share
        share = done
        progress(text, done)
        if throttle.update():
            paused(throttle.pause(()))

    throttle = Throttle(latency, lambda text: progress(text, share), threads)
    try:
        throttle.update()
        yield look
    finally:
        throttle.end()
