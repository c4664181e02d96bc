"""Tensors in a request and in an answer: from JSON or bytes to an array, and back."""

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from types import GenericAlias
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import orjson

from isthmus.features.errors import RequestError
from isthmus.features.types import Bool, DataType, Float64, Int64, String
from isthmus.serving.wire.body import FAILURES
from isthmus.serving.wire.encode import OPTIONS, json_columns
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
_WIDE = {"float": "<f8"}
"""What numbers become at first: those beyond 32 bits are noticed on their way."""
_TYPES: dict[str, DataType] = {"b": Bool, "u": Int64, "i": Int64, "f": Float64, "O": String}
"""Which values of features have the JSON of an array, by its kind."""

_DECODERS = {name: msgspec.json.Decoder(GenericAlias(list, (kind,))) for name, (kind, _) in _JSON.items()}
_OPENING = re.compile(rb"[\s\[]*")
_PLACE = re.compile(r"\$\[(\d+)\]")
_NO_MARKS = bytes(set(range(256)) - set(b"[],"))
_AT_ONCE = 1 << 15
"""Bytes of JSON that are decoded at a time, and elements that are encoded: about a millisecond."""
_PREFIX = 4
"""Bytes of the length before each text: an unsigned integer, little-endian."""


def from_json(where: str, raw: bytes, element: str, shape: Shape) -> Array:
    """The tensor of this shape whose elements are in JSON, flat or nested. Nothing is decoded that has another size.

    Numbers are decoded some at a time: the event loop waits for the interpreter no longer than for those.

    Raises:
        RequestError: the elements have another type, number or nesting, or are beyond their type.
    """
    count = math.prod(shape)
    expected = f"{count:,} {_JSON[element][1]} ({DATATYPES[element]}), flat or nested as {list(shape)}"
    if element == "string":
        return _texts_from_json(where, raw, shape, expected)
    if (elements := raw.count(b",") + 1) != count:
        raise RequestError(where, f"has {elements:,} elements", expected=expected)
    if raw.translate(None, _NO_MARKS) not in (_marks(shape), _marks((count,))):
        raise RequestError(where, "is nested in another way", expected=expected)
    flat, array, place = raw.translate(None, b"[]"), np.empty(count, _NUMPY[element]), 0
    for text in _parts(flat):
        part = _decoded(where, text, element, place, expected)
        array[place : place + len(part)] = part
        place += len(part)
    if place < count:
        raise RequestError(where, f"has {place:,} elements", expected=expected)
    return array.reshape(shape)


def _parts(flat: bytes) -> Iterator[bytes]:
    """A list without its brackets in parts, each to the next comma after so many bytes."""
    begin = 0
    while (end := flat.find(b",", begin + _AT_ONCE)) >= 0:
        yield flat[begin:end]
        begin = end + 1
    yield flat[begin:]


def _decoded(where: str, part: bytes, element: str, place: int, expected: str) -> Array:
    """Some elements, the first of which is at this place of the tensor."""
    try:
        values = _DECODERS[element].decode(b"[%b]" % part)
    except FAILURES as error:
        found = _PLACE.sub(lambda match: f"data[{place + int(match[1])}]", str(error))
        found = found.replace("Invalid enum value", "Expected a number, got")
        raise RequestError(where, found, expected=expected) from error
    wide = np.array(values, _WIDE.get(element, _NUMPY[element]))
    with np.errstate(over="ignore"):
        array = wide.astype(_NUMPY[element])
    if element == "float" and (beyond := np.isinf(array) & np.isfinite(wide)).any():
        raise RequestError(where, f"{wide[beyond][0]} is too large", expected=expected)
    return array


def _texts_from_json(where: str, raw: bytes, shape: Shape, expected: str) -> Array:
    opening = _OPENING.match(raw)
    depth = opening[0].count(b"[") if opening else 0
    if depth not in (1, len(shape)):
        raise RequestError(where, "is nested in another way", expected=expected)
    try:
        array = np.array(_texts_decoder(depth).decode(raw), object)
    except FAILURES as error:
        raise RequestError(where, str(error).replace("$", "data"), expected=expected) from error
    if array.shape not in (shape, (math.prod(shape),)):
        raise RequestError(where, f"has the shape {list(array.shape)}", expected=expected)
    return array.reshape(shape)


@lru_cache(8)
def _texts_decoder(depth: int) -> msgspec.json.Decoder[Any]:
    kind: Any = str
    for _ in range(depth):
        kind = GenericAlias(list, (kind,))
    return msgspec.json.Decoder(kind)


@lru_cache(8)
def _marks(shape: Shape) -> bytes:
    """The brackets and commas of a tensor in JSON."""
    marks = b""
    for size in reversed(shape or (1,)):
        marks = b"[%b]" % b",".join([marks] * size)
    return marks


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


def to_json(array: Array) -> orjson.Fragment:
    """The elements in row-major order, for orjson. A number that is not finite is a word."""
    flat, dtype = array.reshape(1, -1), _TYPES[array.dtype.kind]
    parts = [
        orjson.dumps(json_columns(dtype, flat[:, begin : begin + _AT_ONCE])[0], option=OPTIONS)[1:-1]
        for begin in range(0, flat.shape[1], _AT_ONCE)
    ]
    return orjson.Fragment(b"[%b]" % b",".join(parts))


def to_bytes(array: Array) -> bytes | memoryview:
    """The inverse of `from_bytes`; of numbers it is their own memory."""
    if array.dtype != object:
        return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
    texts = [str(text).encode() for text in array.ravel().tolist()]
    return b"".join(len(text).to_bytes(_PREFIX, "little") + text for text in texts)
