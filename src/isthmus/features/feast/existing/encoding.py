"""Encode columns as the bytes that Feast's online stores keep: serialized `Value` protos, and entity keys."""

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from feast.protos.feast.types.Value_pb2 import Value, ValueType
from feast.type_map import feast_value_type_to_python_type, python_values_to_proto_values
from feast.types import FeastType
from google.protobuf.message import DecodeError

from isthmus.features.audit.history import BYTES, EMPTY
from isthmus.features.errors import DataError
from isthmus.features.feast.values import FORMS, cast_to
from isthmus.features.types import SCALARS, TYPES
from isthmus.features.values.arrow import ARROW, from_arrow
from isthmus.features.values.columns import Ints, Mask

_SCALARS = {scalar.name for scalar in SCALARS}
_SECOND = 1_000_000
_NULLS = [b"\x98\x01\x00", Value(unix_timestamp_val=-(2**63)).SerializeToString()]


def encode(column: pa.ChunkedArray, dtype: FeastType, where: str) -> pa.LargeBinaryArray:
    """Return the serialized proto of each value, as Feast's materialization writes it. A null is empty bytes.

    Raise DataError if a value does not fit the declared type. `where` names the column in the error.
    """
    name = str(dtype)
    if name not in _SCALARS:
        try:
            protos = python_values_to_proto_values(column.to_pylist(maps_as_pydicts="strict"), dtype.to_value_type())
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(where, f"has a value that does not fit ({error})", expected=name) from error
        return pa.array([proto.SerializeToString(deterministic=True) for proto in protos], BYTES)
    cast, field = cast_to(column, TYPES[name], where), Value.DESCRIPTOR.fields_by_name[FORMS[name].kind].number
    if name in ("String", "Bytes"):
        texts = cast.combine_chunks().cast(BYTES)
        lengths = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False)
        prefix = _varints(lengths.astype(np.uint64), field << 3 | 2, np.ones(len(texts), bool))
        return pc.fill_null(pc.binary_join_element_wise(prefix, texts, EMPTY), EMPTY)
    items = from_arrow(cast, TYPES[name])
    if items.data.dtype.kind == "f":
        flat = items.data[items.valid]
        flat = np.where(np.isnan(flat), np.array(np.nan, flat.dtype), flat)  # pandas has one NaN
        size = flat.dtype.itemsize
        content = np.empty((len(flat), 1 + size), np.uint8)
        content[:, 0], content[:, 1:] = field << 3 | (5 if size == 4 else 1), flat.view(np.uint8).reshape(-1, size)
        return _binary(content.tobytes(), items.valid * (1 + size))
    numbers = np.trunc(items.data / _SECOND) if name == "UnixTimestamp" else items.data
    return _varints(numbers.astype(np.int64).view(np.uint64), field << 3, items.valid)


def entity_keys(columns: Mapping[str, tuple[pa.ChunkedArray, FeastType]], where: str) -> pa.Array:
    """Return the entity key of each row, serialized as in version 3; null where a join key is null."""
    header, parts = struct.pack("<I", len(columns)), list[Any]()
    for name, (column, dtype) in sorted(columns.items()):
        header += struct.pack("<II", ValueType.STRING, len(name.encode())) + name.encode()
        kind = TYPES[str(dtype)]
        cast = cast_to(column, kind, f"{where}, join key {name}").combine_chunks()
        if kind.numpy is None:
            content = cast.cast(BYTES)
        else:
            data = from_arrow(cast, kind).data // (_SECOND if kind.name == "UnixTimestamp" else 1)
            content = _binary(data.tobytes(), np.full(len(data), data.dtype.itemsize))
            content = pc.if_else(cast.is_valid(), content, pa.scalar(None, BYTES))
        lengths = pc.fill_null(pc.binary_length(content), 0).to_numpy(zero_copy_only=False).astype("<u4")
        code = struct.pack("<I", dtype.to_value_type().value)
        parts += [pa.scalar(code, BYTES), _binary(lengths.tobytes(), np.full(len(lengths), 4)), content]
    return pc.binary_join_element_wise(pa.scalar(header, BYTES), *parts, EMPTY)


def stored(values: pa.Array, dtype: FeastType) -> pa.Array:
    """Convert values from an online store to the form of `encode`. An Arrow null is a missing feature, and stays."""
    if str(dtype) not in _SCALARS:  # entries of maps have no order
        values = pa.array([None if item is None else Value.FromString(item).SerializeToString(deterministic=True)
                           for item in values.to_pylist()], BYTES)  # fmt: skip
    return pc.if_else(pc.is_in(values, value_set=pa.array(_NULLS, BYTES)), EMPTY, values)


def rounded(column: pa.ChunkedArray, dtype: FeastType) -> pa.Array:
    """Encode values as pandas would round them: Int64 to a double, Float64 to a float. Null for other types."""
    name = str(dtype)
    if name not in ("Int64", "Float64"):
        return pa.nulls(len(column), BYTES)
    narrow = cast_to(column, TYPES[name], "").cast(pa.float64() if name == "Int64" else pa.float32(), safe=False)
    # The nearest double of a large integer may be 2^63.
    fits = pc.less(pc.abs(narrow), 2.0**63) if name == "Int64" else pa.scalar(True)
    return encode(pc.if_else(fits, narrow, None).cast(ARROW[name], safe=False), dtype, "")


def loses(column: pa.ChunkedArray, dtype: FeastType) -> Mask:
    """Mark source values that the declared type rounds, such as 0.1 declared as Float32."""
    kind, lost = column.type, np.zeros(len(column), bool)
    if str(dtype) in ("Int32", "Int64", "Float32", "Float64") and kind != ARROW[str(dtype)]:
        back = cast_to(column, TYPES[str(dtype)], "").cast(kind, safe=False)
        lost |= pc.fill_null(pc.not_equal(back, column), False).to_numpy()
        if pa.types.is_floating(kind):
            lost &= ~pc.fill_null(pc.is_nan(column), False).to_numpy()
    return lost


def decode(value: bytes | None) -> Any:
    """Decode a value for an example; return damaged bytes unchanged."""
    try:
        return None if value is None else feast_value_type_to_python_type(Value.FromString(value))
    except DecodeError:
        return value


def _varints(numbers: Any, tag: int, valid: Mask) -> pa.Array:
    """Encode unsigned numbers as varints after a one-byte tag. Invalid rows are empty."""
    width = max(1, -(-int(numbers.max(initial=0)).bit_length() // 7))
    groups = numbers[:, None] >> (np.arange(width, dtype=np.uint64) * np.uint64(7))
    used = groups != 0
    used[:, 0] = True
    content = np.empty((len(numbers), 1 + width), np.uint8)
    content[:, 0], content[:, 1:] = tag, groups & np.uint64(0x7F)
    content[:, 1:-1][used[:, 1:]] |= 0x80
    kept = np.column_stack([np.ones(len(numbers), bool), used]) & valid[:, None]
    return _binary(content[kept].tobytes(), kept.sum(axis=1))


def _binary(content: bytes, lengths: Ints) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return pa.Array.from_buffers(BYTES, len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(content)])
