"""Losses of numbers, for labels and for a teacher's outputs."""

from torch import Tensor

from isthmus.distill.shapes import agree, average, floats, precise


def squared_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean squared error over all elements of two tensors of equal shape, as a scalar.

    `wanted` gets no gradient. The conditional mean minimizes this loss.
    Raises a ConfigurationError if the tensors are empty or their shapes differ.
    """
    agree("squared errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((precise(student) - precise(wanted.detach())).square())


def absolute_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean absolute error over all elements of two tensors of equal shape, as a scalar.

    `wanted` gets no gradient. The conditional median minimizes this loss.
    Raises a ConfigurationError if the tensors are empty or their shapes differ.
    """
    agree("absolute errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((precise(student) - precise(wanted.detach())).abs())
