"""Array types of training, outputs and metrics."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Answers = Mapping[str, Array]
"""Outputs of a model for n rows: arrays (n, ...) by key."""
Index = np.ndarray[Any, np.dtype[np.int64]]


def spread(count: int, wanted: int) -> Index:
    """Return at most `wanted` row numbers below `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(wanted, count)).astype(np.int64))


def inlier_mask(numbers: Array) -> Array:
    """Return a mask of the finite numbers up to 3,000 times the larger of 1 and the 2 % quantile of all sizes."""
    sizes = np.abs(numbers[np.isfinite(numbers)], dtype=np.float64)
    return np.abs(numbers) <= 3000 * max(1.0, np.quantile(sizes, 0.02) if sizes.size else 0.0)


def in_batches(rows: Index, size: int) -> Iterator[Index]:
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]
