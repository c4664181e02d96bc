"""Golden rows: what a device feeds a model to see that it answers as it should."""

from typing import Any

import numpy as np

from isthmus.distill.dataset import Tensors
from isthmus.distill.split import Index

ROWS = 64
UNSEEN = "\x7fnever in training"


def golden_rows(data: Tensors, test: Index) -> Tensors:
    """Rows spread over the test part, then the edges."""
    return join(data[test[spread(len(test), ROWS)]], edges(data[test[:1]]))


def edges(row: Tensors) -> Tensors:
    """All null, all zero, the extremes of float32, and a row with unseen texts."""
    largest = np.finfo(np.float32).max
    kinds = [(np.nan, ""), (0.0, ""), (largest, UNSEEN), (-largest, UNSEEN)]
    numeric = [np.full_like(row.numeric, number) for number, _ in kinds]
    categories = [np.full_like(row.categories, text) for _, text in kinds]
    return Tensors(
        np.concatenate([*numeric, row.numeric]),
        np.concatenate([*categories, np.full_like(row.categories, UNSEEN)]),
    )


def join(first: Tensors, second: Tensors) -> Tensors:
    """The rows of both."""
    return Tensors(
        np.concatenate([first.numeric, second.numeric]), np.concatenate([first.categories, second.categories])
    )


def spread(count: int, wanted: int) -> Index:
    """Up to `wanted` row numbers below `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(wanted, count)).astype(np.int64))


def plain(rows: Tensors, positions: list[tuple[str, int]]) -> list[list[Any]]:
    """The rows as JSON values in the order of the inputs: null for NaN and for "", float32 values exactly.

    Args:
        rows: the tensors.
        positions: tensor and column of each input.
    """
    columns = []
    for tensor, position in positions:
        if tensor == "categories":
            columns.append([text or None for text in rows.categories[:, position]])
        else:
            values = rows.numeric[:, position].astype(float).tolist()
            columns.append([None if value != value else value for value in values])
    return [list(row) for row in zip(*columns, strict=True)]
