"""Metrics of multiclass logits."""

import math

import numpy as np

from isthmus.distill.evaluation.metrics import calibration_error, log_softmax
from isthmus.distill.types import Array, Index


def multiclass_metrics(labels: Index, logits: Array) -> dict[str, float]:
    """Return log loss, accuracy, macro F1 and ECE of (n, classes) logits against (n,) labels; NaN without rows.

    See `confidence_error` for the calibration error.
    """
    if not len(labels):
        return dict.fromkeys(("log_loss", "accuracy", "macro_f1", "ece"), math.nan)
    predicted = log_softmax(logits).argmax(1)
    return {
        "log_loss": multiclass_log_loss(labels, logits),
        "accuracy": float((predicted == labels).mean()),
        "macro_f1": macro_f1(labels, predicted, logits.shape[1]),
        "ece": confidence_error(labels, logits),
    }


def multiclass_log_loss(labels: Index, logits: Array) -> float:
    """Return the mean negative log-likelihood of (n,) labels in nats; probabilities below 1e-7 are raised to it."""
    if not len(labels):
        return math.nan
    logs = np.maximum(log_softmax(logits)[np.arange(len(labels)), labels], math.log(1e-7))
    return float(-logs.mean())


def macro_f1(labels: Index, predicted: Index, classes: int) -> float:
    """Return the mean of 2 PR / (P + R) over the classes that occur in `labels`; P is precision, R recall."""
    correct = labels[predicted == labels]
    hits, actual, chosen = (np.bincount(part, minlength=classes) for part in (correct, labels, predicted))
    present = actual > 0
    return float((2 * hits[present] / (actual + chosen)[present]).mean())


def confidence_error(labels: Index, logits: Array) -> float:
    """Return the calibration error of the likeliest class, over 15 bins of equal mass by its probability.

    This is the mean over the bins, weighted by their rows, of |mean probability - accuracy| (Guo et al., 2017).
    """
    logs = log_softmax(logits)
    predicted = logs.argmax(1)
    return calibration_error(predicted == labels, np.exp(logs[np.arange(len(predicted)), predicted]))
