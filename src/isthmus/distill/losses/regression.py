"""Losses of numbers, for labels and for a teacher's outputs."""

from torch import Tensor

from isthmus.distill.shapes import agree, average, floats, precise


def squared_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared error, minimal for the conditional mean; `wanted`, of equal shape, has no gradient."""
    agree("squared errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((precise(student) - precise(wanted.detach())).square())


def absolute_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean absolute error, minimal for the conditional median; `wanted`, of equal shape, has no gradient."""
    agree("absolute errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((precise(student) - precise(wanted.detach())).abs())
