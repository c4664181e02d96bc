"""Convert values, entity keys and times from Feast's protos and tables to our columns, and values back to protos."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.protos.feast.types.Value_pb2 import Value
from feast.type_map import python_values_to_proto_values
from feast.types import FeastType

from isthmus.features import clock
from isthmus.features.contract.schema import Column
from isthmus.features.errors import DataError, RequestError, one_of
from isthmus.features.types import KEY_TYPES, TYPES, Bool, Bytes, DataType, Int32, Int64, String, UnixTimestamp
from isthmus.features.values.arrow import ARROW, from_arrow
from isthmus.features.values.columns import Ints, Values, from_python, objects
from isthmus.features.values.entitykey import KeyValue

TIME = pa.timestamp("us", tz="UTC")
_SECOND = 1_000_000
_NO_TIME = -(2**63)
"""Feast's value for a null timestamp in a column that has values."""

_LATEST = 2**63 // _SECOND - 1
_NULL = Value()


@dataclass(frozen=True, slots=True)
class ValueForm:
    """The encoding of a Feast type: our type, the field of `Value`, and whether rows store the serialized proto."""

    dtype: DataType
    kind: str
    serialized: bool = False


_KINDS = {
    "Bool": "bool",
    "Int32": "int32",
    "Int64": "int64",
    "Float32": "float",
    "Float64": "double",
    "UnixTimestamp": "unix_timestamp",
    "String": "string",
    "Bytes": "bytes",
}
_ALIASES = {  # Feast types that are text or bytes under another name.
    "ImageBytes": ("Bytes", "bytes"),
    "PdfBytes": ("Bytes", "bytes"),
    "Json": ("String", "json"),
    "Uuid": ("String", "uuid"),
    "TimeUuid": ("String", "time_uuid"),
    "Decimal": ("String", "decimal"),
}

_NUMBERS = ("int32_val", "int64_val", "float_val", "double_val")
_LISTS = ("int32_list_val", "int64_list_val", "float_list_val", "double_list_val")

FORMS: Mapping[str, ValueForm] = {
    **{name: ValueForm(TYPES[name], f"{kind}_val") for name, kind in _KINDS.items()},
    **{name: ValueForm(TYPES[ours], f"{kind}_val") for name, (ours, kind) in _ALIASES.items()},
    **{f"Array({name})": ValueForm(TYPES[f"Array({name})"], f"{kind}_list_val") for name, kind in _KINDS.items()},
}
"""The Feast types that match one of our types, by Feast's names."""


def encoding_of(dtype: FeastType, *, written: bool = False) -> ValueForm | None:
    """Return how rows in Redis store a Feast type, or None if Feast's Value proto does not have a field for it.

    `written` is True if the online store has the setting types = "written". Then numbers and lists of numbers are
    stored as serialized protos, which keep the type that was written.
    """
    if str(dtype) in FORMS:
        form = FORMS[str(dtype)]
        return ValueForm(Bytes, form.kind, serialized=True) if written and form.kind in (*_NUMBERS, *_LISTS) else form
    kind = f"{dtype.to_value_type().name.removeprefix('VALUE_').lower()}_val"
    return ValueForm(Bytes, kind, serialized=True) if kind in Value.DESCRIPTOR.fields_by_name else None


def from_protos(protos: Sequence[Value], form: ValueForm, where: str) -> Values:
    kinds = _kinds(protos)
    numbers = next((numbers for numbers in (_NUMBERS, _LISTS) if form.kind in numbers), (form.kind,))
    if unexpected := {*kinds} - {*numbers, "null_val", ""}:
        raise DataError(where, f"a value is a {min(unexpected)}", expected=f"{form.kind}, or null")
    if not form.serialized and {*kinds} - {form.kind, "null_val", ""}:
        return _convert_numbers(protos, kinds, form, where)
    valid = np.array([kind not in ("null_val", "") for kind in kinds], bool)
    if form.dtype.element is not None:
        lists = [list(getattr(proto, form.kind).val) if kind == form.kind else None
                 for proto, kind in zip(protos, kinds, strict=True)]  # fmt: skip
        if form.kind == "unix_timestamp_list_val":
            lists = [None if items is None else [_micros(item, where) for item in items] for items in lists]
        return from_python(lists, form.dtype)
    # Map entries have no order: deterministic serialization makes equal maps equal bytes.
    items: list[Any] = [
        proto.SerializeToString(deterministic=True) if form.serialized else getattr(proto, form.kind)
        for proto in protos
    ]
    if form.kind == "unix_timestamp_val":
        valid &= np.array([item != _NO_TIME for item in items], bool)
        items = [_micros(item, where) if ok else 0 for item, ok in zip(items, valid.tolist(), strict=True)]
    if form.dtype.numpy is None:
        data = objects(items, len(items))
        data[~valid] = None
        return Values(data, valid)
    # An unset proto field is zero, which is also the value that we store for a null.
    return Values(np.array(items, form.dtype.numpy), valid)


