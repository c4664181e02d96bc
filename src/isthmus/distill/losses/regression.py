"""Losses of numbers, for labels and for a teacher's outputs."""

from torch import Tensor

from isthmus.distill.shapes import average, booleans, check_tensors, floats, optional, select


def squared_errors(
    student: Tensor, wanted: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the mean squared error between predictions and wanted values, to train a student on numbers.

    `wanted` has labels or the teacher's outputs, in the shape of `student`, and gets no gradient. `mask`, bool in the
    same shape, is True for the numbers that count; None means all. `weights`, floats of at least 0 in the same shape,
    weigh the numbers in the mean. A student with the least loss predicts the conditional mean.
    """
    return average(_errors("squared errors", student, wanted, mask, weights).square(), weights, mask)


def absolute_errors(
    student: Tensor, wanted: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the mean absolute error between predictions and wanted values, which outliers affect less than squares.

    `wanted` has labels or the teacher's outputs, in the shape of `student`, and gets no gradient. `mask`, bool in the
    same shape, is True for the numbers that count; None means all. `weights`, floats of at least 0 in the same shape,
    weigh the numbers in the mean. A student with the least loss predicts the conditional median.
    """
    return average(_errors("absolute errors", student, wanted, mask, weights).abs(), weights, mask)


def _errors(where: str, student: Tensor, wanted: Tensor, mask: Tensor | None, weights: Tensor | None) -> Tensor:
    check_tensors(
        where, student=floats(student, "..."), wanted=floats(wanted, "..."), mask=booleans(mask, "..."),
        weights=optional(weights),
    )  # fmt: skip
    return select(student, mask) - select(wanted.detach(), mask)
