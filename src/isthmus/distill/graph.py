"""The ONNX graph of a student: raw values in, a probability out, everything else inside.

Written node by node: `torch.onnx.export` takes four seconds for these twenty nodes, has no string tensors, and writes
source positions into the file. Export compares the graph with torch on the golden rows, so the two cannot part.
"""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from isthmus.distill.student import CLIP, Student

OPSET, ML_OPSET, IR_VERSION = 17, 2, 8
"""Old enough for runtimes in the field, new enough for per-channel INT8."""
OUTPUT = "probability"


class _Graph:
    """Nodes and constants under fresh names."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, name: str, value: Any) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def add(self, operator: str, inputs: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name


def graph(student: Student) -> onnx.ModelProto:
    """The graph of a student.

    Its inputs are `numeric`, float32 (N, numbers) with NaN for null, and `categories`, string (N, categories) with ""
    for null, each only if the student has such inputs; its output is `probability`, float32 (N,).
    """
    build = _Graph()
    inputs, parts = [], []
    if numbers := len(student.preprocessing.mean):
        inputs.append(helper.make_tensor_value_info("numeric", TensorProto.FLOAT, ["N", numbers]))
        parts += _numbers(build, student)
    if categories := len(student.preprocessing.vocabularies):
        inputs.append(helper.make_tensor_value_info("categories", TensorProto.STRING, ["N", categories]))
        parts += _categories(build, student)
    value = build.add("Concat", parts, "features", axis=1)
    linears = [layer for layer in student.layers if isinstance(layer, nn.Linear)]
    for position, layer in enumerate(linears):
        weight = build.constant(f"weight_{position}", layer.weight.detach().numpy())
        bias = build.constant(f"bias_{position}", layer.bias.detach().numpy())
        value = build.add("Gemm", [value, weight, bias], f"linear_{position}", transB=1)
        if layer is not linears[-1]:
            value = build.add("Relu", [value], f"relu_{position}")
    logit = build.add("Squeeze", [value, build.constant("last_axis", np.array([1], np.int64))], "logit")
    build.add("Sigmoid", [logit], OUTPUT)
    outputs = [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["N"])]
    model = helper.make_model(
        helper.make_graph(build.nodes, "student", inputs, outputs, build.constants),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)],
        ir_version=IR_VERSION,
        producer_name="isthmus",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def _numbers(build: _Graph, student: Student) -> list[str]:
    mean = build.constant("mean", student.mean.numpy())
    scale = build.constant("scale", student.scale.numpy())
    low, high = build.constant("low", np.float32(-CLIP)), build.constant("high", np.float32(CLIP))
    missing = build.add("IsNaN", ["numeric"], "missing")
    centered = build.add("Sub", ["numeric", mean], "centered")
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


def _categories(build: _Graph, student: Student) -> list[str]:
    parts = []
    for position, (words, table) in enumerate(zip(student.preprocessing.vocabularies, student.tables, strict=True)):
        weights = build.constant(f"embedding_{position}", table.weight.detach().numpy())
        column = build.constant(f"column_{position}", np.array(position, np.int64))
        text = build.add("Gather", ["categories", column], f"text_{position}", axis=1)
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
