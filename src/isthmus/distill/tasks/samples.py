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


def edges(row: Columns, types: Mapping[str, DataType]) -> dict[str, Values]:
    edge_rows = {}
    for name, values in row.items():
        dtype = types[name]
        zero = {"String": "", "Bool": False}.get(dtype.name, 0)
        last = UNSEEN if dtype.name == "String" else values.tolist(dtype)[0]
        edge_rows[name] = from_python([None, zero, *_EDGES[dtype.name], last], dtype)
    return edge_rows


def take(columns: Columns, rows: Index | np.ndarray[Any, np.dtype[np.bool_]] | slice) -> dict[str, Values]:
    return {name: values.take(rows) for name, values in columns.items()}


def plain(columns: Columns, inputs: Iterable[ModelInput]) -> list[tuple[Any, ...]]:
    types = {item.name: item.dtype for item in inputs}
    return list(zip(*(_words(columns[name], dtype) for name, dtype in types.items()), strict=True))


def _words(values: Values, dtype: DataType) -> list[Any]:
    if dtype.name == "Float32":
        # Use the fewest digits that float32 parses to the same number.
        short = np.array([float(str(value)) for value in values.data], np.float64)
        return [_word(value) for value in Values(short, values.valid).tolist(Float64)]
    return [_word(value) for value in values.tolist(dtype)]


def _word(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
