"""How long requests may take, and how long each waits for the online store; notes with a request for the metrics."""

import asyncio
import time
from contextvars import ContextVar
from types import TracebackType

DEADLINE = "isthmus.deadline"
"""The key in a request's scope for its deadline."""

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


class Deadlines:
    """Deadlines of the same length: the one that began first ends first, so a single timer serves all of them.

    `asyncio.timeout` sets and cancels a timer for each, twice in a lookup: that was a twentieth of what one of a
    single key cost.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._pending: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, deadline: "Deadline", loop: asyncio.AbstractEventLoop) -> None:
        """Watches a deadline that begins now."""
        self._pending[deadline] = None
        if self._timer is None:
            self._timer = loop.call_later(self.seconds, self._look, loop)

    def remove(self, deadline: "Deadline") -> None:
        """Stops to watch a deadline."""
        self._pending.pop(deadline, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for deadline in list(self._pending):
            if deadline.start + self.seconds > now:
                self._timer = loop.call_at(deadline.start + self.seconds, self._look, loop)
                break
            self.remove(deadline)
            deadline.expire()


class Deadline:
    """Cancels its block when the time is over, which becomes a TimeoutError, like `asyncio.timeout`."""

    __slots__ = ("_all", "_canceling", "_task", "expired", "start")

    def __init__(self, deadlines: Deadlines) -> None:
        self._all = deadlines
        self.expired = False

    def __enter__(self) -> "Deadline":
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        self._task, self._canceling, self.start = task, task.cancelling(), loop.time()
        self._all.add(self, loop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._all.remove(self)
        # Another cancellation, of whoever waits for this task, goes on.
        if self.expired and self._task.uncancel() <= self._canceling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def release(self) -> None:
        """The block may take longer: what it was to do in time is done."""
        self._all.remove(self)

    def expire(self) -> None:
        """The time is over."""
        self.expired = True
        self._task.cancel()
