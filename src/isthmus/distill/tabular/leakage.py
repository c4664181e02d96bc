"""Finds inputs that reveal the label on their own."""

import numpy as np

from isthmus.distill.evaluation.metrics import auc, correlation, ranks
from isthmus.distill.types import Array
from isthmus.features.values.columns import Values

LEAK_FROM = 0.999
"""An input with this AUC, recall or rank correlation leaks: it is the label renamed, or makes a model pointless."""

FEW = 20
"""Minimum number of rows (for classes: of each class): with fewer, an input may match the label by chance."""

_MOST_VALUES = 1024
"""Maximum number of distinct numbers; with more, neighboring numbers share a code."""


def separation_auc(values: Values, labels: Array) -> float:
    """Return the AUC, 0.5 to 1, with which a single input predicts labels of 0 and 1, to detect leaks.

    Near 1, the input reveals the label. `values` has the input's values, and `labels` the labels of the same rows,
    (n,). The result is the best AUC of three scores: the value, the negative value, and whether the value is null. For
    arrays only the last one counts. A text's score is the share of ones among its even rows, measured on the odd rows,
    so a unique key does not seem to reveal the label. A score with fewer than `FEW` (20) zeros or ones counts as 0.5.
    """
    valid = _valid(values)
    data, known = values.data[valid], labels[valid]
    if data.dtype == object:
        # Arrays have no order and are rarely equal, so only their nulls count.
        data, known = _shares(data, known) if isinstance(next(iter(data), ""), str | bytes) else (data[:0], known[:0])
    return max(_either_way(valid, labels), _either_way(data, known))


def mean_recall(values: Values, labels: Array) -> float:
    """Return the mean recall, 0 to 1, with which a single input predicts classes, to detect leaks.

    Near 1, the input reveals the label. `values` has the input's values, and `labels` the class numbers of the same
    rows, (n,). Predicts each odd row as the most common class of the even rows with the same value, so a unique key
    does not seem to reveal the label. Null counts as a value. If there are more than 1,024 distinct numbers,
    neighboring numbers count as the same value. Ignores classes with fewer than `FEW` (20) odd rows, and returns 0 if
    fewer than two classes remain.
    """
    places, classes = _places(values), int(labels.max(initial=0)) + 1
    pairs, counts = np.unique(places[::2] * classes + labels[::2], return_counts=True)
    order = np.argsort(counts, kind="stable")
    named = np.full(places.max(initial=0) + 1, -1)
    named[pairs[order] // classes] = pairs[order] % classes  # the most common is written last
    known, rows = labels[1::2], np.bincount(labels[1::2], minlength=classes)
    right = np.bincount(known[named[places[1::2]] == known], minlength=classes)
    enough = rows >= FEW
    return float((right[enough] / rows[enough]).mean()) if enough.sum() > 1 else 0.0


def rank_correlation(values: Values, labels: Array) -> float:
    """Return the absolute Spearman correlation of a single input with numeric labels, to detect leaks.

    Near 1, the input reveals the label. `values` has the input's values, and `labels` the labels of the same rows,
    (n,). Ignores rows in which the input is null. A text is ranked by the mean label of its even rows, and measured on
    the odd rows. Returns 0 for arrays, for constant values, and for fewer than `FEW` (20) rows.
    """
    valid = _valid(values)
    data, known = values.data[valid], labels[valid]
    if data.dtype == object:
        if not isinstance(next(iter(data), ""), str | bytes):
            return 0.0
        words, place = np.unique(data, return_inverse=True)
        rows, sums = (np.bincount(place[::2], weights, len(words)) for weights in (None, known[::2]))
        data, known = ((sums + known.mean()) / (rows + 1))[place[1::2]] if len(data) else data, known[1::2]
    if len(data) < FEW:
        return 0.0
    value = correlation(ranks(data), ranks(known))
    return 0.0 if np.isnan(value) else abs(value)


def _valid(values: Values) -> Array:
    valid: Array = values.valid & ~np.isnan(values.data) if values.data.dtype.kind == "f" else values.valid
    return valid


def _places(values: Values) -> Array:
    places, valid = np.zeros(len(values.data), np.int64), _valid(values)
    data = values.data[valid]
    if data.dtype == object and not isinstance(next(iter(data), ""), str | bytes):
        return valid.astype(np.int64)
    words, place = np.unique(data, return_inverse=True)
    if data.dtype != object and len(words) > _MOST_VALUES:
        place = place * _MOST_VALUES // len(words)
    places[valid] = place + 1
    return places


def _shares(texts: Array, labels: Array) -> tuple[Array, Array]:
    words, place = np.unique(texts, return_inverse=True)
    rows, ones = (np.bincount(place[::2], weights, len(words)) for weights in (None, labels[::2]))
    # Smooth, so that new and rare texts get about the overall share of ones.
    share = (ones + labels.sum() / max(1, len(labels))) / (rows + 1)
    return share[place[1::2]], labels[1::2]


def _either_way(scores: Array, labels: Array) -> float:
    ones = int(labels.sum())
    if min(ones, len(labels) - ones) < FEW:
        return 0.5
    area = auc(labels, scores)
    return max(area, 1 - area)
