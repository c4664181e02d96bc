"""Training sets as tensors, and what preprocessing learns from the training part."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.split import Index
from isthmus.features.columns import ARROW, Values, from_arrow
from isthmus.features.errors import DataError
from isthmus.features.manifest import Feeds, ModelInput, feeds

VOCABULARY = 254
"""Most categories per column; histogram gradient boosting takes 255 with the missing one."""
INDICATOR_SHARE = 0.01
"""A number that is missing in a smaller share of the training rows gets no missing indicator."""

Array = np.ndarray[Any, Any]


class Tensors(msgspec.Struct, frozen=True, eq=False):
    """The inputs of n rows: float32 (n, numbers) with NaN for null, and texts (n, categories) with "" for null."""

    numeric: Array
    categories: Array

    @property
    def feeds(self) -> Feeds:
        """The tensors that have columns, by the names that a graph without a head gives them."""
        tensors = {"numeric": self.numeric, "categories": self.categories}
        return {name: tensor for name, tensor in tensors.items() if tensor.shape[1]}

    def __getitem__(self, rows: Index | slice) -> "Tensors":
        return Tensors(self.numeric[rows], self.categories[rows])


def tensors(table: pa.Table, inputs: Sequence[ModelInput]) -> Tensors:
    """The inputs of every row of a table.

    Raises:
        DataError: a column is missing, or its values do not fit the declared type.
    """
    return seen(columns(table, inputs), inputs, table.num_rows)


def columns(table: pa.Table, inputs: Sequence[ModelInput]) -> dict[str, Values]:
    """The columns of some inputs.

    Raises:
        DataError: a column is missing, or its values do not fit the declared type.
    """
    return {item.name: _column(table, item) for item in inputs}


def seen(given: Mapping[str, Values], inputs: Sequence[ModelInput], count: int) -> Tensors:
    """What a network sees of `count` rows."""
    fed = feeds(inputs, given)
    return Tensors(
        fed.get("numeric", np.empty((count, 0), np.float32)), fed.get("categories", np.empty((count, 0), object))
    )


def _column(table: pa.Table, item: ModelInput) -> Values:
    if item.name not in table.column_names:
        raise DataError("training set", f"no column {item.name}", expected=f"{item.name} of type {item.dtype}")
    try:
        return from_arrow(pc.cast(table[item.name], ARROW[item.dtype.name]), item.dtype)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"column {item.name}", str(error), expected=f"values of type {item.dtype}") from error


class Preprocessing(msgspec.Struct, frozen=True):
    """What turns raw inputs into a student's inputs; the graph of the student holds all of it.

    Attributes:
        mean: per number, over its finite values in the training part; 0 for a column without any.
        scale: its standard deviation; 1 for a constant column.
        indicators: positions of the numbers whose absence is an input of its own.
        vocabularies: per category the known texts, most frequent first; a text's index is its place, from 1 on. Null,
            "" and unknown texts have index 0.
    """

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    indicators: tuple[int, ...]
    vocabularies: tuple[tuple[str, ...], ...]

    def index(self, categories: Array) -> Array:
        """int64 (n, categories): the index of each text."""
        result = np.empty(categories.shape, np.int64)
        for position, vocabulary in enumerate(self.vocabularies):
            places = {text: place for place, text in enumerate(vocabulary, 1)}
            result[:, position] = [places.get(text, 0) for text in categories[:, position]]
        return result


def fit(train: Tensors) -> Preprocessing:
    """The preprocessing of a training part."""
    mean, scale, indicators = [], [], []
    for position in range(train.numeric.shape[1]):
        column = train.numeric[:, position].astype(np.float64)
        share = float(np.isnan(column).mean())
        finite = column[np.isfinite(column)]
        spread = float(finite.std()) if len(finite) else 0.0
        mean.append(float(finite.mean()) if len(finite) else 0.0)
        # A smaller spread would vanish in float32 and divide by zero.
        scale.append(spread if spread > np.finfo(np.float32).tiny else 1.0)
        if INDICATOR_SHARE <= share < 1:
            indicators.append(position)
    vocabularies = []
    for column in train.categories.T:
        counts = Counter(column.tolist())
        del counts[""]
        ordered = sorted(counts, key=lambda text: (-counts[text], text))
        vocabularies.append(tuple(ordered[:VOCABULARY]))
    return Preprocessing(tuple(mean), tuple(scale), tuple(indicators), tuple(vocabularies))
