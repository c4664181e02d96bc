"""Finds inputs that leak the label: alone, they tell the classes apart."""

import numpy as np

from isthmus.distill.evaluation.metrics import auc
from isthmus.distill.types import Array
from isthmus.features.values.columns import Values

SAYS = 0.999
"""An input with such an AUC is no feature: it is the label under a new name, or makes a model pointless."""

FEW = 20
"""With fewer rows of a class, an order may be perfect by chance."""


def saying(values: Values, labels: Array) -> float:
    """How well (n,) numbers or texts tell (n,) labels apart: from 0.5 to 1, and 0.5 of too few rows.

    The AUC of their order, or of whether they are null if that is better. Texts are ordered by the share of ones among
    their rows with even numbers, and the AUC is that of the rows with odd numbers: so a unique key says nothing.
    """
    valid, data = values.valid, values.data
    if data.dtype.kind == "f":
        valid = valid & ~np.isnan(data)
    data, known = data[valid], labels[valid]
    if data.dtype == object:
        # Arrays have no order, and are hardly ever equal.
        data, known = _shares(data, known) if isinstance(next(iter(data), ""), str | bytes) else (data[:0], known[:0])
    return max(_either_way(valid, labels), _either_way(data, known))


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
