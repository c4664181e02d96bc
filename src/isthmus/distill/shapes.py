"""What tensors must have in common, held before anything is computed from them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.features.errors import ConfigurationError, Problem

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """A tensor and what it is to be.

    Attributes:
        tensor: whatever was given.
        layout: its sizes in words, first to last. A number must be met; a word must stand for the same size in all
            tensors; a leading "..." stands for any number of sizes, the same ones in all tensors.
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
    """Refuses tensors whose kinds, sizes or devices do not go together, and what was found wrong beside that.

    Raises:
        ConfigurationError: with every problem. An empty tensor is one: it has no mean.
    """
    found = [problem for problem in problems if problem is not None]
    sizes: dict[str, tuple[Any, str]] = {}
    for name, expected in tensors.items():
        if expected is not None:
            found += _misfits(name, expected, sizes)
    if found:
        raise ConfigurationError(where, found)


def positive(name: str, value: float) -> Problem | None:
    """What is wrong with a number that must be above 0 and finite."""
    return None if 0 < value < math.inf else Problem(name, repr(value), "a finite number above 0")


def below(name: str, indexes: Tensor, limit: int) -> Problem | None:
    """What is wrong with indexes that must be at least 0 and below a limit.

    A GPU is waited for: an index out of range would end the process there, without a word about whose it was.
    """
    if indexes.numel() == 0:
        return None
    least, largest = (int(value) for value in torch.aminmax(indexes))
    if least >= 0 and largest < limit:
        return None
    return Problem(name, f"{least if least < 0 else largest}", f"0 to {limit - 1}")


def precise(tensor: Tensor) -> Tensor:
    """The tensor in float32 if it has half precision, else as it is."""
    return tensor.float() if tensor.dtype in HALVES else tensor


def select(tensor: Tensor, where: Tensor | None) -> Tensor:
    """The positions that count, (..., n) to (positions, n), in no less than float32.

    The others are taken out before anything is computed: what is not finite there reaches neither loss nor gradient.
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
    found = []
    if not _is(tensor, expected.kind):
        found.append(Problem(name, str(tensor.dtype), expected.kind))
    lead = len(shape) - len(words) + 1 if words[0] == "..." else 0
    if len(shape) != lead + len(words) - (words[0] == "...") or lead < 0:
        return [*found, Problem(name, f"shape {shape}", layout)]
    actual: list[Any] = list(shape)
    if words[0] == "...":
        actual[:lead] = [shape[:lead]]
    for word, size in [*zip(words, actual, strict=True), ("device", tensor.device)]:
        if word.isdigit():
            if size != int(word):
                found.append(Problem(name, f"shape {shape}", layout))
            continue
        first, owner = sizes.setdefault(word, (size, name))
        if first != size:
            label = "leading sizes" if word == "..." else word
            found.append(Problem(name, f"{label} {size}", f"{first}, as in {owner}"))
    return found


def _is(tensor: Tensor, kind: str) -> bool:
    if kind == "floats":
        return tensor.is_floating_point()
    if kind == "booleans":
        return tensor.dtype == torch.bool
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
