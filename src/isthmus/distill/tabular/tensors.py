"""Reads training sets into NumPy arrays for learners and networks."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.types import Array, Index
from isthmus.features.errors import DataError
from isthmus.features.values.arrow import ARROW, from_arrow
from isthmus.features.values.columns import Values
from isthmus.package.inputs import ModelInput, elements, feeds

VOCABULARY = 254
"""Maximum number of categories per column: histogram gradient boosting allows 255, including missing."""


class TabularTensors(msgspec.Struct, frozen=True, eq=False):
    """The inputs of n rows: float32 (n, numbers) with NaN for null, and texts (n, categories) with "" for null."""

    numeric: Array
    categories: Array

    def __getitem__(self, rows: Index | slice) -> "TabularTensors":
        return TabularTensors(self.numeric[rows], self.categories[rows])


def tensors(table: pa.Table, inputs: Sequence[ModelInput]) -> TabularTensors:
    return network_inputs(columns(table, inputs), inputs, table.num_rows)


def columns(table: pa.Table, inputs: Sequence[ModelInput]) -> dict[str, Values]:
    return {item.name: _column(table, item) for item in inputs}


def scalar_columns(table: pa.Table, inputs: Sequence[ModelInput]) -> dict[str, Values]:
    """Return the values of each input by name; for an array, of each of its elements."""
    scalars: dict[str, Values] = {}
    for item, values in zip(inputs, columns(table, inputs).values(), strict=True):
        parts = [values.data] if item.size is None else elements(item, values).T
        scalars |= {name: Values(part, values.valid) for name, part in zip(item.elements, parts, strict=True)}
    return scalars


def network_inputs(values: Mapping[str, Values], inputs: Sequence[ModelInput], count: int) -> TabularTensors:
    empty = {"numeric": np.empty((count, 0), np.float32), "categories": np.empty((count, 0), object)}
    return TabularTensors(**{**empty, **feeds(inputs, values)})


def _column(table: pa.Table, item: ModelInput) -> Values:
    if item.name not in table.column_names:
        raise DataError("training set", f"no column {item.name}", expected=f"{item.name} of type {item.dtype}")
    try:
        return from_arrow(pc.cast(table[item.name], ARROW[item.dtype.name]), item.dtype)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"column {item.name}", str(error), expected=f"values of type {item.dtype}") from error


def vocabularies(train: TabularTensors) -> list[tuple[str, ...]]:
    known = []
    for column in train.categories.T:
        counts = Counter(column.tolist())
        del counts[""]
        known.append(tuple(sorted(counts, key=lambda text: (-counts[text], text))[:VOCABULARY]))
    return known
