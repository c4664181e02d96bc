"""Losses of numbers: to labels, and to a teacher's answers."""

from torch import Tensor

from isthmus.distill.shapes import agree_pair, average, precise


def squared_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Mean of (s - w)², which is least at the mean of what may come. The numbers s and w are (...)."""
    agree_pair("squared errors", "...", student, wanted)
    return average((precise(student) - precise(wanted.detach())).square())


def absolute_errors(student: Tensor, wanted: Tensor) -> Tensor:
    """Mean of |s - w|, which is least at the median of what may come. The numbers s and w are (...)."""
    agree_pair("absolute errors", "...", student, wanted)
    return average((precise(student) - precise(wanted.detach())).abs())
