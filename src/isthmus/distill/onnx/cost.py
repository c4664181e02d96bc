"""What a graph computes for one row: operations, bytes of its weights, values that pass between its products."""

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import onnx

Shape = tuple[int, ...]
_PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")
_OTHERS = (
    "Einsum", "LSTM", "GRU", "RNN", "Attention", "If", "Loop", "Scan", "MatMulInteger", "ConvInteger", "QLinearMatMul",
    "QLinearConv", "DynamicQuantizeMatMul", "FusedMatMul", "FusedGemm", "FusedConv",
)  # fmt: skip
"""Operators that multiply as well, or hold graphs that may; where one of them stands, it is said."""
_TEXT = 16
"""Bytes that a text counts for."""


class GraphWork(msgspec.Struct, frozen=True):
    """Of one row.

    Attributes:
        flops: operations of all products of matrices and convolutions, as torch counts them: a multiplication and an
            addition are two, a bias is none.
        weights: bytes of its constants.
        values: bytes of its inputs and outputs.
        activations: numbers that its products give.
        uncounted: operators whose operations are not in `flops`.
    """

    flops: int
    weights: int
    values: int
    activations: int
    uncounted: tuple[str, ...]


def graph_work(model: bytes, shapes: Mapping[str, Sequence[int]]) -> GraphWork:
    """What a graph in ONNX format does with one row.

    Args:
        model: the graph.
        shapes: of inputs, by their names, where sizes of them have only a name; the size that is called like the first
            one of the first output is that of rows, whichever it is, and without such a name the first one.
    """
    opened = onnx.load_model_from_string(model)
    graph = opened.graph
    answered = graph.output[0].type.tensor_type.shape.dim
    rows = answered[0].dim_param if answered else ""
    for value in graph.input:
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if not size.HasField("dim_value"):
                of_rows = size.dim_param == rows if rows else axis == 0
                size.dim_value = 1 if of_rows else int(shapes[value.name][axis])
    inferred = onnx.shape_inference.infer_shapes(opened, data_prop=True).graph
    known = {value.name: _sizes(value) for value in (*inferred.input, *inferred.value_info, *inferred.output)}
    known |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    known |= {name: tuple(tensor.dims) for name, tensor in _constants(graph)}
    flops, activations, uncounted = 0, 0, []
    for node in inferred.node:
        taken, given = [known.get(name) for name in node.input], known.get(node.output[0])
        if node.op_type in _PRODUCTS and given is not None and taken[0] is not None and taken[1] is not None:
            flops += _operations(node, taken[0], taken[1], given)
            activations += math.prod(given)
        elif node.op_type in _PRODUCTS + _OTHERS:
            uncounted.append(node.op_type)
    passed = [*inferred.input, *inferred.output]
    return GraphWork(
        flops, weight_bytes(model), sum(_bytes(value) for value in passed), activations,
        tuple(sorted(set(uncounted))),
    )  # fmt: skip


def weight_bytes(model: bytes) -> int:
    """Bytes of the constants of a graph."""
    graph = onnx.load_model_from_string(model).graph
    return sum(_size(tensor.data_type, tensor.dims) for tensor in graph.initializer) + sum(
        _size(tensor.data_type, tensor.dims) for _, tensor in _constants(graph)
    )


def _operations(node: onnx.NodeProto, left: Shape, right: Shape, given: Shape) -> int:
    """Two for each product of numbers: as many as numbers are given, times those that are added up for each."""
    settings = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    if node.op_type == "ConvTranspose":  # each number that goes in is multiplied with the weights of its group
        return 2 * math.prod(left) * math.prod(right[1:])
    if node.op_type == "Conv":  # right: (out, in / groups, *kernel)
        return 2 * math.prod(given) * math.prod(right[1:])
    inner = left[0] if settings.get("transA") else left[-1]
    return 2 * math.prod(given) * inner


def _constants(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    for node in graph.node:
        if node.op_type == "Constant":
            yield from ((node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value")


def _sizes(value: onnx.ValueInfoProto) -> Shape | None:
    """The shape; None if a size of it is not known."""
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
