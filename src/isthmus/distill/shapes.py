"""Checks the types, sizes and devices of tensors before anything is computed from them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.features.errors import ConfigurationError, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """A tensor argument, with the layout and kind ("floats", "integers" or "booleans") that it must have.

    `layout` names the sizes, first to last, separated by spaces. A number means exactly that size. A word means a size
    that all tensors share. A leading "..." means any leading sizes, which all tensors share.
    """

    tensor: Any
    layout: str
    kind: str


def floats(tensor: Any, layout: str) -> Expected:
    return Expected(tensor, layout, "floats")


def integers(tensor: Any, layout: str) -> Expected:
    return Expected(tensor, layout, "integers")


def booleans(tensor: Any, layout: str) -> Expected | None:
    return None if tensor is None else Expected(tensor, layout, "booleans")


def optional(weights: Any) -> Expected | None:
    return None if weights is None else Expected(weights, "...", "floats")


def check_tensors(where: str, *problems: Problem | None, **tensors: Expected | None) -> None:
    """Check the arguments of a loss before computing it; raise a ConfigurationError that lists all problems.

    Args:
        where: name of the function, for the error.
        problems: further problems to report in the same error. None means no problem.
        tensors: each tensor by argument name, with its required layout. None skips an argument. Tensors must not be
            empty, and must be on the same device. A size that several layouts name must be equal in all of them.
    """
    failures = [problem for problem in problems if problem is not None]
    sizes: dict[str, tuple[Any, str]] = {}
    for name, expected in tensors.items():
        if expected is not None:
            failures += _misfits(name, expected, sizes)
    if failures:
        raise ConfigurationError(where, failures)


def check_pair(
    where: str, layout: str, student: Any, teacher: Any, *problems: Problem | None, **tensors: Expected | None
) -> None:
    check_tensors(where, *problems, student=floats(student, layout), teacher=floats(teacher, layout), **tensors)


def positive(name: str, value: float) -> Problem | None:
    return None if 0 < value < math.inf else Problem(name, repr(value), "a finite number above 0")


def below(name: str, indexes: Tensor, limit: int) -> Problem | None:
    """Check the indexes in a tensor before use; return a problem if one is negative or at least `limit`, else None.

    `name` names the tensor in the problem. An index out of range on a GPU would kill the process without naming the
    tensor. Waits for the GPU if the indexes are on it.
    """
    if indexes.numel() == 0:
        return None
    least, largest = (int(value) for value in torch.aminmax(indexes))
    if least >= 0 and largest < limit:
        return None
    return Problem(name, f"{least if least < 0 else largest}", f"0 to {limit - 1}")


def to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def select(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """Return the entries of a tensor at which a loss is computed; half precision becomes float32.

    `mask` is a boolean mask over the tensor's first axes: a mask (rows, tokens) selects (selected, n) from (rows,
    tokens, n). None returns the whole tensor. Select before computing, so that NaN in other entries reaches neither
    loss nor gradient.
    """
    return to_float32(tensor if mask is None else tensor[mask])


def average(values: Tensor, weights: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Return the mean of selected values, or Σ w v / Σ w with weights w of all values; 0 if nothing is left.

    `mask` is the mask of `select` with which the values were selected, to select their weights.
    """
    if weights is None:
        return values.sum() / max(values.numel(), 1)
    weights = select(weights, mask)
    total = weights.sum()
    return (values * weights).sum() / total.masked_fill(total == 0, 1.0)


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
