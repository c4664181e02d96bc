"""The ONNX graph of a student: raw values in, a probability out, everything else inside.

Written node by node: `torch.onnx.export` takes four seconds for these twenty nodes, has no string tensors, and writes
source positions into the file. Export compares the graph with torch on the golden rows, so the two cannot part.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from isthmus.distill.head import Head
from isthmus.distill.student import CLIP, Student
from isthmus.features.contract import TransformContract
from isthmus.features.rowgraph import ELEMENTS, MASKS, NOTES, VALID, Layout, found, given
from isthmus.features.types import String

OPSET, ML_OPSET, IR_VERSION = 17, 2, 8
"""Old enough for runtimes in the field, new enough for per-channel INT8. Request transforms have younger ones."""
OUTPUT = "probability"


class _Graph:
    """Nodes and constants under fresh names."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.opset, self.ir_version = OPSET, IR_VERSION

    def constant(self, name: str, value: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def once(self, name: str, value: Any) -> str:
        """A constant that several nodes share."""
        return name if any(known.name == name for known in self.constants) else self.constant(name, value)

    def include(self, model: onnx.ModelProto, part: str, inputs: Mapping[str, str]) -> None:
        """Takes in the nodes of a graph under names of their own, `part/name`.

        Args:
            model: the graph.
            part: what to call it.
            inputs: what to feed each of its inputs with.
        """

        def renamed(name: str) -> str:
            return inputs.get(name) or f"{part}/{name}"

        for node in model.graph.node:
            node.name = renamed(node.name)
            node.input[:] = map(renamed, node.input)
            node.output[:] = map(renamed, node.output)
        for constant in model.graph.initializer:
            constant.name = renamed(constant.name)
        self.nodes += model.graph.node
        self.constants += model.graph.initializer
        self.opset = max(self.opset, model.opset_import[0].version)
        self.ir_version = max(self.ir_version, model.ir_version)


def graph(student: Student, head: Head | None = None) -> onnx.ModelProto:
    """The graph of a student.

    Its inputs are `numeric`, float32 (N, numbers) with NaN for null, and `categories`, string (N, categories) with ""
    for null, each only if the student has such inputs that are not computed; and what request transforms take. Its
    output is `probability`, float32 (N,); NaN where a request transform refuses a row.

    Args:
        student: the network.
        head: request transforms, whose fields are the network's last numbers and its last categories.
    """
    build, head = _Graph(), head or Head()
    inputs: list[onnx.ValueInfoProto] = []
    parts: list[str] = []
    numbers_made, texts_made = _made(build, head, inputs)
    if numbers := len(student.preprocessing.mean):
        value, direct = "numeric", numbers - len(numbers_made)
        if direct:
            inputs.append(helper.make_tensor_value_info("numeric", TensorProto.FLOAT, ["N", direct]))
        if numbers_made:
            value = build.add("Concat", ["numeric", *numbers_made] if direct else numbers_made, "numbers", axis=1)
        parts += _numbers(build, student, value)
    if categories := len(student.preprocessing.vocabularies):
        if direct := categories - len(texts_made):
            inputs.append(helper.make_tensor_value_info("categories", TensorProto.STRING, ["N", direct]))
        parts += _categories(build, student, texts_made)
    value = build.add("Concat", parts, "features", axis=1)
    linears = [layer for layer in student.layers if isinstance(layer, nn.Linear)]
    for position, layer in enumerate(linears):
        weight = build.constant(f"weight_{position}", layer.weight.detach().numpy())
        bias = build.constant(f"bias_{position}", layer.bias.detach().numpy())
        value = build.add("Gemm", [value, weight, bias], f"linear_{position}", transB=1)
        if layer is not linears[-1]:
            value = build.add("Relu", [value], f"relu_{position}")
    logit = build.add("Squeeze", [value, build.constant("last_axis", np.array([1], np.int64))], "logit")
    build.add("Sigmoid", [logit], "chance" if head.transforms else OUTPUT)
    if head.transforms:
        _refuse(build, head)
    outputs = [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["N"])]
    model = helper.make_model(
        helper.make_graph(build.nodes, "student", inputs, outputs, build.constants),
        opset_imports=[
            helper.make_opsetid("", build.opset),
            helper.make_opsetid("ai.onnx.ml", ML_OPSET),
        ],
        ir_version=build.ir_version,
        producer_name="isthmus",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def _made(build: _Graph, head: Head, inputs: list[onnx.ValueInfoProto]) -> tuple[list[str], list[tuple[str, str]]]:
    """Puts request transforms into a graph; the numbers, as columns (N, 1), and the texts with their masks, (N,)."""
    if not head.transforms:
        return [], []
    whole = Layout.of({column.name: column.dtype for column in head.taken})
    inputs += [_rows(given(element), _TENSORS[element], len(names)) for element, names in whole.given.items()]
    inputs.append(_rows(given(VALID), TensorProto.BOOL, len(whole.masks)))
    layouts = {}
    for transform in head.transforms:
        model = onnx.load_model_from_string(transform.graph)
        part = layouts[transform.name] = Layout.loads(next(m.value for m in model.metadata_props if m.key == NOTES))
        fed = {given(element): _picked(build, transform, element, whole.given[element], names)
               for element, names in part.given.items()}  # fmt: skip
        fed[given(VALID)] = _picked(build, transform, VALID, whole.masks, part.masks)
        build.include(model, transform.name, fed)
    numbers: list[str] = []
    texts: list[tuple[str, str]] = []
    for transform, field in head.computed:
        name, layout, element = transform.full_name(field.name), layouts[transform.name], ELEMENTS[field.dtype.name]
        value = _row(build, f"{transform.name}/{found(element)}", layout.found[element].index(field.name))
        valid = _row(build, f"{transform.name}/{MASKS}", layout.fields.index(field.name))
        if field.dtype == String:
            texts.append((value, valid))
            continue
        number = build.add("Cast", [value], f"{name}/number", to=TensorProto.FLOAT)
        number = build.add("Where", [valid, number, build.once("null", np.float32(np.nan))], f"{name}/or_null")
        numbers.append(build.add("Unsqueeze", [number, build.once("as_column", np.array([1]))], name))
    return numbers, texts


def _picked(build: _Graph, transform: TransformContract, what: str, rows: Sequence[str], wanted: Sequence[str]) -> str:
    """The rows of a given tensor that a transform takes, in its order."""
    if list(rows) == list(wanted):
        return given(what)
    parts = [_slice(build, given(what), rows.index(name)) for name in wanted]
    return build.add("Concat", parts, f"{transform.name}/{what}/picked", axis=0) if len(parts) > 1 else parts[0]


def _slice(build: _Graph, tensor: str, place: int) -> str:
    """A row of a tensor, of shape (1, N). No Gather: of a row of texts, ONNX Runtime's copies the first one only."""
    name = f"{tensor}/{place}"
    if not any(node.name == name for node in build.nodes):
        first, end = (build.once(f"place_{at}", np.array([at])) for at in (place, place + 1))
        build.add("Slice", [tensor, first, end, build.once("place_0", np.array([0]))], name)
    return name


def _row(build: _Graph, tensor: str, place: int) -> str:
    """A row of a tensor, of shape (N,)."""
    name = f"{tensor}/{place}/flat"
    if not any(node.name == name for node in build.nodes):
        build.add("Squeeze", [_slice(build, tensor, place), build.once("place_0", np.array([0]))], name)
    return name


def _rows(name: str, tensor: int, count: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor, [count, "N"])


_TENSORS = {
    "bool": TensorProto.BOOL, "int32": TensorProto.INT32, "int64": TensorProto.INT64, "float": TensorProto.FLOAT,
    "double": TensorProto.DOUBLE, "string": TensorProto.STRING,
}  # fmt: skip


def _refuse(build: _Graph, head: Head) -> None:
    """Where a request transform refuses a row, there is no probability."""
    refused = []
    for transform in head.transforms:
        count = len(transform.fields)
        ends = [build.once(f"place_{end}", np.array([end])) for end in (count, 2 * count)]
        name = f"{transform.name}/refused"
        masks = build.add(
            "Slice", [f"{transform.name}/{MASKS}", *ends, build.once("place_0", np.array([0]))], f"{name}/masks"
        )
        counted = build.add("Cast", [masks], f"{name}/counted", to=TensorProto.INT32)
        most = build.add("ReduceMax", [counted, build.once("place_0", np.array([0]))], f"{name}/any", keepdims=0)
        refused.append(build.add("Cast", [most], name, to=TensorProto.BOOL))
    anywhere, *others = refused
    for other in others:
        anywhere = build.add("Or", [anywhere, other], f"{other}/or_before")
    build.add("Where", [anywhere, build.once("null", np.float32(np.nan)), "chance"], OUTPUT)


def _numbers(build: _Graph, student: Student, numeric: str) -> list[str]:
    mean = build.constant("mean", student.mean.numpy())
    scale = build.constant("scale", student.scale.numpy())
    low, high = build.constant("low", np.float32(-CLIP)), build.constant("high", np.float32(CLIP))
    missing = build.add("IsNaN", [numeric], "missing")
    centered = build.add("Sub", [numeric, mean], "centered")
    standard = build.add("Div", [centered, scale], "standard")
    clipped = build.add("Clip", [standard, low, high], "clipped")
    zero = build.constant("zero", np.float32(0))
    parts = [build.add("Where", [missing, zero, clipped], "imputed")]
    if student.preprocessing.indicators:
        picked = build.add(
            "Gather", [missing, build.constant("indicators", student.indicators.numpy())], "picked", axis=1
        )
        parts.append(build.add("Cast", [picked], "absent", to=TensorProto.FLOAT))
    return parts


def _categories(build: _Graph, student: Student, made: Sequence[tuple[str, str]]) -> list[str]:
    parts = []
    direct = len(student.preprocessing.vocabularies) - len(made)
    for position, (words, table) in enumerate(zip(student.preprocessing.vocabularies, student.tables, strict=True)):
        weights = build.constant(f"embedding_{position}", table.weight.detach().numpy())
        if position < direct:
            column = build.constant(f"column_{position}", np.array(position, np.int64))
            text = build.add("Gather", ["categories", column], f"text_{position}", axis=1)
        else:
            text, valid = made[position - direct]
        # LabelEncoder refuses an empty table; "" is index 0 in any case.
        keys = list(words) or [""]
        index = build.add(
            "LabelEncoder",
            [text],
            f"index_{position}",
            domain="ai.onnx.ml",
            keys_strings=keys,
            values_int64s=list(range(1, len(words) + 1)) or [0],
            default_int64=0,
        )
        if position >= direct:  # a null's text may be any
            unknown = build.once("unknown", np.array(0, np.int64))
            index = build.add("Where", [valid, index, unknown], f"known_{position}")
        parts.append(build.add("Gather", [weights, index], f"embedded_{position}", axis=0))
    return parts
