"""How long a request waits for the online store, and the class of its error: notes for the metrics."""

import time
from contextvars import ContextVar

REFUSAL = "isthmus.refusal"
"""The key in a request's scope for the class of the error that it was answered with."""

waits: ContextVar[list[float]] = ContextVar("waits")


class Waiting:
    """Surrounds a wait for the online store, and notes it with the request being answered."""

    __slots__ = ("_start",)

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        waits.get([]).append(time.perf_counter() - self._start)
