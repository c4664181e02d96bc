"""Convert Arrow columns to JSON values of the API. Pushing these values restores the same column."""

import base64
import math
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_BYTES = (pa.binary(), pa.large_binary(), pa.binary_view())


def plain(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Convert an Arrow column to JSON values that `isthmus push` can send to the API.

    Times become microseconds since 1970 UTC, bytes Base64, and NaN and infinities text. Times without a zone or finer
    than a microsecond, and values of other types, become text, which the API accepts only for String features.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        return plain(column.cast(kind.value_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        items = iter(plain(pc.list_flatten(column)))
        return [
            None if length is None else [next(items) for _ in range(length)]
            for length in pc.list_value_length(column).to_pylist()
        ]
    if pa.types.is_timestamp(kind):
        whole = _micros(column) if kind.tz else None
        return list((_text(column) if whole is None else whole).to_pylist())
    if pa.types.is_floating(kind):
        return [_number(value) for value in column.to_pylist()]
    if kind in _BYTES or pa.types.is_fixed_size_binary(kind):
        return [None if value is None else base64.b64encode(value).decode() for value in column.to_pylist()]
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return list(column.to_pylist())
    return [value if value is None else str(value) for value in column.to_pylist()]


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _micros(times: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array | None:
    try:
        return times.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    except pa.ArrowInvalid:
        return None


def _text(times: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    return pc.replace_substring(times.cast(pa.string()), " ", "T")
