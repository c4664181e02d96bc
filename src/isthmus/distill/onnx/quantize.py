"""INT8 by static quantization."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)

from isthmus.distill.onnx.exactness import exact, powers_of_two
from isthmus.distill.onnx.runtime import optimized
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, DataError, Problem
from isthmus.features.package.manifest import Feeds


class _Calibration(CalibrationDataReader):  # type: ignore[misc]
    """Training rows, a batch at a time."""

    def __init__(self, feeds: Iterable[Feeds]) -> None:
        self._batches = iter(feeds)

    def get_next(self) -> Feeds | None:
        return next(self._batches, None)


def quantize(model: onnx.ModelProto, calibration: Iterable[Feeds], operators: Sequence[str]) -> bytes:
    """The model with INT8 weights, one scale per output channel, and INT8 inputs: alike in every runtime.

    Static and not dynamic: a dynamic scale comes from the whole batch, so the answer for one row would depend on the
    rows beside it. Inputs are unsigned: on x86 ONNX Runtime makes signed ones so where it can, and computes in floats
    where it cannot. Weights have seven bits: with eight, processors without VNNI saturate, and answer otherwise than
    the machine the package was checked on. The last layer, a few dozen weights, is the one whose rounding is seen: its
    weights have a dozen bits. What is added or multiplied between layers has steps of powers of two, for which the
    ranges are taken twice. What is left of floats gives the same bits everywhere: see `exactness` and `steps`.

    A Gemm whose bias has a factor stays as it is: the quantizer would lose the factor.

    Args:
        model: float32.
        calibration: rows from which the ranges of the layer inputs are taken, in parts.
        operators: what is a layer.

    Raises:
        ConfigurationError: the graph has no such layer, or one that the quantizer does not take.
        DataError: the quantizer finds no range for rows that are not finite.
    """
    source = onnx.ModelProto()
    source.CopyFrom(model)
    for place, node in enumerate(source.graph.node):
        node.name = node.name or f"node/{place}"
    layers = [node for node in source.graph.node if node.op_type in operators and not _has_factor(node)]
    if not layers:
        problem = Problem("quantized", ", ".join(operators), "an operator that the student's graph has")
        raise ConfigurationError("task", [problem])
    # The graph is built with known shapes and nothing to fold; without the mark the quantizer asks for its own pass.
    onnx.helper.set_model_props(source, {"onnx.quant.pre_process": "onnxruntime.quant"})
    rows, names = [*calibration], [node.name for node in layers]
    quantized = _quantized(source, rows, operators, names, {})
    if steps := powers_of_two(optimized(quantized)):
        quantized = _quantized(source, rows, operators, names, steps)
    found: bytes = exact(quantized, model, layers[-1]).SerializeToString(deterministic=True)
    return found


def _quantized(
    source: onnx.ModelProto, rows: Sequence[Feeds], operators: Sequence[str], layers: Sequence[str],
    steps: Mapping[str, tuple[Array, Array]],
) -> onnx.ModelProto:  # fmt: skip
    """What ONNX Runtime's quantizer makes of a model, with the steps and zero points that some tensors must have."""
    forced = {
        tensor: [{"scale": step, "zero_point": zero, "quant_type": QuantType.QUInt8}]
        for tensor, (step, zero) in steps.items()
    }
    given = onnx.ModelProto()
    given.CopyFrom(source)  # the quantizer moves the constants of what it is given out of it
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "model.onnx"
        try:
            quantize_static(
                given,
                target,
                _Calibration(rows),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                per_channel=True,
                reduce_range=True,
                op_types_to_quantize=[*operators],
                nodes_to_quantize=[*layers],
                extra_options={"TensorQuantOverrides": forced},
            )
        except (MemoryError, OSError):  # the machine's
            raise
        except Exception as error:  # of a layer in a form that it does not know it raises what comes
            ended = f"ONNX Runtime's quantizer ends with {type(error).__name__}: {error}"
            if found := _not_finite(rows):
                # A null may be what the graph replaces: then this ends likewise, and says why.
                _quantized(source, [_finite(feeds) for feeds in rows], operators, layers, steps)
                raise DataError(
                    "task: calibration rows",
                    f"{found}, and {ended}",
                    expected="finite numbers where a layer takes them",
                    remedy="look at this input of the training rows, or replace what is not finite in the graph",
                ) from error
            problem = Problem("quantized", ended, "operators in a form that it knows")
            remedy = "leave operators that it does not know out of `quantized`"
            if uneven := _with_uneven_bias(source, layers):
                remedy = f"give {', '.join(uneven)} one bias per output, or leave the operator out of `quantized`"
            raise ConfigurationError("task", [problem], remedy=remedy) from error
        return onnx.load(target)


def _not_finite(rows: Sequence[Feeds]) -> str:
    """The first that is not finite, in words; nothing where all numbers are."""
    for feeds in rows:
        for name, values in feeds.items():
            if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
                return f"input {name} holds {values[~finite][0]}"
    return ""


def _finite(feeds: Feeds) -> Feeds:
    return {name: np.nan_to_num(x, posinf=0, neginf=0) if x.dtype.kind == "f" else x for name, x in feeds.items()}


def _with_uneven_bias(model: onnx.ModelProto, layers: Sequence[str]) -> list[str]:
    """The layers whose bias has another form than one number per output."""
    sizes = {constant.name: len(constant.dims) for constant in model.graph.initializer}
    return [
        node.name
        for node in model.graph.node
        if node.name in layers and len(node.input) > 2 and sizes.get(node.input[2], 1) != 1
    ]


def _has_factor(node: onnx.NodeProto) -> bool:
    return node.op_type == "Gemm" and any(one.name == "beta" and one.f != 1 for one in node.attribute)
