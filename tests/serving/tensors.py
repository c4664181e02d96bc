"""Packages of tensors: a tiny model that draws and embeds, and one that answers with what it is fed."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from isthmus.features.contract.contract import Contract
from isthmus.features.package.golden import Case, Golden, TensorBytes
from isthmus.features.package.manifest import Element, Feeds, Manifest, Tensor, Variant
from isthmus.features.package.replay import session_options
from tests.serving.support import CONTRACT

FILE = "model.int8.ort"
SIDE, WORDS, LONGEST = 4, 10, 5
"""Pixels of a side of a frame, tokens of the vocabulary, most tokens of a text."""
ELEMENTS: tuple[Element, ...] = ("bool", "uint8", "int32", "int64", "float", "double", "string")

_PROTO = {
    "bool": TensorProto.BOOL, "uint8": TensorProto.UINT8, "int32": TensorProto.INT32, "int64": TensorProto.INT64,
    "float": TensorProto.FLOAT, "double": TensorProto.DOUBLE, "string": TensorProto.STRING,
}  # fmt: skip


def frames(rows: int, positions: int = 3, seed: int = 0) -> Feeds:
    """What the drawing model is fed."""
    draw = np.random.default_rng(seed)
    return {
        "frame": draw.random((rows, 3, SIDE, SIDE), np.float32),
        "ids": draw.integers(0, WORDS, (rows, positions), np.int64),
    }


def make_drawing_package(folder: Path, *, weight: float = 2.0, blank: bool = False, work: int = 0) -> Path:
    """A model of `frame` and `ids` to `image`, the frame times a weight, and `vector`, the mean of embeddings.

    A blank one has NaN for every pixel. Work is how often it multiplies matrices of 256 x 256 before it answers.
    """
    table = np.random.default_rng(1).random((WORDS, 2), np.float32)
    constants = [
        numpy_helper.from_array(np.float32("nan" if blank else weight), "weight"),
        numpy_helper.from_array(table, "table"),
        numpy_helper.from_array(np.array([1], np.int64), "axes"),
    ]
    nodes = [
        helper.make_node("Mul", ["frame", "weight"], ["image"]),
        helper.make_node("Gather", ["table", "ids"], ["embedded"]),
        helper.make_node("ReduceMean", ["embedded", "axes"], ["vector"], keepdims=0),
    ]
    if work:
        constants += [
            numpy_helper.from_array(np.full((256, 256), 1 / 256, np.float32), "square"),
            numpy_helper.from_array(np.zeros(1, np.float32), "zero"),
            numpy_helper.from_array(np.array([0, 1, 2, 3], np.int64), "all"),
        ]
        nodes = [
            # Of the input, so that nothing is computed when the file is written.
            helper.make_node("ReduceMax", ["frame", "all"], ["largest"], keepdims=0),
            helper.make_node("Add", ["square", "largest"], ["work0"]),
            *(helper.make_node("MatMul", [f"work{n}", "square"], [f"work{n + 1}"]) for n in range(work)),
            helper.make_node("ReduceMax", [f"work{work}"], ["done"], keepdims=0),
            helper.make_node("Mul", ["done", "zero"], ["nothing"]),
            helper.make_node("Add", ["frame", "nothing"], ["later"]),
            helper.make_node("Mul", ["later", "weight"], ["image"]),
            *nodes[1:],
        ]
    tensors = [Tensor("frame", "float", ("N", 3, SIDE, SIDE)), Tensor("ids", "int64", ("N", "P"))]
    outputs = [Tensor("image", "float", ("N", 3, SIDE, SIDE)), Tensor("vector", "float", ("N", 2))]
    cases = [frames(2), frames(1, 1, seed=7)]
    return make_tensor_package(folder, nodes, tensors, outputs, cases, constants=constants, most={"P": LONGEST})


def make_echo_package(folder: Path) -> Path:
    """A model that answers `a_<element>`, (N,), with `b_<element>`, of every element type."""
    nodes = [helper.make_node("Identity", [f"a_{element}"], [f"b_{element}"]) for element in ELEMENTS]
    tensors = [Tensor(f"a_{element}", element, ("N",)) for element in ELEMENTS]
    outputs = [Tensor(f"b_{element}", element, ("N",)) for element in ELEMENTS]
    return make_tensor_package(folder, nodes, tensors, outputs, [everything()])


def everything() -> Feeds:
    """What the echo is fed: the ends of every type."""
    words = np.empty(3, object)
    words[:] = ["", "é😀", "a\nb"]
    return {
        "a_bool": np.array([True, False, True]),
        "a_uint8": np.array([0, 255, 7], np.uint8),
        "a_int32": np.array([-(2**31), 2**31 - 1, 0], np.int32),
        "a_int64": np.array([-(2**63), 2**63 - 1, 2**53 + 1], np.int64),
        "a_float": np.array([np.nan, -np.inf, 0.1], np.float32),
        "a_double": np.array([1e300, np.inf, -0.0]),
        "a_string": words,
    }


def make_tensor_package(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
    cases: Sequence[Feeds],
    *,
    constants: Sequence[onnx.TensorProto] = (),
    most: Mapping[str, int] | None = None,
    contract: Contract = CONTRACT,
) -> Path:
    """A package of a graph, which has answered its golden cases."""
    folder.mkdir(parents=True)
    file = folder / FILE
    _save(file, nodes, tensors, outputs, constants)
    opened = session(folder)
    names = [tensor.name for tensor in outputs]
    golden = [Case(_bytes(fed), {FILE: _bytes(dict(zip(names, opened.run(names, fed), strict=True)))}) for fed in cases]
    variant = Variant(
        FILE, "int8", "ort", file.stat().st_size, _sum(file), 1e-5, 0.0, {"quality": 0.5}, dict(most or {})
    )
    manifest = Manifest(
        format_version=2, name="draws", contract=contract.hash, service="late", model="student", training_set="none",
        task="drawing:Drawing", metric="quality", inputs=(), tensors=tuple(tensors), outputs=tuple(outputs),
        variants=(variant,), files={},
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    (folder / "contract.json").write_bytes(contract.dumps())
    (folder / "golden.json").write_bytes(msgspec.json.encode(Golden((), tuple(golden))))
    (folder / "SHA256SUMS").write_text("".join(f"{_sum(f)}  {f.name}\n" for f in sorted(folder.iterdir())))
    return folder


def session(package: Path) -> Any:
    """The package's model in ONNX Runtime, as a server opens it."""
    return onnxruntime.InferenceSession(
        (package / FILE).read_bytes(), session_options(1), providers=["CPUExecutionProvider"]
    )


def _save(
    file: Path,
    nodes: Sequence[onnx.NodeProto],
    tensors: Sequence[Tensor],
    outputs: Sequence[Tensor],
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
