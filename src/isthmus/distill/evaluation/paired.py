"""What a model loses beside another on the same rows, and how far chance may have it so."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from isthmus.distill.evaluation.confidence import placements
from isthmus.distill.types import Array
from isthmus.features.errors import DataError


class Loss(NamedTuple):
    """What is lost of a measure, above 0 where the model is worse, and its standard error over other rows."""

    value: float
    error: float

    def least(self, chance: float) -> float:
        """What is lost at the least, unless that is as unlikely as `chance`: the end of a one-sided interval."""
        return self.value + float(ndtri(chance)) * self.error


def lost(metric: str, labels: Array, scores: Array, former: Array) -> Loss:
    """What (n,) scores lose of a measure beside (n,) scores of a former model for the same rows, with their labels.

    The error is of the paired difference: rows that are hard for both models are no noise. It takes rows for
    independent, and is a large sample's.

    Raises:
        DataError: the measure has no value, for there are too few rows or one class only.
    """
    labels, scores, former = (np.asarray(part, np.float64) for part in (labels, scores, former))
    if len(labels) < 2 or (metric == "auc" and min(labels.sum(), len(labels) - labels.sum()) < 2):
        raise DataError(metric, f"{len(labels)} rows", expected="two or more, of each class where it is an AUC")
    if metric == "auc":
        return _auc(labels, scores, former)
    if metric == "rmse":
        return _rmse(labels, scores, former)
    difference = ROWS[metric](labels, scores) - ROWS[metric](labels, former)
    return Loss(float(difference.mean()), _error(difference))


def _log_loss(labels: Array, scores: Array) -> Array:
    clipped = np.clip(scores, 1e-7, 1 - 1e-7)
    loss: Array = -np.where(labels == 1, np.log(clipped), np.log1p(-clipped))
    return loss


ROWS: Mapping[str, Callable[[Array, Array], Array]] = {
    "log_loss": _log_loss,
    "brier": lambda labels, scores: np.square(scores - labels),
    "mae": lambda labels, scores: np.abs(scores - labels),
}
"""Measures that are a mean over rows."""
MEASURES = ("auc", "rmse", *ROWS)


def _auc(labels: Array, scores: Array, former: Array) -> Loss:
    """By the placements of DeLong et al. (Biometrics 44, 1988)."""
    places = placements(labels, former) - placements(labels, scores)
    ones, zeros = places[labels == 1], places[labels == 0]
    return Loss(float(ones.mean()), float(np.hypot(_error(ones), _error(zeros))))


def _rmse(labels: Array, scores: Array, former: Array) -> Loss:
    """The error is that of its linear part (the delta method)."""
    squares = [np.square(part - labels) for part in (scores, former)]
    roots = [float(np.sqrt(part.mean())) for part in squares]
    linear = [part / (2 * root) if root else part for part, root in zip(squares, roots, strict=True)]
    return Loss(roots[0] - roots[1], _error(linear[0] - linear[1]))


def _error(parts: Array) -> float:
    return float(parts.std(ddof=1) / np.sqrt(len(parts)))
