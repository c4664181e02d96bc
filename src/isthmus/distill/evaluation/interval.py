"""What several seeds say together."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from isthmus.features.errors import DataError

LEVEL = 0.95


class Interval(NamedTuple):
    """A mean and its two-sided 95 % interval, which one value does not have."""

    value: float
    low: float | None
    high: float | None

    @property
    def bounds(self) -> list[float] | None:
        """Low and high."""
        return None if self.low is None or self.high is None else [self.low, self.high]


def interval(values: Sequence[float]) -> Interval:
    """The mean of what the seeds gave, with Student's t interval (Student, 1908).

    It is that of the mean over all seeds, if their values are about normal; it says nothing of other rows. Of two
    models hand in the differences, seed by seed.

    Raises:
        DataError: there is no value, or one is not finite.
    """
    found = np.asarray(values, np.float64)
    if not found.size or not np.isfinite(found).all():
        raise DataError("interval", str(list(values)), expected="finite numbers, at least one")
    mean = float(found.mean())
    if found.size == 1:
        return Interval(mean, None, None)
    half = float(stdtrit(found.size - 1, (1 + LEVEL) / 2) * found.std(ddof=1) / np.sqrt(found.size))
    return Interval(mean, mean - half, mean + half)
