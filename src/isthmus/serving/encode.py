"""Values as the JSON of an answer."""

from typing import Any

import numpy as np
import orjson

from isthmus.features.types import DataType
from isthmus.serving.lookup import Nulls, _arrays, _coded, _masked, _rows, _seconds, _word

OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NAIVE_UTC | orjson.OPT_UTC_Z


LABELS = ("PRESENT", "NULL_VALUE", "OUTSIDE_MAX_AGE", "NOT_FOUND")
"""Feast's word for each code of `Status`."""


def labels(codes: np.ndarray[Any, np.dtype[np.uint8]]) -> list[str]:
    """Feast's words for codes of `Status`."""
    return [LABELS[code] for code in codes.tolist()]


def json_columns(dtype: DataType, data: np.ndarray[Any, Any], null: Nulls | None = None) -> list[Any]:
    """Columns of one type, shape (m, n), as orjson writes them.

    A float32 is widened to the double it is, a timestamp is seconds (with a fraction where a column has one), as in
    Feast. A number that is not finite is a word, bytes are Base64.

    Args:
        dtype: the type of all.
        data: the values as `Values` has them.
        null: shape (m, n); None if there is no null.
    """
    if dtype.element is not None:
        return [_arrays(dtype.element, column) for column in data]
    match dtype.name:
        case "Float32" | "Float64":
            wide = np.array(data, np.float64, order="C")
            finite = np.isfinite(wide)
            if null is not None:
                # orjson writes NaN as null, which is what a null is.
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
            return [_coded(column) for column in data.tolist()]
    texts: list[Any] = data.tolist()
    return texts


def repeated(item: bytes, count: int) -> bytes:
    """A JSON array that holds one item `count` times."""
    return b"[" + ((item + b",") * count)[:-1] + b"]"
