"""Measures of rows with their 95 % intervals, in closed form: the same rows give the same numbers.

Rows count as independent. Where many rows have a cause in common, as the flights of a stormy night, the truth is wider.
"""

import math

import numpy as np
from scipy.special import ndtri, stdtrit

from isthmus.distill.evaluation import metrics
from isthmus.distill.evaluation.interval import LEVEL, Interval
from isthmus.distill.evaluation.metrics import BINS
from isthmus.distill.types import Array

_NORMAL = float(ndtri((1 + LEVEL) / 2))
_HALF_NORMAL = math.sqrt(2 / math.pi)
"""The mean distance of a standard normal number from 0."""
_CLEAR = 2.0
"""Standard errors by which the gap of a bin shows that there is one."""


def mean(values: Array) -> Interval:
    """The mean of (n,) values with Student's t interval (Student, 1908): of a log loss, a Brier score, an MAE."""
    numbers = values.astype(np.float64)
    count, value = len(numbers), float(numbers.mean())
    if count < 2:
        return Interval(value, None, None)
    half = float(stdtrit(count - 1, (1 + LEVEL) / 2) * numbers.std(ddof=1) / math.sqrt(count))
    return Interval(value, value - half, value + half)


def root_mean(squares: Array) -> Interval:
    """The root of the mean of (n,) squares, of whose mean the interval is taken: of an RMSE."""
    value, low, high = mean(squares)
    ends = [None if end is None else math.sqrt(max(end, 0.0)) for end in (low, high)]
    return Interval(math.sqrt(value), *ends)


def share(count: int, rows: int) -> Interval:
    """A share with its score interval (Wilson, Journal of the American Statistical Association 22, 1927)."""
    value, square = count / rows, _NORMAL**2
    middle = (count + square / 2) / (rows + square)
    half = _NORMAL * math.sqrt(count * (rows - count) / rows + square / 4) / (rows + square)
    return Interval(value, max(middle - half, 0.0), min(middle + half, 1.0))


def placements(labels: Array, scores: Array) -> Array:
    """Of each row the share of rows with the other label, 0 or 1, that its score is on the right side of, ties half.

    The mean over the ones is the AUC, and so is that over the zeros.
    """
    ones = labels == 1
    found = np.empty(len(labels))
    for own, others in ((ones, ~ones), (~ones, ones)):
        ordered = np.sort(scores[others])
        below = np.searchsorted(ordered, scores[own], "left") + np.searchsorted(ordered, scores[own], "right")
        found[own] = below / (2 * len(ordered))
    found[~ones] = 1 - found[~ones]
    return found


def auc(labels: Array, scores: Array) -> Interval | None:
    """The area under the ROC curve with its interval; None if all labels are the same.

    Its variance is that of the placements of each row among those of the other label (DeLong, DeLong and
    Clarke-Pearson, Biometrics 44, 1988), by ranks (Sun and Xu, IEEE Signal Processing Letters 21, 2014); the interval
    is that of the logit, so that it stays between 0 and 1. Labels that are told apart without a fault have none.
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
    """The expected calibration error over 15 bins of equal mass (`metrics.calibration_error`) with its interval.

    The mean of distances is above 0 where there is none, by chance alone. So the lower end leaves out what chance adds
    at most: of each bin whose gap is less than two standard errors, the mean distance of chance. The upper end leaves
    nothing out. The interval is a bit wide, and never too narrow (tests/distill/evaluation/test_confidence.py).
    """
    plain = metrics.calibration_error(labels, probabilities)
    if len(labels) < 2 * BINS:
        return Interval(plain, None, None)
    order = np.argsort(probabilities, kind="stable")
    gaps = probabilities[order].astype(np.float64) - labels[order]
    variance, chance = 0.0, 0.0
    for part in np.array_split(gaps, BINS):
        weight = len(part) / len(gaps)
        # As if there were two rows more, half a row off each (after Agresti and Coull, The American Statistician 52,
        # 1998): a bin of zeros has no variance otherwise.
        error = math.sqrt((float(part.var()) * len(part) + 0.5) / (len(part) + 2) / len(part))
        variance += (weight * error) ** 2
        chance += weight * error * _HALF_NORMAL if abs(float(part.mean())) < _CLEAR * error else 0.0
    half = _NORMAL * math.sqrt(variance)
    return Interval(plain, max(plain - chance - half, 0.0), min(plain + half, 1.0))
