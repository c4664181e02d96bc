"""Encode values as the JSON of an answer."""

import math
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from isthmus.features.types import Bytes, DataType
from isthmus.features.values.columns import split

OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z


LABELS = ("PRESENT", "NULL_VALUE", "OUTSIDE_MAX_AGE", "NOT_FOUND", "INVALID")
"""Feast's name for each code of `Status`."""


Nulls = np.ndarray[Any, np.dtype[np.bool_]]
_SHORT = 16
"""Number of array items below which orjson writes a list faster."""
_SECOND = 1_000_000
_EXACT = 53
"""Bits of an integer that a double represents exactly."""
CALENDAR = (-62_135_596_800 * _SECOND, 253_402_300_800 * _SECOND - 1)
"""The years 1 to 9999, in microseconds."""
EPOCH = b'"1970-01-01T00:00:00Z"'
_WORDS = [(bytes([code]), f'"{label}",'.encode()) for code, label in enumerate(LABELS)]


def labels(codes: np.ndarray[Any, np.dtype[np.uint8]]) -> list[str]:
    return [LABELS[code] for code in codes.tolist()]


def json_columns(dtype: DataType, data: np.ndarray[Any, Any], null: Nulls | None = None) -> list[Any]:
    """Convert columns of one type to lists or arrays that orjson can encode. `data` has shape (columns, rows).

    A timestamp becomes seconds since 1970, as in Feast, with a fraction if any value of its column has one. NaN and
    infinity become strings, and bytes become Base64. `null` is True where a value is null, or None if no value is. It
    is ignored for texts, bytes and arrays, which hold None themselves.
    """
    if dtype.element is not None:
        return [_arrays(dtype.element, column) for column in data]
    match dtype.name:
        case "Float32" | "Float64":
            wide = np.array(data, np.float64, order="C")
            finite = np.isfinite(wide)
            if null is not None:
                # orjson writes NaN as null.
                wide[null] = np.nan
                finite |= null
            columns = _rows(wide)
            if np.count_nonzero(finite) != finite.size:
                for n in np.flatnonzero(~finite.all(axis=1)).tolist():
                    columns[n] = wide[n].tolist()
                    for place in np.flatnonzero(~finite[n]).tolist():
                        columns[n][place] = _word(columns[n][place])
            return columns
        case "Int32" | "Int64":
            return _masked(_rows(np.array(data, order="C")), null)
        case "Bool":
            return _masked(_rows(np.array(data, bool, order="C")), null)
        case "UnixTimestamp":
            return _masked([_seconds(column) for column in data], null)
        case "Bytes":
            return [base64_texts(column) for column in data.tolist()]
    texts: list[Any] = data.tolist()
    return texts


def repeated(item: bytes, count: int) -> bytes:
    return b"[" + ((item + b",") * count)[:-1] + b"]"


def _seconds(column: np.ndarray[Any, Any]) -> Any:
    if not (column % _SECOND).any():
        return column // _SECOND
    if (np.abs(column) >> _EXACT).any():
        # Do not convert to double first, which would round twice.
        return [value / _SECOND for value in column.tolist()]
    return column / _SECOND


def _rows(matrix: np.ndarray[Any, Any]) -> list[Any]:
    """Split a matrix into rows. orjson writes short lists faster than short arrays, and long arrays without a copy."""
    rows: list[Any] = matrix.tolist() if matrix.shape[1] < _SHORT else list(matrix)
    return rows


def _masked(columns: list[Any], null: Nulls | None) -> list[Any]:
    if null is None:
        return columns
    for n in np.flatnonzero(null.any(axis=1)).tolist():
        column = columns[n] if isinstance(columns[n], list) else columns[n].tolist()
        for place in np.flatnonzero(null[n]).tolist():
            column[place] = None
        columns[n] = column
    return columns


def _arrays(element: DataType, column: np.ndarray[Any, Any]) -> list[Any]:
    rows: list[Any] = column.tolist()
    arrays = [array for array in rows if array is not None]
    if element.numpy is None or not arrays:
        return [None if array is None else base64_texts(array) for array in rows] if element == Bytes else rows
    (flat,) = json_columns(element, np.concatenate(arrays)[None])
    if len(flat) < _SHORT * len(arrays) and isinstance(flat, np.ndarray):
        flat = flat.tolist()
    lengths = [0 if array is None else len(array) for array in rows]
    return list(split(flat, lengths, [array is not None for array in rows]))


def base64_texts(values: Sequence[bytes | None]) -> list[str | None]:
    return [None if value is None else b64encode(value).decode() for value in values]


def status_words(codes: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    text = codes.tobytes()
    for code, word in _WORDS:
        text = text.replace(code, word)
    return b"[" + text[:-1] + b"]"


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
