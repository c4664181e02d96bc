"""Metrics by kind of label, agreement with a teacher, and latency of a call."""

import math
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from isthmus.distill.types import Array, Index
from isthmus.features.errors import DataError

BINS = 15
NEAREST = 10
RECALL = f"recall_at_{NEAREST}"


def metrics(labels: Array, probabilities: Array) -> dict[str, float]:
    """Return the quality of a binary classifier: `auc`, `log_loss`, `brier` and `ece` (calibration error).

    `labels`, 0 or 1, and `probabilities` of the label 1 are (n,). `auc` is NaN if all labels are the same.
    """
    return {
        "auc": auc(labels, probabilities),
        "log_loss": log_loss(labels, probabilities),
        "brier": brier(labels, probabilities),
        "ece": calibration_error(labels, probabilities),
    }


def auc(labels: Array, scores: Array, weights: Array | None = None) -> float:
    """Return the area under the ROC curve of (n,) scores for (n,) labels of 0 or 1; NaN if all labels are the same.

    Tied scores count half. `weights` has the weight of each row; None weighs all rows equally.
    """
    _, place = np.unique(scores, return_inverse=True)
    each = np.ones(len(labels)) if weights is None else weights
    ones, zeros = (np.bincount(place, np.where(labels == label, each, 0.0)) for label in (1, 0))
    pairs = ones.sum() * zeros.sum()
    below = np.cumsum(zeros) - zeros / 2
    return float((ones * below).sum() / pairs) if pairs > 0 else math.nan


def ranks(numbers: Array) -> Array:
    _, place, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    mean_places: Array = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return mean_places


def mean(values: Array, weights: Array | None = None) -> float:
    return float(values.mean(dtype=np.float64) if weights is None else weights @ values)


def log_loss(labels: Array, probabilities: Array, weights: Array | None = None) -> float:
    """Return the mean negative log-likelihood of 0/1 labels, in nats, with probabilities clipped to [1e-7, 1 - 1e-7].

    `weights` has the weight of each row and must sum to 1; None weighs all rows equally.
    """
    return mean(log_losses(labels, probabilities), weights)


def log_losses(labels: Array, probabilities: Array) -> Array:
    clipped = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)
    losses: Array = -np.where(labels == 1, np.log(clipped), np.log1p(-clipped))
    return losses


def brier(labels: Array, probabilities: Array) -> float:
    return float(np.square(probabilities.astype(np.float64) - labels).mean())


def calibration_error(labels: Array, probabilities: Array) -> float:
    """Return the expected calibration error (ECE) of probabilities for 0/1 labels (Naeini, 2015; Nixon, 2019).

    It is the mean of |probability - share of ones| over 15 bins with equal numbers of rows, sorted by probability.
    """
    order = np.argsort(probabilities, kind="stable")
    gap = probabilities[order].astype(np.float64) - labels[order]
    return float(sum(abs(part.sum()) for part in np.array_split(gap, BINS)) / len(gap))


def multiclass_metrics(labels: Index, logits: Array) -> dict[str, float]:
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
    if not len(labels):
        return math.nan
    logs = np.maximum(log_softmax(logits)[np.arange(len(labels)), labels], math.log(1e-7))
    return float(-logs.mean())


def macro_f1(labels: Index, predicted: Index, classes: int) -> float:
    correct = labels[predicted == labels]
    return _macro_f1(*(np.bincount(part, minlength=classes) for part in (correct, labels, predicted)))


def _macro_f1(hits: Index, actual: Index, chosen: Index) -> float:
    present = actual > 0
    return float((2 * hits[present] / (actual + chosen)[present]).mean()) if present.any() else math.nan


def multilabel_metrics(labels: Index, logits: Array) -> dict[str, float]:
    """Return the quality of independent classes: `log_loss`, `micro_f1`, `macro_f1` and `ece`, over rows and classes.

    `labels`, 0 or 1, and `logits` are (n, classes). A class is predicted where its probability is above 0.5. `macro_f1`
    leaves out classes that no row has.
    """
    chances, predicted = sigmoid(logits), logits > 0
    hits, actual, chosen = ((part == 1).sum(0) for part in (labels * predicted, labels, predicted))
    total = actual.sum() + chosen.sum()
    return {
        "log_loss": log_loss(labels, chances),
        "micro_f1": float(2 * hits.sum() / total) if total else math.nan,
        "macro_f1": _macro_f1(hits, actual, chosen),
        "ece": calibration_error(labels.ravel(), chances.ravel()),
    }


def confidence_error(labels: Index, logits: Array) -> float:
    logs = log_softmax(logits)
    predicted = logs.argmax(1)
    return calibration_error(predicted == labels, np.exp(logs[np.arange(len(predicted)), predicted]))


