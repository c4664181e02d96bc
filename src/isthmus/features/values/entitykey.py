"""Encode and decode entity keys: the names of the Redis hashes that hold their rows."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isthmus.features.contract.schema import Column
from isthmus.features.errors import RequestError

KeyValue = bool | int | str | bytes
"""A join key's value; UnixTimestamp is in microseconds."""

_TAGS = {"Bool": b"b", "Int32": b"i", "Int64": b"i", "UnixTimestamp": b"t", "String": b"s", "Bytes": b"y"}


def entity_key(project: str, keys: Sequence[tuple[Column, KeyValue]]) -> bytes:
    """Return the name of the Redis hash that has the rows of an entity key. Different keys always have different names.

    `keys` has pairs of a join key's column and its value, in any order. The name has the project, the join keys in
    alphabetical order, and each value with its type and length. Raise RequestError for a text that UTF-8 cannot encode.
    """
    ordered = sorted(keys, key=lambda pair: pair[0].name)
    values = [_encode([value], column)[0] for column, value in ordered]
    return key_prefix(project, [column for column, _ in ordered]) + b"".join(values)


def key_prefix(project: str, keys: Iterable[Column]) -> bytes:
    return f"{project}:{','.join(sorted(column.name for column in keys))}:".encode()


def _encode(values: Sequence[Any], column: Column, before: bytes = b"") -> list[bytes]:
    head = before + _TAGS[column.dtype.name]
    if column.dtype.numpy is not None:
        pack = struct.Struct("<?" if column.dtype.name == "Bool" else "<q").pack
        return [head + pack(value) for value in values]
    if column.dtype.name == "String":
        try:
            values = [value.encode() for value in values]
        except UnicodeEncodeError as error:
            raise RequestError(
                f"key {error.object!r}", "is not text", expected="text that can be encoded in UTF-8"
            ) from None
    pack = struct.Struct("<I").pack
    return [head + pack(len(value)) + value for value in values]


def decode_key(project: str, columns: Sequence[Column], name: bytes) -> tuple[KeyValue, ...]:
    # To detect other names, encode the values again and compare.
    return decode_values(name.removeprefix(key_prefix(project, columns)))


def by_join_key(columns: Iterable[Column], keys: Sequence[tuple[KeyValue, ...]]) -> dict[str, list[KeyValue]]:
    ordered = sorted(column.name for column in columns)
    return {name: [key[n] for key in keys] for n, name in enumerate(ordered)}


def decode_values(data: bytes) -> tuple[KeyValue, ...]:
    values: list[KeyValue] = []
    while data:
        tag, end = data[:1], _size(data, 0)
        if tag == b"b":
            values += struct.unpack_from("<?", data, 1)
        elif tag in (b"s", b"y"):
            values.append(data[5:end].decode() if tag == b"s" else data[5:end])
        else:
            values += struct.unpack_from("<q", data, 1)
        data = data[end:]
    return tuple(values)


def key_size(columns: Sequence[Column], data: bytes, place: int) -> int:
    start = place
    for column in sorted(columns, key=lambda column: column.name):
        if data[place : place + 1] != _TAGS[column.dtype.name]:
            raise ValueError(f"no {column.dtype} at byte {place}")
        place += _size(data, place)
    return place - start


def key_part(columns: Sequence[Column], name: str, key: bytes) -> bytes:
    place = 0
    for column in sorted(columns, key=lambda column: column.name):
        end = place + _size(key, place)
        if column.name == name:
            return key[place:end]
        place = end
    raise KeyError(name)


def _size(data: bytes, place: int) -> int:
    match data[place : place + 1]:
        case b"b":
            return 2
        case b"s" | b"y":
            return 5 + int.from_bytes(data[place + 1 : place + 5], "little")
    return 9


def entity_keys(project: str, columns: Sequence[Column], values: Mapping[str, Sequence[KeyValue]]) -> list[bytes]:
    return encode_keys(columns, values, key_prefix(project, columns))


def encode_keys(
    columns: Sequence[Column], values: Mapping[str, Sequence[KeyValue]], prefix: bytes = b""
) -> list[bytes]:
    ordered = sorted(columns, key=lambda column: column.name)
    parts = [_encode(values[column.name], column, b"" if n else prefix) for n, column in enumerate(ordered)]
    return [b"".join(row) for row in zip(*parts, strict=True)] if len(parts) > 1 else parts[0]
