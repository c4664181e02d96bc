"""Frequent timer interrupts on the cores of a training, so that whoever it gives way to gets a core at once.

A kernel that preempts lazily lets a computing thread go on until the next tick, up to 4 ms, even if it has the lowest
priority and a server has work. It looks at the return from any interrupt. A thread per core that sleeps for a fifth of
a millisecond, again and again, is one.
"""

import os
import threading
import time
from collections.abc import Iterable

_SECONDS = 0.0002
_FEW = 2
"""Cores up to which each is interrupted so often; with more, all together no more often than these."""


class Wakeups:
    """A thread per core that wakes up all the time, with the priority of the thread that starts them. Linux only."""

    def __init__(self, cores: Iterable[int]) -> None:
        self._ended = False
        cores = list(cores)
        self._seconds = _SECONDS * max(1.0, len(cores) / _FEW)
        self._threads = [
            threading.Thread(target=self._wake, args=(core,), name=f"wakeups {core}", daemon=True) for core in cores
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Ends the threads."""
        self._ended = True
        for thread in self._threads:
            thread.join()

    def _wake(self, core: int) -> None:
        os.sched_setaffinity(0, {core})
        while not self._ended:
            time.sleep(self._seconds)
