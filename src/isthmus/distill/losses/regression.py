"""Losses of numbers, for labels and for a teacher's outputs."""

from torch import Tensor

from isthmus.distill.shapes import agree, average, floats, precise


def squared_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared error between `student` and `wanted`, which are labels or a teacher's outputs.

    `wanted` has the same shape and gets no gradient. A student with the least loss predicts the conditional mean.
    """
    agree("squared errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((precise(student) - precise(wanted.detach())).square())


def absolute_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean absolute error between `student` and `wanted`, which are labels or a teacher's outputs.

    `wanted` has the same shape and gets no gradient. A student with the least loss predicts the conditional median.
    """
    agree("absolute errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((precise(student) - precise(wanted.detach())).abs())
