"""Run a model's graph on the tensors of requests, one run at a time."""

import asyncio
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import orjson

from isthmus.features.contract.diff import require_service
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import RequestError, one_of
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import TensorInfo
from isthmus.serving.limits import Limits
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.threads import start_task
from isthmus.serving.wire import tensors
from isthmus.serving.wire.encode import OPTIONS
from isthmus.serving.wire.errors import TooLargeError
from isthmus.serving.wire.inference import DATATYPES, InferRequest, RequestInput, TensorRequest
from isthmus.serving.wire.messages import PredictRequest

if TYPE_CHECKING:
    import onnxruntime

_SPLIT = "split it into several requests, or raise [server.limits]"


TensorOutputs = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, slots=True)
class TensorInputs:
    """Input tensors by name, and the names of the outputs to compute.

    If `again` is True, ONNX Runtime keeps the memory of a large run, because a similar run follows.
    """

    feeds: Feeds
    outputs: tuple[str, ...]
    again: bool = False


class Turns:
    """The run queue of a model of tensors: one run at a time, in a thread, in order of arrival.

    Running all requests at once would leave no processor for lookups and would need memory for all of them. `quick` is
    False: no run is fast enough for the event loop.
    """

    quick = False

    def __init__(self, model: DeployedModel) -> None:
        self._model = model
        self._lock = asyncio.Lock()

    async def predict(self, inputs: TensorInputs, _rows: int) -> TensorOutputs:
        """Run the model in a thread after earlier calls have ended; return the output tensors by name.

        Canceling the caller stops the run, and the next run starts only after it has ended.
        """
        options = self._options(inputs)
        await self._lock.acquire()
        run = start_task(asyncio.to_thread(self._model.run, inputs.feeds, inputs.outputs, options))
        run.add_done_callback(lambda _: self._lock.release())
        return await _ended(run, options)

    async def predict_now(self, inputs: TensorInputs, *, in_thread: bool) -> TensorOutputs:  # noqa: ARG002 - always in one
        options = self._options(inputs)
        run = start_task(asyncio.to_thread(self._model.run, inputs.feeds, inputs.outputs, options))
        return await _ended(run, options)

    def _options(self, inputs: TensorInputs) -> "onnxruntime.RunOptions":
        import onnxruntime  # a server without a model does not need it

        options = onnxruntime.RunOptions()
        if not inputs.again and sum(array.size for array in inputs.feeds.values()) > self._model.elements:
            # Otherwise ONNX Runtime keeps the memory. Releasing it takes half as long as a run, so release it
            # for large inputs only.
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return options


async def _ended(
    run: asyncio.Future[dict[str, np.ndarray[Any, Any]]], options: "onnxruntime.RunOptions"
) -> TensorOutputs:
    try:
        return await asyncio.shield(run)
    except asyncio.CancelledError:
        options.terminate = True
        raise


