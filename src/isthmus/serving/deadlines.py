"""Deadlines of requests, and the time that a request spends waiting for the online store (`StoreWait`)."""

import asyncio
import time
from contextvars import ContextVar
from types import TracebackType

DEADLINE = "isthmus.deadline"
"""Key in a request's scope for its deadline."""

REFUSAL = "isthmus.refusal"
"""Key in a request's scope for the name of the error class in its answer."""

waits: ContextVar[list[float]] = ContextVar("waits")


class StoreWait:
    """Measure a wait for the online store in a `with` block. Append the seconds to the list in `waits`, if any."""

    __slots__ = ("_start",)

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        waits.get([]).append(time.perf_counter() - self._start)


class Deadlines:
    """Time limits of equal length on one timer, because a timer per request took 5 % of a small lookup."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._pending: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, deadline: "Deadline", loop: asyncio.AbstractEventLoop) -> None:
        self._pending[deadline] = None
        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._expire, loop)

    def remove(self, deadline: "Deadline") -> None:
        self._pending.pop(deadline, None)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for deadline in list(self._pending):
            if deadline.start + self.seconds > now:
                self._timer = loop.call_at(deadline.start + self.seconds, self._expire, loop)
                break
            self.remove(deadline)
            deadline.expire()


class Deadline:
    """A time limit for a `with` block: a late block raises TimeoutError. `expired` tells it from other timeouts."""

    __slots__ = ("_all", "_canceling", "_task", "expired", "start")

    def __init__(self, deadlines: Deadlines) -> None:
        self._all = deadlines
        self.expired = False

    def __enter__(self) -> "Deadline":
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None  # noqa: S101 - a coroutine always runs in a task
        self._task, self._canceling, self.start = task, task.cancelling(), loop.time()
        self._all.add(self, loop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._all.remove(self)
        # Let other cancellations of this task through.
        if self.expired and self._task.uncancel() <= self._canceling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def release(self) -> None:
        """Remove the time limit for the rest of the `with` block. Used before streaming a text, which takes longer."""
        self._all.remove(self)

    def expire(self) -> None:
        self.expired = True
        self._task.cancel()
