"""Measures of numbers: how far a model is from them, and how alike two models are."""

import math

import numpy as np

from isthmus.distill.types import Array


def rmse(labels: Array, values: Array) -> float:
    """Root of the mean squared difference of (n,) values from (n,) labels, in float64; NaN without rows."""
    return math.sqrt(_mean(np.square(labels - values))) if len(labels) else math.nan


def mae(labels: Array, values: Array) -> float:
    """Mean absolute difference, likewise."""
    return _mean(np.abs(labels - values)) if len(labels) else math.nan


def r2(labels: Array, values: Array) -> float:
    """Share of the variance of (n,) labels that (n,) values explain: 1 is best; NaN where all labels are the same."""
    variance = float(np.square(labels - labels.mean()).sum()) if len(labels) else 0.0
    return 1 - float(np.square(labels - values).sum()) / variance if variance else math.nan


def correlation(values: Array, others: Array) -> float:
    """Pearson's correlation of (n,) and (n,) numbers; NaN where either are all the same."""
    pair = [part.astype(np.float64) - part.mean(dtype=np.float64) for part in (values, others)]
    # Scaled by the largest, so that no square leaves the range of floats.
    largest = [float(np.abs(part).max(initial=0.0)) for part in pair]
    if not all(largest):
        return math.nan
    one, other = (part / most for part, most in zip(pair, largest, strict=True))
    return float((one * other).sum() / math.sqrt(np.square(one).sum() * np.square(other).sum()))


def _mean(values: Array) -> float:
    return float(values.mean(dtype=np.float64))
