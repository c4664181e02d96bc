"""Run large work in a thread, so that the event loop stays free for small requests, and start coroutines as tasks."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

VALUES = 10_000
"""Most values to handle on the event loop. They take about a millisecond, ten times the cost of using a thread."""

BYTES = 1 << 15
"""Most bytes of a body to decode on the event loop. They take about a millisecond."""

P = ParamSpec("P")
T = TypeVar("T")


async def offload(large: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    if large:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


def start_task(work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Start a coroutine as a task, and return the task, for work whose result may not be needed.

    If the caller never awaits the task, its exception is dropped. asyncio would log it.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
