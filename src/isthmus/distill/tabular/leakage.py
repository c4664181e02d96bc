"""Finds inputs that leak the label: alone, they tell the classes apart, or rise and fall with it."""

import numpy as np

from isthmus.distill.evaluation.metrics import auc
from isthmus.distill.evaluation.residuals import correlation
from isthmus.distill.types import Array
from isthmus.features.values.columns import Values

SAYS = 0.999
"""An input with such an AUC is no feature: it is the label under a new name, or makes a model pointless."""

FEW = 20
"""With fewer rows of a class, an order may be perfect by chance."""

_MOST_VALUES = 1024
"""Numbers with more values than that are taken together with their neighbors."""


def saying(values: Values, labels: Array) -> float:
    """How well (n,) numbers or texts tell (n,) labels apart: from 0.5 to 1, and 0.5 of too few rows.

    The AUC of their order, or of whether they are null if that is better. Texts are ordered by the share of ones among
    their rows with even numbers, and the AUC is that of the rows with odd numbers: so a unique key says nothing.
    """
    valid = _valid(values)
    data, known = values.data[valid], labels[valid]
    if data.dtype == object:
        # Arrays have no order, and are hardly ever equal.
        data, known = _shares(data, known) if isinstance(next(iter(data), ""), str | bytes) else (data[:0], known[:0])
    return max(_either_way(valid, labels), _either_way(data, known))


def naming(values: Values, labels: Array) -> float:
    """How well (n,) numbers or texts name (n,) classes: their mean recall, from 0 to 1; 0 of too few rows.

    A row with an odd number gets the class that is most common among the rows with even numbers and the same value, of
    numbers with very many values a value nearby: so a unique key says nothing. Null is a value.
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


def following(values: Values, labels: Array) -> float:
    """How closely (n,) labels follow (n,) numbers or texts, up or down: 0 to 1, and 0 of too few rows.

    Spearman's rank correlation without its sign, of the rows that are not null. Texts are ordered by the mean label of
    their rows with even numbers, and it is that of the rows with odd numbers.
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
    found = correlation(_ranks(data), _ranks(known))
    return 0.0 if np.isnan(found) else abs(found)


def _valid(values: Values) -> Array:
    """Where there is a value that is a number, or a text."""
    valid: Array = values.valid & ~np.isnan(values.data) if values.data.dtype.kind == "f" else values.valid
    return valid


def _places(values: Values) -> Array:
    """The number of each row's value; null is 0."""
    places, valid = np.zeros(len(values.data), np.int64), _valid(values)
    data = values.data[valid]
    if data.dtype == object and not isinstance(next(iter(data), ""), str | bytes):
        return valid.astype(np.int64)
    words, place = np.unique(data, return_inverse=True)
    if data.dtype != object and len(words) > _MOST_VALUES:
        place = place * _MOST_VALUES // len(words)
    places[valid] = place + 1
    return places


def _ranks(numbers: Array) -> Array:
    """The place of each number in ascending order; equal ones share the mean of theirs."""
    _, place, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    ranks: Array = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def _shares(texts: Array, labels: Array) -> tuple[Array, Array]:
    """Scores and labels of every second row, by the labels of the rows between them with the same text."""
    words, place = np.unique(texts, return_inverse=True)
    rows, ones = (np.bincount(place[::2], weights, len(words)) for weights in (None, labels[::2]))
    # Smoothed: a new text has the share of ones in all rows, a rare text nearly so.
    share = (ones + labels.sum() / max(1, len(labels))) / (rows + 1)
    return share[place[1::2]], labels[1::2]


def _either_way(scores: Array, labels: Array) -> float:
    ones = int(labels.sum())
    if min(ones, len(labels) - ones) < FEW:
        return 0.5
    area = auc(labels, scores)
    return max(area, 1 - area)
