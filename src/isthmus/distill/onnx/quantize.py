"""Smaller ONNX graphs: static INT8 with ONNX Runtime's quantizer, weights in 8 or 16 bits, and both in one graph."""

import tempfile
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from isthmus.distill.onnx.exactness import make_exact, power_of_two_steps
from isthmus.distill.onnx.runtime import ask, optimized, session
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, DataError, Problem
from isthmus.package.inputs import Feeds

TABLE = "Gather"
"""The operator that reads embedding tables; it also stands for Slice, which reads tables of positions."""
LEAST_TABLE = 4096
"""Fewest numbers of a table or weight to make smaller: below, the added nodes would outweigh the savings."""
COMPRESSED = ("w8", "fp16")
"""Precisions that store smaller weights and compute in float32, see `compress_weights`."""
MIXED = "mixed"
"""Precision in which layers with outliers have 8-bit weights and all others INT8, see `quantize_mixed`."""
OUTLIERS, SHARE = 32.0, 6
"""Layers have outliers if the range of their inputs exceeds this many times their root mean square: 255 steps then
round with an error of 4 %. Of all layers, one in `SHARE` may be treated so."""

_STATISTICS = ("ReduceMax", "ReduceMin", "ReduceSumSquare", "Size")


class _Calibration(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, feeds: Iterable[Feeds]) -> None:
        self._batches = iter(feeds)

    def get_next(self) -> Feeds | None:
        return next(self._batches, None)


def quantize(model: onnx.ModelProto, calibration: Iterable[Feeds], operators: Sequence[str]) -> bytes:
    """Return a copy of a model with INT8 inputs and per-channel INT8 weights, as ONNX bytes, for a smaller package.

    The copy gives the same bits in every runtime, as far as `make_exact` can achieve.

    * Static, not dynamic: a dynamic scale depends on the batch, so a row's result would depend on its neighbors.
    * Inputs are unsigned: on x86 ONNX Runtime cannot always convert signed inputs, and then computes in floats.
    * Weights have seven bits: with eight, processors without VNNI saturate and differ from the machine that checked the
      package. The few weights of the last layer get a dozen bits, because their rounding shows in the output.
    * Tensors multiplied between layers get power-of-two steps, in a second run of the quantizer.
    * A Gemm with beta stays in float32: the quantizer would drop the factor.
    * If `operators` has "Gather", embedding tables become integers with one step per row.

    `calibration` has batches of input rows, which determine the ranges of the layer inputs. `operators` has the ONNX
    operators to quantize, such as "Gemm". Raises a ConfigurationError if the graph has none of them, or has one in a
    form that the quantizer rejects. Raises a DataError if the quantizer fails because a number in `calibration` is not
    finite.
    """
    source = _named(model)
    tables = _compress_tables(source.graph, "w8") if TABLE in operators else 0
    layers = _layers(source, operators)
    if tables and not layers:
        return bytes(source.SerializeToString(deterministic=True))
    if not layers:
        problem = Problem("quantized", ", ".join(operators), "an operator that the student's graph has")
        raise ConfigurationError("task", [problem])
    rows, names = [*calibration], [node.name for node in layers]
    quantized = _quantized(source, rows, names, {})
    if steps := power_of_two_steps(optimized(quantized)):
        quantized = _quantized(source, rows, names, steps)
    return bytes(make_exact(quantized, model, layers[-1]).SerializeToString(deterministic=True))


def quantize_mixed(model: onnx.ModelProto, calibration: Iterable[Feeds], operators: Sequence[str]) -> bytes:
    """Return a copy of a model with INT8 layers, except those that would lose the most accuracy, as ONNX bytes.

    More accurate than `quantize`, for transformers, whose activations have outliers. In contrast to `quantize`:

    * The layers with the worst outliers among their inputs, at most one in `SHARE`, only get 8-bit weights, as in
      `compress_weights`, and so does the last layer. Without constant weights they stay in float32.
    * Outputs of Gemm and MatMul are not rounded: a transformer adds them to numbers with outliers.
    * Runtimes may differ by the rounding of float32. Such a difference can also round an INT8 input to another step.

    Arguments and errors are those of `quantize`.
    """
    source, rows = _named(model), [*calibration]
    names = [node.name for node in _layers(source, operators)]
    if not names:
        return quantize(model, rows, operators)
    spared = [*_with_outliers(source, names, rows), names[-1]]
    result = _compressed(source, "w8", operators, spared)
    if names := [name for name in names if name not in spared]:
        result = _quantized(result, rows, names, {}, rounded_outputs=False)
    return bytes(result.SerializeToString(deterministic=True))


