"""Array types of training, outputs and metrics; row numbers spread evenly or in batches; a mask of usual numbers."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Answers = Mapping[str, Array]
"""Outputs of a model for n rows: arrays (n, ...) by key."""
Index = np.ndarray[Any, np.dtype[np.int64]]


def evenly_spaced(count: int, wanted: int) -> Index:
    return np.unique(np.linspace(0, count - 1, min(wanted, count)).astype(np.int64))


def inlier_mask(numbers: Array) -> Array:
    """Return a mask of the same shape: False for NaN, infinity and outliers, which would distort a scale or tolerance.

    An outlier has an absolute value above 3,000 * max(1, q). q is the 2 % quantile of the finite absolute values.
    """
    sizes = np.abs(numbers[np.isfinite(numbers)], dtype=np.float64)
    return np.abs(numbers) <= 3000 * max(1.0, np.quantile(sizes, 0.02) if sizes.size else 0.0)


def in_batches(rows: Index, size: int) -> Iterator[Index]:
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]
