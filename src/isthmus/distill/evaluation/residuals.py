"""Metrics of numeric predictions."""

import math

import numpy as np

from isthmus.distill.types import Array


def rmse(labels: Array, values: Array) -> float:
    """Return the root mean squared difference of (n,) values from (n,) labels, in float64; NaN without rows."""
    return math.sqrt(_mean(np.square(labels - values))) if len(labels) else math.nan


def mae(labels: Array, values: Array) -> float:
    """Return the mean absolute difference of (n,) values from (n,) labels, in float64; NaN without rows."""
    return _mean(np.abs(labels - values)) if len(labels) else math.nan


def r2(labels: Array, values: Array) -> float:
    """Return the share of the labels' variance that (n,) values explain; 1 is best, NaN if all labels are equal."""
    variance = float(np.square(labels - labels.mean()).sum()) if len(labels) else 0.0
    return 1 - float(np.square(labels - values).sum()) / variance if variance else math.nan


def correlation(first: Array, second: Array) -> float:
    """Return Pearson's correlation of two (n,) arrays; NaN if all numbers of one are equal."""
    pair = [part.astype(np.float64) - part.mean(dtype=np.float64) for part in (first, second)]
    # Scale by the largest number so that squares do not overflow.
    largest = [float(np.abs(part).max(initial=0.0)) for part in pair]
    if not all(largest):
        return math.nan
    x, y = (part / most for part, most in zip(pair, largest, strict=True))
    return float((x * y).sum() / math.sqrt(np.square(x).sum() * np.square(y).sum()))


def _mean(values: Array) -> float:
    return float(values.mean(dtype=np.float64))
