"""Whether an input says the label by itself, as what is known only after the label does."""

import numpy as np

from isthmus.distill.evaluation.metrics import auc
from isthmus.distill.types import Array
from isthmus.features.values.columns import Values

SAYS = 0.999
"""An input with such an AUC is no feature: it is the label under another name, or all that a model could find."""

FEW = 20
"""Of fewer rows with a value and one of the labels, an order may be perfect by chance."""


def saying(values: Values, labels: Array) -> float:
    """How well one input tells the labels apart: the AUC of its order, or of whether it is null, the better of both.

    Texts have no order: a text counts for the share of ones among the rows of even number that have it, and the AUC is
    that of the others. So a key of which each row has its own says nothing.

    Args:
        values: (n,) numbers or texts.
        labels: (n,) 0 or 1.

    Returns:
        From 0.5, where nothing is said or rows are too few, to 1.
    """
    there, data = values.valid, values.data
    if data.dtype.kind == "f":
        there = there & ~np.isnan(data)
    data, kept = data[there], labels[there]
    if data.dtype == object:
        # Arrays have no order, and hardly ever two the same.
        data, kept = _shares(data, kept) if isinstance(next(iter(data), ""), str | bytes) else (data[:0], kept[:0])
    return max(_either_way(there, labels), _either_way(data, kept))


def _shares(texts: Array, labels: Array) -> tuple[Array, Array]:
    """What the texts of every second row say of it, and the labels of these rows."""
    words, place = np.unique(texts, return_inverse=True)
    told, asked, labeled = place[::2], place[1::2], labels[::2]
    rows, ones = (np.bincount(told, weights, len(words)) for weights in (None, labeled))
    # A text that has not been met counts for what all do, one that was met once for little more.
    share = (ones + labels.sum() / max(1, len(labels))) / (rows + 1)
    return share[asked], labels[1::2]


def _either_way(scores: Array, labels: Array) -> float:
    ones = int(labels.sum())
    if min(ones, len(labels) - ones) < FEW:
        return 0.5
    found = auc(labels, scores)
    return max(found, 1 - found)
