"""Runs over tensors: one at a time, in a thread, in the order in which they were asked for.

A run over an image takes milliseconds of a processor. As many at a time as there are requests would leave none to
lookups, and take the memory of all of them at once.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.package.inputs import Feeds
from isthmus.serving.predict.model import Model

if TYPE_CHECKING:
    import onnxruntime

TensorOutputs = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class TensorInputs:
    """The tensors for a graph by name, and the outputs that are asked for; `again` if a run like it follows."""

    feeds: Feeds
    outputs: tuple[str, ...]
    again: bool = False


class Turns:
    """The runs of a model of tensors in an event loop; none is `quick` enough for the loop itself."""

    quick = False

    def __init__(self, model: Model) -> None:
        self._model = model
        self._lock = asyncio.Lock()

    async def predict(self, inputs: TensorInputs, _rows: int) -> TensorOutputs:
        """The outputs of a run. It ends early where nobody waits for it any more, and only then comes the next."""
        options = self._options(inputs)
        await self._lock.acquire()
        run = self._started(inputs, options)
        run.add_done_callback(lambda _: self._lock.release())
        return await _ended(run, options)

    async def beside(self, inputs: TensorInputs, *, in_thread: bool) -> TensorOutputs:  # noqa: ARG002 - always in one
        """The outputs of a run that has no turn; it ends early, too."""
        options = self._options(inputs)
        return await _ended(self._started(inputs, options), options)

    def _options(self, inputs: TensorInputs) -> "onnxruntime.RunOptions":
        import onnxruntime  # a server without a model has no need of it

        options = onnxruntime.RunOptions()
        if not inputs.again and sum(array.size for array in inputs.feeds.values()) > self._model.elements:
            # ONNX Runtime would keep the memory that it took. Giving it back takes half as long as a run.
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return options

    def _started(self, inputs: TensorInputs, options: "onnxruntime.RunOptions") -> asyncio.Future[Any]:
        run = asyncio.ensure_future(asyncio.to_thread(self._model.run, inputs.feeds, inputs.outputs, options))
        # Nobody may wait for it any more, and asyncio would log its exception with all frames.
        run.add_done_callback(lambda run: run.cancelled() or run.exception())
        return run


async def _ended(run: asyncio.Future[TensorOutputs], options: "onnxruntime.RunOptions") -> TensorOutputs:
    try:
        return await asyncio.shield(run)
    except asyncio.CancelledError:
        options.terminate = True
        raise
