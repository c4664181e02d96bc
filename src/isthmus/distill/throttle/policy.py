"""How a training gives way to the servers of its machine, degree by degree, and takes back what it gave.

The degrees: 0 is a low priority, which any training beside a server has; 1 is the lowest; then come ever fewer cores,
down to one; the last is a pause. None of them changes what is computed. The lowest priority is not taken back: it has
all that is idle, and on Linux only who has the right to can raise it again.
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
"""The degree of the lowest priority."""
LOOK_SECONDS = 1.0
SETTLE_SECONDS = WINDOW_SECONDS + WRITE_SECONDS
"""Until a degree shows in what servers say."""
SHORTEST_SECONDS, LONGEST_SECONDS = 30.0, 960.0
"""How long the p99 must keep its objective before a degree is taken back: at first, and after that has failed often."""
STARVED_SECONDS = 600.0
"""Of pauses with hardly a step between them, after which somebody is told."""
_NAP_SECONDS, _TELL_SECONDS = 0.1, 60.0


@dataclass(frozen=True)
class Policy:
    """How far a training gives way, in seconds of some clock.

    Attributes:
        degree: of giving way.
        changed: when it became so.
        strained: when the p99 was last above its objective, or the degree was changed.
        hold: how long it must keep it before the next degree is taken back.
        rose: whether the last change took a degree back.
    """

    degree: int = 0
    changed: float = -SETTLE_SECONDS
    strained: float = 0.0
    hold: float = SHORTEST_SECONDS
    rose: bool = False

    def then(self, strained: bool, now: float, deepest: int) -> "Policy":
        """What follows.

        Args:
            strained: whether the p99 is above its objective.
            now: the time.
            deepest: the last degree.
        """
        if strained:
            settles = not self.rose and now - self.changed < SETTLE_SECONDS
            if settles or self.degree == deepest:
                return replace(self, strained=now)
            # What was taken back too early is taken back later the next time.
            hold = min(2 * self.hold, LONGEST_SECONDS) if self.rose else self.hold
            return Policy(self.degree + 1, now, now, hold)
        if now - self.strained < self.hold:
            return self
        if self.degree > LOWEST:
            return Policy(self.degree - 1, now, now, self.hold, rose=True)
        return replace(self, hold=SHORTEST_SECONDS, rose=False)


class Throttle:
    """A training that gives way.

    Args:
        heard: what servers of this machine answered of late; None if there is none.
        tell: is told what is done.
        threads: that compute: more cores than these are not missed.
        pauses: whether it may pause.
        slowed: seconds that an earlier run of it had fewer cores.
        paused: seconds that it paused for.

    Attributes:
        slowed: and `paused`: with those since then.
    """

    def __init__(
        self, heard: Callable[[], Latency | None], tell: Callable[[str], None], threads: int, *, pauses: bool = True,
        slowed: float = 0.0, paused: float = 0.0,
    ) -> None:  # fmt: skip
        self._heard, self._tell = heard, tell
        self._priority, self._beside = Priority(), False
        self._cores = [self._priority.cores] * 2
        while self._cores[-1] > 1:
            self._cores.append(max(1, min(self._cores[-1], threads) // 2))
        self._deepest = len(self._cores) if pauses else len(self._cores) - 1
        # Listens at once: what comes first may take long.
        self._courtesy, self._looked = Policy(), time.monotonic() - LOOK_SECONDS
        self.slowed, self.paused = slowed, paused
        self._free, self._warned = (self._looked, paused), False

    @property
    def pausing(self) -> bool:
        """Whether it is to do nothing."""
        return self._courtesy.degree == len(self._cores)

    def look(self) -> bool:
        """Listens, if it is time, and gives way or takes back; returns whether to pause."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return self.pausing
        since, self._looked = now - self._looked, now
        before = self._courtesy
        if self.pausing:
            self.paused += since
        elif before.degree > LOWEST:
            self.slowed += since
        latency = self._heard()
        if latency is not None and not self._beside:
            self._beside = True
            self._take()
        strained = latency is not None and latency.strained
        self._courtesy = before.then(strained, now, self._deepest)
        if self._courtesy.degree != before.degree:
            self._take()
            what = f"gives way to serving ({latency})" if strained else "takes back what serving does not need"
            self._tell(f"{what}: {self._shown()}")
        self._watch(now, latency)
        return self.pausing

    def pause(self, ended: Sequence[int]) -> float:
        """Does nothing until there is room again, or something has `ended` it; returns the seconds that took."""
        before, told = self.paused, time.monotonic()
        self._looked = told  # what was done since the pause was decided on, is work
        while self.look() and not ended:
            time.sleep(_NAP_SECONDS)
            if self._looked - told >= _TELL_SECONDS:
                told = self._looked
                self._tell(f"gives way to serving: paused for {self.paused - before:,.0f} s")
        return self.paused - before

    def end(self) -> None:
        """Gives nothing any more."""
        self._priority.restore()

    def _take(self) -> None:
        """What the degree leaves it. A pause takes nothing, and whoever ends it shall not have to wait for a turn."""
        degree = 0 if self.pausing else self._courtesy.degree
        self._priority.lower(self._cores[degree], idle=degree >= LOWEST)

    def _shown(self) -> str:
        degree, (most, *_) = self._courtesy.degree, self._cores
        if self.pausing:
            return "paused"
        if degree > LOWEST and most > 1:
            return f"{self._cores[degree]} of {most} cores"
        return "lowest priority"

    def _watch(self, now: float, latency: Latency | None) -> None:
        """Warns, once, of a training that would never end."""
        if self._courtesy.degree <= LOWEST:
            self._free = now, self.paused
        began, paused = self._free
        if not self._warned and now - began >= STARVED_SECONDS and self.paused - paused >= 0.9 * (now - began):
            self._warned = True
            text = (
                f"training starves: it gives way to serving for {(now - began) / 60:.0f} minutes on end ({latency}); "
                "raise server.latency_objective_ms and start the API again, train where nothing is served, or set "
                "profiles.training.give_way = false"
            )
            self._tell(text)
            warnings.warn(text, RuntimeWarning, stacklevel=2)


@contextmanager
def throttled(
    heard: Callable[[], Latency | None] | None, progress: Progress, threads: int, paused: Callable[[float], None]
) -> Iterator[Progress]:
    """Within the block, something that tells its progress gives way each time it does.

    Args:
        heard: as `Giving` hears it; None gives nothing.
        progress: is told the same, and what is given.
        threads: that compute.
        paused: is told each pause's seconds.
    """
    if heard is None:
        yield progress
        return
    share = 0.0

    def told(text: str, done: float) -> None:
        nonlocal share
        share = done
        progress(text, done)
        if giving.look():
            paused(giving.pause(()))

    giving = Throttle(heard, lambda text: progress(text, share), threads)
    try:
        giving.look()
        yield told
    finally:
        giving.end()
