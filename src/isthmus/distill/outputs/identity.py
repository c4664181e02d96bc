"""Row identities: sixteen bytes that depend on the content of a row, not on the table it is in."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from isthmus.distill.types import Array
from isthmus.features.errors import DataError

_PLAIN = (bool, int, float, date, Decimal)


def identities(columns: pa.Table | Mapping[str, Any], *, seed: int | None = None) -> Array:
    """Return a 16-byte identity per row, uint8 (n, 16): the keys under which a teacher's outputs are cached.

    The identity is a hash (SHA-256) of the row's content. Rows with equal content have equal identities in every table,
    so the teacher computes them only once.

    Args:
        columns: everything that identifies a row, by name: keys, event time, and all content that the teacher sees. A
            column is an array, a tensor (n, ...), or a sequence of texts, bytes, numbers, times, arrays, lists of
            these, and None. The order of columns does not matter; float32 and float64 values differ.
        seed: seed of the random augmentation, if the teacher sees augmented content; None otherwise.

    Raises:
        DataError: there are no columns, they have different lengths, or a value has an unsupported type.
    """
    items = (
        zip(columns.column_names, columns.columns, strict=True) if isinstance(columns, pa.Table) else columns.items()
    )
    encoded = dict(sorted((name, _column(name, column)) for name, column in items))
    lengths = {name: count for name, (_, count, _) in encoded.items()}
    if len(set(lengths.values())) != 1:
        raise DataError("identities of rows", f"columns of {lengths or 'no'} rows", expected="columns of one length")
    begin = hashlib.sha256(repr([seed, [(name, kind) for name, (kind, _, _) in encoded.items()]]).encode())
    (count,) = set(lengths.values())
    result = np.empty((count, 16), np.uint8)
    for row, values in enumerate(zip(*(values for _, _, values in encoded.values()), strict=True)):
        sha = begin.copy()
        for value in values:
            sha.update(value)
        result[row] = np.frombuffer(sha.digest(), np.uint8, 16)
    return result


def _column(name: str, column: Any) -> tuple[str, int, Iterable[Any]]:
    if isinstance(column, pa.ChunkedArray | pa.Array):
        # The type tells a date from a text with the same characters.
        kind = str(column.type)
        if pa.types.is_temporal(column.type) and not pa.types.is_interval(column.type):
            column = column.cast(pa.int32() if column.type.bit_width == 32 else pa.int64())
        return kind, len(column), (_bytes(name, value) for value in _listed(column))
    if isinstance(column, Tensor):
        column = column.detach().cpu().numpy()
    if isinstance(column, np.ndarray) and column.dtype.kind in "biufcSUMm" and column.ndim:
        rows = np.ascontiguousarray(column).reshape(len(column), -1) if column.size else column
        return f"{column.dtype.str} {column.shape[1:]}", len(column), rows.view(np.uint8) if column.size else rows
    values = list(column)
    return "values", len(values), (_bytes(name, value) for value in values)


def _listed(column: pa.ChunkedArray | pa.Array) -> Iterator[Any]:
    for begin in range(0, len(column), 4096):
        yield from column.slice(begin, 4096).to_pylist()


def _bytes(name: str, value: Any) -> bytes:
    if value is None:
        kind, content = "none", b""
    elif isinstance(value, str):
        kind, content = "text", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        kind, content = "bytes", value
    elif isinstance(value, Tensor):
        return _bytes(name, value.detach().cpu().numpy())
    elif isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSUMm":
        kind, content = f"array {value.dtype.str} {value.shape}", value.tobytes()
    elif isinstance(value, list | tuple):
        kind, content = "list", b"".join(_bytes(name, item) for item in value)
    elif isinstance(value, dict):
        kind, content = "map", b"".join(_bytes(name, part) for pair in value.items() for part in pair)
    elif isinstance(value, datetime):
        value = value if value.tzinfo is None else value.astimezone(UTC)
        kind, content = "time", value.isoformat().encode()
    elif isinstance(value, _PLAIN):
        kind, content = type(value).__name__, repr(value).encode()
    else:
        raise DataError(
            f"identities of rows, column {name}",
            f"a {type(value).__name__}",
            expected="a text, bytes, a number, a time, an array, or None",
        )
    return f"{kind} {len(content)} ".encode() + content
