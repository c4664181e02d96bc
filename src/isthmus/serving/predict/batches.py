"""`Batches`: the prediction queue of a model. A fast model runs on the event loop: a thread would take longer.

A slow model runs in a thread, and the requests that arrive meanwhile form its next batch. There is no timer: a request
never waits for others to join its batch.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.features.profiles import BATCH_ROWS
from isthmus.features.values.columns import Values, concatenated
from isthmus.serving.threads import offload

QUICK_SECONDS = 500e-6
"""Longest time that the prediction of one row may block the event loop."""

QUICK_ROWS, QUICK_CHARACTERS = 1000, 1000
"""Most rows, and characters of texts, that a fast model predicts on the event loop."""

Columns = Mapping[str, Values]
Outputs = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class _Waiting:
    columns: Columns
    rows: int
    outputs: asyncio.Future[Outputs]


class Batches:
    """The prediction queue of a model in an event loop.

    `seconds` is the time to predict one row, and decides whether the model is `quick`. `most` limits the rows of a
    batch; a larger request runs alone, outside the queue. `texts` names the columns that the model tokenizes.
    """

    def __init__(
        self,
        predict: Callable[[Columns], Outputs],
        seconds: float,
        most: int = BATCH_ROWS,
        texts: Sequence[str] = (),
    ) -> None:
        self._predict, self._texts = predict, texts
        self._most = most
        self.quick = seconds <= QUICK_SECONDS
        self._waiting: list[_Waiting] = []
        self._runner: asyncio.Task[None] | None = None

    async def predict(self, columns: Columns, rows: int) -> Outputs:
        """Predict the rows of a request; return the outputs, shape (rows, ...).

        A slow model may run several requests as one batch. If the batch fails, it runs each of its requests again
        alone, so that only the request with the error fails.
        """
        if self.quick:
            return await offload(rows > QUICK_ROWS or self._long(columns), self._predict, columns)
        if rows > self._most:
            return await asyncio.to_thread(self._predict, columns)
        waiting = _Waiting(columns, rows, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        return await waiting.outputs

    async def predict_now(self, columns: Columns, *, in_thread: bool) -> Outputs:
        return await offload(in_thread or self._long(columns), self._predict, columns)

    def _long(self, columns: Columns) -> bool:
        texts = (text for name in self._texts for text in columns[name].data if text)
        return sum(map(len, texts)) > QUICK_CHARACTERS

    async def _run(self) -> None:
        try:
            while batch := self._next():
                try:
                    outputs = await asyncio.to_thread(
                        self._predict, concatenated([waiting.columns for waiting in batch])
                    )
                except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions share no base class
                    if len(batch) == 1:
                        _fail(batch[0], error)
                    else:
                        await self._separately(batch)
                    continue
                ends = np.cumsum([waiting.rows for waiting in batch])[:-1]
                for waiting, part in zip(batch, np.split(outputs, ends), strict=True):
                    _answer(waiting, part)
        finally:
            self._runner = None

    def _next(self) -> list[_Waiting]:
        rows = count = 0
        for waiting in self._waiting:
            rows += waiting.rows
            if rows > self._most:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _separately(self, batch: Sequence[_Waiting]) -> None:
        for waiting in batch:
            try:
                _answer(waiting, await asyncio.to_thread(self._predict, waiting.columns))
            except Exception as error:  # noqa: BLE001 - the request gets the error
                _fail(waiting, error)


def _fail(waiting: _Waiting, error: Exception) -> None:
    if not waiting.outputs.done():
        waiting.outputs.set_exception(error)


def _answer(waiting: _Waiting, outputs: Outputs) -> None:
    # The future is done already if the request was canceled.
    if not waiting.outputs.done():
        waiting.outputs.set_result(outputs)
