"""Frequent timer interrupts on the cores of a training, so that servers get a core immediately.

A kernel with lazy preemption lets a computing thread continue until the next tick, up to 4 ms, even at the lowest
priority while a server has work. It checks after every interrupt, though. A thread per core that repeatedly sleeps for
a fifth of a millisecond causes such interrupts.
"""

import os
import threading
import time
from collections.abc import Iterable

_SECONDS = 0.0002
_FEW = 2
"""Up to this many cores, each gets an interrupt per `_SECONDS`; more cores share the same total rate."""


class Wakeups:
    """A thread per core that keeps waking up, with the priority of the thread that creates it. Linux only."""

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
        self._ended = True
        for thread in self._threads:
            thread.join()

    def _wake(self, core: int) -> None:
        os.sched_setaffinity(0, {core})
        while not self._ended:
            time.sleep(self._seconds)
