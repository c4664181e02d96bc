"""The cost of a graph for one row: operations, bytes of weights, inputs and outputs, and activations."""

import math
from collections.abc import Mapping, Sequence

import msgspec
import onnx

Shape = tuple[int, ...]
_PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")
_UNCOUNTED = (
    "Einsum", "LSTM", "GRU", "RNN", "Attention", "If", "Loop", "Scan", "MatMulInteger", "ConvInteger", "QLinearMatMul",
    "QLinearConv", "DynamicQuantizeMatMul", "FusedMatMul", "FusedGemm", "FusedConv",
)  # fmt: skip
"""Operators that may also multiply, directly or in subgraphs. They are reported, not counted."""
_TEXT = 16
"""Bytes assumed per string."""


class GraphWork(msgspec.Struct, frozen=True):
    """The cost of a graph for one row, to estimate its latency.

    `flops` counts products and convolutions as in torch: two per multiply-add, none for a bias. `weights` is the bytes
    of the constants, `values` the bytes of inputs and outputs, and `activations` the numbers that products output.
    `uncounted` has operators that may multiply but are not counted.
    """

    flops: int
    weights: int
    values: int
    activations: int
    uncounted: tuple[str, ...]


def graph_work(model: bytes, shapes: Mapping[str, Sequence[int]]) -> GraphWork:
    """Count the operations and bytes of an ONNX graph for one row, to estimate what a prediction costs.

    `model` is the content of the ONNX file. `shapes` has an example shape for each input by name, from which dynamic
    dimensions are taken. The number of rows is always set to 1. It is the dynamic dimension with which the first output
    begins, or axis 0 of each input if that output begins with a fixed dimension.
    """
    loaded = onnx.load_model_from_string(model)
    graph = loaded.graph
    dimensions = graph.output[0].type.tensor_type.shape.dim
    rows = dimensions[0].dim_param if dimensions else ""
    for value in graph.input:
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if not size.HasField("dim_value"):
                is_rows = size.dim_param == rows if rows else axis == 0
                size.dim_value = 1 if is_rows else int(shapes[value.name][axis])
    inferred = onnx.shape_inference.infer_shapes(loaded, data_prop=True).graph
    known = {value.name: _sizes(value) for value in (*inferred.input, *inferred.value_info, *inferred.output)}
    known |= {name: tuple(tensor.dims) for name, tensor in _constants(graph).items()}
    flops, activations, uncounted = 0, 0, []
    for node in inferred.node:
        inputs, output = [known.get(name) for name in node.input], known.get(node.output[0])
        if node.op_type in _PRODUCTS and output is not None and inputs[0] is not None and inputs[1] is not None:
            flops += _operations(node, inputs[0], inputs[1], output)
            activations += math.prod(output)
        elif node.op_type in _PRODUCTS + _UNCOUNTED:
            uncounted.append(node.op_type)
    values = sum(map(_bytes, (*inferred.input, *inferred.output)))
    return GraphWork(flops, weight_bytes(model), values, activations, tuple(sorted(set(uncounted))))


def weight_bytes(model: bytes) -> int:
    constants = _constants(onnx.load_model_from_string(model).graph)
    return sum(_size(tensor.data_type, tensor.dims) for tensor in constants.values())


def _operations(node: onnx.NodeProto, left: Shape, right: Shape, output: Shape) -> int:
    if node.op_type == "ConvTranspose":  # each input meets all weights of its group
        return 2 * math.prod(left) * math.prod(right[1:])
    if node.op_type == "Conv":  # right: (out, in / groups, *kernel)
        return 2 * math.prod(output) * math.prod(right[1:])
    transposed = any(attribute.name == "transA" and attribute.i for attribute in node.attribute)
    return 2 * math.prod(output) * left[0 if transposed else -1]


def _constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            constants.update((node.output[0], part.t) for part in node.attribute if part.name == "value")
    return constants


def _sizes(value: onnx.ValueInfoProto) -> Shape | None:
    if not value.type.tensor_type.HasField("shape"):
        return None
    sizes = value.type.tensor_type.shape.dim
    return tuple(size.dim_value for size in sizes) if all(size.HasField("dim_value") for size in sizes) else None


def _bytes(value: onnx.ValueInfoProto) -> int:
    sizes = _sizes(value)
    return 0 if sizes is None else _size(value.type.tensor_type.elem_type, sizes)


def _size(element: int, sizes: Sequence[int]) -> int:
    if element == onnx.TensorProto.STRING:
        return math.prod(sizes) * _TEXT
    return math.prod(sizes) * int(onnx.helper.tensor_dtype_to_np_dtype(element).itemsize)
