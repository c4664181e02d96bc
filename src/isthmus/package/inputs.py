"""Input tensors of a model of rows. Training, export, verification and serving all build them with `feeds`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from isthmus.features.errors import DataError
from isthmus.features.request.layout import VALID, Layout, input_name
from isthmus.features.types import VECTOR, DataType, String, element_names, is_readable
from isthmus.features.values.columns import Values, first_wrong_size
from isthmus.package.texts import TextTokenizer

Feeds = dict[str, np.ndarray[Any, Any]]
Truth = Literal["uint8", "bool"]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A raw input of a model. Unless `row` or `text` is True, a String is a category and any other type numbers.

    Attributes:
        row: True if a request transform in the graph reads the value, unchanged and in its own type.
        truth: element type of booleans and masks in the tensors of such inputs; "bool" in earlier packages.
        size: number of elements of an array; None for a single value.
        text: True for a String that the model reads as tokens.
        tokenizer: tokenizer of such an input, which `feeds` needs.
    """

    name: str
    dtype: DataType
    row: bool = False
    truth: Truth = "uint8"
    size: int | None = None
    text: bool = False
    tokenizer: TextTokenizer | None = None

    @property
    def is_category(self) -> bool:
        return self.dtype == String and not self.row and not self.text

    @property
    def is_number(self) -> bool:
        return self.dtype != String and not self.row and not self.text

    @property
    def elements(self) -> list[str]:
        return element_names(self.name, self.size)


def feeds(inputs: Sequence[ModelInput], columns: Mapping[str, Values]) -> Feeds:
    """Build the input tensors of a model from n rows of raw feature values, by tensor name, to run its graph.

    `inputs` are the model's inputs in order, and `columns` has their values by name. Other columns are ignored.
    "numeric" is float32 of shape (n, number of numeric inputs), with NaN for null and microseconds since 1970 UTC for a
    UnixTimestamp; an array has a column per element. "categories" is an object array of str, of shape (n, number of
    String inputs), with "" for null.
    "input_ids" and "attention_mask" have the tokens of a text. A null is tokenized like an empty text.
    Inputs of request transforms are in other tensors, one per type, with a row per input (see `request.layout`). A
    tensor without inputs is omitted. Raises DataError if a column is missing, or if models cannot read an input's type.
    """
    missing = [item.name for item in inputs if item.name not in columns]
    if missing:
        raise DataError("model inputs", f"no column {', '.join(missing)}", expected="a column for every input")
    if unusable := [item for item in inputs if not is_readable(item.dtype, item.size)]:
        where = f"model input {unusable[0].name}"
        raise DataError(where, f"its type is {unusable[0].dtype}", expected=f"a number, a String or a sized {VECTOR}")
    numbers = [item for item in inputs if item.is_number]
    categories = [columns[item.name] for item in inputs if item.is_category]
    tensors: Feeds = {}
    if numbers:
        width, position = sum(item.size or 1 for item in numbers), 0
        numeric = np.empty((len(columns[numbers[0].name].data), width), np.float32)
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite, and the model clips them
            for item in numbers:
                values = columns[item.name]
                if item.size is None:
                    numeric[:, position] = values.data
                    numeric[~values.valid, position] = np.nan
                else:
                    numeric[:, position : position + item.size] = elements(item, values)
                position += item.size or 1
        tensors["numeric"] = numeric
    if categories:
        texts = np.empty((len(categories[0].data), len(categories)), object)
        for position, values in enumerate(categories):
            texts[:, position] = values.data
            texts[~values.valid, position] = ""
        tensors["categories"] = texts
    for item in inputs:
        if item.tokenizer is not None:
            values = columns[item.name]
            tensors |= item.tokenizer.feeds(np.where(values.valid, values.data, "").tolist())
    rows = {item.name: item.dtype for item in inputs if item.row}
    if rows:
        tensors |= Layout.of(rows).feeds(columns)
        if any(item.truth == "uint8" for item in inputs if item.row):
            for name in (input_name(VALID), input_name("bool")):
                if name in tensors:
                    tensors[name] = tensors[name].view(np.uint8)
    return tensors


def elements(item: ModelInput, values: Values) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the elements of an input's n arrays, float32 (n, size), with NaN in the row of a null array."""
    assert item.size is not None  # noqa: S101 - an array
    if wrong := first_wrong_size(values.data, item.size):
        found = f"an array of {wrong[1]} elements in row {wrong[0]}"
        raise DataError(f"model input {item.name}", found, expected=f"{item.size} elements")
    rows = np.full((len(values.data), item.size), np.nan, np.float32)
    if values.valid.any():
        rows[values.valid] = np.stack([*values.data[values.valid]])
    return rows