def rmse(labels: Array, values: Array, weights: Array | None = None) -> float:
    return math.sqrt(mean(np.square(labels - values), weights)) if len(labels) else math.nan


def mae(labels: Array, values: Array, weights: Array | None = None) -> float:
    return mean(np.abs(labels - values), weights) if len(labels) else math.nan


def r2(labels: Array, values: Array) -> float:
    variance = float(np.square(labels - labels.mean()).sum()) if len(labels) else 0.0
    return 1 - float(np.square(labels - values).sum()) / variance if variance else math.nan


def correlation(first: Array, second: Array) -> float:
    pair = [part.astype(np.float64) - part.mean(dtype=np.float64) for part in (first, second)]
    # Scale by the largest number so that squares do not overflow.
    largest = [float(np.abs(part).max(initial=0.0)) for part in pair]
    if not all(largest):
        return math.nan
    x, y = (part / most for part, most in zip(pair, largest, strict=True))
    return float((x * y).sum() / math.sqrt(np.square(x).sum() * np.square(y).sum()))


def ndcg(relevance: Index, scores: Array, groups: Index, cutoff: int) -> float:
    """Return the quality of a ranking: the mean over the groups of the normalized discounted cumulative gain.

    A group has the rows of one query. `relevance`, integers of at least 0, `scores` and `groups`, the number of each
    row's group, are (n,). The gain of a group is the sum of (2**relevance - 1) / log2(rank + 1) over the `cutoff` rows
    with the highest scores (Järvelin and Kekäläinen, 2002). It is divided by the gain of the best order. Rows with
    equal scores share the mean of their gains (McSherry and Najork, ECIR 2008). Groups without a relevant row are
    skipped; the result is NaN if no group is left.
    """
    gains = np.exp2(relevance.astype(np.float64)) - 1
    best, reached = (_cumulated(gains, order, groups, cutoff) for order in (gains, scores))
    counts = best > 0
    return float((reached[counts] / best[counts]).mean()) if counts.any() else math.nan


def chance_ndcg(relevance: Index, groups: Index, at: int) -> float:
    return ndcg(relevance, np.zeros(len(relevance)), groups, at)


def reciprocal_rank(relevance: Index, scores: Array, groups: Index) -> float:
    """Return the quality of a ranking: the mean over the groups of 1 / (rank of the first relevant row).

    A group has the rows of one query. `relevance`, `scores` and `groups`, the number of each row's group, are (n,). A
    row is relevant if its `relevance` is above 0. Irrelevant rows with the same score rank before it. Groups without a
    relevant row are skipped; the result is NaN if no group is left.
    """
    numbers = _numbers(groups)
    best = np.full(numbers.max(initial=-1) + 1, -np.inf)
    relevant = relevance > 0
    np.maximum.at(best, numbers[relevant], scores[relevant])
    above = np.bincount(numbers[~relevant & (scores >= best[numbers])], minlength=len(best))
    counts = best > -np.inf
    return float((1 / (1 + above[counts])).mean()) if counts.any() else math.nan


def _cumulated(gains: Array, scores: Array, groups: Index, at: int) -> Array:
    if not len(gains):
        return np.empty(0)
    numbers = _numbers(groups)
    order = np.lexsort((-scores, numbers))
    gains, scores, numbers = gains[order], scores[order], numbers[order]
    new = np.diff(numbers, prepend=-1) != 0
    place = np.arange(len(numbers)) - np.flatnonzero(new)[np.cumsum(new) - 1]
    tied = np.cumsum(new | (np.diff(scores, prepend=np.nan) != 0)) - 1
    mean = np.bincount(tied, gains) / np.bincount(tied)
    discounts = np.where(place < at, 1 / np.log2(place + 2.0), 0.0)
    return np.bincount(numbers, mean[tied] * discounts)


def retrieval(
    queries: Array, candidates: Array, taught: Array, index: Array, *, alone: bool = False
) -> dict[str, float]:
    """Measure a search of n queries among n candidates by dot products; NaN if there are ten or fewer to find.

    * recall_at_10: share of the teacher's ten nearest candidates that are also among the student's ten nearest;
    * recall_at_10_of_its_index: the same for the student's queries and the teacher's candidates;
    * mrr: mean reciprocal rank of the candidate that belongs to the query; not with `alone`.

    The vectors are (n, width), row i of each for the same example: the student's `queries` and `candidates`, and the
    teacher's, `taught` and `index`. With `alone`, candidates are the texts of all other queries.
    """
    names = (RECALL, f"{RECALL}_of_its_index", "mrr")[: 2 if alone else 3]
    if len(queries) <= NEAREST + alone:
        return dict.fromkeys(names, math.nan)
    sums = np.zeros(3)
    for begin in range(0, len(queries), 1024):
        rows = np.arange(begin, min(begin + 1024, len(queries)))
        own = rows - begin, rows
        scores, in_index, wanted = queries[rows] @ candidates.T, queries[rows] @ index.T, taught[rows] @ index.T
        ranks = 1 + (scores > scores[own][:, None]).sum(1)
        for each in (scores, in_index, wanted):
            each[own] = -np.inf if alone else each[own]
        found = [np.argpartition(-each, NEAREST - 1, 1)[:, :NEAREST] for each in (scores, in_index, wanted)]
        # Equal texts have equal scores but for rounding, and any of them is right.
        least = np.take_along_axis(wanted, found[2], 1).min(1, keepdims=True) - 1e-6
        shared = [(np.take_along_axis(wanted, part, 1) >= least).mean(1).sum() for part in found[:2]]
        sums += *shared, (1 / ranks).sum()
    return dict(zip(names, (sums / len(queries)).tolist(), strict=False))


