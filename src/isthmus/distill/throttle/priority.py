"""Changes priority and cores of this process's threads, but not the number of threads, on which sums depend."""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

NICE = 10
"""Nice value next to a server; the process gets a tenth of the time of one with nice 0."""


class _Scheduling(NamedTuple):
    policy: int
    nice: int
    cores: frozenset[int]


class Priority:
    """Lowers and restores priority and cores of all threads of this process. Only Linux: elsewhere nothing happens.

    `cores` is the number of cores at the start, and 1 outside Linux.
    """

    def __init__(self) -> None:
        self._before: Mapping[int, _Scheduling] = {}
        self.cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1

    def lower(self, cores: int, *, idle: bool = False) -> None:
        if sys.platform == "linux":
            self._before = self._before or _current()
            for thread in _threads():
                before = self._of(thread)
                policy = os.SCHED_IDLE if idle or before.policy == os.SCHED_IDLE else os.SCHED_BATCH
                _set(thread, _Scheduling(policy, max(before.nice, NICE), frozenset(sorted(before.cores)[-cores:])))

    def restore(self) -> None:
        if sys.platform == "linux" and self._before:
            for thread in _threads():
                _set(thread, self._of(thread))
            self._before = {}

    def _of(self, thread: int) -> _Scheduling:
        # A thread that started later would have inherited from the main thread.
        return self._before.get(thread) or self._before[os.getpid()]


if sys.platform == "linux":

    def _threads() -> list[int]:
        return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]

    def _current() -> Mapping[int, _Scheduling]:
        threads = {}
        for thread in _threads():
            with suppress(ProcessLookupError):  # it has ended
                nice = os.getpriority(os.PRIO_PROCESS, thread)
                threads[thread] = _Scheduling(
                    os.sched_getscheduler(thread), nice, frozenset(os.sched_getaffinity(thread))
                )
        return threads

    def _set(thread: int, scheduling: _Scheduling) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, scheduling.cores)
            with suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, thread, scheduling.nice)
            with suppress(PermissionError):
                os.sched_setscheduler(thread, scheduling.policy, os.sched_param(0))
