"""How good a model is, and how fast it answers one row."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
BINS = 15


def metrics(labels: Array, probabilities: Array) -> dict[str, float]:
    """AUC, log loss and expected calibration error of (n,) probabilities against (n,) labels of both classes."""
    return {
        "auc": auc(labels, probabilities),
        "log_loss": log_loss(labels, probabilities),
        "ece": calibration_error(labels, probabilities),
    }


def auc(labels: Array, scores: Array) -> float:
    """Area under the ROC curve: the chance that a 1 scores above a 0, ties counting half (Mann and Whitney, 1947)."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positive = int(labels.sum())
    return float((rank[labels == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive)))


def log_loss(labels: Array, probabilities: Array) -> float:
    """Mean negative log-likelihood in nats; probabilities are held 1e-7 away from 0 and 1."""
    clipped = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(-np.where(labels == 1, np.log(clipped), np.log1p(-clipped)).mean())


def calibration_error(labels: Array, probabilities: Array) -> float:
    """Expected calibration error over 15 bins of equal mass (Naeini et al., 2015; Nixon et al., 2019).

    The mean over the bins, weighted by their rows, of |mean probability - share of ones|.
    """
    order = np.argsort(probabilities, kind="stable")
    gap = probabilities[order].astype(np.float64) - labels[order]
    return float(sum(abs(part.sum()) for part in np.array_split(gap, BINS)) / len(gap))


_ROUNDS = 5
_SECONDS = 0.5


def latency(call: Callable[[], object], *, calls: int = 1000) -> dict[str, float]:
    """p50 and p99 of one call in microseconds, after a tenth as many calls to warm up.

    Short calls are measured in several rounds, of which the one with the least p99 counts: what else a machine does can
    only add to it.
    """
    for _ in range(calls // 10):
        call()
    rounds: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
    started = time.perf_counter()
    while not rounds or (len(rounds) < _ROUNDS and time.perf_counter() - started < _SECONDS):
        spent = np.empty(calls)
        for number in range(calls):
            start = time.perf_counter_ns()
            call()
            spent[number] = time.perf_counter_ns() - start
        rounds.append(np.percentile(spent, (50, 99)) / 1000)
    p50, p99 = min(rounds, key=lambda percentiles: percentiles[1])
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}


def sigmoid(logits: Array) -> Array:
    """Probabilities of logits, in float64."""
    return np.exp(-np.logaddexp(0, -logits.astype(np.float64)))
