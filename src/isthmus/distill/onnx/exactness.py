"""INT8 graphs that every runtime computes to the bit: their last layer, and the sums between the others.

Whole numbers are multiplied alike everywhere, sums of floats are not: runtimes add up in another order, and with fused
multiply-add or without, as a browser does. Where every product and every sum is a float32 anyway, as whole numbers up
to 2**24 times a power of two are, neither matters. And of a single addition, multiplication or division IEEE 754 says
each bit.
"""

import numpy as np
import onnx
from onnx import helper, numpy_helper

from isthmus.distill.onnx.primitives import in_steps
from isthmus.distill.types import Array
from isthmus.transforms.rowwise.core.graph import needed

_EXACT = 2**24
"""Up to here every whole number is a float32."""

_WEIGHTED = ("Gemm", "MatMul", "Conv", "ConvTranspose")

_FINEST = 100
"""Steps of 2**-100 and below would leave the range of float32."""


def exact(quantized: onnx.ModelProto, model: onnx.ModelProto, layer: onnx.NodeProto) -> onnx.ModelProto:
    """A graph that answers to the bit alike in every runtime, if nothing but layers and `steps` stood against it.

    Its last layer takes whole numbers of eight bits, as all do, but its weights are floats again, rounded to what its
    sums can hold: for 32 inputs to twelve bits, for 144 to ten. What it gives is not rounded any more. Weights that are
    computed stay whole numbers of eight bits, and so do those of another layer than a Gemm, a MatMul or a convolution,
    of a transposed convolution in groups, of a Gemm whose product has a factor, of a product with one vector, and of a
    layer with so many inputs, from 65,793 on if none is negative, that the steps would be larger than its weights.

    Args:
        quantized: of ONNX Runtime's quantizer, with every layer between a DequantizeLinear and a QuantizeLinear.
        model: what was quantized.
        layer: its last one, with a name.
    """
    result = onnx.ModelProto()
    result.CopyFrom(quantized)
    told = {constant.name: numpy_helper.to_array(constant) for constant in model.graph.initializer}
    given = [tensor for tensor in layer.input[1:] if tensor]
    if layer.op_type in _WEIGHTED and all(tensor in told for tensor in given) and _has_outputs(layer, told[given[0]]):
        _sum_exactly(result.graph, layer.name, [told[tensor] for tensor in given])
    nodes = needed(in_steps(result), [output.name for output in result.graph.output])
    used = {tensor for node in nodes for tensor in node.input}
    constants = [constant for constant in result.graph.initializer if constant.name in used]
    del result.graph.node[:], result.graph.initializer[:]
    result.graph.node.extend(nodes)
    result.graph.initializer.extend(constants)
    return result


def powers_of_two(optimized: onnx.GraphProto) -> dict[str, tuple[Array, Array]]:
    """Steps of whole numbers that a runtime adds and multiplies alike, however it goes about it.

    ONNX Runtime makes one operation of an addition between whole numbers. It multiplies them by the ratio of their
    steps, with fused multiply-add on x86 and without in a browser: of some millions one is rounded otherwise. By powers
    of two every product, and every sum of two, is a float32.

    Args:
        optimized: a quantized graph as ONNX Runtime computes it; its constants have the names that its quantizer gave.

    Returns:
        For each tensor that such an operation takes or gives, if its step is no power of two: the next larger one,
        float32 (), and its zero point, uint8 ().
    """
    told = {constant.name: numpy_helper.to_array(constant) for constant in optimized.initializer}
    found = {}
    for node in optimized.node:
        if node.op_type in ("QLinearAdd", "QLinearMul"):
            for name, zero_point in (node.input[1:3], node.input[4:6], node.input[6:8]):
                step, zero = told[name], told[zero_point]
                larger = np.float32(2.0 ** np.ceil(np.log2(step)))
                if larger != step:
                    tensor = name.removesuffix("_scale")
                    found[tensor] = (np.array(larger), np.array(np.rint(zero * (step / larger)), np.uint8))
    return found


def _sum_exactly(graph: onnx.GraphProto, name: str, parameters: list[Array]) -> None:
    makers = {output: node for node in graph.node for output in node.output}
    constants = {constant.name: constant for constant in graph.initializer}
    place, layer = next((place, node) for place, node in enumerate(graph.node) if node.name == name)
    fed = makers[layer.input[0]]
    scale, zero = (numpy_helper.to_array(constants[tensor]) for tensor in fed.input[1:])
    axis = {"Conv": 0, "MatMul": parameters[0].ndim - 1}.get(layer.op_type, 1 - _attribute(layer, "transB"))
    largest = max(int(zero), 255 - int(zero))
    rounded = _rounded(parameters[0] * np.float64(scale), parameters[1:], axis, largest)
    if not rounded:
        return
    names = [f"{name}/exact/{part}" for part in ("weight", "bias")]
    for tensor, value in zip(names, rounded, strict=False):
        graph.initializer.append(numpy_helper.from_array(value, tensor))
    graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), f"{name}/one"))
    whole = helper.make_node(
        "DequantizeLinear", [fed.input[0], f"{name}/one", fed.input[2]], [f"{name}/whole"], name=f"{name}/whole"
    )
    # What comes behind takes its answer by the name that it has behind these two.
    quantize = next(node for node in graph.node if layer.output[0] in node.input)
    dequantize = next(node for node in graph.node if quantize.output[0] in node.input)
    layer.output[0] = dequantize.output[0]
    graph.node.remove(quantize)
    graph.node.remove(dequantize)
    layer.input[:] = [f"{name}/whole", *names[: len(rounded)]]
    graph.node.insert(place, whole)


def _rounded(weights: Array, biases: list[Array], axis: int, largest: int) -> list[Array]:
    """Weights and bias in steps of which no output's sum passes 2**24, whatever whole numbers up to `largest` come in.

    Args:
        weights: of inputs that are whole numbers.
        biases: one, (outputs,), or none.
        axis: of the outputs in the weights.
        largest: magnitude of an input.

    Returns:
        Weights and bias, float32; nothing where there are so many inputs that steps would be larger than most weights.
    """
    shape = [-1 if place == axis else 1 for place in range(weights.ndim)]
    parts = [weights, *(bias.astype(np.float64) for bias in biases)]
    inputs = weights.size // weights.shape[axis]
    most = np.abs(weights).sum(tuple({*range(weights.ndim)} - {axis})) * largest + sum(map(np.abs, parts[1:]))
    # Rounding adds half a step to each weight and to the bias.
    room = _EXACT - (inputs * largest + 1) / 2
    if room <= _EXACT / 2:  # A step, `most` over `room` at least, is then larger than the mean of the weights.
        return []
    with np.errstate(divide="ignore"):
        power = np.minimum(np.floor(np.log2(room / most)), _FINEST)
    steps = [np.exp2(-power).reshape(shape), np.exp2(-power)]
    return [(np.rint(part / step) * step).astype(np.float32) for part, step in zip(parts, steps, strict=False)]


def _has_outputs(layer: onnx.NodeProto, weights: Array) -> bool:
    """Whether the outputs are one axis of the weights, and the sums what the weights say."""
    if layer.op_type == "ConvTranspose":
        return _attribute(layer, "group") in (0, 1)
    if layer.op_type == "Gemm":
        return all(one.f == 1 for one in layer.attribute if one.name == "alpha")
    return weights.ndim > 1


def _attribute(node: onnx.NodeProto, name: str) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), 0)
