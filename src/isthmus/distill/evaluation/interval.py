"""The mean over several seeds and its confidence interval."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from isthmus.distill.types import Array
from isthmus.features.errors import DataError

LEVEL = 0.95


class Interval(NamedTuple):
    """A mean and its two-sided 95 % interval. `low` and `high` are None if there is none, as for a single value."""

    value: float
    low: float | None
    high: float | None

    @property
    def bounds(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of the results of several seeds, with its 95 % interval (Student, 1908).

    `values` has one result per seed, such as an AUC. The interval is for the mean over all possible seeds, and assumes
    roughly normal values. It does not cover the choice of the test rows. To compare two models, pass the differences of
    their results, seed by seed.

    Raises:
        DataError: `values` is empty or has a value that is not finite.
    """
    numbers = np.asarray(values, np.float64)
    if not numbers.size or not np.isfinite(numbers).all():
        raise DataError("interval", str(list(values)), expected="finite numbers, at least one")
    return student_interval(numbers)


def student_interval(numbers: Array) -> Interval:
    mean = float(numbers.mean())
    if numbers.size < 2:
        return Interval(mean, None, None)
    half = float(stdtrit(numbers.size - 1, (1 + LEVEL) / 2) * numbers.std(ddof=1) / np.sqrt(numbers.size))
    return Interval(mean, mean - half, mean + half)
