"""How much worse a model is than a former model on the same rows, and how much of that chance explains."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri

from isthmus.distill.evaluation.confidence import placements
from isthmus.distill.evaluation.metrics import log_losses
from isthmus.distill.types import Array
from isthmus.features.errors import DataError


class PairedLoss(NamedTuple):
    """The loss in a metric, above 0 where the model is worse, and its standard error over other rows."""

    value: float
    error: float

    def least(self, chance: float) -> float:
        """Return a bound that the true loss is below only with probability `chance`."""
        return self.value + float(ndtri(chance)) * self.error


def lost(metric: str, labels: Array, scores: Array, former: Array) -> PairedLoss:
    """Return how much worse (n,) scores are than (n,) scores of a former model for the same rows and labels.

    The standard error belongs to the paired difference, so rows that are hard for both models add no noise. It treats
    rows as independent and is a large-sample approximation.

    Raises:
        DataError: the metric is not defined: fewer than two rows, or an AUC with fewer than two rows of a class.
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
    return PairedLoss(float(difference.mean()), _error(difference))


ROWS: Mapping[str, Callable[[Array, Array], Array]] = {
    "log_loss": log_losses,
    "brier": lambda labels, scores: np.square(scores - labels),
    "mae": lambda labels, scores: np.abs(scores - labels),
}
"""Metrics that are a mean over rows."""
MEASURES = ("auc", "rmse", *ROWS)


def _auc(labels: Array, scores: Array, former: Array) -> PairedLoss:
    """Compare the placements of DeLong et al. (Biometrics 44, 1988)."""
    places = placements(labels, former) - placements(labels, scores)
    ones, zeros = places[labels == 1], places[labels == 0]
    return PairedLoss(float(ones.mean()), float(np.hypot(_error(ones), _error(zeros))))


def _rmse(labels: Array, scores: Array, former: Array) -> PairedLoss:
    """Compare two RMSEs; the error follows from the linear part (the delta method)."""
    squares = [np.square(part - labels) for part in (scores, former)]
    roots = [float(np.sqrt(part.mean())) for part in squares]
    linear = [part / (2 * root) if root else part for part, root in zip(squares, roots, strict=True)]
    return PairedLoss(roots[0] - roots[1], _error(linear[0] - linear[1]))


def _error(parts: Array) -> float:
    return float(parts.std(ddof=1) / np.sqrt(len(parts)))