def _numbers(groups: Index) -> Index:
    _, numbers = np.unique(groups, return_inverse=True)
    return numbers.astype(np.int64)


_ELEMENTS = 1 << 18
"""Numbers compared at a time, 2 MB as float64, to bound memory for any number of rows and classes."""


def agreement(student: Array, teacher: Array) -> dict[str, float]:
    """Compare predictions of student and teacher on the same rows, to see how well the student imitates the teacher.

    Args:
        student: logits of the student, (n, c) for c classes, or (n,) logits of the second of two classes.
        teacher: logits of the teacher, of the same shape.

    Returns:
        `agreement`, the share of rows for which both choose the same class; the first class on ties. `kl`, the mean of
        KL(teacher || student) in nats, computed in float64.

    Raises:
        DataError: the shapes differ, there are no rows, or a logit is not finite.
    """
    same, divergence, rows = 0, 0.0, len(teacher)
    for ours, theirs in _parts(student, teacher, "logits", dimensions=(1, 2)):
        if ours.ndim == 1:
            # The logit x of the second class alone means the logits (0, x).
            ours, theirs = (np.stack([np.zeros_like(x), x], 1) for x in (ours, theirs))
        same += int((ours.argmax(1) == theirs.argmax(1)).sum())
        ours, theirs = log_softmax(ours), log_softmax(theirs)
        # A divergence is never negative, but rounding can take a row of equal distributions below 0.
        divergence += float((np.exp(theirs) * (theirs - ours)).sum(1).clip(0).sum())
    return {"agreement": same / rows, "kl": divergence / rows}


def cosine(student: Array, teacher: Array) -> float:
    """Return how similar the (n, d) embeddings of student and teacher are: the mean cosine of n pairs, in float64.

    Raises:
        DataError: the shapes differ, there are no rows, a number is not finite, or an embedding is zero.
    """
    total = 0.0
    for pair in _parts(student, teacher, "embeddings", dimensions=(2,)):
        # Scale by the largest number so that squares do not overflow.
        largest = [np.abs(part).max(1, keepdims=True) for part in pair]
        if not all(part.all() for part in largest):
            raise DataError("embeddings", "an embedding is zero", expected="embeddings with a direction")
        ours, theirs = (part / most for part, most in zip(pair, largest, strict=True))
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        total += float(((ours * theirs).sum(1) / lengths).sum())
    return total / len(teacher)


def _parts(student: Array, teacher: Array, kind: str, dimensions: tuple[int, ...]) -> Iterator[tuple[Array, Array]]:
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


def log_softmax(logits: Array) -> Array:
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


_FEWEST = 20
"""Minimum number of calls per round, however slow they are."""


def throughput(call: Callable[[], object], seconds: float = 0.5) -> float:
    began, calls = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        call()
        calls += 1
    return round(calls / spent, 1)


def interleaved(
    models: Mapping[str, Callable[[], object]], *, calls: int = 1000, rounds: int = 5, seconds: float = 2.0
) -> dict[str, dict[str, float]]:
    """Measure the latency of models fairly: call them in turn, so that the machine's load affects all of them alike.

    Args:
        models: maps a model's name to a function without arguments that computes one prediction.
        calls: maximum number of calls per model in a round.
        rounds: number of rounds after a short warm-up.
        seconds: time after which the calls of a slow model in a round end, but not before 20 calls.

    Returns:
        `p50_us` and `p99_us`, in microseconds per call, by model name, from the model's round with the lowest p99.
    """
    for call in models.values():
        _spent(call, calls // 10, seconds / 10)
    spent: dict[str, list[Array]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, call in models.items():
            spent[name].append(_spent(call, calls, seconds))
    return {name: _quietest(parts) for name, parts in spent.items()}


def _spent(call: Callable[[], object], calls: int, seconds: float) -> Array:
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
    """Convert logits to probabilities, 1 / (1 + exp(-logit)), in float64 and without overflow."""
    return np.exp(-np.logaddexp(0, -logits.astype(np.float64)))
