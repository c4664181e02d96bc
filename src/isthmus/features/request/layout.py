"""The tensors of a request transform's graph (`Layout`), its results (`Computed`) and refused rows (`InputRefusal`)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from isthmus.features.errors import DataError
from isthmus.features.request.onnxbytes import NUMPY
from isthmus.features.types import DataType
from isthmus.features.values.columns import Mask, Values, first_wrong_size

# Each tensor adds as much to a call of the runtime as several nodes, so columns of one element type are the rows of one
# tensor. A graph takes `given_<element>` of shape (columns, n) for each of bool, int32, int64, float, double and string
# in use, with any value where a column is null, and the booleans `given_valid` of shape (all columns, n). An array
# column is a separate tensor, `given_array_<column>` of shape (size, n), and shares `given_valid`. The graph returns
# `found_<element>` in the same form, with any value where a field is null or refused, and `found_masks` of shape
# (2 fields, n): first the validity of each field, ignoring refusals, then True where Spark would refuse to compute it.
# The layout is in the metadata of the model.

VALID, MASKS, NOTES = "valid", "found_masks", "rows"
"""Element of the input masks, name of the output masks, and metadata key of the layout."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The fields of a request transform for n rows. `refused` has masks of refused rows, for fields that have any."""

    values: Mapping[str, Values]
    refused: Mapping[str, Mask]


@dataclass(frozen=True, slots=True)
class InputRefusal:
    """A row for which Spark would refuse to compute a field.

    Attributes:
        field: refused field; with `rule`, the request field that breaks its rule.
        row: number of the row, from 0.
        shown: text with the values that caused it.
        expected: values that could be computed.
    """

    field: str
    row: int
    shown: str
    expected: str
    rule: bool = False


class Layout(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True,
    rename={"inputs": "given", "outputs": "found"},
):  # fmt: skip
    """The tensor and row of each column in a request transform's ONNX graph, which has one tensor per element type.

    A column's row is its place in the list of its element type. `masks` has all input columns, `fields` all output
    fields, and `arrays` the element type and size of array columns.
    """

    inputs: Mapping[str, Sequence[str]]
    masks: Sequence[str]
    outputs: Mapping[str, Sequence[str]]
    fields: Sequence[str]
    arrays: Mapping[str, tuple[str, int]] = {}  # omitted if empty, so graphs without arrays keep their bytes

    @classmethod
    def of(cls, columns: Mapping[str, DataType]) -> "Layout":
        rows: dict[str, list[str]] = {}
        for name, dtype in columns.items():
            rows.setdefault(dtype.tensor, []).append(name)
        return cls(rows, list(columns), {}, [])

    def dumps(self) -> str:
        return json.dumps(msgspec.to_builtins(self), sort_keys=True)

    @classmethod
    def loads(cls, text: str) -> "Layout":
        return msgspec.json.decode(text, type=cls)

    def feeds(self, columns: Mapping[str, Values]) -> dict[str, np.ndarray[Any, Any]]:
        masks = _rows([columns[name].valid for name in self.masks])
        feeds = {input_name(VALID): masks}
        for element, names in self.inputs.items():
            data = [columns[name].data for name in names]
            if element == "string" and np.count_nonzero(masks) != masks.size:
                data = [np.where(columns[name].valid, part, "") for name, part in zip(names, data, strict=True)]
            rows = _rows(data)
            feeds[input_name(element)] = rows.view(np.bool_) if element == "bool" else rows
        for name, (element, size) in self.arrays.items():
            feeds[array_input_name(name)] = _elements(name, columns[name], element, size)
        return feeds


def input_name(element: str) -> str:
    return f"given_{element}"


def array_input_name(column: str) -> str:
    return input_name(f"array_{column}")


def output_name(element: str) -> str:
    return f"found_{element}"


def _rows(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return parts[0][None] if len(parts) == 1 else np.concatenate(parts).reshape(len(parts), -1)


def _elements(name: str, values: Values, element: str, size: int) -> np.ndarray[Any, Any]:
    if wrong := first_wrong_size(values.data, size):
        raise DataError(f"column {name}", f"an array of {wrong[1]} elements in row {wrong[0]}", expected=f"{size}")
    rows = np.full((len(values.data), size), "" if element == "string" else 0, NUMPY[element])
    if arrays := values.data[values.valid].tolist():
        rows[values.valid] = np.concatenate(arrays).reshape(-1, size) if element != "string" else arrays
    return np.ascontiguousarray(rows.T)
