"""The latency of a project's servers: each writes its counters to a small file, so that training can give way."""

import platform
import secrets
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import msgspec

# No request waits for a write, and readers cost the servers no time.

WRITE_SECONDS = 1.0
STALE_SECONDS = 5.0
"""A server that has not written for this long counts as dead."""
_ABANDONED_SECONDS = 600.0
"""Any server's file that was not written for this long is deleted."""
WINDOW_SECONDS = 4.0
"""The time window of the reported latency."""
_FEWEST_SLOW = 3
"""Fewer slow responses are ignored, because a server's first response is always slow."""


class LatencySample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The counters that a server process writes to its file, for training on the same machine.

    Attributes:
        at: seconds of the machine's monotonic clock, which all its processes share.
        objective_ms: upper limit for the p99, in milliseconds.
        bounds: upper bounds of durations in seconds, ascending; the objective is among them.
        counts: requests answered since the server's start, by bound; the last count is above all bounds.
    """

    machine: str
    at: float
    objective_ms: float
    bounds: tuple[float, ...]
    counts: tuple[int, ...]


class Latency(NamedTuple):
    """The recent latency of all servers of a project on this machine.

    `p99_ms` is interpolated between bounds, and at most the last bound. `slow` counts requests above the objective.
    """

    p99_ms: float
    objective_ms: float
    answered: int
    slow: int

    @property
    def strained(self) -> bool:
        return self.slow >= _FEWEST_SLOW and self.slow * 100 > self.answered

    def __str__(self) -> str:
        return f"p99 {self.p99_ms:.3g} ms > {self.objective_ms:g} ms"


class LatencyWriter:
    """Writes the counters of a server process to a file in `folder`. `bounds` are in seconds (see `LatencySample`)."""

    def __init__(self, folder: Path, objective_ms: float, bounds: Sequence[float]) -> None:
        # Not named after the process id: processes in two containers may have the same id.
        self._file = folder / f"{secrets.token_hex(8)}.json"
        self._objective_ms, self._bounds = objective_ms, tuple(bounds)

    def write(self, counts: Sequence[int]) -> None:
        """Replace this server's file with its current counters, so that training on this machine can make way for it.

        `counts` has the number of requests in each latency bucket since the server started: one number per upper bound,
        and one for requests above the last bound. The first call also creates the folder, and deletes the files of this
        machine's killed servers and all files that were not written for ten minutes.
        """
        first = not self._file.exists()
        sample = LatencySample(_machine(), time.monotonic(), self._objective_ms, self._bounds, tuple(counts))
        if first:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._file.with_suffix(".json.partial")
        partial.write_bytes(msgspec.json.encode(sample))
        partial.replace(self._file)
        if first:
            _delete_stale(self._file.parent, self._file.stat().st_mtime)

    def close(self) -> None:
        with suppress(OSError):
            self._file.unlink(missing_ok=True)


class LatencyReader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._samples: dict[Path, deque[LatencySample]] = {}

    def __call__(self) -> Latency | None:
        """Return the latency over about `WINDOW_SECONDS`, or None if no server has written within `STALE_SECONDS`.

        Call this repeatedly: a server's requests count only after two of its samples have been seen.
        """
        fresh = _fresh(self._folder)
        for gone in self._samples.keys() - fresh.keys():
            del self._samples[gone]
        for file, sample in fresh.items():
            samples = self._samples.setdefault(file, deque())
            if not samples or sample.at > samples[-1].at:
                samples.append(sample)
            while len(samples) > 2 and samples[1].at <= sample.at - WINDOW_SECONDS:
                samples.popleft()
        if not fresh:
            return None
        counts: Counter[float] = Counter()
        slow = 0
        for first, *_, last in (samples for samples in self._samples.values() if len(samples) > 1):
            answered = [now - before for now, before in zip(last.counts, first.counts, strict=True)]
            slow += sum(answered[bisect_left(last.bounds, last.objective_ms / 1000) + 1 :])
            for bound, count in zip((*last.bounds, float("inf")), answered, strict=True):
                counts[bound] += count
        objective = min(sample.objective_ms for sample in fresh.values())
        return Latency(quantile(counts, 0.99) * 1000, objective, counts.total(), slow)


def quantile(counts: Mapping[float, float], share: float) -> float:
    """Return a quantile of durations, in seconds, from a histogram; 0 if the histogram is empty.

    The result is interpolated within its bucket, like Prometheus's `histogram_quantile`. In the bucket that ends at
    infinity, it is the bucket's lower bound.

    Args:
        counts: number of durations in each bucket, by the bucket's upper bound in seconds.
        share: share of the durations below the quantile, such as 0.99 for the p99.
    """
    rank, below = share * sum(counts.values()), 0.0
    for lower, upper in pairwise((0.0, *sorted(counts))):
        if below + counts[upper] >= rank and counts[upper]:
            return lower if upper == float("inf") else lower + (upper - lower) * (rank - below) / counts[upper]
        below += counts[upper]
    return 0.0


def _fresh(folder: Path) -> dict[Path, LatencySample]:
    samples, now = _samples(folder), time.monotonic()
    # A sample from before a reboot is ahead of the clock.
    return {file: sample for file, sample in samples.items() if 0 <= now - sample.at < STALE_SECONDS}


def _samples(folder: Path) -> dict[Path, LatencySample]:
    samples, machine = {}, _machine()
    for file in folder.glob("*.json"):
        with suppress(OSError, msgspec.MsgspecError):
            sample = msgspec.json.decode(file.read_bytes(), type=LatencySample)
            if sample.machine == machine:
                samples[file] = sample
    return samples


def _delete_stale(folder: Path, now: float) -> None:
    """Delete the files of killed servers. `now` is a time of the file system, the only clock that machines share."""
    stale = _samples(folder).keys() - _fresh(folder).keys()
    for file in folder.glob("*.json*"):
        with suppress(OSError):
            if file in stale or now - file.stat().st_mtime > _ABANDONED_SECONDS:
                file.unlink()


def _machine() -> str:
    """Return an identifier that all processes of a machine share, in any container, until it reboots."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
