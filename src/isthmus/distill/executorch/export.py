"""Converts a student to a program of ExecuTorch, which phones run without ONNX Runtime."""

import copy
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from isthmus.distill.declaration import EXECUTORCH, Distillation
from isthmus.distill.executorch.process import INSTALL, NAME, PINS, Program, Refused
from isthmus.distill.onnx.runtime import Run
from isthmus.distill.tasks.task import Task
from isthmus.distill.teachers.teacher import named
from isthmus.distill.types import Index
from isthmus.features.errors import ConfigurationError, GateFailed, Problem
from isthmus.features.package.manifest import Tensor as Described

FILE = "model.fp32.pte"
QUANTIZED = "model.int8.pte"
CALIBRATION_ROWS = 256
"""An eighth of those for ONNX: a program takes a row at a time."""

_NARROWEST = 2**-12
"""The least scale of a range, as in XNNPACK's quantizer."""

_CHATTER = ("torch", "torchao", "torch.utils._pytree", "executorch", "root")


class Converted(NamedTuple):
    """A program: the name and content of its file, and the maximum of each named size of the graph."""

    file: str
    model: bytes
    max_sizes: Mapping[str, int]


def require_installed(declaration: Distillation) -> None:
    """Raises a ConfigurationError, with the packages to install, if a declaration needs ExecuTorch and lacks it."""
    if EXECUTORCH not in declaration.runtimes:
        return
    problems = []
    for name, version in PINS.items():
        try:
            installed = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            problems.append(Problem("runtimes", f"{NAME} needs {name}, which is not installed", version))
            continue
        if installed != version:
            problems.append(Problem("runtimes", f"{NAME} needs {name}, and {installed} is installed", version))
    if problems:
        raise ConfigurationError(
            declaration.where, problems, remedy=f'run {INSTALL}, or leave "{EXECUTORCH}" out of the runtimes'
        )


class _Ordered(nn.Module):
    """A network with its inputs and outputs in the order of the graph."""

    def __init__(self, network: nn.Module, order: Sequence[int], keys: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.network = network
        self._order, self._keys, self._outputs = order, keys, outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = named(self.network(*(tensors[place] for place in self._order)), self._keys, NAME)
        return tuple(outputs[name] for name in self._outputs)


def converted(
    task: Task,
    student: nn.Module,
    row: Index,
    tensors: Sequence[Described],
    outputs: Sequence[Described],
    calibration: Index | None = None,
) -> Converted:
    """The program of a student for a row at a time; the same student has the same bytes.

    XNNPACK computes what it can, ExecuTorch's portable operators the rest. The student is in eval mode; `tensors` and
    `outputs` are those of its graph, and `row` is any row, as an example. Rows for calibration make a static INT8
    program, like the graph in ONNX, which quantizes the weights and inputs of the operators that XNNPACK's quantizer
    knows. Raises a GateFailed if ExecuTorch does not support it.
    """
    network, file = task.network(student), FILE if calibration is None else QUANTIZED
    texts = [tensor.name for tensor in tensors if tensor.element == "string"]
    if network is None or texts:
        raise GateFailed(
            file,
            f"{NAME} has no operators for what the graph begins with"
            + (f": its inputs include texts ({', '.join(texts)})" if texts else ""),
            expected="a task whose `network` is a module of torch that does all that the graph does",
            remedy="run the files in ONNX or ORT format",
        )
    max_sizes = _max_sizes(file, task, tensors, outputs)
    fed, input_names = task.feeds(row), [tensor.name for tensor in tensors]
    examples, sizes = [], []
    open_sizes = {name: torch.export.Dim(name, max=size) for name, size in max_sizes.items() if size > 1}
    for tensor in tensors:
        shape = [max_sizes[size] if isinstance(size, str) else size for size in tensor.shape]
        examples.append(torch.from_numpy(np.resize(fed[tensor.name], shape)))
        sizes.append({axis: open_sizes[size] for axis, size in enumerate(tensor.shape) if size in open_sizes})
    output_names = [output.name for output in outputs]
    keys = task.keys if network is student else output_names
    # A copy in contiguous layout: XNNPACK's passes fail on weights in channels-last order.
    plain = copy.deepcopy(network)
    for weights in plain.parameters():
        weights.data = weights.data.contiguous()
    module = _Ordered(plain, [input_names.index(name) for name in fed], keys, output_names).eval()
    try:
        with _quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            exported = torch.export.export(module, tuple(examples), dynamic_shapes=(tuple(sizes),))
            if calibration is not None:
                feeds = (task.feeds(index) for index in np.split(calibration, len(calibration)))
                rows = (tuple(torch.from_numpy(values[name]) for name in input_names) for values in feeds)
                exported = torch.export.export(_quantized(exported, rows), tuple(examples), dynamic_shapes=tuple(sizes))
            return Converted(file, _lowered(exported), max_sizes)
    except Exception as error:  # those of torch, XNNPACK and ExecuTorch have no base class in common
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise GateFailed(
            file,
            f"{NAME} cannot convert the student: {reason[:300]}",
            expected="a module that torch.export supports, of operators that ExecuTorch has",
            remedy=f'change the student, or leave "{EXECUTORCH}" out of the runtimes',
        ) from error


@contextmanager
def running(program: Converted, tensors: Sequence[Described], outputs: Sequence[Described]) -> Iterator[Run]:
    """Runs a program within the context. Raises a GateFailed if ExecuTorch refuses it."""
    try:
        with Program(program.model, tensors, outputs, program.max_sizes) as opened:
            yield opened.ask
    except Refused as error:
        remedy = "report this: the program is wrong"
        raise GateFailed(program.file, f"{NAME} refuses it ({error})", remedy=remedy) from error


def _max_sizes(file: str, task: Task, tensors: Sequence[Described], outputs: Sequence[Described]) -> dict[str, int]:
    """The maximum of each named size: a single row, else as the task says."""
    max_sizes: dict[str, int] = {}
    for tensor in tensors:
        for axis, size in enumerate(tensor.shape):
            if isinstance(size, str):
                max_sizes[size] = 1 if axis == 0 else task.max_sizes.get(size, 0)
    if unknown := [name for name, size in max_sizes.items() if not size]:
        raise GateFailed(
            file, f"{unknown[0]}, a size that the graph leaves open, has no limit",
            expected=f"a limit, as {NAME} plans its memory ahead",
            remedy=f"declare it in the task: max_sizes = {{{unknown[0]!r}: ...}}",
        )  # fmt: skip
    single = {size for size, largest in max_sizes.items() if largest == 1} | {1}
    if shared := [tensor.name for tensor in (*tensors, *outputs) if not single.intersection(tensor.shape[:1])]:
        raise GateFailed(file, f"tensor {shared[0]} does not begin with a size for the rows", expected="rows in each",
                         remedy="run the files in ONNX or ORT format")  # fmt: skip
    return max_sizes


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


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the libraries: their messages are about themselves."""
    loggers = [logging.getLogger(name) for name in _CHATTER]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
