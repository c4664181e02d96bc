"""The part of a student that ExecuTorch, LiteRT and Core ML can compute, as a module for torch.export (`Portable`)."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.distill.onnx.runtime import Run
from isthmus.distill.runtimes.libraries import Libraries
from isthmus.distill.runtimes.process import Program, ProgramRejected
from isthmus.distill.tasks.task import Task
from isthmus.distill.teachers.teacher import by_key
from isthmus.distill.types import Index
from isthmus.features.errors import GateFailed
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import CORE, MODEL
from isthmus.package.manifest import TensorInfo as Described

_CHATTER = ("torch", "torchao", "torch.utils._pytree", "executorch", "root")


class Converted(NamedTuple):
    """A model file for a runtime other than ONNX Runtime.

    `max_sizes` has the maximum of each named size. Inputs are padded to this maximum along the sizes in `padded`.
    """

    file: str
    model: bytes
    max_sizes: Mapping[str, int]
    padded: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Portable:
    """The part of a student, in eval mode, that a runtime without ONNX operators computes.

    Attributes:
        part: "model" for the whole graph, "core" for its numeric core.
        network: module from the tensors to the outputs, in order; None if no module computes this part.
        feeds: returns the input arrays of rows, by name.
        limits: maximum of each named size except the rows.
        padded: named sizes that may be padded with zeros.
        row: number of an example row.
        head: returns `head.json`, which describes a core's inputs, or raises a GateFailed; None for a whole graph.
    """

    part: str
    network: nn.Module | None
    tensors: Sequence[Described]
    outputs: Sequence[Described]
    feeds: Callable[[Index], Feeds]
    limits: Mapping[str, int]
    padded: Sequence[str]
    row: Index
    head: Callable[[], bytes] | None = None

    def require(self, file: str, name: str) -> nn.Module:
        texts = [tensor.name for tensor in self.tensors if tensor.element == "string"]
        if self.network is None or texts:
            raise GateFailed(
                file,
                f"{name} has no operators for the start of the graph"
                + (f": its inputs include texts ({', '.join(texts)})" if texts else ""),
                expected="a task whose `network` is a torch module that computes the whole graph, or whose `core` "
                "computes the part after the texts",
                remedy="use the files in ONNX or ORT format",
            )
        return self.network

    def max_sizes(self, file: str, name: str) -> dict[str, int]:
        max_sizes: dict[str, int] = {}
        for tensor in self.tensors:
            for axis, size in enumerate(tensor.shape):
                if isinstance(size, str):
                    max_sizes[size] = 1 if axis == 0 else self.limits.get(size, 0)
        if unknown := [size for size, largest in max_sizes.items() if not largest]:
            raise GateFailed(
                file, f"dynamic size {unknown[0]} has no limit",
                expected=f"a limit, because {name} plans its memory ahead",
                remedy=f"declare it in the task: max_sizes = {{{unknown[0]!r}: ...}}",
            )  # fmt: skip
        single = {size for size, largest in max_sizes.items() if largest == 1} | {1}
        if shared := [t.name for t in (*self.tensors, *self.outputs) if not single.intersection(t.shape[:1])]:
            raise GateFailed(
                file, f"tensor {shared[0]} has no rows as its first axis",
                expected="rows as the first axis", remedy="use the files in ONNX or ORT format",
            )  # fmt: skip
        return max_sizes

    def examples(self, max_sizes: Mapping[str, int]) -> dict[str, Tensor]:
        inputs, examples = self.feeds(self.row), {}
        for tensor in self.tensors:
            shape = [max_sizes[size] if isinstance(size, str) else size for size in tensor.shape]
            examples[tensor.name] = torch.from_numpy(np.resize(inputs[tensor.name], shape))
        return examples

    def open_sizes(self, max_sizes: Mapping[str, int]) -> dict[str, dict[int, Any]]:
        dims = {name: torch.export.Dim(name, max=size) for name, size in max_sizes.items() if size > 1}
        return {
            tensor.name: {axis: dims[size] for axis, size in enumerate(tensor.shape) if size in dims}
            for tensor in self.tensors
        }


def portable_part(
    task: Task, student: nn.Module, row: Index, tensors: Sequence[Described], outputs: Sequence[Described]
) -> Portable:
    names = [output.name for output in outputs]
    if (core := task.core(student)) is not None:
        order, keys, network = [tensor.name for tensor in core.tensors], names, core.network
        feeds, tensors = task.core_feeds, core.tensors
    elif (whole := task.network(student)) is None:
        return Portable(MODEL, None, tensors, outputs, task.feeds, task.max_sizes, task.padded, row)
    else:
        network, feeds, order = whole, task.feeds, [*task.feeds(row)]
        keys = [*task.keys] if network is student else names
    # XNNPACK's passes fail on weights in channels-last order: make a copy in contiguous layout.
    plain = copy.deepcopy(network)
    for weights in plain.parameters():
        weights.data = weights.data.contiguous()
    places = [tensor.name for tensor in tensors]
    ordered = _Ordered(plain, [places.index(name) for name in order], keys, names).eval()
    part, head = (MODEL, None) if core is None else (CORE, core.head)
    return Portable(part, ordered, tensors, outputs, feeds, task.max_sizes, task.padded, row, head)


class _Ordered(nn.Module):
    def __init__(self, network: nn.Module, order: Sequence[int], keys: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.network = network
        self._order, self._keys, self._outputs = order, keys, outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = by_key(self.network(*(tensors[place] for place in self._order)), self._keys, "the network")
        return tuple(outputs[name] for name in self._outputs)


@contextmanager
def run_program(
    kind: type[Program], program: Converted, tensors: Sequence[Described], outputs: Sequence[Described]
) -> Iterator[Run]:
    """Start a child process that runs a converted model; yield a function from inputs to outputs, both arrays by name.

    `kind` is the class for the runtime. `tensors` and `outputs` describe the inputs and outputs of the model. The
    process ends with the `with` block. Raise a GateFailed if the runtime rejects the model or its inputs, or takes too
    long. Raise a DependencyError if the runtime is not installed.
    """
    try:
        with kind(program.model, tensors, outputs, program.max_sizes) as opened:
            yield opened.ask
    except ProgramRejected as error:
        raise GateFailed(
            program.file, f"{kind.libraries.name} refuses it ({error})", remedy="report this bug: the program is wrong"
        ) from error


def unconvertible(file: str, libraries: Libraries, error: Exception | str) -> GateFailed:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return GateFailed(
        file,
        f"{libraries.name} cannot convert the student: {reason[:300]}",
        expected=f"a module that torch.export supports, with operators that {libraries.name} has",
        remedy=f'change the student, or leave "{libraries.runtime}" out of the runtimes',
    )


@contextmanager
def quiet() -> Iterator[None]:
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