class TensorPredictor:
    """A model that takes tensors. Raises a ContractMismatch if its service has changed since its package was exported.

    A request contains everything the model reads. Requests run one at a time and are not batched, so an answer does not
    depend on other requests, and lookups can use the remaining processors.
    """

    def __init__(self, contract: Contract, model: DeployedModel) -> None:
        deployment = model.deployment
        require_service(f"model {deployment.model}", model.contract, contract, deployment.service)
        self.contract, self.model = contract, model
        self.tensors = {tensor.name: tensor for tensor in model.manifest.tensors}
        self.outputs = {tensor.name: tensor for tensor in model.manifest.outputs}
        self.max_sizes = model.manifest.variant(deployment.precision).most
        first = {tensor.shape[0] if tensor.shape else 1 for tensor in model.manifest.tensors}
        self._rows = next(iter(first)) if len(first) == 1 else 1
        self.batches = Turns(model)
        self.plan = LookupPlan(contract, [])
        self.bits: Mapping[str, bytes] = {}

    def read(
        self, message: PredictRequest | TensorRequest, limits: Limits
    ) -> tuple[dict[str, list[Any]], TensorInputs, int]:
        """Decode a request of tensors; return no join keys (an empty dict), its tensors, and the number of rows.

        The number of rows is the size of the first dimension if it has the same name in all inputs, and otherwise 1.
        All sizes are checked before any tensor is decoded. Raises RequestError if the tensors do not fit the model, or
        if the request is a PredictRequest. Raises TooLargeError for too many rows or elements.
        """
        if isinstance(message, PredictRequest):
            name = self.model.deployment.model
            raise RequestError(f"model {name}", "takes tensors, not rows of features",
                               expected=", ".join(map(described, self.tensors.values())),
                               remedy=f"use /v2/models/{name}/infer")  # fmt: skip
        request, names = message.message, self._output_names(message.message)
        inputs = self._inputs(request)
        sizes = self._sizes(inputs)
        rows = sizes.get(self._rows, 1) if isinstance(self._rows, str) else 1
        if rows > limits.rows:
            raise TooLargeError("inputs", f"{rows:,} rows", expected=f"{limits.rows:,} at most", remedy=_SPLIT)
        require_elements("inputs", [tuple(item.shape) for item in inputs.values()], limits)
        shapes = [[sizes.get(size, 0) if isinstance(size, str) else size for size in self.outputs[name].shape]
                  for name in names]  # fmt: skip
        require_elements("outputs", shapes, limits)
        return {}, TensorInputs(self._decoded(request, inputs, message.binary), names), rows

    def inputs(self, fields: TensorInputs, _answers: Mapping[str, ViewAnswer]) -> TensorInputs:
        return fields

    def require(self, outputs: TensorOutputs, inputs: TensorInputs) -> None:
        """Accept every output, including NaN, because only the author of the graph knows what it means."""

    def encode(self, outputs: TensorOutputs, request: InferRequest) -> tuple[bytes, int | None]:
        binary = {item.name: item.parameters.binary_data for item in request.outputs}
        described, parts = [], list[bytes | memoryview]()
        for name, array in outputs.items():
            entry: dict[str, Any] = {
                "name": name, "datatype": DATATYPES[self.outputs[name].element], "shape": list(array.shape)
            }  # fmt: skip
            own = binary.get(name)
            if own if isinstance(own, bool) else request.parameters.binary_data_output:
                parts.append(tensors.to_bytes(array))
                entry["parameters"] = {"binary_data_size": len(parts[-1])}
            else:
                entry["data"] = tensors.to_json(array)
            described.append(entry)
        deployment = self.model.deployment
        answer: dict[str, Any] = {"model_name": deployment.model, "model_version": deployment.digest}
        if isinstance(request.id, str):
            answer["id"] = request.id
        text = orjson.dumps({**answer, "outputs": described}, option=OPTIONS)
        return b"".join((text, *parts)), len(text) if parts else None

    def _output_names(self, request: InferRequest) -> tuple[str, ...]:
        if request.model_name not in (None, name := self.model.deployment.model):
            raise RequestError("model_name", f"is {request.model_name!r:.80}", expected=f"{name}, as in the path")
        names = tuple(item.name for item in request.outputs)
        for name in names:
            if name not in self.outputs:
                raise RequestError(
                    f"outputs.{name:.80}", "is not an output of the model", expected=one_of(self.outputs)
                )
            if names.count(name) > 1:
                raise RequestError(f"outputs.{name}", "is requested twice", expected="each output once")
        return names or tuple(self.outputs)

    def _inputs(self, request: InferRequest) -> dict[str, RequestInput]:
        expected = ", ".join(map(described, self.tensors.values()))
        inputs: dict[str, RequestInput] = {}
        for item in request.inputs:
            if item.name not in self.tensors:
                raise RequestError(f"inputs.{item.name:.80}", "is not an input of the model", expected=expected)
            if item.name in inputs:
                raise RequestError(f"inputs.{item.name}", "appears twice", expected="each input once")
            inputs[item.name] = item
        for name, tensor in self.tensors.items():
            if name not in inputs:
                raise RequestError(f"inputs.{name}", "is missing", expected=described(tensor))
            datatype = DATATYPES[tensor.element]
            if inputs[name].datatype != datatype:
                raise RequestError(
                    f"inputs.{name}", f"has the datatype {inputs[name].datatype!r:.40}", expected=datatype
                )
        return {name: inputs[name] for name in self.tensors}

    def _sizes(self, inputs: Mapping[str, RequestInput]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        first: dict[str, str] = {}
        for name, item in inputs.items():
            where, tensor = f"inputs.{name}", self.tensors[name]
            if len(item.shape) != len(tensor.shape) or any(
                isinstance(size, int) and size != own for size, own in zip(tensor.shape, item.shape, strict=True)
            ):
                raise RequestError(where, f"has the shape {item.shape[:16]}", expected=described(tensor))
            for size, own in zip(tensor.shape, item.shape, strict=True):
                if isinstance(size, int):
                    continue
                if own == 0:
                    raise RequestError(where, f"has the shape {item.shape}: {size} is 0", expected="1 or more")
                if own > (most := self.max_sizes.get(size, own)):
                    raise TooLargeError(where, f"has the shape {item.shape}: {size} is {own:,}",
                                        expected=f"{most:,} at most")  # fmt: skip
                if sizes.setdefault(size, own) != own:
                    raise RequestError(where, f"has the shape {item.shape}: {size} is {own:,}",
                                       expected=f"{sizes[size]:,}, as in {first[size]}")  # fmt: skip
                first.setdefault(size, name)
        return sizes

    def _decoded(self, request: InferRequest, inputs: Mapping[str, RequestInput], binary: memoryview) -> Feeds:
        feeds, place = {}, 0
        for item in request.inputs:
            where, element, shape = f"inputs.{item.name}", self.tensors[item.name].element, tuple(item.shape)
            size, data = item.parameters.binary_data_size, item.data
            if isinstance(size, int) == isinstance(data, msgspec.Raw):
                problem = "has `data` and `binary_data_size`" if isinstance(size, int) else "has no data"
                raise RequestError(where, problem, expected="`data`, or `binary_data_size` and as many bytes")
            if isinstance(data, msgspec.Raw):
                feeds[item.name] = tensors.from_json(where, bytes(data), element, shape)
                continue
            assert isinstance(size, int)  # noqa: S101 - exactly one of the two is set
            if place + size > len(binary):
                raise RequestError(where, f"has {len(binary) - place:,} bytes after the JSON", expected=f"{size:,}")
            feeds[item.name] = tensors.from_bytes(where, binary[place : place + size], element, shape)
            place += size
        if place != len(binary):
            raise RequestError("body", f"has {len(binary) - place:,} bytes after its tensors", expected="none")
        return {name: feeds[name] for name in inputs}


def flat(outputs: TensorOutputs) -> np.ndarray[Any, Any]:
    """Flatten output tensors to one array of numbers, shape (n,), to compare models. A string becomes its CRC-32."""
    parts = [
        [zlib.crc32(str(text).encode()) for text in array.ravel().tolist()] if array.dtype == object else array.ravel()
        for array in outputs.values()
    ]
    return np.concatenate([np.asarray(part, np.float64) for part in parts])


def described(tensor: TensorInfo) -> str:
    return f"{tensor.name}: {DATATYPES[tensor.element]} [{', '.join(map(str, tensor.shape))}]"


def require_elements(where: str, shapes: Iterable[Sequence[int]], limits: Limits) -> None:
    elements = sum(map(math.prod, shapes))
    if elements > limits.values:
        raise TooLargeError(where, f"{elements:,} elements", expected=f"{limits.values:,} at most", remedy=_SPLIT)
