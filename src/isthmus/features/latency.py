"""How fast the servers of a project answer, for whoever shares their machine: a small file of each, every second.

No request waits for it: a server writes what it counts anyway. Whoever reads asks no server, which would cost it time.
"""

import platform
import secrets
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

WRITE_SECONDS = 1.0
STALE_SECONDS = 5.0
"""After which a server that has written nothing is taken for dead."""
WINDOW_SECONDS = 4.0
"""Of requests that are looked at together."""
FEWEST = 3
"""Slow answers that say something: a server's first one is always slow."""


class LatencySample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one server process says.

    Attributes:
        machine: where it runs.
        at: when it said so, in seconds of the machine's monotonic clock, which all its processes share.
        objective_ms: what the p99 shall not be above.
        bounds: upper bounds of durations in seconds, ascending; the objective is one of them.
        counts: requests answered since its start, by bound, and at last those beyond all of them.
    """

    machine: str
    at: float
    objective_ms: float
    bounds: tuple[float, ...]
    counts: tuple[int, ...]


class Latency(NamedTuple):
    """What servers answered of late.

    Attributes:
        p99_ms: in milliseconds, between bounds in proportion, as Prometheus says it; beyond the last one, that.
        objective_ms: the lowest of any server.
        answered: requests.
        slow: of these, how many took longer than their server's objective: exact, whatever the p99 is.
    """

    p99_ms: float
    objective_ms: float
    answered: int
    slow: int

    @property
    def strained(self) -> bool:
        """Whether the p99 is above the objective."""
        return self.slow >= FEWEST and self.slow * 100 > self.answered

    def __str__(self) -> str:
        return f"p99 {self.p99_ms:.3g} ms > {self.objective_ms:g} ms"


class LatencyWriter:
    """Writes what one server process says.

    Args:
        folder: of all servers of the project.
        objective_ms: what the p99 shall not be above.
        bounds: of what it counts, in seconds.
    """

    def __init__(self, folder: Path, objective_ms: float, bounds: Sequence[float]) -> None:
        # Not called by a process id: those of two containers may be the same.
        self._file = folder / f"{secrets.token_hex(8)}.json"
        self._objective_ms, self._bounds = objective_ms, tuple(bounds)

    def write(self, counts: Sequence[int]) -> None:
        """Writes what was counted so far. It need not outlive the machine, so nothing waits for the disk.

        Raises:
            OSError: it cannot be written.
        """
        told = LatencySample(_machine(), time.monotonic(), self._objective_ms, self._bounds, tuple(counts))
        if not self._file.exists():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            for left in set(self._file.parent.glob("*.json")) - _fresh(self._file.parent).keys():
                left.unlink(missing_ok=True)  # of a server that was killed
        partial = self._file.with_suffix(".json.partial")
        partial.write_bytes(msgspec.json.encode(told))
        partial.replace(self._file)

    def close(self) -> None:
        """Says nothing any more."""
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


class LatencyReader:
    """Reads what the servers of a project on this machine say; `()` gives what they answered of late.

    Args:
        folder: where they write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: dict[Path, deque[LatencySample]] = {}

    def __call__(self) -> Latency | None:
        """None if no server is there. A server counts from the second time on that it is heard."""
        fresh = _fresh(self._folder)
        for gone in self._kept.keys() - fresh.keys():
            del self._kept[gone]
        for file, told in fresh.items():
            kept = self._kept.setdefault(file, deque())
            if not kept or told.at > kept[-1].at:
                kept.append(told)
            while len(kept) > 2 and kept[1].at <= told.at - WINDOW_SECONDS:
                kept.popleft()
        if not fresh:
            return None
        counts: Counter[float] = Counter()
        slow = 0
        for first, *_, last in (kept for kept in self._kept.values() if len(kept) > 1):
            answered = [now - before for now, before in zip(last.counts, first.counts, strict=True)]
            slow += sum(answered[bisect_left(last.bounds, last.objective_ms / 1000) + 1 :])
            for bound, count in zip((*last.bounds, float("inf")), answered, strict=True):
                counts[bound] += count
        objective = min(told.objective_ms for told in fresh.values())
        return Latency(p99(counts) * 1000, objective, counts.total(), slow)


def p99(counts: "Counter[float]") -> float:
    """Of durations by the upper bounds that they fell below: linear within those (Prometheus, `histogram_quantile`)."""
    rank, below = 0.99 * counts.total(), 0
    for lower, upper in pairwise((0.0, *sorted(counts))):
        if below + counts[upper] >= rank and counts[upper]:
            return lower if upper == float("inf") else lower + (upper - lower) * (rank - below) / counts[upper]
        below += counts[upper]
    return 0.0


def _fresh(folder: Path) -> dict[Path, LatencySample]:
    """What servers of this machine have said just now. What cannot be read says nothing."""
    found = {}
    machine, now = _machine(), time.monotonic()
    for file in folder.glob("*.json"):
        with suppress(OSError, msgspec.MsgspecError):
            told = msgspec.json.decode(file.read_bytes(), type=LatencySample)
            # A clock that began anew with the machine is behind.
            if told.machine == machine and 0 <= now - told.at < STALE_SECONDS:
                found[file] = told
    return found


def _machine() -> str:
    """The same for all processes of a machine, in whatever containers, until it starts again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
