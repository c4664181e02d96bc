"""Makes INT8 graphs give the same bits in every runtime: each product and sum becomes exact in float32."""

import numpy as np
import onnx
from onnx import helper, numpy_helper

from isthmus.distill.onnx.primitives import in_primitives
from isthmus.distill.types import Array
from isthmus.transforms.rowwise.core.graph import needed

_EXACT = 2**24
"""Every integer up to here is exact in float32."""

_WEIGHTED = ("Gemm", "MatMul", "Conv", "ConvTranspose")

_FINEST = 100
"""Quantization steps below 2**-100 would leave the range of float32."""


def make_exact(quantized: onnx.ModelProto, model: onnx.ModelProto, layer: onnx.NodeProto) -> onnx.ModelProto:
    """Return a copy of a quantized graph that gives the same bits in every runtime, as far as possible.

    `quantized` is the output of ONNX Runtime's quantizer for the float graph `model`, and `layer` is the last layer
    that it quantized. The weights of this layer become floats again, rounded so that its sums are exact: to twelve bits
    for 32 inputs, to ten for 144. Its output is no longer rounded. The layer keeps its INT8 weights if this is not
    possible, for example because they are not constants, or because it has too many inputs.
    """
    result = onnx.ModelProto()
    result.CopyFrom(quantized)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    names = [name for name in layer.input[1:] if name]
    if layer.op_type in _WEIGHTED and constants.keys() >= {*names} and _has_outputs(layer, constants[names[0]]):
        _sum_exactly(result.graph, layer.name, [constants[name] for name in names])
    nodes = needed(in_primitives(result), [output.name for output in result.graph.output])
    used = {tensor for node in nodes for tensor in node.input}
    initializers = [tensor for tensor in result.graph.initializer if tensor.name in used]
    del result.graph.node[:], result.graph.initializer[:]
    result.graph.node.extend(nodes)
    result.graph.initializer.extend(initializers)
    return result


def power_of_two_steps(optimized: onnx.GraphProto) -> dict[str, tuple[Array, Array]]:
    """Return quantization steps with which all runtimes multiply integers to equal bits, by tensor.

    Runtimes scale such integers by the ratio of their steps, and round differently. With powers of two, each product is
    exact in float32. The result has the inputs and outputs of QLinearMul in the quantized graph `optimized` whose step
    is not a power of two yet. A value is the next larger power, float32, and its zero point, uint8.
    """
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in optimized.initializer}
    steps = {}
    for node in optimized.node:
        if node.op_type == "QLinearMul":
            for name, zero_point in (node.input[1:3], node.input[4:6], node.input[6:8]):
                step, zero = constants[name], constants[zero_point]
                larger = np.float32(2.0 ** np.ceil(np.log2(step)))
                if larger != step:
                    tensor = name.removesuffix("_scale")
                    steps[tensor] = (np.array(larger), np.array(np.rint(zero * (step / larger)), np.uint8))
    return steps


def _sum_exactly(graph: onnx.GraphProto, name: str, parameters: list[Array]) -> None:
    producers = {output: node for node in graph.node for output in node.output}
    constants = {constant.name: constant for constant in graph.initializer}
    place, layer = next((place, node) for place, node in enumerate(graph.node) if node.name == name)
    dequantized = producers[layer.input[0]]
    scale, zero = (numpy_helper.to_array(constants[tensor]) for tensor in dequantized.input[1:])
    axis = {"Conv": 0, "MatMul": parameters[0].ndim - 1}.get(layer.op_type, 1 - _attribute(layer, "transB"))
    largest = max(int(zero), 255 - int(zero))
    rounded = _rounded(parameters[0] * np.float64(scale), parameters[1:], axis, largest)
    if not rounded:
        return
    names = [f"{name}/exact/{part}" for part in ("weight", "bias")]
    for tensor, value in zip(names, rounded, strict=False):
        graph.initializer.append(numpy_helper.from_array(value, tensor))
    graph.initializer.append(numpy_helper.from_array(np.array(1, np.float32), f"{name}/one"))
    whole, inputs = f"{name}/whole", [dequantized.input[0], f"{name}/one", dequantized.input[2]]
    # The next layers read the output under the name it has after these two nodes.
    quantize = next(node for node in graph.node if layer.output[0] in node.input)
    dequantize = next(node for node in graph.node if quantize.output[0] in node.input)
    layer.output[0] = dequantize.output[0]
    graph.node.remove(quantize)
    graph.node.remove(dequantize)
    layer.input[:] = [whole, *names[: len(rounded)]]
    graph.node.insert(place, helper.make_node("DequantizeLinear", inputs, [whole], name=whole))


def _rounded(weights: Array, biases: list[Array], axis: int, largest: int) -> list[Array]:
    """Round so that no sum exceeds 2**24 steps for integer inputs up to `largest`; return [] with too many inputs."""
    shape = [-1 if place == axis else 1 for place in range(weights.ndim)]
    parts = [weights, *(bias.astype(np.float64) for bias in biases)]
    inputs = weights.size // weights.shape[axis]
    most = np.abs(weights).sum(tuple({*range(weights.ndim)} - {axis})) * largest + sum(map(np.abs, parts[1:]))
    # Rounding adds half a step to each weight and to the bias.
    room = _EXACT - (inputs * largest + 1) / 2
    if room <= _EXACT / 2:  # a step, at least `most` / `room`, would exceed the mean weight
        return []
    with np.errstate(divide="ignore"):
        power = np.minimum(np.floor(np.log2(room / most)), _FINEST)
    steps = [np.exp2(-power).reshape(shape), np.exp2(-power)]
    return [(np.rint(part / step) * step).astype(np.float32) for part, step in zip(parts, steps, strict=False)]


def _has_outputs(layer: onnx.NodeProto, weights: Array) -> bool:
    if layer.op_type == "ConvTranspose":
        return _attribute(layer, "group") in (0, 1)
    if layer.op_type == "Gemm":
        return all(attribute.f == 1 for attribute in layer.attribute if attribute.name == "alpha")
    return weights.ndim > 1


def _attribute(node: onnx.NodeProto, name: str) -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == name), 0)
