"""Golden rows, which let a device check a model's outputs: rows with extreme values, and rows as JSON values."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from isthmus.distill.types import Index
from isthmus.features.types import DataType, Float64
from isthmus.features.values.columns import Values, from_python
from isthmus.package.inputs import ModelInput

UNSEEN = "\x7fnever in training"

Columns = Mapping[str, Values]

_LARGEST = float(np.finfo(np.float32).max)
_EDGES: dict[str, tuple[Any, Any]] = {
    "Bool": (True, False),
    "Int32": (2**31 - 1, -(2**31)),
    "Int64": (2**63 - 1, -(2**63)),
    "UnixTimestamp": (253_402_300_799_999_999, -62_135_596_800_000_000),
    "Float32": (_LARGEST, -_LARGEST),
    "Float64": (_LARGEST, -_LARGEST),
    "String": (UNSEEN, UNSEEN),
}
"""Extremes of each type: times span years with four digits, doubles the range of float32, the network's type."""


def edges(row: Columns, inputs: Iterable[ModelInput]) -> dict[str, Values]:
    edge_rows = {}
    for item in inputs:
        single = item.dtype.element or item.dtype
        zero = {"String": "", "Bool": False}.get(single.name, 0)
        last = UNSEEN if single.name == "String" else row[item.name].tolist(item.dtype)[0]
        values = [value if item.size is None else [value] * item.size for value in (zero, *_EDGES[single.name])]
        edge_rows[item.name] = from_python([None, *values, last], item.dtype)
    return edge_rows


def take(columns: Columns, rows: Index | np.ndarray[Any, np.dtype[np.bool_]] | slice) -> dict[str, Values]:
    return {name: values.take(rows) for name, values in columns.items()}


def plain(columns: Columns, inputs: Iterable[ModelInput]) -> list[tuple[Any, ...]]:
    types = {item.name: item.dtype for item in inputs}
    return list(zip(*(_words(columns[name], dtype) for name, dtype in types.items()), strict=True))


def _words(values: Values, dtype: DataType) -> list[Any]:
    if (element := dtype.element) is not None:
        arrays = (None if array is None else Values(array, np.ones(len(array), bool)) for array in values.data)
        return [None if array is None else tuple(_words(array, element)) for array in arrays]
    if dtype.name == "Float32":
        # Use the fewest digits that float32 parses to the same number.
        short = np.array([float(str(value)) for value in values.data], np.float64)
        return [_word(value) for value in Values(short, values.valid).tolist(Float64)]
    return [_word(value) for value in values.tolist(dtype)]


def _word(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
