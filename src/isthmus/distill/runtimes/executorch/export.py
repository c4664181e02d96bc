"""Converts a student to a program of ExecuTorch, which phones run without ONNX Runtime."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from isthmus.distill.onnx.runtime import Run
from isthmus.distill.runtimes.executorch.process import LIBRARIES, NAME, Program
from isthmus.distill.runtimes.network import Converted, Portable, in_process, quiet, unconvertible
from isthmus.distill.types import Index, spread

__all__ = ["LIBRARIES", "converted", "files", "running"]

CALIBRATION_ROWS = 256
"""An eighth of those for ONNX: a program takes a row at a time."""

_NARROWEST = 2**-12
"""The least scale of a range, as in XNNPACK's quantizer."""


def files(of: Portable, train: Index) -> Mapping[str, Callable[[], Converted]]:
    """A file in fp32 and a file in INT8, each with what makes it."""
    rows = train[spread(len(train), CALIBRATION_ROWS)]
    return {
        f"{of.part}.fp32.pte": partial(converted, of),
        f"{of.part}.int8.pte": partial(converted, of, rows),
    }


def converted(of: Portable, calibration: Index | None = None) -> Converted:
    """The program for a row at a time; the same student has the same bytes.

    XNNPACK computes what it can, ExecuTorch's portable operators the rest. Rows for calibration make a static INT8
    program, like the graph in ONNX, which quantizes the weights and inputs of the operators that XNNPACK's quantizer
    knows. Raises a GateFailed if ExecuTorch does not support it.
    """
    file = f"{of.part}.{'fp32' if calibration is None else 'int8'}.pte"
    module = of.require(file, NAME)
    max_sizes = of.max_sizes(file, NAME)
    examples, sizes = tuple(of.examples(max_sizes).values()), tuple(of.open_sizes(max_sizes).values())
    try:
        with quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            exported = torch.export.export(module, examples, dynamic_shapes=(sizes,))
            if calibration is not None:
                feeds = (of.feeds(index) for index in np.split(calibration, len(calibration)))
                rows = (tuple(torch.from_numpy(values[t.name]) for t in of.tensors) for values in feeds)
                exported = torch.export.export(_quantized(exported, rows), examples, dynamic_shapes=sizes)
            return Converted(file, _lowered(exported), max_sizes)
    except Exception as error:  # those of torch, XNNPACK and ExecuTorch have no base class in common
        raise unconvertible(file, LIBRARIES, error) from error


def running(program: Converted, of: Portable) -> AbstractContextManager[Run]:
    """Runs a program within the context. Raises a GateFailed if ExecuTorch refuses it."""
    return in_process(Program, program, of)


def _quantized(exported: ExportedProgram, rows: Iterable[tuple[Tensor, ...]]) -> nn.Module:
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.observer import MinMaxObserver
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    class Quantizer(XNNPACKQuantizer):  # type: ignore[misc]
        """Leaves constants alone: by default each becomes a float, and positions are no indexes any more."""

        def transform_for_annotation(self, model: nn.Module) -> nn.Module:
            return model

    usual = get_symmetric_quantization_config(is_per_channel=True)
    # From the least to the largest number, as in ONNX: the default, histograms, takes a second for a frame.
    ranges = replace(usual.input_activation, observer_or_fake_quant_ctr=MinMaxObserver.with_args(eps=_NARROWEST))
    config = replace(usual, input_activation=ranges, output_activation=ranges)
    prepared = prepare_pt2e(exported.module(), Quantizer().set_global(config))
    for tensors in rows:
        prepared(*tensors)
    result: nn.Module = convert_pt2e(prepared)
    return result


def _lowered(exported: ExportedProgram) -> bytes:
    # These imports take ten seconds.
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    return bytes(lowered.to_executorch().buffer)
