"""Measures of the logits of classes."""

import math

import numpy as np

from isthmus.distill.evaluation.metrics import BINS
from isthmus.distill.types import Array, Index


def multiclass_metrics(labels: Index, logits: Array) -> dict[str, float]:
    """Log loss, accuracy, macro F1 and calibration error of (n, classes) logits against (n,) labels; NaN without rows.

    The calibration error is that of the likeliest class, over 15 bins of equal mass by its probability: the mean over
    the bins, weighted by their rows, of |mean probability - accuracy| (Guo et al., 2017).
    """
    if not len(labels):
        return dict.fromkeys(("log_loss", "accuracy", "macro_f1", "ece"), math.nan)
    logs = log_softmax(logits)
    named = logs.argmax(1)
    return {
        "log_loss": multiclass_log_loss(labels, logits),
        "accuracy": float((named == labels).mean()),
        "macro_f1": macro_f1(labels, named, logits.shape[1]),
        "ece": confidence_error(labels, logits),
    }


def multiclass_log_loss(labels: Index, logits: Array) -> float:
    """Mean negative log-likelihood of (n,) labels in nats; probabilities are clipped to 1e-7."""
    if not len(labels):
        return math.nan
    logs = np.maximum(log_softmax(logits)[np.arange(len(labels)), labels], math.log(1e-7))
    return float(-logs.mean())


def macro_f1(labels: Index, named: Index, classes: int) -> float:
    """Mean over the classes among the (n,) labels of 2 PR / (P + R), with precision P and recall R of (n,) answers."""
    right, are, said = (np.bincount(part, minlength=classes) for part in (labels[named == labels], labels, named))
    present = are > 0
    return float((2 * right[present] / (are + said)[present]).mean())


def confidence_error(labels: Index, logits: Array) -> float:
    """The calibration error of the likeliest class."""
    logs = log_softmax(logits)
    named = logs.argmax(1)
    confidence = np.exp(logs[np.arange(len(named)), named])
    order = np.argsort(confidence, kind="stable")
    gap = confidence[order] - (named == labels)[order]
    return float(sum(abs(part.sum()) for part in np.array_split(gap, BINS)) / len(gap))


def log_softmax(logits: Array) -> Array:
    """Logarithms of probabilities, of (n, classes) logits, in float64."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result
