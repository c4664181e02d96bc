"""How long requests wait for a connection or a batch, as counters that every worker shares."""

import time
from contextvars import ContextVar

REFUSAL = "isthmus.refusal"
"""Where a request's scope has the class of the error that it was answered with."""


_waits: ContextVar[list[float]] = ContextVar("waits")


class Waiting:
    """Surrounds a wait for the online store, and notes it with the request being answered."""

    __slots__ = ("_start",)

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        _waits.get([]).append(time.perf_counter() - self._start)
