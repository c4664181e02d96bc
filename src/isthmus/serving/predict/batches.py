"""Predictions of one model: several that wait for a slow one are made together.

A quick model answers in less time than handing its work over takes: ten microseconds against thirty, for the model of
`examples/flights`. It runs where it is asked. A slow one runs in a thread, and what has been asked meanwhile is its
next batch. Nothing ever waits for company: there is no timer.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.features.profiles import BATCH_ROWS
from isthmus.features.values.columns import Values
from isthmus.serving.threads import offload

QUICK_SECONDS = 500e-6
"""How long a prediction of one row may hold up the event loop."""

QUICK_ROWS = 1000
"""Rows that a quick model predicts on the event loop."""

Columns = Mapping[str, Values]
Outputs = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A prediction that waits: its columns, its number of rows, and where its outputs go."""

    columns: Columns
    rows: int
    outputs: asyncio.Future[Outputs]


class Batches:
    """The predictions of one model in one event loop.

    Args:
        predict: the model: columns of n values to n outputs, which do not depend on each other.
        seconds: how long it takes for one row.
        most: rows of a batch; a request with more is a batch of its own, beside the others.
    """

    def __init__(self, predict: Callable[[Columns], Outputs], seconds: float, most: int = BATCH_ROWS) -> None:
        self._predict = predict
        self._most = most
        self._quick = seconds <= QUICK_SECONDS
        self._waiting: list[_Waiting] = []
        self._runner: asyncio.Task[None] | None = None

    async def predict(self, columns: Columns, rows: int) -> Outputs:
        """The outputs for some rows, shape (rows,)."""
        if self._quick:
            return await offload(rows > QUICK_ROWS, self._predict, columns)
        if rows > self._most:
            return await asyncio.to_thread(self._predict, columns)
        waiting = _Waiting(columns, rows, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return await waiting.outputs

    async def _run(self) -> None:
        """Makes batches until nothing waits."""
        try:
            while batch := self._next():
                try:
                    outputs = await asyncio.to_thread(self._predict, _together([one.columns for one in batch]))
                except Exception as error:  # noqa: BLE001 - onnxruntime's have no base class of their own
                    if len(batch) == 1:
                        _fail(batch[0], error)
                    else:
                        await self._apart(batch)
                    continue
                ends = np.cumsum([one.rows for one in batch])[:-1]
                for one, part in zip(batch, np.split(outputs, ends), strict=True):
                    _answer(one, part)
        finally:
            self._runner = None

    def _next(self) -> list[_Waiting]:
        """Takes from the front what fits into one batch."""
        rows = count = 0
        for one in self._waiting:
            rows += one.rows
            if rows > self._most:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _apart(self, batch: Sequence[_Waiting]) -> None:
        """After a batch has failed: nobody's prediction fails for the rows of another."""
        for one in batch:
            try:
                _answer(one, await asyncio.to_thread(self._predict, one.columns))
            except Exception as error:  # noqa: BLE001 - whoever asked is told
                _fail(one, error)


def _fail(one: _Waiting, error: Exception) -> None:
    if not one.outputs.done():
        one.outputs.set_exception(error)


def _answer(one: _Waiting, outputs: Outputs) -> None:
    # Done already if whoever asked has been canceled.
    if not one.outputs.done():
        one.outputs.set_result(outputs)


def _together(parts: Sequence[Columns]) -> Columns:
    """The columns of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return {
        name: Values(
            np.concatenate([part[name].data for part in parts]), np.concatenate([part[name].valid for part in parts])
        )
        for name in parts[0]
    }
