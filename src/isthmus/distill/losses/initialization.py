"""Initializes a student with layers of its teacher."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from isthmus.features.errors import ConfigurationError, Problem

Choice = Literal["first", "last"] | int | Sequence[int]
"""The teacher's layers to copy: the first ones, the last ones, every k-th starting with the first (a number k), or
indexes from 0 in the student's order.
"""


@dataclass(frozen=True, slots=True)
class Copied:
    """A part that was copied.

    Attributes:
        student: part of the student, "layer 0" or the name of a pair.
        teacher: part of the teacher.
        tensors: number of tensors copied, including buffers.
        numbers: number of elements in them.
    """

    student: str
    teacher: str
    tensors: int
    numbers: int


def drop_layers(
    teacher: nn.ModuleList,
    student: nn.ModuleList,
    choice: Choice,
    *,
    pairs: Mapping[str, tuple[nn.Module, nn.Module]] | None = None,
) -> list[Copied]:
    """Copy layers of a teacher into the layers of a student, in order, and return what was copied.

    DistilBERT (Sanh et al., 2019, arXiv:1910.01108) starts with every second layer. Nothing is copied if an error is
    raised. The student's tensors keep their type and device.

    Args:
        teacher: layers of the teacher.
        student: layers of the student, at most as many as the teacher's.
        choice: layers of the teacher to copy.
        pairs: further parts to copy, such as embeddings: (teacher's module, student's module) by name.

    Raises:
        ConfigurationError: lists every layer that does not exist and every tensor that differs in name or shape.
    """
    indexes = _indexes(choice, len(teacher), len(student))
    parts = [(f"layer {n}", f"layer {index}", teacher[index], student[n]) for n, index in enumerate(indexes)]
    parts += [(name, name, theirs, ours) for name, (theirs, ours) in (pairs or {}).items()]
    problems = [problem for name, _, theirs, ours in parts for problem in _misfits(name, theirs, ours)]
    if problems:
        remedy = "give the student the teacher's widths, or train it from scratch"
        raise ConfigurationError("layers of a teacher", problems, remedy=remedy)
    report = []
    for name, source, theirs, ours in parts:
        state = theirs.state_dict()
        ours.load_state_dict(state)
        report.append(Copied(name, source, len(state), sum(tensor.numel() for tensor in state.values())))
    return report


def _indexes(choice: Choice, teacher: int, student: int) -> list[int]:
    if choice == "first":
        indexes = list(range(student))
    elif choice == "last":
        indexes = list(range(teacher - student, teacher))
    elif isinstance(choice, int):
        indexes = [place * choice for place in range(student)]
    elif isinstance(choice, str):
        problem = Problem("choice", repr(choice), '"first", "last", a number or indexes')
        raise ConfigurationError("layers of a teacher", [problem])
    else:
        indexes = list(choice)
    problems = []
    if len(indexes) != student:
        problems.append(Problem("choice", f"{len(indexes)} layers", f"{student}, as many as the student has"))
    if isinstance(choice, int) and choice < 1:
        problems.append(Problem("choice", f"every {choice}th layer", "a number above 0"))
    absent = [index for index in indexes if not 0 <= index < teacher]
    if absent:
        listed = ", ".join(map(str, absent))
        problems.append(Problem("choice", f"layer {listed}", f"the teacher's layers 0 to {teacher - 1}"))
    if problems:
        raise ConfigurationError("layers of a teacher", problems)
    return indexes


def _misfits(name: str, teacher: nn.Module, student: nn.Module) -> list[Problem]:
    theirs, ours = (
        {key: str(tuple(tensor.shape)) for key, tensor in module.state_dict().items()} for module in (teacher, student)
    )
    shapes = {key: (theirs.get(key, "absent"), ours.get(key, "absent")) for key in sorted(theirs.keys() | ours.keys())}
    return [
        Problem(f"{name}: {key}", f"{actual} in the teacher", f"{needed}, as in the student")
        for key, (actual, needed) in shapes.items()
        if actual != needed
    ]
