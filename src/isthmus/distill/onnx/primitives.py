"""Decomposes ONNX operators on floats into exact sums and single operations, whose bits IEEE 754 defines."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from isthmus.distill.types import Array

_END, _SQUARINGS = 16.0, 5
_SMALLER = 2.0**-_SQUARINGS
_FINE = 2.0**40
"""Resolution relative to the largest number of a sum: sums of 8,192 numbers stay exact in float64."""
_ERF = 0.3275911, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
_AXES_ARE_INPUTS = 18
"""From this opset on, all operators along axes take the axes as an input."""


def in_primitives(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the nodes of a graph, with simple operators in place of operators whose bits differ between runtimes.

    Replaces sigmoid, tanh, erf, GELU, softmax, layer norm, reductions, and each Add that ONNX Runtime could turn into
    an integer operator. Adds constants to `model` in place, but does not replace its nodes. Sigmoid, tanh and erf are
    within 2e-6 of the exact value. Softmax, layer norm and reductions stay unchanged below opset 18, or if their axes
    are computed. A layer norm stays unchanged unless its axis is -1 and its scale is a constant with one number per
    column. A sum of over 8,192 numbers may depend on their order. An interpolating Resize stays, and may differ.
    """
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    known = onnx.shape_inference.infer_shapes(model).graph
    floats = {
        value.name
        for value in (*known.value_info, *known.input, *known.output)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
    }
    opset = next(imported.version for imported in model.opset_import if not imported.domain)
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        write = _ELEMENTWISE.get(node.op_type) or (_ALONG_AXES.get(node.op_type) if opset >= _AXES_ARE_INPUTS else None)
        writer = _Writer(model.graph, node, constants)
        if write is not None and node.input[0] in floats:
            write(writer)
        if writer.nodes:
            writer.nodes[-1].output[0] = node.output[0]
        nodes += writer.nodes or [node]
    return nodes


class _Writer:
    """Collects the nodes that replace `node`; if there are none, the node stays."""

    def __init__(self, graph: onnx.GraphProto, node: onnx.NodeProto, constants: Mapping[str, Array]) -> None:
        self._graph = graph
        self._numbers = count()
        self._names = {tensor.name for tensor in graph.initializer}
        self.constants, self.node = constants, node
        self.attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        self.nodes: list[onnx.NodeProto] = []

    def step(self, operator: str, *inputs: str | float, wide: bool = False, **attributes: Any) -> str:
        kind = np.float64 if wide else np.float32
        names = [value if isinstance(value, str) else self.constant(np.array(value, kind)) for value in inputs]
        name = f"{self.node.output[0]}/{next(self._numbers)}"
        self.nodes.append(helper.make_node(operator, names, [name], name=name, **attributes))
        return name

    def reads(self, operator: str) -> bool:
        """Return True if a node of this operator computes an input of `node`."""
        inputs = {*self.node.input}
        return any(node.op_type == operator and inputs & {*node.output} for node in self._graph.node)

    def reduced(self, operator: str, value: str, axes: Sequence[int], *, keep: bool = True) -> str:
        return self.step(operator, value, self.constant(np.array(axes)), keepdims=int(keep))

    def cast(self, value: str, kind: int) -> str:
        return self.step("Cast", value, to=kind)

    def constant(self, value: Array) -> str:
        name = f"number/{value.dtype.name}/{value.tolist()}"
        if name not in self._names:
            self._graph.initializer.append(numpy_helper.from_array(value, name))
            self._names.add(name)
        return name


def _power(writer: _Writer, small: str) -> str:
    """Return exp(32 * small), `small` within ±0.5: Taylor polynomial of degree 4, squared five times (Higham, 2005)."""
    power: str | float = 1 / 24
    for coefficient in (1 / 6, 1 / 2, 1, 1):
        power = writer.step("Add", writer.step("Mul", small, power), coefficient)
    for _ in range(_SQUARINGS):
        power = writer.step("Mul", power, power)
    return str(power)


def _exact_sum(writer: _Writer, value: str, axes: Sequence[int], *, squares: bool = False) -> str:
    """Sum float64 numbers, or their squares, in steps of 2**-40 of the largest number; keep the axes, with size 1."""
    largest = writer.reduced("ReduceMax", writer.step("Abs", value), axes)
    largest = writer.step("Max", largest, 1e-150, wide=True)
    parts = writer.step("Div", value, largest)
    if squares:
        parts, largest = writer.step("Mul", parts, parts), writer.step("Mul", largest, largest)
    steps = writer.step("Round", writer.step("Mul", parts, _FINE, wide=True))
    total = writer.step("Mul", writer.reduced("ReduceSum", steps, axes), 1 / _FINE, wide=True)
    return writer.step("Mul", total, largest)


def _sigmoid(writer: _Writer, value: str = "", times: float = 1.0) -> str:
    clipped = writer.step("Clip", value or writer.node.input[0], -_END / times, _END / times)
    power = _power(writer, writer.step("Mul", clipped, -_SMALLER * times))
    return writer.step("Div", 1.0, writer.step("Add", power, 1.0))


def _tanh(writer: _Writer) -> None:
    writer.step("Sub", writer.step("Mul", _sigmoid(writer, times=2.0), 2.0), 1.0)


