"""Measures of weighted rows: scores, labels and weights have shape (n,), and weights sum to 1."""

import math

import numpy as np

from isthmus.orchestration.attribution.shapley import Numbers


def mean(scores: Numbers, weights: Numbers) -> float:
    return float(weights @ scores)


def log_loss(labels: Numbers, scores: Numbers, weights: Numbers) -> float:
    """Return the weighted version of `distill.evaluation.metrics.log_loss`."""
    clipped = np.clip(scores, 1e-7, 1 - 1e-7)
    return float(-weights @ np.where(labels == 1, np.log(clipped), np.log1p(-clipped)))


def auc(labels: Numbers, scores: Numbers, weights: Numbers) -> float:
    """Return the weighted probability that a 1 scores above a 0, ties counting half; NaN if a label is missing."""
    _, place = np.unique(scores, return_inverse=True)
    ones, zeros = (np.bincount(place, np.where(labels == label, weights, 0.0)) for label in (1, 0))
    pairs = ones.sum() * zeros.sum()
    below = np.cumsum(zeros) - zeros / 2
    return float((ones * below).sum() / pairs) if pairs > 0 else math.nan


def rmse(labels: Numbers, scores: Numbers, weights: Numbers) -> float:
    return math.sqrt(weights @ np.square(scores - labels))


def mae(labels: Numbers, scores: Numbers, weights: Numbers) -> float:
    return float(weights @ np.abs(scores - labels))
