"""Quality of a model, agreement with its teacher, and latency of a row."""

import math
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from isthmus.distill.types import Array
from isthmus.features.errors import DataError

BINS = 15


def metrics(labels: Array, probabilities: Array) -> dict[str, float]:
    """AUC, log loss, Brier score and calibration error of (n,) probabilities against (n,) labels of both classes."""
    return {
        "auc": auc(labels, probabilities),
        "log_loss": log_loss(labels, probabilities),
        "brier": brier(labels, probabilities),
        "ece": calibration_error(labels, probabilities),
    }


def auc(labels: Array, scores: Array) -> float:
    """Area under the ROC curve: the chance that a 1 scores above a 0, ties counting half (Mann and Whitney, 1947)."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[place]
    positive = int(labels.sum())
    return float((rank[labels == 1].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive)))


def log_loss(labels: Array, probabilities: Array) -> float:
    """Mean negative log-likelihood in nats; probabilities are clipped to 1e-7 from 0 and 1."""
    clipped = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(-np.where(labels == 1, np.log(clipped), np.log1p(-clipped)).mean())


def brier(labels: Array, probabilities: Array) -> float:
    """Mean squared distance of (n,) probabilities from (n,) labels of 0 and 1 (Brier, 1950): 0 is best, 1 worst."""
    return float(np.square(probabilities.astype(np.float64) - labels).mean())


def calibration_error(labels: Array, probabilities: Array) -> float:
    """Expected calibration error over 15 bins of equal mass (Naeini et al., 2015; Nixon et al., 2019).

    The mean over the bins, weighted by their rows, of |mean probability - share of ones|.
    """
    order = np.argsort(probabilities, kind="stable")
    gap = probabilities[order].astype(np.float64) - labels[order]
    return float(sum(abs(part.sum()) for part in np.array_split(gap, BINS)) / len(gap))


_ELEMENTS = 1 << 18
"""Numbers compared at a time: 2 MB as float64, however many rows and classes there are."""


def agreement(student: Array, teacher: Array) -> dict[str, float]:
    """How alike the logits of student and teacher are: (n,) of the second of two classes, or (n, c) of c classes.

    Returns:
        `agreement`, the share of rows that both put into the same class (the first of those with equal logits), and
        `kl`, the mean of KL(teacher || student) in nats, computed in float64.

    Raises:
        DataError: shapes differ, there is no row, or a logit is not finite.
    """
    same, divergence, rows = 0, 0.0, len(teacher)
    for ours, theirs in _parts(student, teacher, "logits", dimensions=(1, 2)):
        if ours.ndim == 1:
            # Two classes whose logits are 0 and x.
            ours, theirs = (np.stack([np.zeros_like(x), x], 1) for x in (ours, theirs))
        same += int((ours.argmax(1) == theirs.argmax(1)).sum())
        ours, theirs = _log_softmax(ours), _log_softmax(theirs)
        # Rounding may take a row of equal distributions below 0, which no divergence is.
        divergence += float((np.exp(theirs) * (theirs - ours)).sum(1).clip(0).sum())
    return {"agreement": same / rows, "kl": divergence / rows}


def cosine(student: Array, teacher: Array) -> float:
    """Mean cosine of the (n, d) embeddings of student and teacher, row by row, in float64.

    Raises:
        DataError: shapes differ, there is no row, a number is not finite, or an embedding is zero and has no direction.
    """
    total = 0.0
    for pair in _parts(student, teacher, "embeddings", dimensions=(2,)):
        # Scaled by the largest, so that no square leaves the range of floats.
        largest = [np.abs(part).max(1, keepdims=True) for part in pair]
        if not all(part.all() for part in largest):
            raise DataError("embeddings", "an embedding is zero", expected="embeddings that have a direction")
        ours, theirs = (part / most for part, most in zip(pair, largest, strict=True))
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        total += float(((ours * theirs).sum(1) / lengths).sum())
    return total / len(teacher)


def _parts(student: Array, teacher: Array, kind: str, dimensions: tuple[int, ...]) -> Iterator[tuple[Array, Array]]:
    """Both as float64, `_ELEMENTS` at a time."""
    if student.shape != teacher.shape or student.ndim not in dimensions or 0 in student.shape:
        shapes = " or ".join(("(n,)", "(n, c)")[number - 1] for number in dimensions)
        difference = f"{student.shape} of the student and {teacher.shape} of the teacher"
        raise DataError(kind, difference, expected=f"the same shape {shapes} for both, with at least one row")
    rows = max(1, _ELEMENTS // math.prod(student.shape[1:]))
    for start in range(0, len(student), rows):
        parts = [values[start : start + rows].astype(np.float64) for values in (student, teacher)]
        for name, part in zip(("student", "teacher"), parts, strict=True):
            if not np.isfinite(part).all():
                row = start + int(np.argwhere(~np.isfinite(part))[0][0])
                raise DataError(f"{kind} of the {name}, row {row}", "not finite", expected="finite numbers")
        yield parts[0], parts[1]


def _log_softmax(logits: Array) -> Array:
    shifted: Array = logits - logits.max(1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(1, keepdims=True))
    return shifted


_FEWEST = 20
"""Calls of a round, however slow they are."""


def throughput(call: Callable[[], object], seconds: float = 0.5) -> float:
    """Sequential calls per second."""
    began, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        call()
        calls += 1
    return round(calls / spent, 1)


def interleaved(
    models: Mapping[str, Callable[[], object]], *, calls: int = 1000, rounds: int = 5, seconds: float = 2.0
) -> dict[str, dict[str, float]]:
    """p50 and p99 of a call of each model in microseconds, measured in turn.

    Every model is warmed up by a tenth as many calls, then called in each round, so that the machine's load affects all
    alike. Of each model the round with the lowest p99 counts: load can only add to it. A slow model's part of a round
    ends after `seconds`, with at least 20 calls; the p99 of fewer than a hundred calls is close to the slowest.
    """
    for call in models.values():
        _spent(call, calls // 10, seconds / 10)
    spent: dict[str, list[Array]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, call in models.items():
            spent[name].append(_spent(call, calls, seconds))
    return {name: _quietest(parts) for name, parts in spent.items()}


def _spent(call: Callable[[], object], calls: int, seconds: float) -> Array:
    """Nanoseconds of each call; of fewer calls if they take longer than `seconds`."""
    spent = np.empty(calls)
    until = time.perf_counter_ns() + seconds * 1e9
    for number in range(calls):
        start = time.perf_counter_ns()
        if number >= _FEWEST and start > until:
            return spent[:number]
        call()
        spent[number] = time.perf_counter_ns() - start
    return spent


def _quietest(rounds: list[Array]) -> dict[str, float]:
    p50, p99 = min((np.percentile(spent, (50, 99)) / 1000 for spent in rounds), key=lambda both: both[1])
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}


def sigmoid(logits: Array) -> Array:
    """Probabilities of logits, in float64."""
    return np.exp(-np.logaddexp(0, -logits.astype(np.float64)))
