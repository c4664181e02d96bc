"""Losses of numbers: to labels, and to a teacher's answers."""

from torch import Tensor

from isthmus.distill.shapes import agree, average, floats, precise


def squared_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Mean of (s - w)², which is least at the mean of what may come. The numbers s and w are (...)."""
    agree("squared errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((precise(student) - precise(wanted.detach())).square())


def absolute_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Mean of |s - w|, which is least at the median of what may come. The numbers s and w are (...)."""
    agree("absolute errors", student=floats(student, "..."), wanted=floats(wanted, "..."))
    return average((precise(student) - precise(wanted.detach())).abs())
