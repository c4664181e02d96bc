"""What runtimes without the operators of ONNX compute of a student, as a module and as an exported program."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.distill.onnx.runtime import Run
from isthmus.distill.runtimes.libraries import Libraries
from isthmus.distill.runtimes.process import Program, Refused
from isthmus.distill.tasks.task import Task
from isthmus.distill.teachers.teacher import named
from isthmus.distill.types import Index
from isthmus.features.errors import GateFailed
from isthmus.package.inputs import Feeds
from isthmus.package.manifest import CORE, MODEL
from isthmus.package.manifest import TensorInfo as Described

_CHATTER = ("torch", "torchao", "torch.utils._pytree", "executorch", "root")


class Converted(NamedTuple):
    """A program: the name and content of its file, the maximum of each named size, and those that it is always fed."""

    file: str
    model: bytes
    max_sizes: Mapping[str, int]
    padded: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Portable:
    """What a runtime without the operators of ONNX computes of a student, in eval mode.

    Attributes:
        part: "model" if that is all that the graph does, "core" if it is the graph's numeric core.
        network: from the tensors to the outputs, each in order; None if no module does it.
        tensors: its inputs.
        outputs: those of the graph.
        feeds: the inputs for rows.
        limits: the maximum of each named size but the rows.
        padded: those of them that zeros may fill up.
        row: any row, as an example.
        head: gives the content of `head.json`, which feeds a core, or raises a GateFailed; None where there is none.
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
        """The network. Raises a GateFailed if there is none, or if it takes texts: a runtime of this name has none."""
        texts = [tensor.name for tensor in self.tensors if tensor.element == "string"]
        if self.network is None or texts:
            raise GateFailed(
                file,
                f"{name} has no operators for what the graph begins with"
                + (f": its inputs include texts ({', '.join(texts)})" if texts else ""),
                expected="a task whose `network` is a module of torch that does all that the graph does, or whose "
                "`core` does what follows its texts",
                remedy="run the files in ONNX or ORT format",
            )
        return self.network

    def max_sizes(self, file: str, name: str) -> dict[str, int]:
        """The maximum of each named size: a single row, else the limits. Raises a GateFailed for a size without one."""
        max_sizes: dict[str, int] = {}
        for tensor in self.tensors:
            for axis, size in enumerate(tensor.shape):
                if isinstance(size, str):
                    max_sizes[size] = 1 if axis == 0 else self.limits.get(size, 0)
        if unknown := [size for size, largest in max_sizes.items() if not largest]:
            raise GateFailed(
                file, f"{unknown[0]}, a size that the graph leaves open, has no limit",
                expected=f"a limit, as {name} plans its memory ahead",
                remedy=f"declare it in the task: max_sizes = {{{unknown[0]!r}: ...}}",
            )  # fmt: skip
        single = {size for size, largest in max_sizes.items() if largest == 1} | {1}
        if shared := [t.name for t in (*self.tensors, *self.outputs) if not single.intersection(t.shape[:1])]:
            raise GateFailed(file, f"tensor {shared[0]} does not begin with a size for the rows",
                             expected="rows in each", remedy="run the files in ONNX or ORT format")  # fmt: skip
        return max_sizes

    def examples(self, max_sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """A row at the largest sizes, by name."""
        fed, examples = self.feeds(self.row), {}
        for tensor in self.tensors:
            shape = [max_sizes[size] if isinstance(size, str) else size for size in tensor.shape]
            examples[tensor.name] = torch.from_numpy(np.resize(fed[tensor.name], shape))
        return examples

    def open_sizes(self, max_sizes: Mapping[str, int]) -> dict[str, dict[int, Any]]:
        """The sizes that differ from call to call, for torch.export: by tensor, axis to size."""
        dims = {name: torch.export.Dim(name, max=size) for name, size in max_sizes.items() if size > 1}
        return {
            tensor.name: {axis: dims[size] for axis, size in enumerate(tensor.shape) if size in dims}
            for tensor in self.tensors
        }


def portable(
    task: Task, student: nn.Module, row: Index, tensors: Sequence[Described], outputs: Sequence[Described]
) -> Portable:
    """Of a student in eval mode, with the tensors and outputs of its graph."""
    names = [output.name for output in outputs]
    if (core := task.core(student)) is not None:
        order, keys, network = [tensor.name for tensor in core.tensors], names, core.network
        feeds, tensors = task.core_feeds, core.tensors
    elif (whole := task.network(student)) is None:
        return Portable(MODEL, None, tensors, outputs, task.feeds, task.max_sizes, task.padded, row)
    else:
        network, feeds, order = whole, task.feeds, [*task.feeds(row)]
        keys = [*task.keys] if network is student else names
    # A copy in contiguous layout: XNNPACK's passes fail on weights in channels-last order.
    plain = copy.deepcopy(network)
    for weights in plain.parameters():
        weights.data = weights.data.contiguous()
    places = [tensor.name for tensor in tensors]
    ordered = _Ordered(plain, [places.index(name) for name in order], keys, names).eval()
    part, head = (MODEL, None) if core is None else (CORE, core.head)
    return Portable(part, ordered, tensors, outputs, feeds, task.max_sizes, task.padded, row, head)


class _Ordered(nn.Module):
    """A network with its inputs and outputs in the order of the graph."""

    def __init__(self, network: nn.Module, order: Sequence[int], keys: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.network = network
        self._order, self._keys, self._outputs = order, keys, outputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = named(self.network(*(tensors[place] for place in self._order)), self._keys, "the network")
        return tuple(outputs[name] for name in self._outputs)


class Conversion(Protocol):
    """How a runtime gets its files."""

    LIBRARIES: Libraries

    def files(self, of: Portable, train: Index) -> Mapping[str, Callable[[], Converted]]:
        """The files by name, fp32 first, each with what makes it and raises a GateFailed where that is impossible.

        `train` are the rows of the training part.
        """

    def running(self, program: Converted, of: Portable) -> AbstractContextManager[Run]:
        """Runs a program within the context. Raises a GateFailed if the runtime refuses it."""


@contextmanager
def in_process(kind: type[Program], program: Converted, of: Portable) -> Iterator[Run]:
    """Runs a program in a process of its own within the context. Raises a GateFailed if the runtime refuses it."""
    try:
        with kind(program.model, of.tensors, of.outputs, program.max_sizes) as opened:
            yield opened.ask
    except Refused as error:
        raise GateFailed(
            program.file, f"{kind.libraries.name} refuses it ({error})", remedy="report this: the program is wrong"
        ) from error


def unconvertible(file: str, libraries: Libraries, error: Exception | str) -> GateFailed:
    """The error of a student that a runtime does not support."""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return GateFailed(
        file,
        f"{libraries.name} cannot convert the student: {reason[:300]}",
        expected=f"a module that torch.export supports, of operators that {libraries.name} has",
        remedy=f'change the student, or leave "{libraries.runtime}" out of the runtimes',
    )


@contextmanager
def quiet() -> Iterator[None]:
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
