"""Large work goes to a thread, so that the event loop has time for small requests meanwhile."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

VALUES = 10_000
"""Values that are read or written on the event loop: about a millisecond, ten times what going to a thread costs."""

BYTES = 1 << 15
"""Bytes of a body that are decoded on the event loop: they take about 1 ms."""

P = ParamSpec("P")
T = TypeVar("T")


async def offload(large: bool, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns: from a thread if the work is large, else from here and now."""
    if large:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)
