"""What the tests of this folder share: contracts by hand, and strategies for values to the bit."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from isthmus.features import clock
from isthmus.features.contract.schema import Column, Contract, ViewContract
from isthmus.features.offline.history import LatestRows, ViewHistory, status_column
from isthmus.features.pointintime.join import moments
from isthmus.features.types import SCALARS, TYPES, Array, DataType, Int64
from isthmus.features.values.arrow import ARROW
from isthmus.features.values.columns import Values, from_python
from isthmus.features.values.rows import HEADER, VERSION, RowCodec

SECOND = 1_000_000
DAY = 86_400 * SECOND
FIRST, LAST = -62_135_596_800 * SECOND, 253_402_300_799 * SECOND + 999_999
"""The first and the last microsecond that a datetime can hold."""


def make_view(
    fields: Mapping[str, DataType],
    keys: Mapping[str, DataType] | None = None,
    ttl: int | None = None,
    name: str = "traffic",
    code: str = "1",
) -> ViewContract:
    columns = tuple(Column(field, dtype) for field, dtype in fields.items())
    key_columns = tuple(Column(key, dtype) for key, dtype in ({"k": Int64} if keys is None else keys).items())
    return ViewContract(name, ("thing",), key_columns, columns, ttl, 0, ("source",), code)


def make_contract(*views: ViewContract, project: str = "prod") -> Contract:
    return Contract(project, {view.name: view for view in views}, {}, {}, {})


def _of_bits(bits: bytes, dtype: str) -> float:
    return float(np.frombuffer(bits, dtype)[0])


def _edges(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def integers(bits: int) -> st.SearchStrategy[int]:
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    return st.integers(low, high) | _edges(low, -1, 0, 1, high)


# Signalling NaNs of Float32 are left out here: a Python float cannot carry one.
_QUIET_NANS = st.integers(0x7FC00000, 0x7FFFFFFF).map(lambda n: _of_bits(n.to_bytes(4, "little"), "<f4"))

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "Bool": st.booleans(),
    "Int32": integers(32),
    "Int64": integers(64),
    "Float32": st.floats(width=32) | _QUIET_NANS | _edges(-0.0, 0.0, float("inf"), float("-inf")),
    "Float64": st.binary(min_size=8, max_size=8).map(lambda bits: _of_bits(bits, "<f8")) | st.floats(),
    "UnixTimestamp": st.integers(FIRST, LAST) | _edges(FIRST, -1, 0, LAST),
    "String": st.text(max_size=12) | _edges("", "\0", "München", "東京", "🛫"),
    "Bytes": st.binary(max_size=12) | _edges(b"", b"\0", b"\0\0", b"\xff"),
}

VALUES |= {Array(scalar).name: st.lists(VALUES[scalar.name], max_size=4) for scalar in SCALARS}

ALL: dict[str, DataType] = {name.lower().replace("(", "_").rstrip(")"): dtype for name, dtype in TYPES.items()}
"""A feature of each type: `int64`, `array_int64`."""

DTYPES = st.sampled_from(list(TYPES.values()))
MOMENTS = integers(64)


def schemas(smallest: int, largest: int) -> st.SearchStrategy[dict[str, DataType]]:
    return st.lists(DTYPES, min_size=smallest, max_size=largest).map(
        lambda dtypes: {f"f{n}": dtype for n, dtype in enumerate(dtypes)}
    )


def values_of(fields: Mapping[str, DataType]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: st.none() | VALUES[dtype.name] for name, dtype in fields.items()})


def columns_of(view: ViewContract, rows: Sequence[Mapping[str, Any]]) -> dict[str, Values]:
    return {field.name: from_python([row[field.name] for row in rows], field.dtype) for field in view.fields}


def bits(value: Any, dtype: DataType) -> Any:
    """The value as bytes, an array as a list of them, so that NaN equals itself and -0.0 does not equal 0.0."""
    if value is None:
        return None
    if dtype.element is not None:
        return [bits(item, dtype.element) for item in value]
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    return np.array(value, dtype.numpy).tobytes()


def bits_of(values: Values, dtype: DataType) -> list[Any]:
    if dtype.numpy is None:
        return [bits(value, dtype) if valid else None for value, valid in zip(values.data, values.valid, strict=True)]
    return [values.data[n : n + 1].tobytes() if valid else None for n, valid in enumerate(values.valid.tolist())]


def arrow(values: Sequence[Any], dtype: DataType) -> pa.Array:
    """An Arrow column of Python values, NaNs to the bit."""
    if dtype.element is not None:
        offsets = np.cumsum([0, *(len(value or ()) for value in values)])
        flat = arrow([item for value in values for item in value or ()], dtype.element)
        mask = pa.array([value is None for value in values], pa.bool_())
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), flat, mask=mask)
    mask = np.array([value is None for value in values], bool)
    if dtype.name in ("Float32", "Float64"):
        return pa.array(np.array([0 if value is None else value for value in values], dtype.numpy), mask=mask)
    if dtype.name == "UnixTimestamp":
        return pa.array(values, pa.int64()).cast(ARROW[dtype.name])
    return pa.array(values, ARROW[dtype.name])


def times(values: Sequence[int]) -> pa.Array:
    return pa.array(values, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


def table(view: ViewContract, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """An offline table: each row holds the keys, `_event`, `_known` and the features."""
    data = {key.name: arrow([row[key.name] for row in rows], key.dtype) for key in view.keys}
    data["event_timestamp"] = times([row["_event"] for row in rows])
    data["known_at"] = times([row["_known"] for row in rows])
    for field in view.fields:
        data[field.name] = arrow([row[field.name] for row in rows], field.dtype)
    data["content_hash"] = pa.array(RowCodec(view).content(columns_of(view, rows), len(rows)), pa.int64())
    return pa.table(data)


def latest(history: ViewHistory, at: int) -> pa.Table:
    """The row of each key of a history in memory at a moment."""
    state = LatestRows.of(history, at)
    return pa.concat_tables(state.rows(np.arange(len(state.content))))


def same_bits(left: pa.Table, right: pa.Table) -> bool:
    """Whether two tables hold the same values to the bit, in the same order, under the same names."""
    if left.column_names != right.column_names or len(left) != len(right):
        return False
    return all(_plain(left[name]) == _plain(right[name]) for name in left.column_names)


def _plain(values: pa.ChunkedArray) -> list[Any]:
    found = values.combine_chunks()
    if pa.types.is_list(found.type):
        return [None if not item.is_valid else _plain(pa.chunked_array([item.values])) for item in found]
    if pa.types.is_floating(found.type):
        # By Arrow's own bytes: a Python float does not carry every NaN.
        code = f"<u{found.type.bit_width // 8}"
        whole = np.frombuffer(found.buffers()[1] or b"", code)[found.offset : found.offset + len(found)]
        return [
            value if valid else None for value, valid in zip(whole.tolist(), found.is_valid().to_pylist(), strict=True)
        ]
    if pa.types.is_timestamp(found.type):
        found = found.cast(pa.int64())
    listed: list[Any] = found.to_pylist()
    return listed


def join_naively(spine: pa.Table, history: ViewHistory) -> pa.Table:
    """Joins a view to a spine row by row with `clock.as_of`: the oracle of `point_in_time`."""
    view, table = history.view, history.table()
    rows: dict[tuple[object, ...], list[clock.Row]] = {}
    place: dict[int, int] = {}
    times = [table[name].cast(pa.int64()).to_pylist() for name in ("event_timestamp", "known_at")]
    features = [table[column.name].to_pylist() for column in view.fields]
    keys = [table[column.name].to_pylist() for column in view.keys]
    for n, content in enumerate(table["content_hash"].to_pylist()):
        row = clock.Row(times[0][n], times[1][n], content, tuple(column[n] for column in features))
        rows.setdefault(tuple(key[n] for key in keys), []).append(row)
        place[id(row)] = n
    winners, statuses = [], []
    spine_keys = zip(*(spine[column.name].to_pylist() for column in view.keys), strict=True)
    for key, at in zip(spine_keys, moments(spine, 0).tolist(), strict=True):
        winner, status = clock.as_of(rows.get(key, ()), at, view.ttl)
        winners.append(place[id(winner)] if winner else None)
        statuses.append(int(status))
    for column in view.fields:
        # Arrow copies the values: a signaling NaN does not survive Python's float.
        values = table[column.name].take(pa.array(winners, pa.int64()))
        spine = spine.append_column(view.full_name(column.name), values)
    labels = pa.array([status.label for status in clock.Status])
    column = pa.DictionaryArray.from_arrays(pa.array(statuses, pa.int8()), labels)
    return spine.append_column(status_column(view), column)


def encode_row(view: ViewContract, event: int, known: int, values: Mapping[str, Any]) -> bytes:
    """A packed row, written as the layout reads: the oracle of `RowCodec`. Values are Python's, times microseconds."""
    nulls, fixed, ends, tail = 0, b"", b"", b""
    for bit, column in enumerate(view.fields):
        nulls |= (values[column.name] is None) << bit
    for column in view.fields:
        encoded = _encode_value(values[column.name], column.dtype)
        if column.dtype.numpy is None:
            tail += encoded
            ends += struct.pack("<I", len(tail))
        else:
            fixed += encoded
    body = nulls.to_bytes((len(view.fields) + 7) // 8, "little") + fixed + ends
    state = seed = 0x9E3779B97F4A7C15
    words = [int.from_bytes(body[i : i + 8], "little") for i in range(0, len(body), 8)]
    if any(column.dtype.numpy is None for column in view.fields):
        words.append(int.from_bytes(hashlib.blake2b(tail, digest_size=8).digest(), "little"))
    for word in words:
        state = ((state ^ word) + seed) % 2**64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
        state ^= state >> 31
    return HEADER.pack(VERSION, view.prefix, event, known, state >> 1) + body + tail


def _encode_value(value: Any, dtype: DataType) -> bytes:
    if dtype.numpy is not None:
        code = {"|u1": "B", "<i4": "i", "<i8": "q", "<f4": "f", "<f8": "d"}[dtype.numpy]
        return struct.pack("<" + code, 0 if value is None else value)
    if dtype.element is None or value is None:
        return b"" if value is None else value.encode() if isinstance(value, str) else bytes(value)
    items = [_encode_value(item, dtype.element) for item in value]
    return b"".join(items if dtype.element.numpy else [struct.pack("<I", len(item)) + item for item in items])
