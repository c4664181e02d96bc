"""Move large work to a thread, so that the event loop stays free for small requests; and start work in tasks."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

VALUES = 10_000
"""Values handled on the event loop: about a millisecond, ten times the cost of using a thread."""

BYTES = 1 << 15
"""Bytes of a body decoded on the event loop: about a millisecond."""

P = ParamSpec("P")
T = TypeVar("T")


async def offload(large: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work`, in a thread if it is large, and return its result."""
    if large:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


def started(work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Start work whose caller may leave: without one, asyncio would log its exception with a full traceback."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
