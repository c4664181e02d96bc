"""The ONNX graph of a student: raw values in, a probability out, everything else inside.

Written node by node: `torch.onnx.export` takes four seconds for these twenty nodes, has no string tensors, and writes
source positions into the file. Export compares the graph with torch on the golden rows, so the two cannot part.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from isthmus.distill.head import Head
from isthmus.distill.student import CLIP, Student
from isthmus.features.rowgraph import REFUSED, VALID
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

    def within(self, part: str, name: str) -> str:
        """What a tensor of an included graph is called here."""
        return f"{part}/{name}"

    def include(self, model: onnx.ModelProto, part: str, inputs: list[onnx.ValueInfoProto]) -> None:
        """Takes in the nodes of a graph under names of their own. Its inputs keep theirs, and are there once."""
        given = {value.name for value in model.graph.input}
        inputs += [value for value in model.graph.input if value.name not in {known.name for known in inputs}]
        for node in model.graph.node:
            node.name = self.within(part, node.name)
            for names in (node.input, node.output):
                names[:] = [name if name in given else self.within(part, name) for name in names]
        for constant in model.graph.initializer:
            constant.name = self.within(part, constant.name)
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
        value, given = "numeric", numbers - len(numbers_made)
        if given:
            inputs.append(helper.make_tensor_value_info("numeric", TensorProto.FLOAT, ["N", given]))
        if numbers_made:
            value = build.add("Concat", ["numeric", *numbers_made] if given else numbers_made, "numbers", axis=1)
        parts += _numbers(build, student, value)
    if categories := len(student.preprocessing.vocabularies):
        if given := categories - len(texts_made):
            inputs.append(helper.make_tensor_value_info("categories", TensorProto.STRING, ["N", given]))
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


def _made(build: _Graph, head: Head, inputs: list[onnx.ValueInfoProto]) -> tuple[list[str], list[str]]:
    """Puts request transforms into a graph; the numbers, as columns of shape (N, 1), and the texts, as (N,)."""
    for transform in head.transforms:
        build.include(onnx.load_model_from_string(transform.graph), transform.name, inputs)
    numbers, texts = [], []
    for transform, field in head.computed:
        name, value = transform.full_name(field.name), build.within(transform.name, transform.output(field.name))
        if field.dtype == String:
            texts.append(value)  # the empty text where it is null
            continue
        number = build.add("Cast", [value], f"{name}/number", to=TensorProto.FLOAT)
        null = build.once("null", np.float32(np.nan))
        number = build.add("Where", [f"{value}{VALID}", number, null], f"{name}/or_null")
        numbers.append(build.add("Unsqueeze", [number, build.once("column", np.array([1]))], name))
    return numbers, texts


def _refuse(build: _Graph, head: Head) -> None:
    """Where a request transform refuses a row, there is no probability."""
    refused, *others = [build.within(transform.name, REFUSED) for transform in head.transforms]
    for other in others:
        refused = build.add("Or", [refused, other], f"{other}/any")
    build.add("Where", [refused, build.once("null", np.float32(np.nan)), "chance"], OUTPUT)


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


def _categories(build: _Graph, student: Student, made: Sequence[str]) -> list[str]:
    parts = []
    given = len(student.preprocessing.vocabularies) - len(made)
    for position, (words, table) in enumerate(zip(student.preprocessing.vocabularies, student.tables, strict=True)):
        weights = build.constant(f"embedding_{position}", table.weight.detach().numpy())
        if position < given:
            column = build.constant(f"column_{position}", np.array(position, np.int64))
            text = build.add("Gather", ["categories", column], f"text_{position}", axis=1)
        else:
            text = made[position - given]
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
        parts.append(build.add("Gather", [weights, index], f"embedded_{position}", axis=0))
    return parts
