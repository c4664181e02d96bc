"""Losses of numbers, for labels and for a teacher's outputs."""

from torch import Tensor

from isthmus.distill.shapes import average, check_tensors, floats, to_float32


def squared_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared error between `student` and `wanted`, which are labels or a teacher's outputs.

    `wanted` has the same shape and gets no gradient. A student with the least loss predicts the conditional mean.
    """
    check_tensors("squared errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((to_float32(student) - to_float32(wanted.detach())).square())


def absolute_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean absolute error between `student` and `wanted`, which are labels or a teacher's outputs.

    `wanted` has the same shape and gets no gradient. A student with the least loss predicts the conditional median.
    """
    check_tensors("absolute errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((to_float32(student) - to_float32(wanted.detach())).abs())