def compress_weights(model: onnx.ModelProto, precision: str, operators: Sequence[str]) -> bytes:
    """Return a copy of a model that stores smaller weights and computes in float32, as ONNX bytes.

    "w8" stores 8-bit weights with one step per output of a layer and per row of an embedding table. "fp16" stores
    half-precision weights. Inputs of layers are not rounded, so no calibration is needed, and outliers among them do no
    harm. The graph converts the weights with Cast and Mul: runtimes then differ by float32 rounding only. ONNX
    Runtime's MatMulNBits is faster, but rounds the inputs of layers on some processors and not on others.

    `operators` has the ONNX operators whose weights become smaller. Weights with fewer than `LEAST_TABLE` numbers, and
    weights that are not finite in the smaller type, stay in float32.
    """
    return bytes(_compressed(model, precision, operators).SerializeToString(deterministic=True))


def _compressed(
    model: onnx.ModelProto, precision: str, operators: Sequence[str], names: Container[str] | None = None
) -> onnx.ModelProto:
    """Compress tables and layers of a copy, if `names` is set only the layers with these names."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    if TABLE in operators:
        _compress_tables(graph, precision)
    constants = {tensor.name: tensor for tensor in graph.initializer if _is_large(tensor)}
    nodes, stored = list[onnx.NodeProto](), dict[str, Array]()
    for node in graph.node:
        weight = constants.get(node.input[1]) if len(node.input) > 1 else None
        axis = _output_axis(node)
        if (
            weight is None or axis is None or node.op_type not in operators or _has_factor(node)
            or (names is not None and node.name not in names)
        ):  # fmt: skip
            nodes.append(node)
            continue
        values, step = _smaller(numpy_helper.to_array(weight), axis, precision)
        nodes += (
            _converted(node, f"{weight.name}/{axis % len(weight.dims)}", values, step, stored)
            if values is not None
            else [node]
        )
    del graph.node[:]
    graph.node.extend(nodes)
    used = {*_read_names(graph)}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in stored.items())
    return result


def _named(model: onnx.ModelProto) -> onnx.ModelProto:
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for place, node in enumerate(result.graph.node):
        node.name = node.name or f"node/{place}"
    # The graph needs no preprocessing; without this mark the quantizer asks for it.
    helper.set_model_props(result, {"onnx.quant.pre_process": "onnxruntime.quant"})
    return result


def _layers(model: onnx.ModelProto, operators: Sequence[str]) -> list[onnx.NodeProto]:
    return [n for n in model.graph.node if n.op_type in operators and n.op_type != TABLE and not _has_factor(n)]


def _with_outliers(model: onnx.ModelProto, names: Sequence[str], rows: Sequence[Feeds]) -> list[str]:
    """Choose the layers among `names` whose inputs have the widest range, in units of their root mean square."""
    measured, constants = onnx.ModelProto(), {tensor.name for tensor in model.graph.initializer}
    measured.CopyFrom(model)
    fed = {node.name: [name for name in node.input[:2] if name not in constants]
           for node in model.graph.node if node.name in names}  # fmt: skip
    tensors = dict.fromkeys(tensor for inputs in fed.values() for tensor in inputs)
    for tensor in tensors:
        for kind in _STATISTICS:
            result = f"{tensor}/{kind}"
            element = onnx.TensorProto.INT64 if kind == "Size" else onnx.TensorProto.FLOAT
            options: dict[str, Any] = {} if kind == "Size" else {"keepdims": 0}
            measured.graph.node.append(helper.make_node(kind, [tensor], [result], **options))
            measured.graph.output.append(helper.make_tensor_value_info(result, element, []))
    opened = session(bytes(measured.SerializeToString()), 1)
    batches = [ask(opened, feeds) for feeds in rows if all(array.size for array in feeds.values())]
    width = {}
    for tensor in tensors:
        high, low, squares, sizes = (np.array([batch[f"{tensor}/{kind}"] for batch in batches], np.float64)
                                     for kind in _STATISTICS)  # fmt: skip
        width[tensor] = (high.max(initial=0) - low.min(initial=0)) / np.sqrt(squares.sum() / sizes.sum() or np.inf)
    widest = {name: max((width[tensor] for tensor in inputs), default=0.0) for name, inputs in fed.items()}
    order = sorted(names, key=lambda name: widest[name], reverse=True)
    return [name for name in order[: len(names) // SHARE] if widest[name] > OUTLIERS]


def _smaller(weights: Array, axis: int, precision: str) -> tuple[Array | None, Array | None]:
    """Return weights in a smaller type, and for "w8" the steps along `axis`; (None, None) if they are not finite."""
    if precision == "fp16":
        with np.errstate(over="ignore"):
            half = weights.astype(np.float16)
        return (half, None) if np.isfinite(half).all() else (None, None)
    others = tuple(place for place in range(weights.ndim) if place != axis % weights.ndim)
    step = np.abs(weights).max(others, keepdims=True) / np.float32(127)
    step = np.where(step > 0, step, np.float32(1)).astype(np.float32)
    return (np.rint(weights / step).astype(np.int8), step) if np.isfinite(step).all() else (None, None)


def _converted(
    node: onnx.NodeProto, stem: str, values: Array, step: Array | None, stored: dict[str, Array]
) -> Iterator[onnx.NodeProto]:
    """Yield a layer with smaller weights and the nodes that convert them; add its constants to `stored`."""
    out, layer = node.output[0], onnx.NodeProto()
    layer.CopyFrom(node)
    whole, plain, scaled = f"{stem}/whole", f"{stem}/float", f"{stem}/scaled"
    is_new = whole not in stored
    stored[whole] = values
    if is_new:
        yield helper.make_node("Cast", [whole], [plain], name=plain, to=onnx.TensorProto.FLOAT)
    layer.input[1] = plain
    if step is None:
        yield layer
    elif values.ndim > 2:
        stored[f"{stem}/step"] = step
        if is_new:
            yield helper.make_node("Mul", [plain, f"{stem}/step"], [scaled], name=scaled)
        layer.input[1] = scaled
        yield layer
    else:  # scale the outputs, as there are fewer of them than weights
        stored[f"{stem}/step"] = step.ravel()
        bias = layer.input[2:]
        del layer.input[2:]
        layer.output[0] = f"{out}/whole"
        yield layer
        product = f"{out}/product" if bias else out
        yield helper.make_node("Mul", [f"{out}/whole", f"{stem}/step"], [product], name=f"{out}/scaled")
        if bias:
            yield helper.make_node("Add", [product, *bias], [out], name=f"{out}/sum")


def _is_large(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1 and np.prod(tensor.dims) >= LEAST_TABLE


def _output_axis(node: onnx.NodeProto) -> int | None:
    if node.op_type == "Gemm":
        return 0 if any(attribute.name == "transB" and attribute.i for attribute in node.attribute) else 1
    return {"MatMul": -1, "Conv": 0, "ConvTranspose": 1}.get(node.op_type)


def _read_names(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (output.name for output in graph.output)
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            yield from _read_names(attribute.g)


def _compress_tables(graph: onnx.GraphProto, precision: str) -> int:
    """Compress in place the tables of which only rows are read, for "w8" with one step per row; return how many."""
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT}
    integers = (tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.INT64)
    first = {tensor.name for tensor in integers if numpy_helper.to_array(tensor).tolist() == [0]}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(node)
    count = 0
    for name, tensor in constants.items():
        nodes = readers.get(name, [])
        embeds = all(_reads_rows(node, name, first) for node in nodes)
        if not nodes or not embeds or len(tensor.dims) != 2 or np.prod(tensor.dims) < LEAST_TABLE:
            continue
        values, steps = _smaller(numpy_helper.to_array(tensor), 0, precision)
        if values is None:
            continue
        whole, step = f"{name}/whole", f"{name}/step"
        graph.initializer.remove(tensor)
        graph.initializer.append(numpy_helper.from_array(values, whole))
        if steps is not None:
            graph.initializer.append(numpy_helper.from_array(steps, step))
        for node in nodes:
            out = node.output[0]
            plain = out if steps is None else f"{out}/float"
            made = [
                *(helper.make_node(node.op_type, [source, *node.input[1:]], [rows], name=rows)
                  for source, rows in ((whole, f"{out}/whole"), (step, f"{out}/step"))),
                helper.make_node("Cast", [f"{out}/whole"], [plain], name=plain, to=1),
                helper.make_node("Mul", [plain, f"{out}/step"], [out], name=f"{out}/row"),
            ]  # fmt: skip
            made = made if steps is not None else [made[0], made[2]]
            place = [*graph.node].index(node)
            graph.node.remove(node)
            for offset, each in enumerate(made):
                graph.node.insert(place + offset, each)
        count += 1
    return count


def _reads_rows(node: onnx.NodeProto, table: str, first: Container[str]) -> bool:
    """Return True if a node reads rows of `table`. `first` has the names of constants that name only the first axis."""
    if node.op_type == "Slice":  # the first rows of a table of positions
        return table not in node.input[1:] and len(node.input) > 3 and node.input[3] in first
    along = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    return node.op_type == TABLE and along == 0 and [*node.input].index(table) == 0


def _quantized(
    source: onnx.ModelProto, rows: Sequence[Feeds], layers: Sequence[str], steps: Mapping[str, tuple[Array, Array]],
    *, rounded_outputs: bool = True,
) -> onnx.ModelProto:  # fmt: skip
    forced = {
        tensor: [{"scale": step, "zero_point": zero, "quant_type": QuantType.QUInt8}]
        for tensor, (step, zero) in steps.items()
    }
    options: dict[str, Any] = {"TensorQuantOverrides": forced}
    if not rounded_outputs:
        options["OpTypesToExcludeOutputQuantization"] = ["Gemm", "MatMul"]
    copied = onnx.ModelProto()
    copied.CopyFrom(source)  # the quantizer moves constants out of its input
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model.onnx"
        try:
            quantize_static(
                copied,
                target,
                _Calibration(rows),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                per_channel=True,
                reduce_range=True,
                op_types_to_quantize=sorted({node.op_type for node in source.graph.node if node.name in layers}),
                nodes_to_quantize=[*layers],
                extra_options=options,
            )
        except (MemoryError, OSError):  # caused by the machine, not the graph
            raise
        except Exception as error:  # the quantizer raises errors of any class
            failure = f"ONNX Runtime's quantizer fails with {type(error).__name__}: {error}"
            if not_finite := _not_finite(rows):
                # If finite rows fail, too, the values were not the cause: raise that error instead.
                _quantized(source, [_finite(feeds) for feeds in rows], layers, steps)
                raise DataError(
                    "task: calibration rows",
                    f"{not_finite}, and {failure}",
                    expected="finite numbers in the inputs of layers",
                    remedy="check this input in the training rows, or replace such values in the graph",
                ) from error
            problem = Problem("quantized", failure, "operators in a form that it supports")
            remedy = "leave operators that it does not support out of `quantized`"
            if uneven := _with_uneven_bias(source, layers):
                remedy = f"give {', '.join(uneven)} one bias per output, or leave the operator out of `quantized`"
            raise ConfigurationError("task", [problem], remedy=remedy) from error
        return onnx.load(target)


def _not_finite(rows: Sequence[Feeds]) -> str:
    for feeds in rows:
        for name, values in feeds.items():
            if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
                return f"input {name} holds {values[~finite][0]}"
    return ""


def _finite(feeds: Feeds) -> Feeds:
    return {name: np.nan_to_num(x, posinf=0, neginf=0) if x.dtype.kind == "f" else x for name, x in feeds.items()}


def _with_uneven_bias(model: onnx.ModelProto, layers: Sequence[str]) -> list[str]:
    sizes = {constant.name: len(constant.dims) for constant in model.graph.initializer}
    return [
        node.name
        for node in model.graph.node
        if node.name in layers and len(node.input) > 2 and sizes.get(node.input[2], 1) != 1
    ]


def _has_factor(node: onnx.NodeProto) -> bool:
    return node.op_type == "Gemm" and any(attribute.name == "beta" and attribute.f != 1 for attribute in node.attribute)
