"""Metrics and paired losses with 95 % confidence intervals, which treat rows as independent."""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from isthmus.distill.evaluation import metrics
from isthmus.distill.evaluation.interval import LEVEL, Interval, student_interval
from isthmus.distill.evaluation.metrics import BINS, log_losses
from isthmus.distill.types import Array
from isthmus.features.errors import DataError

_NORMAL = float(ndtri((1 + LEVEL) / 2))
_HALF_NORMAL = math.sqrt(2 / math.pi)
"""Mean absolute value of a standard normal variable."""
_CLEAR = 2.0
"""A bin's gap counts as real from this many standard errors on."""


def mean(values: Array) -> Interval:
    return student_interval(values.astype(np.float64))


def root_mean(squares: Array) -> Interval:
    value, low, high = mean(squares)
    ends = [None if end is None else math.sqrt(max(end, 0.0)) for end in (low, high)]
    return Interval(math.sqrt(value), *ends)


def share(count: int, rows: int) -> Interval:
    value, square = count / rows, _NORMAL**2
    middle = (count + square / 2) / (rows + square)
    half = _NORMAL * math.sqrt(count * (rows - count) / rows + square / 4) / (rows + square)
    return Interval(value, max(middle - half, 0.0), min(middle + half, 1.0))


def placements(labels: Array, scores: Array) -> Array:
    """Return for each row the share of correctly ordered pairs with the rows of the opposite label, float64 (n,).

    Use it for the variance of an AUC. `labels`, 0 or 1, and `scores` are (n,). A pair is ordered correctly if the row
    with label 1 has the higher score; ties count half. The mean over the rows with the same label is the AUC. Both
    labels must occur.
    """
    ones = labels == 1
    shares = np.empty(len(labels))
    for rows, opposite in ((ones, ~ones), (~ones, ones)):
        ordered = np.sort(scores[opposite])
        below = np.searchsorted(ordered, scores[rows], "left") + np.searchsorted(ordered, scores[rows], "right")
        shares[rows] = below / (2 * len(ordered))
    shares[~ones] = 1 - shares[~ones]
    return shares


def auc(labels: Array, scores: Array) -> Interval | None:
    """Return the area under the ROC curve (AUC) with its 95 % interval, or None if all labels are the same.

    `labels`, 0 or 1, and `scores` are (n,). The variance is from DeLong, DeLong and Clarke-Pearson (1988). The interval
    is computed for the logit of the AUC, so it stays between 0 and 1. Its ends are None if the AUC is 0 or 1, or if
    only one row has a label 0 or only one row has a label 1.
    """
    ones = labels == 1
    if not ones.any() or ones.all():
        return None
    places = placements(labels, scores)
    up, down = places[ones], places[~ones]
    value = float(up.mean())
    if min(len(up), len(down)) < 2:
        return Interval(value, None, None)
    error = math.sqrt(up.var(ddof=1) / len(up) + down.var(ddof=1) / len(down))
    if not 0 < value < 1:
        return Interval(value, None, None)
    logit, half = math.log(value / (1 - value)), _NORMAL * error / (value * (1 - value))
    low, high = (1 / (1 + math.exp(-min(max(end, -700.0), 700.0))) for end in (logit - half, logit + half))
    return Interval(value, low, high)


def calibration_error(labels: Array, probabilities: Array) -> Interval:
    """Return the expected calibration error of (n,) probabilities for 0/1 labels, with its 95 % interval.

    The rows are sorted by probability and divided into 15 bins of equal size. Chance alone raises the error above 0, so
    the lower end of the interval is reduced by the error expected by chance in bins without a significant gap. The
    interval may be too wide. Its ends are None below 30 rows.
    """
    plain = metrics.calibration_error(labels, probabilities)
    if len(labels) < 2 * BINS:
        return Interval(plain, None, None)
    order = np.argsort(probabilities, kind="stable")
    gaps = probabilities[order].astype(np.float64) - labels[order]
    variance, chance = 0.0, 0.0
    for part in np.array_split(gaps, BINS):
        weight = len(part) / len(gaps)
        # Two pseudo rows per bin, each half a row off (after Agresti and Coull, The American Statistician 52, 1998).
        # Otherwise a bin of zeros would have no variance.
        error = math.sqrt((float(part.var()) * len(part) + 0.5) / (len(part) + 2) / len(part))
        variance += (weight * error) ** 2
        chance += weight * error * _HALF_NORMAL if abs(float(part.mean())) < _CLEAR * error else 0.0
    half = _NORMAL * math.sqrt(variance)
    return Interval(plain, max(plain - chance - half, 0.0), min(plain + half, 1.0))


class PairedDifference(NamedTuple):
    """How much worse a model is than a former model in a metric, above 0 if worse, with the standard error."""

    value: float
    error: float

    def least(self, chance: float) -> float:
        return self.value + float(ndtri(chance)) * self.error


def paired_loss(metric: str, labels: Array, scores: Array, former: Array) -> PairedDifference:
    """Return how much worse a model is than a former model on the same rows, to find a deployment that lowers quality.

    `scores` and `former` are the scores of the two models, and `labels` the true values, each (n,). `metric` is "auc",
    "log_loss" or "brier" for labels of 0 or 1, and "rmse" or "mae" for numbers. The standard error is for large
    samples. Raises a DataError for fewer than two rows; for "auc", for fewer than two rows per class.
    """
    labels, scores, former = (np.asarray(part, np.float64) for part in (labels, scores, former))
    if len(labels) < 2 or (metric == "auc" and min(labels.sum(), len(labels) - labels.sum()) < 2):
        raise DataError(
            metric, f"{len(labels)} rows", expected="at least two rows, for an AUC at least two of each class"
        )
    if metric == "auc":
        return _auc(labels, scores, former)
    if metric == "rmse":
        return _rmse(labels, scores, former)
    difference = ROWS[metric](labels, scores) - ROWS[metric](labels, former)
    return PairedDifference(float(difference.mean()), _error(difference))


ROWS: Mapping[str, Callable[[Array, Array], Array]] = {
    "log_loss": log_losses,
    "brier": lambda labels, scores: np.square(scores - labels),
    "mae": lambda labels, scores: np.abs(scores - labels),
}
"""Metrics that are a mean over rows."""


def _auc(labels: Array, scores: Array, former: Array) -> PairedDifference:
    places = placements(labels, former) - placements(labels, scores)
    ones, zeros = places[labels == 1], places[labels == 0]
    return PairedDifference(float(ones.mean()), float(np.hypot(_error(ones), _error(zeros))))


def _rmse(labels: Array, scores: Array, former: Array) -> PairedDifference:
    squares = [np.square(part - labels) for part in (scores, former)]
    roots = [float(np.sqrt(part.mean())) for part in squares]
    linear = [part / (2 * root) if root else part for part, root in zip(squares, roots, strict=True)]
    return PairedDifference(roots[0] - roots[1], _error(linear[0] - linear[1]))


def _error(parts: Array) -> float:
    return float(parts.std(ddof=1) / np.sqrt(len(parts)))
