"""Run a model of tensors: one run at a time, in a thread, in order of arrival.

A run over an image takes milliseconds of a processor. Running all requests at once would leave no processor for lookups
and would need memory for all of them.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.package.inputs import Feeds
from isthmus.serving.predict.model import DeployedModel

if TYPE_CHECKING:
    import onnxruntime

TensorOutputs = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class TensorInputs:
    """Input tensors by name, and the outputs to compute. `again` is True if a similar run follows."""

    feeds: Feeds
    outputs: tuple[str, ...]
    again: bool = False


class Turns:
    """The run queue of a model of tensors in an event loop. No run is `quick` enough for the event loop itself."""

    quick = False

    def __init__(self, model: DeployedModel) -> None:
        self._model = model
        self._lock = asyncio.Lock()

    async def predict(self, inputs: TensorInputs, _rows: int) -> TensorOutputs:
        """Run the model when its turn comes.

        Canceling the caller stops the run, and the next run starts once it has stopped.
        """
        options = self._options(inputs)
        await self._lock.acquire()
        run = self._started(inputs, options)
        run.add_done_callback(lambda _: self._lock.release())
        return await _ended(run, options)

    async def beside(self, inputs: TensorInputs, *, in_thread: bool) -> TensorOutputs:  # noqa: ARG002 - always in one
        """Run outside the queue. Canceling the caller stops the run."""
        options = self._options(inputs)
        return await _ended(self._started(inputs, options), options)

    def _options(self, inputs: TensorInputs) -> "onnxruntime.RunOptions":
        import onnxruntime  # a server without a model does not need it

        options = onnxruntime.RunOptions()
        if not inputs.again and sum(array.size for array in inputs.feeds.values()) > self._model.elements:
            # Otherwise ONNX Runtime keeps the memory. Releasing it takes half as long as a run, so do it for large
            # inputs only.
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return options

    def _started(self, inputs: TensorInputs, options: "onnxruntime.RunOptions") -> asyncio.Future[Any]:
        run = asyncio.ensure_future(asyncio.to_thread(self._model.run, inputs.feeds, inputs.outputs, options))
        # Retrieve the exception: if the caller was canceled, asyncio would log it with a full traceback.
        run.add_done_callback(lambda run: run.cancelled() or run.exception())
        return run


async def _ended(run: asyncio.Future[TensorOutputs], options: "onnxruntime.RunOptions") -> TensorOutputs:
    try:
        return await asyncio.shield(run)
    except asyncio.CancelledError:
        options.terminate = True
        raise
