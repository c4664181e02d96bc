"""Losses of numbers, for labels and for a teacher's outputs."""

from torch import Tensor

from isthmus.distill.shapes import agree, average, floats, precise


def squared_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared error, which the conditional mean minimizes; `wanted` gets no gradient."""
    agree("squared errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((precise(student) - precise(wanted.detach())).square())


def absolute_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean absolute error, which the conditional median minimizes; `wanted` gets no gradient."""
    agree("absolute errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((precise(student) - precise(wanted.detach())).abs())
