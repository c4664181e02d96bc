"""Tensors in a request and in an answer: from JSON or bytes to an array, and back."""

import math
import re
from functools import lru_cache
from types import GenericAlias
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from isthmus.features.errors import RequestError
from isthmus.features.types import Bool, DataType, Float64, Int64, String
from isthmus.serving.wire.body import FAILURES, unreadable
from isthmus.serving.wire.encode import json_columns
from isthmus.serving.wire.inference import DATATYPES

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

_WORDS = ', "NaN", "Infinity" or "-Infinity"'
_JSON: dict[str, tuple[Any, str]] = {
    "bool": (bool, "true or false"),
    "uint8": (Annotated[int, msgspec.Meta(ge=0, le=255)], "whole numbers from 0 to 255"),
    "int32": (Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)], "whole numbers of 32 bits"),
    "int64": (Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)], "whole numbers of 64 bits"),
    "float": (float | Literal["NaN", "Infinity", "-Infinity"], f"numbers of 32 bits{_WORDS}"),
    "double": (float | Literal["NaN", "Infinity", "-Infinity"], f"numbers of 64 bits{_WORDS}"),
    "string": (str, "strings"),
}
_NUMPY = {"bool": "|b1", "uint8": "|u1", "int32": "<i4", "int64": "<i8", "float": "<f4", "double": "<f8"}
_WIDE = {**_NUMPY, "float": "<f8", "string": "O"}
"""What JSON becomes at first: numbers beyond 32 bits are noticed on their way to them."""
_TYPES: dict[str, DataType] = {"b": Bool, "u": Int64, "i": Int64, "f": Float64, "O": String}
"""Which values of features have the JSON of an array, by its kind."""

_OPENING = re.compile(rb"[\s\[]*")
_PREFIX = 4
"""Bytes of the length before each text: an unsigned integer, little-endian."""


def from_json(where: str, raw: bytes, element: str, shape: Shape) -> Array:
    """The tensor of this shape whose elements are in JSON, flat or nested. Nothing is decoded that has another size.

    Raises:
        RequestError: the elements have another type, number or nesting, or are beyond their type.
    """
    count = math.prod(shape)
    expected = f"{count:,} {_JSON[element][1]} ({DATATYPES[element]}), flat or nested as {list(shape)}"
    if element != "string" and (elements := raw.count(b",") + 1) != count:
        raise RequestError(where, f"has {elements:,} elements", expected=expected)
    opening = _OPENING.match(raw)
    depth = opening[0].count(b"[") if opening else 0
    if depth not in (1, len(shape)):
        raise RequestError(where, f"has {depth} lists within each other", expected=expected)
    try:
        decoded = _decoder(element, depth).decode(raw)
    except msgspec.ValidationError as error:
        found = str(error).replace("$", "data").replace("Invalid enum value", "Expected a number, got")
        raise RequestError(where, found, expected=expected) from error
    except FAILURES as error:
        raise unreadable(where, raw, error) from error
    try:
        array = np.array(decoded, _WIDE[element])
    except ValueError as error:
        raise RequestError(where, "has lists of different lengths", expected=expected) from error
    if array.shape not in (shape, (count,)):
        raise RequestError(where, f"has the shape {list(array.shape)}", expected=expected)
    if element == "float":
        array = _narrow(where, array, expected)
    return array.reshape(shape)


def _narrow(where: str, wide: Array, expected: str) -> Array:
    with np.errstate(over="ignore"):
        array = wide.astype(np.float32)
    beyond = np.isinf(array) & np.isfinite(wide)
    if beyond.any():
        raise RequestError(where, f"{wide[beyond][0]} is too large", expected=expected)
    return array


@lru_cache(256)
def _decoder(element: str, depth: int) -> msgspec.json.Decoder[Any]:
    kind = _JSON[element][0]
    for _ in range(depth):
        kind = GenericAlias(list, (kind,))
    return msgspec.json.Decoder(kind)


def from_bytes(where: str, data: memoryview, element: str, shape: Shape) -> Array:
    """The tensor of this shape whose elements are these bytes: little-endian, each text after its length.

    Raises:
        RequestError: there are more or fewer bytes than elements, a truth value is neither 0 nor 1, or a text is not
            UTF-8.
    """
    count = math.prod(shape)
    if element == "string":
        return _texts(where, data, count).reshape(shape)
    dtype = np.dtype(_NUMPY[element])
    if len(data) != count * dtype.itemsize:
        raise RequestError(where, f"has {len(data):,} bytes",
                           expected=f"{count * dtype.itemsize:,}: {list(shape)} {DATATYPES[element]}")  # fmt: skip
    if element == "bool" and count and np.frombuffer(data, np.uint8).max() > 1:
        raise RequestError(where, "has a byte that is neither 0 nor 1", expected="a byte for each truth value")
    # The JSON before it has any length: a kernel may want its numbers at even addresses.
    return np.require(np.frombuffer(data, dtype), requirements="A").reshape(shape)


def _texts(where: str, data: memoryview, count: int) -> Array:
    expected = f"{count:,} texts in UTF-8, each after its length in {_PREFIX} bytes"
    # As many as can be there: an array of what was announced could be of any size.
    if count * _PREFIX > len(data):
        raise RequestError(where, f"has {len(data):,} bytes", expected=expected)
    texts, place = np.empty(count, object), 0
    for number in range(count):
        begin = place + _PREFIX
        place = begin + int.from_bytes(data[place:begin], "little")
        if place > len(data):
            raise RequestError(where, f"ends within text {number}", expected=expected)
        try:
            texts[number] = str(data[begin:place], "utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(where, f"text {number} is not UTF-8", expected=expected) from error
    if place != len(data):
        raise RequestError(where, f"has {len(data) - place:,} bytes after its texts", expected=expected)
    return texts


def to_json(array: Array) -> Any:
    """The elements in row-major order, as orjson writes them. A number that is not finite is a word."""
    return json_columns(_TYPES[array.dtype.kind], array.reshape(1, -1))[0]


def to_bytes(array: Array) -> bytes:
    """The inverse of `from_bytes`."""
    if array.dtype != object:
        return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    texts = [str(text).encode() for text in array.ravel().tolist()]
    return b"".join(len(text).to_bytes(_PREFIX, "little") + text for text in texts)
