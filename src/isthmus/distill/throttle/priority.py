"""What a process takes of its machine: scheduling policy, nice and cores, which on Linux each thread has for itself.

torch's number of threads is left alone: sums are split among threads, and other parts give other last bits. On fewer
cores the same threads compute the same.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NICE = 10
"""Of what runs beside a server: a tenth of what a process without it gets."""


class _Held(NamedTuple):
    """What a thread has."""

    policy: int
    nice: int
    cores: frozenset[int]


class Priority:
    """Of all threads of this process. Where the system is not Linux, nothing is changed.

    Attributes:
        cores: that it may use at first.
    """

    def __init__(self) -> None:
        self._before: Mapping[int, _Held] = {}
        self.cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1

    def lower(self, cores: int, *, idle: bool = False) -> None:
        """Lets other processes go first.

        Args:
            cores: how many of its cores it may use, the last ones.
            idle: only what nobody else wants of them.
        """
        if sys.platform == "linux":
            self._before = self._before or _all_held()
            for thread in _threads():
                before = self._of(thread)
                policy = os.SCHED_IDLE if idle or before.policy == os.SCHED_IDLE else os.SCHED_BATCH
                _set(thread, _Held(policy, max(before.nice, NICE), frozenset(sorted(before.cores)[-cores:])))

    def restore(self) -> None:
        """What it was before; but a user who may not raise a priority leaves it low (sched(7), RLIMIT_NICE)."""
        if sys.platform == "linux" and self._before:
            for thread in _threads():
                _set(thread, self._of(thread))
            self._before = {}

    def _of(self, thread: int) -> _Held:
        """A thread that came later would have had what the first one had."""
        return self._before.get(thread) or self._before[os.getpid()]


if sys.platform == "linux":

    def _threads() -> list[int]:
        return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]

    def _all_held() -> Mapping[int, _Held]:
        found = {}
        for thread in _threads():
            with suppress(ProcessLookupError):  # it has ended
                nice = os.getpriority(os.PRIO_PROCESS, thread)
                found[thread] = _Held(os.sched_getscheduler(thread), nice, frozenset(os.sched_getaffinity(thread)))
        return found

    def _set(thread: int, held: _Held) -> None:
        """As far as this user may."""
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, held.cores)
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, thread, held.nice)
            with suppress(PermissionError):
                os.sched_setscheduler(thread, held.policy, os.sched_param(0))
