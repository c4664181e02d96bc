"""Converts a student or a language model to an ExecuTorch program, which phones run without ONNX Runtime."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from isthmus.distill.decoder.network import CachedModel
from isthmus.distill.runtimes.executorch.process import LIBRARIES
from isthmus.distill.runtimes.network import Converted, Portable, quiet, unconvertible
from isthmus.distill.types import Index, evenly_spaced
from isthmus.package.generation.prompt import PAST, TOKENS

CALIBRATION_ROWS = 256
"""An eighth of the rows for ONNX, because the program runs one row at a time."""

DECODER = "model.fp32.pte"
"""File of a language model."""

_NARROWEST = 2**-12
"""Smallest scale of a range, as in XNNPACK's quantizer."""


def files(portable: Portable, train: Index, _precisions: Collection[str]) -> Mapping[str, Callable[[], Converted]]:
    rows = train[evenly_spaced(len(train), CALIBRATION_ROWS)]
    return {
        f"{portable.part}.fp32.pte": partial(convert_student, portable),
        f"{portable.part}.int8.pte": partial(convert_student, portable, rows),
    }


def convert_student(portable: Portable, calibration: Index | None = None) -> Converted:
    """Convert a student to an ExecuTorch program that computes one row at a time, in this process.

    `portable` is the part of the student to convert. `calibration` has the indexes of rows that determine the ranges
    of INT8 numbers; None converts to float32. With rows, weights and inputs become INT8 if XNNPACK's quantizer supports
    the operator. ExecuTorch's portable kernels compute the operators that XNNPACK lacks. Raise a GateFailed if
    ExecuTorch cannot convert the student.
    """
    file = f"{portable.part}.{'fp32' if calibration is None else 'int8'}.pte"
    module = portable.require(file, LIBRARIES.name)
    max_sizes = portable.max_sizes(file, LIBRARIES.name)
    examples, sizes = tuple(portable.examples(max_sizes).values()), tuple(portable.open_sizes(max_sizes).values())
    try:
        with quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            exported = torch.export.export(module, examples, dynamic_shapes=(sizes,))
            if calibration is not None:
                feeds = (portable.feeds(index) for index in np.split(calibration, len(calibration)))
                rows = (tuple(torch.from_numpy(values[t.name]) for t in portable.tensors) for values in feeds)
                exported = torch.export.export(_quantized(exported, rows), examples, dynamic_shapes=sizes)
            return Converted(file, _lowered(exported), max_sizes)
    except Exception as error:  # errors of torch, XNNPACK and ExecuTorch share no base class
        raise unconvertible(file, LIBRARIES, error) from error


def converted_decoder(network: CachedModel) -> Converted:
    # With a dynamic number of tokens, ExecuTorch's passes would fix every tensor at the size of the example.
    max_sizes = {TOKENS: 1, PAST: network.context}
    past = torch.zeros(1, network.context, 2 * network.layers, network.shared, network.width)
    sizes: tuple[dict[int, Any], ...] = ({}, {1: torch.export.Dim(PAST, max=network.context)})
    try:
        with quiet(), torch.no_grad():
            tokens = torch.ones(1, 1, dtype=torch.int64)
            exported = torch.export.export(network.eval(), (tokens, past), dynamic_shapes=sizes)
            return Converted(DECODER, _lowered(exported), max_sizes)
    except Exception as error:  # errors of torch, XNNPACK and ExecuTorch share no base class
        raise unconvertible(DECODER, LIBRARIES, error) from error


def _quantized(exported: ExportedProgram, rows: Iterable[tuple[Tensor, ...]]) -> nn.Module:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.observer import MinMaxObserver
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    class Quantizer(XNNPACKQuantizer):  # type: ignore[misc]
        """XNNPACK's quantizer without its preparation, which makes constants floats and so breaks indexes."""

        def transform_for_annotation(self, model: nn.Module) -> nn.Module:
            return model

    default = get_symmetric_quantization_config(is_per_channel=True)
    # Minimum to maximum, as in ONNX. The default, histograms, takes a second per image frame.
    ranges = replace(default.input_activation, observer_or_fake_quant_ctr=MinMaxObserver.with_args(eps=_NARROWEST))
    config = replace(default, input_activation=ranges, output_activation=ranges)
    quantizer, operators = Quantizer(), " ".join(str(node.target) for node in exported.graph.nodes)
    # Matching a pattern takes seconds: skip those, such as "conv_bn", whose first operator the graph lacks.
    quantizer.SUPPORTED_PATTERNS = [
        pattern for pattern in quantizer.SUPPORTED_PATTERNS if pattern.name.partition("_")[0] in operators
    ]
    prepared = prepare_pt2e(exported.module(), quantizer.set_global(config))
    for tensors in rows:
        prepared(*tensors)
    result: nn.Module = convert_pt2e(prepared)
    return result


def _lowered(exported: ExportedProgram) -> bytes:
    # These imports take ten seconds.
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    program = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    return bytes(program.to_executorch().buffer)