def _softmax(writer: _Writer) -> None:
    """Write exp(x - max) divided by its sum; a number 16 or more below the largest counts as 0."""
    value, axes = writer.node.input[0], [writer.attributes.get("axis", -1)]
    below = writer.step("Sub", value, writer.reduced("ReduceMax", value, axes))
    power = _power(writer, writer.step("Mul", writer.step("Clip", below, -_END, 0.0), _SMALLER))
    # NaN compares false, so it stays NaN.
    power = writer.step("Where", writer.step("LessOrEqual", below, -_END), 0.0, power)
    total = _exact_sum(writer, writer.cast(power, TensorProto.DOUBLE), axes)
    writer.step("Div", power, writer.cast(total, TensorProto.FLOAT))


def _erfc(writer: _Writer, value: str) -> str:
    """Write 1 - erf(|x|), within 2e-7: Abramowitz and Stegun, 1964, formula 7.1.26."""
    positive, (rate, coefficients) = writer.step("Abs", value), _ERF
    part = writer.step("Div", 1.0, writer.step("Add", writer.step("Mul", positive, rate), 1.0))
    polynomial = writer.step("Mul", part, coefficients[0])
    for coefficient in coefficients[1:]:
        polynomial = writer.step("Mul", writer.step("Add", polynomial, coefficient), part)
    square = writer.step("Clip", writer.step("Mul", positive, positive), 0.0, _END)
    return writer.step("Mul", polynomial, _power(writer, writer.step("Mul", square, -_SMALLER)))


def _erf(writer: _Writer) -> None:
    value = writer.node.input[0]
    positive = writer.step("Sub", 1.0, _erfc(writer, value))
    writer.step("Where", writer.step("Less", value, 0.0), writer.step("Neg", positive), positive)


def _gelu(writer: _Writer) -> None:
    """Multiply the input by the normal distribution's mass below it (Hendrycks and Gimpel, 2016, arXiv:1606.08415)."""
    value = writer.node.input[0]
    if writer.attributes.get("approximate", b"none") == b"tanh":
        cube = writer.step("Mul", writer.step("Mul", value, value), value)
        inner = writer.step("Add", value, writer.step("Mul", cube, 0.044715))
        share = _sigmoid(writer, writer.step("Mul", inner, 2 * (2 / np.pi) ** 0.5))
    else:
        half = writer.step("Mul", _erfc(writer, writer.step("Mul", value, 0.5**0.5)), 0.5)
        below = writer.step("Less", value, 0.0)
        share = writer.step("Where", below, half, writer.step("Sub", 1.0, half))
    writer.step("Mul", value, share)


def _layer_norm(writer: _Writer) -> None:
    """Write (x - mean) / sqrt(variance + epsilon), scaled, shifted (Ba, Kiros and Hinton, 2016, arXiv:1607.06450)."""
    scale = writer.constants.get(writer.node.input[1])
    # The scale has the row size, unless it is a single number.
    if scale is None or scale.ndim != 1 or scale.size == 1:
        return
    if len(writer.node.output) > 1 or writer.attributes.get("axis", -1) != -1:
        return
    wide = writer.cast(writer.node.input[0], TensorProto.DOUBLE)
    mean = writer.step("Div", _exact_sum(writer, wide, [-1]), float(scale.size), wide=True)
    centered = writer.step("Sub", wide, mean)
    variance = writer.step("Div", _exact_sum(writer, centered, [-1], squares=True), float(scale.size), wide=True)
    spread = writer.step("Sqrt", writer.step("Add", variance, writer.attributes.get("epsilon", 1e-5), wide=True))
    normalized = writer.cast(writer.step("Div", centered, spread), TensorProto.FLOAT)
    scaled = writer.step("Mul", normalized, writer.node.input[1])
    for bias in writer.node.input[2:]:
        writer.step("Add", scaled, bias)


def _reduction(writer: _Writer) -> None:
    kind, value = writer.node.op_type, writer.node.input[0]
    constant = writer.constants.get("".join(writer.node.input[1:]))
    if constant is None or not constant.size:
        return
    axes = constant.tolist()
    total = _exact_sum(writer, writer.cast(value, TensorProto.DOUBLE), axes, squares=kind == "ReduceL2")
    if kind == "ReduceL2":
        total = writer.step("Sqrt", total)
    if kind == "ReduceMean":
        sizes = writer.step("Gather", writer.step("Shape", value), writer.constant(constant))
        number = writer.cast(writer.step("ReduceProd", sizes, keepdims=0), TensorProto.DOUBLE)
        total = writer.step("Div", total, number)
    result = writer.cast(total, TensorProto.FLOAT)
    if not writer.attributes.get("keepdims", 1):
        writer.reduced("ReduceMax", result, axes, keep=False)


def _add(writer: _Writer) -> None:
    """Write a Sum, which no QLinearAdd replaces: on AArch64, that rounds half of the ties differently.

    A constant operand keeps its Add, which never becomes a QLinearAdd. So does the float output of a Gemm: ONNX Runtime
    merges a Gemm and a Sum.
    """
    if not writer.constants.keys() & {*writer.node.input} and not writer.reads("Gemm"):
        writer.step("Sum", *writer.node.input)


_ELEMENTWISE: dict[str, Callable[[_Writer], object]] = {
    "Sigmoid": _sigmoid, "Tanh": _tanh, "Erf": _erf, "Gelu": _gelu, "Add": _add,
}  # fmt: skip
_ALONG_AXES: dict[str, Callable[[_Writer], object]] = {
    "Softmax": _softmax, "LayerNormalization": _layer_norm, "ReduceSum": _reduction, "ReduceMean": _reduction,
    "ReduceL2": _reduction,
}  # fmt: skip
