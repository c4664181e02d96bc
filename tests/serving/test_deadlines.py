"""Deadlines with a single timer do what `asyncio.timeout` does."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import pytest
import uvloop

from isthmus.serving.deadlines import Deadline, Deadlines


@asynccontextmanager
async def _with(deadlines: Deadlines) -> AsyncIterator[None]:
    with Deadline(deadlines):
        yield


async def _outcome(work: float, bound: AbstractAsyncContextManager[object], canceled_after: float | None) -> str:
    """How a task ends that works for some seconds within a bound, and is canceled, or not."""

    async def run() -> None:
        async with bound:
            await asyncio.sleep(work)

    task = asyncio.create_task(run())
    if canceled_after is not None:
        await asyncio.sleep(canceled_after)
        task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        return "canceled"
    error = task.exception()
    return "done" if error is None else type(error).__name__


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_deadline_ends_what_asyncio_would(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def outcomes(deadlines: Deadlines | None) -> list[str]:
        bound = partial(asyncio.timeout, 0.4) if deadlines is None else partial(_with, deadlines)
        cases = [(0.0, None), (0.1, None), (9.0, None), (9.0, 0.1), (0.2, 0.1), (9.0, None), (0.1, 0.0)]
        # Each batch begins before the former has ended.
        batches = []
        for _ in range(3):
            batches.append(asyncio.gather(*(_outcome(work, bound(), after) for work, after in cases)))
            await asyncio.sleep(0.15)
        return [outcome for batch in await asyncio.gather(*batches) for outcome in batch]

    async def both() -> tuple[list[str], list[str]]:
        return await outcomes(None), await outcomes(Deadlines(0.4))

    with asyncio.Runner(loop_factory=loop) as runner:
        expected, found = runner.run(both())
    assert found == expected
    assert set(found) == {"done", "canceled", "TimeoutError"}


def test_the_inner_of_two_deadlines_ends_its_own_block() -> None:
    async def run() -> str:
        with Deadline(Deadlines(30)):
            try:
                with Deadline(Deadlines(0.05)):
                    await asyncio.sleep(30)
            except TimeoutError:
                await asyncio.sleep(0)
                return "inner"
        return "none"

    assert asyncio.run(run()) == "inner"


def test_an_error_of_the_block_is_raised_also_after_the_deadline() -> None:
    async def run() -> None:
        with Deadline(Deadlines(0.05)):
            try:
                await asyncio.sleep(30)
            finally:
                raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(run())
