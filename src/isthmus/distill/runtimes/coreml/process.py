"""Interprets a Core ML program in a child process with torch: Core ML itself only runs on Apple's systems."""

import io
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from math import prod
from types import ModuleType
from typing import Any

import numpy as np
from msgspec.structs import replace

from isthmus.distill.runtimes import process
from isthmus.distill.runtimes.libraries import libraries
from isthmus.distill.runtimes.process import Description, Loaded, serve
from isthmus.distill.types import Array
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import TensorInfo

LIBRARIES = libraries("Core ML", "coreml")
MODEL, WEIGHTS = "com.apple.CoreML/model.mlmodel", "com.apple.CoreML/weights/weight.bin"
"""Files of an .mlpackage, in its folder `Data`."""

_SENTINEL = 0xDEADBEEF
_HEADER = np.dtype([("sentinel", "<u4"), ("kind", "<u4"), ("size", "<u8"), ("offset", "<u8")])
"""Header of a tensor in the weights, see MILBlob's StorageFormat.hpp."""

_ELEMENTS = {"FLOAT32": "float", "INT32": "int32", "BOOL": "bool"}
_NUMPY: Mapping[str, "np.dtype[Any]"] = {
    "FLOAT32": np.dtype("<f4"), "FLOAT16": np.dtype("<f2"), "INT32": np.dtype("<i4"), "INT8": np.dtype("i1"),
    "BOOL": np.dtype("?"),
}  # fmt: skip


class CoreMLProgram(process.Program):
    libraries, package = LIBRARIES, "coremltools"

    def __init__(
        self, model: bytes, tensors: Sequence[TensorInfo], outputs: Sequence[TensorInfo], max_sizes: Mapping[str, int]
    ) -> None:
        # Core ML has no 64-bit integers.
        narrow = [replace(tensor, element="int32") if tensor.element == "int64" else tensor for tensor in tensors]
        super().__init__(model, narrow, outputs, max_sizes)

    def ask(self, feeds: Feeds) -> dict[str, Array]:
        return super().ask({
            name: array.astype(np.int32) if array.dtype == np.int64 else array for name, array in feeds.items()
        })  # fmt: skip


def _prepare() -> Callable[[bytes], Loaded]:
    import torch

    if (found := find_spec("coremltools")) is None or not found.submodule_search_locations:
        raise ImportError("no module named coremltools")
    # Import only the protocol buffers: all of coremltools takes ten seconds.
    package = ModuleType("isthmus_coreml")
    package.__path__ = [f"{found.submodule_search_locations[0]}/proto"]
    sys.modules[package.__name__] = package
    described, mil = (import_module(f"{package.__name__}.{name}") for name in ("Model_pb2", "MIL_pb2"))
    torch.set_num_threads(1)

    def load(model: bytes) -> Loaded:
        with zipfile.ZipFile(io.BytesIO(model)) as archive:
            names = {name.partition("/Data/")[2]: name for name in archive.namelist()}
            specification = described.Model()
            specification.ParseFromString(archive.read(names[MODEL]))
            weights = archive.read(names[WEIGHTS]) if WEIGHTS in names else b""
        graph = _Graph(specification, _Values(mil, weights))
        return Loaded(graph.inputs(), graph.outputs(), graph.run)

    return load


class _Graph:
    def __init__(self, specification: Any, values: "_Values") -> None:
        self._values = values
        self._limits = {item.name: item.type.multiArrayType for item in specification.description.input}
        self._function = specification.mlProgram.functions["main"]
        self._block = self._function.block_specializations[self._function.opset]
        self._operations = [each for each in self._block.operations if each.type not in _CONSTANTS]
        self._constants = {
            each.outputs[0].name: _CONSTANTS[each.type]({name: values.read(x) for name, x in each.attributes.items()})
            for each in self._block.operations
            if each.type in _CONSTANTS
        }

    def inputs(self) -> list[Description]:
        described = (self._values.describe(item.name, item.type.tensorType) for item in self._function.inputs)
        return [_limited(each, self._limits[each.name]) for each in described]

    def outputs(self) -> list[Description]:
        results = {item.name: item.type.tensorType for each in self._operations for item in each.outputs}
        return [self._values.describe(name, results[name]) for name in self._block.outputs]

    def run(self, tensors: list[Array]) -> list[Array]:
        import torch

        from isthmus.distill.runtimes.coreml.operations import compute

        feeds = zip(self._function.inputs, tensors, strict=True)
        state = {**self._constants, **{item.name: torch.from_numpy(array.copy()) for item, array in feeds}}
        for operation in self._operations:
            arguments = {}
            for name, bound in operation.inputs.items():
                parts = [state[part.name] if part.name else self._values.read(part.value) for part in bound.arguments]
                arguments[name] = parts if name == "values" else parts[0]
            results = compute(operation.type, arguments)
            names = [output.name for output in operation.outputs]
            state |= zip(names, results if isinstance(results, tuple) else (results,), strict=True)
        return [state[name].numpy() for name in self._block.outputs]


def _dequantized(parts: Mapping[str, Any]) -> Any:
    data, axis = parts["quantized_data"], int(parts["axis"])
    shape = [-1 if place == axis else 1 for place in range(data.ndim)]
    zero, scale = (parts[name].reshape(shape if parts[name].ndim else []) for name in ("zero_point", "scale"))
    return (data.to(scale.dtype) - zero.to(scale.dtype)) * scale


_CONSTANTS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "const": lambda parts: parts["val"], "constexpr_affine_dequantize": _dequantized,
}  # fmt: skip


def _limited(described: Description, limits: Any) -> Description:
    ranges = [limit.upperBound for limit in limits.shapeRange.sizeRanges] or described.shape
    sizes = [most if size == -1 else size for size, most in zip(described.shape, ranges, strict=True)]
    return replace(described, shape=tuple(sizes))


class _Values:
    def __init__(self, mil: ModuleType, weights: bytes) -> None:
        self._mil, self._weights = mil, weights

    def kind(self, tensor: Any) -> str:
        return str(self._mil.DataType.Name(tensor.dataType))

    def describe(self, name: str, tensor: Any) -> Description:
        kind = self.kind(tensor)
        shape = tuple(size.constant.size if size.HasField("constant") else -1 for size in tensor.dimensions)
        return Description(_ELEMENTS.get(kind, kind), shape, name)

    def read(self, value: Any) -> Any:
        import torch

        kind = self.kind(value.type.tensorType)
        if kind == "STRING":
            return value.immediateValue.tensor.strings.values[0]
        if kind not in _NUMPY:
            raise NotImplementedError(f"values of kind {kind} are not supported by the interpreter")
        shape = [size.constant.size for size in value.type.tensorType.dimensions]
        if value.HasField("blobFileValue"):
            data = self._stored(value.blobFileValue.offset, prod(shape), _NUMPY[kind])
        else:
            field = value.immediateValue.tensor.WhichOneof("value")
            found: Any = getattr(value.immediateValue.tensor, field).values
            data = np.frombuffer(bytes(found), _NUMPY[kind]) if field == "bytes" else np.array(found, _NUMPY[kind])
        return torch.from_numpy(data.reshape(shape).copy())

    def _stored(self, place: int, count: int, dtype: "np.dtype[Any]") -> Array:
        (header,) = np.frombuffer(self._weights, _HEADER, 1, place)
        if int(header["sentinel"]) != _SENTINEL or int(header["size"]) != count * dtype.itemsize:
            raise ValueError(f"byte {place} of the weights does not begin a tensor")
        return np.frombuffer(self._weights, dtype, count, int(header["offset"]))


if __name__ == "__main__":
    serve(_prepare)