def arrow_column(values: pa.ChunkedArray, dtype: FeastType, form: ValueForm, where: str) -> Values:
    if not form.serialized:
        return from_arrow(cast_to(values, form.dtype, where), form.dtype)
    if _without_nan(values).null_count == len(values) and form.kind not in (*_NUMBERS, *_LISTS):
        return from_protos([_NULL] * len(values), form, where)
    try:
        protos = python_values_to_proto_values(values.to_pylist(maps_as_pydicts="strict"), dtype.to_value_type())
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        raise DataError(where, f"has a value that does not fit ({error})", expected=f"{dtype}, as declared") from error
    return from_protos(protos, form, where)


def to_protos(values: Values, form: ValueForm) -> list[Value]:
    """Convert a column to Feast protos for a response: one per value, an empty proto for null.

    Timestamps lose the fraction of a second, as in Feast.
    """
    if form.serialized:
        return [_NULL if item is None else Value.FromString(item) for item in values.data]
    items = values.tolist(form.dtype)
    if form.kind == "unix_timestamp_val":
        items = [None if item is None else item // _SECOND for item in items]
    elif form.kind == "unix_timestamp_list_val":
        items = [None if times is None else [time // _SECOND for time in times] for times in items]
    if form.dtype.element is not None:
        message = type(getattr(_NULL, form.kind))
        items = [None if item is None else message(val=item) for item in items]
    return [_NULL if item is None else Value(**{form.kind: item}) for item in items]


def key_columns(keys: Sequence[EntityKey], columns: Sequence[Column], where: str) -> dict[str, list[KeyValue]]:
    names = {column.name for column in columns}
    rows = [dict(zip(key.join_keys, key.entity_values, strict=True)) for key in keys]
    for row in rows:
        if row.keys() != names:
            raise RequestError(where, f"an entity key of {', '.join(sorted(row))}", expected=", ".join(sorted(names)))
    return {column.name: _key_values([row[column.name] for row in rows], column, where) for column in columns}


def plain_keys(values: pa.ChunkedArray, column: Column, where: str) -> list[KeyValue]:
    if column.dtype == String and pa.types.is_integer(values.type):
        values = values.cast(pa.string())
    keys = cast_to(values, column.dtype, f"{where}, join key {column.name}")
    if keys.null_count:
        raise DataError(f"{where}, join key {column.name}", f"{keys.null_count} nulls", expected="no null")
    plain: list[KeyValue] = (keys.cast(pa.int64()) if column.dtype.name == "UnixTimestamp" else keys).to_pylist()
    return plain


def key_type(value: Value) -> str:
    kind = str(value.WhichOneof("val")).removesuffix("_val")
    return _wide(next((name for name, known in _KINDS.items() if known == kind), kind))


def inferred_key_type(kind: pa.DataType, where: str) -> str:
    return _wide(arrow_key_type(kind, where).name)


def _wide(key: str) -> str:
    # Writers and readers may use different integer widths for the same key.
    return "Int64" if key == "Int32" else key


def arrow_key_type(kind: pa.DataType, where: str) -> DataType:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    for fits, dtype in (
        (pa.types.is_boolean(kind), Bool),
        (pa.types.is_int32(kind), Int32),
        (pa.types.is_integer(kind), Int64),
        (pa.types.is_timestamp(kind), UnixTimestamp),
        (pa.types.is_string(kind) or pa.types.is_large_string(kind), String),
        (pa.types.is_binary(kind) or pa.types.is_large_binary(kind), Bytes),
    ):
        if fits:
            return dtype
    raise DataError(where, f"has type {kind}", expected=one_of(dtype.name for dtype in KEY_TYPES))


def micros(times: Sequence[datetime], where: str) -> Ints:
    if not all(map(is_time, times)):
        raise DataError(where, "a row has no event timestamp", expected="one in every row")
    aware = (time.replace(tzinfo=UTC) if time.tzinfo is None else time for time in times)
    return np.array([clock.micros(time) for time in aware], np.int64)


def to_timestamps(column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """Cast a column of timestamps or dates to UTC microseconds. Nanoseconds are rounded down. No time zone means UTC.

    A column that has only nulls may have any type. Raise DataError for another type, or for a time that does not fit.
    `where` names the column in the error.
    """
    kind = column.type
    if _without_nan(column).null_count == len(column):
        return pa.chunked_array([pa.nulls(len(column), TIME)])
    if not (pa.types.is_timestamp(kind) or pa.types.is_date(kind)):
        raise DataError(where, f"has type {kind}", expected="timestamps")
    try:
        if pa.types.is_date(kind):
            column = column.cast(pa.timestamp("us"))
        elif kind.unit == "ns":
            column = pc.floor_temporal(column.cast(pa.timestamp("ns", "UTC")), unit="microsecond")
        return column.cast(TIME)
    except pa.ArrowInvalid as error:
        raise DataError(where, f"has a time that does not fit ({error})", expected="microseconds") from None


def cast_to(column: pa.ChunkedArray, dtype: DataType | None, where: str) -> pa.ChunkedArray:
    """Cast a column of a source to its declared type, or return it unchanged if `dtype` is None.

    For a float type, a number with decimals is rounded to the nearest float. NaN becomes null if `dtype` is not a float
    type. Raise DataError if a value does not fit. `where` names the column in the error.
    """
    if dtype is None:
        return column
    target = ARROW[dtype.name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.type == target:
        return column
    if not pa.types.is_floating(target):
        # pandas uses NaN for null, and doubles for a column without values.
        column = _without_nan(column)
        if column.null_count == len(column):
            return pa.chunked_array([pa.nulls(len(column), target)])
    if dtype.name == "UnixTimestamp":
        return to_timestamps(column, where)
    if not _compatible(column.type, target):
        raise DataError(where, f"has type {column.type}", expected=f"{dtype}, as declared",
                        remedy="if the source has changed, update the feature view")  # fmt: skip
    try:
        return _cast(column, target)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(where, f"has a value that does not fit ({error})", expected=f"{dtype}, as declared") from None


def _without_nan(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.if_else(pc.is_nan(column), None, column) if pa.types.is_floating(column.type) else column


def is_time(time: datetime | None) -> bool:
    return time is not None and time == time


def is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(kind))


def _compatible(actual: pa.DataType, target: pa.DataType) -> bool:
    if pa.types.is_list(target):
        lists: bool = pa.types.is_list(actual) or pa.types.is_large_list(actual) or pa.types.is_fixed_size_list(actual)
        return lists and _compatible(actual.value_type, target.value_type)
    if pa.types.is_null(actual):
        return True
    numbers: bool = pa.types.is_integer(actual) or pa.types.is_floating(actual) or pa.types.is_decimal(actual)
    if pa.types.is_integer(target) or pa.types.is_floating(target):
        # pandas stores integers with nulls as floating-point numbers.
        return numbers
    if pa.types.is_timestamp(target):
        return bool(pa.types.is_timestamp(actual))
    texts = is_text(actual)
    blobs = pa.types.is_binary(actual) or pa.types.is_large_binary(actual) or pa.types.is_fixed_size_binary(actual)
    return bool((texts and pa.types.is_string(target)) or (blobs and pa.types.is_binary(target)) or actual == target)


def _convert_numbers(protos: Sequence[Value], kinds: Sequence[str], form: ValueForm, where: str) -> Values:
    items: list[Any] = [
        None if kind in ("null_val", "") else getattr(proto, kind) for proto, kind in zip(protos, kinds, strict=True)
    ]
    if form.dtype.element is not None:
        items = [None if item is None else list(item.val) for item in items]
    try:
        converted = _cast(pa.array(items), ARROW[form.dtype.name])
    except pa.ArrowInvalid as error:
        raise DataError(
            where, f"has a value that does not fit ({error})", expected=f"{form.dtype}, as declared"
        ) from None
    return from_arrow(converted, form.dtype)


def _cast(array: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """Cast values: whole numbers exactly, others to the nearest. Raise ArrowInvalid if a value becomes infinite."""
    converted = array.cast(kind)
    if _infinities(converted) > _infinities(array):
        raise pa.ArrowInvalid("it is beyond the largest number")
    return converted


def _infinities(array: pa.Array | pa.ChunkedArray) -> int:
    flat = pc.list_flatten(array) if pa.types.is_nested(array.type) else array
    return int(pc.sum(pc.is_inf(flat)).as_py() or 0) if pa.types.is_floating(flat.type) else 0


def _kinds(protos: Sequence[Value]) -> list[str]:
    return [proto.WhichOneof("val") or "" for proto in protos]


def _micros(seconds: int, where: str) -> int:
    if abs(seconds) > _LATEST:
        raise DataError(where, f"a timestamp of {seconds} seconds", expected=f"at most {_LATEST} before or after 1970")
    return seconds * _SECOND


def _key_values(values: Sequence[Value], column: Column, where: str) -> list[KeyValue]:
    kind = f"{_KINDS[column.dtype.name]}_val"
    # Both integer widths give the same key.
    allowed = {"int32_val", "int64_val"} if kind in ("int32_val", "int64_val") else {kind}
    kinds = _kinds(values)
    if unexpected := {*kinds} - allowed:
        actual = min(unexpected) or "null"
        raise RequestError(where, f"a value of join key {column.name} is {actual}", expected=one_of(allowed))
    keys: list[KeyValue] = [getattr(value, field) for value, field in zip(values, kinds, strict=True)]
    return [_micros(int(key), where) for key in keys] if kind == "unix_timestamp_val" else keys
