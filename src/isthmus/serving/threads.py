"""Move large work to a thread, so that the event loop stays free for small requests."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

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
