"""Runs over tensors: one at a time, in a thread, in the order in which they were asked for.

A run over an image takes milliseconds of a processor. As many at a time as there are requests would leave none to
lookups, and take the memory of all of them at once.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.features.package.inputs import Feeds
from isthmus.serving.predict.model import Model

TensorOutputs = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class TensorInputs:
    """The tensors for a graph by name, and the outputs that are asked for."""

    feeds: Feeds
    outputs: tuple[str, ...]


class Turns:
    """The runs of a model of tensors in an event loop; none is `quick` enough for the loop itself."""

    quick = False

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = asyncio.Lock()

    async def predict(self, inputs: TensorInputs, _rows: int) -> TensorOutputs:
        """The outputs of a run. It ends early where nobody waits for it any more, and only then comes the next."""
        import onnxruntime  # a server without a model has no need of it

        options = onnxruntime.RunOptions()
        if sum(array.size for array in inputs.feeds.values()) > self._model.elements:
            # ONNX Runtime would keep the memory that it took. Giving it back takes half as long as a run.
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        await self._lock.acquire()
        run = asyncio.ensure_future(asyncio.to_thread(self._model.run, inputs.feeds, inputs.outputs, options))
        run.add_done_callback(self._ended)
        try:
            return await asyncio.shield(run)
        except asyncio.CancelledError:
            options.terminate = True
            raise

    def _ended(self, run: asyncio.Future[Any]) -> None:
        # Nobody may wait for it any more, and asyncio would log its exception with all frames.
        if not run.cancelled():
            run.exception()
        self._lock.release()
