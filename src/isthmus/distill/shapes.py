"""Checks of the kinds, sizes and devices of tensors, before anything is computed from them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.features.errors import ConfigurationError, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """A value that must be a tensor.

    Attributes:
        layout: its sizes in words, first to last. A number is that size; a word is a size that all tensors share; a
            leading "..." is any number of sizes, which all tensors share.
        kind: "floats", "integers" or "booleans".
    """

    tensor: Any
    layout: str
    kind: str


def floats(tensor: Any, layout: str) -> Expected:
    """A tensor of floating-point numbers of any precision."""
    return Expected(tensor, layout, "floats")


def integers(tensor: Any, layout: str) -> Expected:
    """A tensor of integers."""
    return Expected(tensor, layout, "integers")


def booleans(tensor: Any, layout: str) -> Expected | None:
    """A mask: a tensor of booleans, true where a position counts, or None if all do."""
    return None if tensor is None else Expected(tensor, layout, "booleans")


def agree(where: str, *problems: Problem | None, **tensors: Expected | None) -> None:
    """Refuses tensors whose kinds, sizes or devices do not go together, together with the problems passed in.

    Raises:
        ConfigurationError: with every problem. An empty tensor is a problem: it has no mean.
    """
    failures = [problem for problem in problems if problem is not None]
    sizes: dict[str, tuple[Any, str]] = {}
    for name, expected in tensors.items():
        if expected is not None:
            failures += _misfits(name, expected, sizes)
    if failures:
        raise ConfigurationError(where, failures)


def agree_pair(
    where: str, layout: str, student: Any, teacher: Any, *problems: Problem | None, **tensors: Expected | None
) -> None:
    """`agree` for floats of student and teacher in the same layout, and further tensors."""
    agree(where, *problems, student=floats(student, layout), teacher=floats(teacher, layout), **tensors)


def positive(name: str, value: float) -> Problem | None:
    """The problem of a number that is not above 0 and finite."""
    return None if 0 < value < math.inf else Problem(name, repr(value), "a finite number above 0")


def below(name: str, indexes: Tensor, limit: int) -> Problem | None:
    """The problem of indexes that are not at least 0 and below a limit.

    Waits for a GPU: an index out of range would kill the process there, without a word about whose it was.
    """
    if indexes.numel() == 0:
        return None
    least, largest = (int(value) for value in torch.aminmax(indexes))
    if least >= 0 and largest < limit:
        return None
    return Problem(name, f"{least if least < 0 else largest}", f"0 to {limit - 1}")


def precise(tensor: Tensor) -> Tensor:
    """The tensor in float32 if it has half precision, else as it is."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def select(tensor: Tensor, where: Tensor | None) -> Tensor:
    """The positions that count, (..., n) to (positions, n), in no less than float32.

    The rest is dropped before anything is computed: what is not finite there reaches neither loss nor gradient.
    """
    return precise(tensor if where is None else tensor[where])


def average(values: Tensor) -> Tensor:
    """The mean, and 0 if no position counts."""
    return values.sum() / max(values.numel(), 1)


def _misfits(name: str, expected: Expected, sizes: dict[str, tuple[Any, str]]) -> list[Problem]:
    tensor, words = expected.tensor, expected.layout.split()
    if not isinstance(tensor, Tensor):
        return [Problem(name, f"a {type(tensor).__name__}", "a tensor")]
    shape = tuple(tensor.shape)
    layout = f"({', '.join(words)})"
    if tensor.numel() == 0:
        return [Problem(name, f"empty: shape {shape}", layout)]
    problems = []
    if not _is(tensor, expected.kind):
        problems.append(Problem(name, str(tensor.dtype), expected.kind))
    lead = len(shape) - len(words) + 1 if words[0] == "..." else 0
    if len(shape) != lead + len(words) - (words[0] == "...") or lead < 0:
        return [*problems, Problem(name, f"shape {shape}", layout)]
    actual: list[Any] = list(shape)
    if words[0] == "...":
        actual[:lead] = [shape[:lead]]
    for word, size in [*zip(words, actual, strict=True), ("device", tensor.device)]:
        if word.isdigit():
            if size != int(word):
                problems.append(Problem(name, f"shape {shape}", layout))
            continue
        first, owner = sizes.setdefault(word, (size, name))
        if first != size:
            label = "leading sizes" if word == "..." else word
            problems.append(Problem(name, f"{label} {size}", f"{first}, as in {owner}"))
    return problems


def _is(tensor: Tensor, kind: str) -> bool:
    if kind == "floats":
        return tensor.is_floating_point()
    if kind == "booleans":
        return tensor.dtype == torch.bool
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
