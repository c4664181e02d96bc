"""Feast's protos and tables as columns of ours, and protos back: values, entity keys and times."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    from feast.protos.feast.types.EntityKey_pb2 import EntityKey
    from feast.protos.feast.types.Value_pb2 import Value
    from feast.type_map import python_values_to_proto_values
    from feast.types import FeastType

from isthmus.features import clock
from isthmus.features.contract.contract import Column, one_of
from isthmus.features.errors import DataError, RequestError
from isthmus.features.types import TYPES, Bytes, DataType
from isthmus.features.values.columns import ARROW, Values, from_arrow, objects, to_arrow
from isthmus.features.values.entitykey import KeyValue
from isthmus.features.values.rows import Int64

TIME = pa.timestamp("us", tz="UTC")
_SECOND = 1_000_000
_NO_TIME = -(2**63)
"""What Feast writes for a null timestamp among others that are none."""

_LATEST = 2**63 // _SECOND - 1
_NULL = Value()


@dataclass(frozen=True, slots=True)
class Form:
    """How a type of Feast's lies in a row and in a proto.

    Attributes:
        dtype: its type in our rows.
        kind: the field of `Value` that holds it.
        whole: whether the row has the proto itself, as bytes: our types know nothing like it.
    """

    dtype: DataType
    kind: str
    whole: bool = False


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
# Types of Feast's that are text or bytes under another name.
_ALIASES = {
    "ImageBytes": ("Bytes", "bytes"),
    "PdfBytes": ("Bytes", "bytes"),
    "Json": ("String", "json"),
    "Uuid": ("String", "uuid"),
    "TimeUuid": ("String", "time_uuid"),
    "Decimal": ("String", "decimal"),
}

FORMS: Mapping[str, Form] = {
    **{name: Form(TYPES[name], f"{kind}_val") for name, kind in _KINDS.items()},
    **{name: Form(TYPES[ours], f"{kind}_val") for name, (ours, kind) in _ALIASES.items()},
    **{
        f"Array({name})": Form(TYPES[f"Array({name})"], f"{kind}_list_val")
        for name, kind in _KINDS.items()
        if f"Array({name})" in TYPES
    },
}
"""The types of Feast's that are types of ours, by Feast's words for them."""


def form_of(dtype: FeastType) -> Form | None:
    """How a type lies in a row and in a proto: a map, a set or a struct lies there whole. None if it has no values."""
    if str(dtype) in FORMS:
        return FORMS[str(dtype)]
    kind = f"{dtype.to_value_type().name.removeprefix('VALUE_').lower()}_val"
    return Form(Bytes, kind, whole=True) if kind in Value.DESCRIPTOR.fields_by_name else None


def column(protos: Sequence[Value], form: Form, where: str) -> Values:
    """The NumPy form of n protos; one without a value is null.

    Args:
        protos: n values.
        form: what they are.
        where: the column, for a message.

    Raises:
        DataError: a value is of another type, or a time that no row can hold.
    """
    kinds = _kinds(protos)
    others = {*kinds} - {form.kind, "null_val", ""}
    if others:
        raise DataError(where, f"a value is a {min(others)}", expected=f"{form.kind}, or none")
    valid = np.array([kind == form.kind for kind in kinds], bool)
    # Entries of a map have no order but the deterministic one: equal maps are equal bytes.
    found: list[Any] = [
        proto.SerializeToString(deterministic=True) if form.whole else getattr(proto, form.kind) for proto in protos
    ]
    if form.kind.endswith("_list_val") and not form.whole:
        lists = [list(item.val) if kind == form.kind else None for item, kind in zip(found, kinds, strict=True)]
        return _lists(lists, form, where)
    if form.kind == "unix_timestamp_val":
        valid &= np.array([item != _NO_TIME for item in found], bool)
        found = [_micros(item, where) if good else 0 for item, good in zip(found, valid.tolist(), strict=True)]
    if form.dtype.numpy is None:
        data = objects(found, len(found))
        data[~valid] = None
        return Values(data, valid)
    # A field that is not set reads as zero, which is what lies under a null.
    return Values(np.array(found, form.dtype.numpy), valid)


def arrow_column(found: pa.ChunkedArray, dtype: FeastType, form: Form, where: str) -> Values:
    """The NumPy form of a column of a table, shape (n,); what a row holds whole is made one of Feast's protos by Feast.

    Args:
        found: the column.
        dtype: the declared type.
        form: how that lies in a row.
        where: the column, for a message.

    Raises:
        DataError: the column holds something else, or a value that does not fit.
    """
    if not form.whole:
        return from_arrow(typed(found, form.dtype, where), form.dtype)
    try:
        made = python_values_to_proto_values(found.to_pylist(maps_as_pydicts="strict"), dtype.to_value_type())
    except (TypeError, ValueError, KeyError, AssertionError) as error:
        raise DataError(where, f"has a value that does not fit ({error})", expected=f"{dtype}, as declared") from error
    return column(made, form, where)


def protos(values: Values, form: Form) -> list[Value]:
    """A proto per value; null is one without a value. Feast's timestamps are whole seconds: the rest is cut off."""
    if form.whole:
        return [_NULL if item is None else Value.FromString(item) for item in values.data]
    if form.kind.endswith("_list_val"):
        made = type(getattr(_NULL, form.kind))
        return [
            _NULL if items is None else Value(**{form.kind: made(val=items)}) for items in _plain_lists(values, form)
        ]
    items = values.tolist(form.dtype)
    if form.kind == "unix_timestamp_val":
        items = [None if item is None else item // _SECOND for item in items]
    return [_NULL if item is None else Value(**{form.kind: item}) for item in items]


def key_columns(keys: Sequence[EntityKey], columns: Sequence[Column], where: str) -> dict[str, list[KeyValue]]:
    """Join key name to its values in n entity keys.

    Args:
        keys: n entity keys.
        columns: the join keys of the view.
        where: the view, for a message.

    Raises:
        RequestError: an entity key has other join keys, or a value of another type.
    """
    names = {column.name for column in columns}
    rows = [dict(zip(key.join_keys, key.entity_values, strict=True)) for key in keys]
    for row in rows:
        if row.keys() != names:
            raise RequestError(where, f"an entity key of {', '.join(sorted(row))}", expected=", ".join(sorted(names)))
    return {column.name: _key_values([row[column.name] for row in rows], column, where) for column in columns}


def plain_keys(values: pa.ChunkedArray, column: Column, where: str) -> list[KeyValue]:
    """The values of a join key, as `key_columns` gives them.

    Raises:
        DataError: one is null, or has another type.
    """
    found = typed(values, column.dtype, f"{where}, join key {column.name}")
    if found.null_count:
        raise DataError(f"{where}, join key {column.name}", f"{found.null_count} nulls", expected="no null")
    plain: list[KeyValue] = (found.cast(pa.int64()) if column.dtype.name == "UnixTimestamp" else found).to_pylist()
    return plain


def key_type(value: Value) -> str:
    """The name of the type that a value of an entity key has by itself."""
    kind = str(value.WhichOneof("val")).removesuffix("_val")
    return next((name for name, known in _KINDS.items() if known == kind), kind)


def micros(times: Sequence[datetime], where: str) -> Int64:
    """Microseconds since 1970 UTC of n moments; without a time zone they are UTC, as in Feast.

    Raises:
        DataError: there is none (`NaT`).
    """
    if not all(map(is_time, times)):
        raise DataError(where, "a row has no event timestamp", expected="one in every row")
    return np.array([clock.micros(_aware(time)) for time in times], np.int64)


def moments(column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """A column of times as microseconds in UTC; without a time zone they are UTC, as everywhere in Feast.

    Raises:
        DataError: they are no times, or lie beyond what microseconds can hold.
    """
    kind = column.type
    if pa.types.is_null(kind):
        return column.cast(TIME)
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


def typed(column: pa.ChunkedArray, dtype: DataType | None, where: str) -> pa.ChunkedArray:
    """A column in a declared type, every value kept.

    Raises:
        DataError: the column holds something else, or a value that does not fit.
    """
    if dtype is None:
        return column
    wanted = ARROW[dtype.name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.type == wanted:
        return column
    if dtype.name == "UnixTimestamp":
        return moments(column, where)
    if not _alike(column.type, wanted):
        raise DataError(where, f"has type {column.type}", expected=f"{dtype}, as declared",
                        remedy="if the source has changed, change the feature view with it")  # fmt: skip
    try:
        return column.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(where, f"has a value that does not fit ({error})", expected=f"{dtype}, as declared") from None


def is_time(time: datetime | None) -> bool:
    """Whether a time is one: pandas has a value of it, `NaT`, that is none."""
    return time is not None and time == time


def _alike(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether values of one type are values of the other, written otherwise; text that looks like a number is none."""
    if pa.types.is_list(wanted):
        lists: bool = pa.types.is_list(found) or pa.types.is_large_list(found) or pa.types.is_fixed_size_list(found)
        return lists and _alike(found.value_type, wanted.value_type)
    if pa.types.is_null(found):
        return True
    numbers: bool = pa.types.is_integer(found) or pa.types.is_floating(found) or pa.types.is_decimal(found)
    if pa.types.is_integer(wanted) or pa.types.is_floating(wanted):
        # pandas has whole numbers with nulls among them as floating-point numbers.
        return numbers
    if pa.types.is_timestamp(wanted):
        return bool(pa.types.is_timestamp(found))
    texts = pa.types.is_string(found) or pa.types.is_large_string(found)
    blobs = pa.types.is_binary(found) or pa.types.is_large_binary(found) or pa.types.is_fixed_size_binary(found)
    return bool((texts and pa.types.is_string(wanted)) or (blobs and pa.types.is_binary(wanted)) or found == wanted)


def _kinds(protos: Sequence[Value]) -> list[str]:
    return [proto.WhichOneof("val") or "" for proto in protos]


def _aware(time: datetime) -> datetime:
    return time.replace(tzinfo=UTC) if time.tzinfo is None else time


def _micros(seconds: int, where: str) -> int:
    if abs(seconds) > _LATEST:
        raise DataError(where, f"a timestamp of {seconds} seconds", expected=f"{_LATEST} before or after 1970 at most")
    return seconds * _SECOND


def _key_values(values: Sequence[Value], column: Column, where: str) -> list[KeyValue]:
    kind = f"{_KINDS[column.dtype.name]}_val"
    # Both widths of integers make the same key.
    allowed = {"int32_val", "int64_val"} if kind in ("int32_val", "int64_val") else {kind}
    found = _kinds(values)
    others = {*found} - allowed
    if others:
        met = min(others) or "null"
        raise RequestError(where, f"a value of join key {column.name} is {met}", expected=one_of(allowed))
    plain: list[KeyValue] = [getattr(value, kind) for value, kind in zip(values, found, strict=True)]
    if kind == "unix_timestamp_val":
        return [_micros(int(value), where) for value in plain]
    return plain


def _lists(lists: Sequence[list[Any] | None], form: Form, where: str) -> Values:
    arrow = ARROW[form.dtype.name]
    if form.kind == "unix_timestamp_list_val":
        whole = [None if items is None else [_micros(item, where) for item in items] for items in lists]
        return from_arrow(pa.array(whole, pa.list_(pa.int64())).cast(arrow), form.dtype)
    return from_arrow(pa.array(lists, arrow), form.dtype)


def _plain_lists(values: Values, form: Form) -> list[Any]:
    array = to_arrow(values, form.dtype)
    if form.kind == "unix_timestamp_list_val":
        whole = array.cast(pa.list_(pa.int64())).to_pylist()
        return [None if items is None else [item // _SECOND for item in items] for items in whole]
    plain: list[Any] = array.to_pylist()
    return plain
