"""Packages of tensors: a tiny model that draws and embeds, and one that answers with what it is fed."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from isthmus.features.contract.schema import Contract
from isthmus.package.golden import Golden, GoldenCase, TensorBytes
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import Element, Manifest, TensorInfo, Variant
from isthmus.package.replay import session_options
from isthmus.serving.wire.inference import HEADER
from tests.serving.support import CONTRACT

FILE = "model.int8.ort"
SIDE, WORDS, LONGEST = 4, 10, 5
"""Pixels of a side of a frame, tokens of the vocabulary, most tokens of a text."""
ELEMENTS: tuple[Element, ...] = ("bool", "uint8", "int32", "int64", "float", "double", "string")

_PROTO = {
    "bool": TensorProto.BOOL, "uint8": TensorProto.UINT8, "int32": TensorProto.INT32, "int64": TensorProto.INT64,
    "float": TensorProto.FLOAT, "double": TensorProto.DOUBLE, "string": TensorProto.STRING,
}  # fmt: skip


def frames(rows: int, positions: int = 3, seed: int = 0, words: int = WORDS) -> Feeds:
    """What the drawing model is fed."""
    draw = np.random.default_rng(seed)
    return {
        "frame": draw.random((rows, 3, SIDE, SIDE), np.float32),
        "ids": draw.integers(0, words, (rows, positions), np.int64),
    }


def make_drawing_package(folder: Path, *, weight: float = 2.0, words: int = WORDS, name: str = "draws") -> Path:
    """A model of `frame` and `ids` to `image`, the frame times a weight, and `vector`, the mean of embeddings.

    It cannot be run over a token beyond its words.
    """
    table = np.random.default_rng(1).random((WORDS, 2), np.float32)[:words]
    constants = [
        numpy_helper.from_array(np.array(weight, np.float32), "weight"),
        numpy_helper.from_array(table, "table"),
        numpy_helper.from_array(np.array([1], np.int64), "axes"),
    ]
    nodes = [
        helper.make_node("Mul", ["frame", "weight"], ["image"]),
        helper.make_node("Gather", ["table", "ids"], ["embedded"]),
        helper.make_node("ReduceMean", ["embedded", "axes"], ["vector"], keepdims=0),
    ]
    tensors = [TensorInfo("frame", "float", ("N", 3, SIDE, SIDE)), TensorInfo("ids", "int64", ("N", "P"))]
    outputs = [TensorInfo("image", "float", ("N", 3, SIDE, SIDE)), TensorInfo("vector", "float", ("N", 2))]
    cases = [frames(2, words=words), frames(1, 1, seed=7, words=words)]
    return make_tensor_package(
        folder, nodes, tensors, outputs, cases, constants=constants, most={"P": LONGEST}, name=name
    )


def make_counting_package(folder: Path, name: str = "draws") -> Path:
    """A model that counts to `steps`, (1,): as long as a request likes."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["goes on"]),
            helper.make_node("Add", ["before", "one"], ["after"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("before", TensorProto.INT64, [1]),
        ],
        [
            helper.make_tensor_value_info("goes on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("after", TensorProto.INT64, [1]),
        ],
    )
    constants = [
        numpy_helper.from_array(np.ones(1, np.int64), "one"),
        numpy_helper.from_array(np.zeros(1, np.int64), "zero"),
        numpy_helper.from_array(np.array(True), "yes"),
    ]
    nodes = [
        helper.make_node("Squeeze", ["steps"], ["often"]),
        helper.make_node("Loop", ["often", "yes", "zero"], ["counted"], body=body),
    ]
    tensors, outputs = [TensorInfo("steps", "int64", (1,))], [TensorInfo("counted", "int64", (1,))]
    return make_tensor_package(
        folder, nodes, tensors, outputs, [{"steps": np.array([3], np.int64)}], constants=constants, name=name
    )


def make_listing_package(folder: Path) -> Path:
    """A model that lists the numbers below `steps`, (1,)."""
    constants = [
        numpy_helper.from_array(np.array(number, np.int64), name) for number, name in ((0, "zero"), (1, "one"))
    ]
    nodes = [
        helper.make_node("Squeeze", ["steps"], ["end"]),
        helper.make_node("Range", ["zero", "end", "one"], ["listed"]),
    ]
    tensors, outputs = [TensorInfo("steps", "int64", (1,))], [TensorInfo("listed", "int64", ("K",))]
    return make_tensor_package(
        folder, nodes, tensors, outputs, [{"steps": np.array([3], np.int64)}], constants=constants
    )


def make_echo_package(folder: Path) -> Path:
    """A model that answers `a_<element>`, (N,), with `b_<element>`, of every element type."""
    nodes = [helper.make_node("Identity", [f"a_{element}"], [f"b_{element}"]) for element in ELEMENTS]
    tensors = [TensorInfo(f"a_{element}", element, ("N",)) for element in ELEMENTS]
    outputs = [TensorInfo(f"b_{element}", element, ("N",)) for element in ELEMENTS]
    return make_tensor_package(folder, nodes, tensors, outputs, [everything()])


def everything(first: float = 0.0) -> Feeds:
    """What the echo is fed: the ends of every type. No golden output is NaN."""
    words = np.empty(3, object)
    words[:] = ["", "é😀", "a\nb"]
    return {
        "a_bool": np.array([True, False, True]),
        "a_uint8": np.array([0, 255, 7], np.uint8),
        "a_int32": np.array([-(2**31), 2**31 - 1, 0], np.int32),
        "a_int64": np.array([-(2**63), 2**63 - 1, 2**53 + 1], np.int64),
        "a_float": np.array([first, -np.inf, 0.1], np.float32),
        "a_double": np.array([1e300, np.inf, -0.0]),
        "a_string": words,
    }


def make_tensor_package(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    tensors: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    cases: Sequence[Feeds],
    *,
    constants: Sequence[onnx.TensorProto] = (),
    most: Mapping[str, int] | None = None,
    contract: Contract = CONTRACT,
    name: str = "draws",
) -> Path:
    """A package of a graph, which has answered its golden cases."""
    folder.mkdir(parents=True)
    file = folder / FILE
    _save(file, nodes, tensors, outputs, constants)
    opened = session(folder)
    names = [tensor.name for tensor in outputs]
    golden = [
        GoldenCase(_bytes(fed), {FILE: _bytes(dict(zip(names, opened.run(names, fed), strict=True)))}) for fed in cases
    ]
    variant = Variant(
        FILE, "int8", "ort", file.stat().st_size, _sum(file), 1e-5, 0.0, {"quality": 0.5}, dict(most or {})
    )
    manifest = Manifest(
        format_version=2, name=name, contract=contract.hash, service="late", model="student", training_set="none",
        task="drawing:Drawing", metric="quality", inputs=(), tensors=tuple(tensors), outputs=tuple(outputs),
        variants=(variant,), files={},
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    (folder / "contract.json").write_bytes(contract.dumps())
    (folder / "golden.json").write_bytes(msgspec.json.encode(Golden((), tuple(golden))))
    (folder / "SHA256SUMS").write_text("".join(f"{_sum(f)}  {f.name}\n" for f in sorted(folder.iterdir())))
    return folder


def as_json(fed: Feeds, **more: Any) -> dict[str, Any]:
    """The request with these tensors in JSON, nested."""
    return {"inputs": [{**_named(name, array), "data": _plain(array.tolist())} for name, array in fed.items()], **more}


def as_binary(fed: Feeds, **more: Any) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of the request with these tensors as bytes."""
    parts = {name: _raw(array) for name, array in fed.items()}
    inputs = [
        {**_named(name, array), "parameters": {"binary_data_size": len(parts[name])}} for name, array in fed.items()
    ]
    text = json.dumps({"inputs": inputs, **more}).encode()
    return b"".join((text, *parts.values())), {HEADER: str(len(text))}


def answered(answer: httpx.Response) -> Feeds:
    """The outputs in an answer, from JSON or from bytes."""
    assert answer.status_code == 200, answer.text
    size = int(answer.headers.get(HEADER, len(answer.content)))
    binary = answer.headers["content-type"] == "application/octet-stream"
    assert binary == (HEADER in answer.headers)
    found, place = {}, size
    for output in json.loads(answer.content[:size])["outputs"]:
        dtype = _DTYPES[output["datatype"]]
        if "data" in output:
            flat = np.array(output["data"], np.float64 if dtype == np.float32 else dtype).astype(dtype)
        else:
            end = place + output["parameters"]["binary_data_size"]
            data, place = answer.content[place:end], end
            flat = _texts(data) if dtype is object else np.frombuffer(data, dtype)
        found[output["name"]] = flat.reshape(output["shape"])
    assert place == len(answer.content)
    return found


_DTYPES: dict[str, Any] = {
    "BOOL": np.bool_, "UINT8": np.uint8, "INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "FP64": np.float64,
    "BYTES": object,
}  # fmt: skip


def _named(name: str, array: "np.ndarray[Any, Any]") -> dict[str, Any]:
    datatype = next(word for word, dtype in _DTYPES.items() if array.dtype == dtype)
    return {"name": name, "datatype": datatype, "shape": list(array.shape)}


def _plain(value: Any) -> Any:
    """With words for the numbers that JSON lacks."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _raw(array: "np.ndarray[Any, Any]") -> bytes:
    if array.dtype != object:
        return array.tobytes()
    texts = [text.encode() for text in array.ravel().tolist()]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def _texts(data: bytes) -> "np.ndarray[Any, Any]":
    texts = []
    while data:
        (length,) = struct.unpack_from("<I", data)
        texts.append(data[4 : 4 + length].decode())
        data = data[4 + length :]
    return np.array(texts, object)


def session(package: Path) -> Any:
    """The package's model in ONNX Runtime, as a server opens it."""
    return onnxruntime.InferenceSession(
        (package / FILE).read_bytes(), session_options(1), providers=["CPUExecutionProvider"]
    )


def _save(
    file: Path,
    nodes: Sequence[onnx.NodeProto],
    tensors: Sequence[TensorInfo],
    outputs: Sequence[TensorInfo],
    constants: Sequence[onnx.TensorProto],
) -> None:
    inputs, results = (
        [helper.make_tensor_value_info(tensor.name, _PROTO[tensor.element], tensor.shape) for tensor in side]
        for side in (tensors, outputs)
    )
    graph = helper.make_graph(list(nodes), "draws", inputs, results, list(constants))
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(file)
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _bytes(tensors: Mapping[str, Any]) -> dict[str, TensorBytes]:
    return {name: TensorBytes.of(array) for name, array in tensors.items()}


def _sum(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()
