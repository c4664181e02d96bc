"""Convert texts, bytes and arrays of a feature to the variable part of packed rows, and back.

A String is encoded as UTF-8. An array of fixed-width elements is its elements, concatenated. An array of String or
Bytes has the length of each element in 4 bytes before it. An empty array takes no bytes; it is not null.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from isthmus.features.errors import DataError
from isthmus.features.types import DataType
from isthmus.features.values.columns import array_of, objects, split

_LENGTH = struct.Struct("<I")


def pack(values: Iterable[Any], dtype: DataType, where: str) -> list[bytes]:
    try:
        if dtype.element is None:
            return [b"" if value is None else _blob(value) for value in values]
        return [b"" if value is None else _array(value, dtype.element, where) for value in values]
    except UnicodeEncodeError as error:
        raise DataError(where, f"{error.object!r} is not text", expected="text that can be encoded in UTF-8") from None


def unpack(packed: Sequence[bytes | None], dtype: DataType) -> np.ndarray[Any, Any]:
    element = dtype.element
    if dtype.name == "String":
        return objects([None if text is None else text.decode() for text in packed], len(packed))
    if element is None:
        return objects(packed, len(packed))
    if element.numpy is None:
        return objects([None if array is None else _items(array, element) for array in packed], len(packed))
    lengths, remainders = np.divmod([len(array or b"") for array in packed], np.dtype(element.numpy).itemsize)
    if remainders.any():
        raise ValueError("incomplete element")
    flat = np.frombuffer(b"".join([array or b"" for array in packed]), element.numpy)
    return split(flat, lengths, [array is not None for array in packed])


def _blob(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _array(value: Any, element: DataType, where: str) -> bytes:
    items = array_of(value, element, where)
    if element.numpy is not None:
        return bytes(items.tobytes())
    blobs = [_blob(item) for item in items]
    return b"".join([_LENGTH.pack(len(blob)) + blob for blob in blobs])


def _items(packed: bytes, element: DataType) -> list[Any]:
    items: list[Any] = []
    start = 0
    while start < len(packed):
        if len(packed) < start + 4:
            raise ValueError("incomplete length")
        (length,) = _LENGTH.unpack_from(packed, start)
        item = packed[start + 4 : start + 4 + length]
        if len(item) != length:
            raise ValueError("incomplete element")
        items.append(item.decode() if element.name == "String" else item)
        start += 4 + length
    return items
