"""Weights of rows: a column of the training set, and weights that balance classes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from isthmus.distill.declaration import Predictor
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.tasks.split import PARTS, required_column
from isthmus.distill.types import Array, Index
from isthmus.features.errors import DataError

_EXPECTED = "numbers from 0, finite in float32"


def row_weights(table: pa.Table, declared: Predictor, labels: Array, train: Index) -> Array | None:
    """Return the weight of each row, float64 (n,), or None if all rows count the same.

    With balanced classes, the weight is divided by the share of the weights of the row's class, so that all classes
    have the same weight in the training part. `labels` has class numbers from 0, or -1 or NaN without a label, and
    `train` the training rows with a label.

    Raise a DataError if a weight is missing, negative or not finite, or if the rows of the training part or of one of
    its classes have no weight.
    """
    if declared.weight is None and declared.class_weight is None:
        return None
    weights = np.ones(len(table)) if declared.weight is None else _column(table, declared.weight)
    where = f"weight {declared.weight}"
    if not weights[train].any():
        raise DataError(where, f"0 in all {len(train):,} rows of the {PARTS[0]} part", expected="a row above 0")
    if declared.class_weight is None:
        return weights
    sums = np.bincount(labels[train].astype(np.int64), weights[train])
    if not sums.all():
        found = f"0 in all rows of a class in the {PARTS[0]} part"
        raise DataError(where, found, expected="a row above 0 in each class", remedy="leave class_weight out")
    factors = (sums.sum() / len(sums) / sums)[np.maximum(np.nan_to_num(labels), 0).astype(np.int64)]
    # Rows without a label, which the teacher alone teaches, keep their weight.
    balanced: Array = weights * np.where(labels >= 0, factors, 1.0)
    return balanced


def _column(table: pa.Table, name: str) -> Array:
    try:
        values: Array = pc.cast(required_column(table, name, _EXPECTED), pa.float64()).to_numpy()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"weight {name}", str(error), expected=_EXPECTED) from error
    if len(wrong := np.flatnonzero(~((values >= 0) & (values <= np.finfo(np.float32).max)))):
        found = f"{len(wrong):,} of {len(values):,} rows are wrong, such as row {wrong[0]}: {values[wrong[0]]:g}"
        raise DataError(
            f"weight {name}", found, expected=_EXPECTED, remedy="give rows that must not count the weight 0"
        )
    return values


def weighted_targets(targets: Tensor, weights: Array) -> Tensor:
    """Return labels and weights as float32 (n, 2) or (n, 2, classes), the labels of a `weighted` objective."""
    labels = targets.numpy()
    each = np.broadcast_to(weights, labels.T.shape).T
    return torch.tensor(np.stack([labels, each], 1), dtype=torch.float32)


def weighted(objective: Objective, dtype: torch.dtype) -> Objective:
    """Return an objective whose losses get weights, from labels as `weighted_targets` returns them.

    `dtype` is the type of the labels that the losses take.
    """
    return objective.changed(lambda term: _weighted(term, dtype))


def _weighted(term: Term, dtype: torch.dtype) -> Term:
    named = {name for name, source in term.arguments.items() if source == "labels"}
    sources = {name: source for name, source in term.arguments.items() if source != "labels"}
    return Term(partial(_apply, term.loss, named, dtype), term.weight, **sources, labels_and_weights="labels")


def _apply(
    loss: Callable[..., Tensor], named: set[str], dtype: torch.dtype, /, *, labels_and_weights: Tensor, **tensors: Any
) -> Tensor:
    labels, weights = labels_and_weights.unbind(1)
    return loss(**tensors, **dict.fromkeys(named, labels.to(dtype)), weights=weights)
