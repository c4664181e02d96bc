"""Losses of numbers, for labels and for a teacher's outputs."""

from torch import Tensor

from isthmus.distill.shapes import average, check_tensors, floats, to_float32


def squared_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared error between predictions and wanted values, to train a student on numbers.

    `wanted` has labels or the teacher's outputs, in the shape of `student`, and gets no gradient. A student with the
    least loss predicts the conditional mean.
    """
    check_tensors("squared errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((to_float32(student) - to_float32(wanted.detach())).square())


def absolute_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean absolute error between predictions and wanted values, which outliers affect less than squares.

    `wanted` has labels or the teacher's outputs, in the shape of `student`, and gets no gradient. A student with the
    least loss predicts the conditional median.
    """
    check_tensors("absolute errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((to_float32(student) - to_float32(wanted.detach())).abs())
