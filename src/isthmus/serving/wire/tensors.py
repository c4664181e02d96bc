"""Convert tensors of requests and answers: JSON or bytes to arrays, and back."""

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
"""Type to parse numbers as first, to detect those too large for 32 bits."""
_TYPES: dict[str, DataType] = {"b": Bool, "u": Int64, "i": Int64, "f": Float64, "O": String}
"""Feature type with the same JSON, by kind of array."""

_DECODERS = {name: msgspec.json.Decoder(GenericAlias(list, (kind,))) for name, (kind, _) in _JSON.items()}
_OPENING = re.compile(rb"[\s\[]*")
_PLACE = re.compile(r"\$\[(\d+)\]")
_NO_MARKS = bytes(set(range(256)) - set(b"[],"))
_AT_ONCE = 1 << 15
"""Bytes of JSON decoded, or elements encoded, in one step: about a millisecond."""
_PREFIX = 4
"""Bytes of the length before each string: an unsigned little-endian integer."""


def from_json(where: str, raw: bytes, element: str, shape: Shape) -> Array:
    """Decode the JSON of an input tensor in a request: a flat list, or lists nested like `shape`.

    `element` is the element type in ONNX's words, such as "float" or "string". `where` names the tensor in errors.
    Raises a RequestError if the number, nesting or type of the elements is wrong. Checks the number before it decodes
    numbers, and decodes them in chunks, so that other threads can run in between.
    """
    count = math.prod(shape)
    expected = f"{count:,} {_JSON[element][1]} ({DATATYPES[element]}), flat or nested as {list(shape)}"
    if element == "string":
        return _texts_from_json(where, raw, shape, expected)
    if (elements := raw.count(b",") + 1) != count:
        raise RequestError(where, f"has {elements:,} elements", expected=expected)
    if raw.translate(None, _NO_MARKS) not in (_marks(shape), _marks((count,))):
        raise RequestError(where, "has another nesting", expected=expected)
    flat, array, place = raw.translate(None, b"[]"), np.empty(count, _NUMPY[element]), 0
    for text in _parts(flat):
        part = _decoded(where, text, element, place, expected)
        array[place : place + len(part)] = part
        place += len(part)
    if place < count:
        raise RequestError(where, f"has {place:,} elements", expected=expected)
    return array.reshape(shape)


def _parts(flat: bytes) -> Iterator[bytes]:
    begin = 0
    while (end := flat.find(b",", begin + _AT_ONCE)) >= 0:
        yield flat[begin:end]
        begin = end + 1
    yield flat[begin:]


def _decoded(where: str, part: bytes, element: str, place: int, expected: str) -> Array:
    try:
        values = _DECODERS[element].decode(b"[%b]" % part)
    except FAILURES as error:
        message = _PLACE.sub(lambda match: f"data[{place + int(match[1])}]", str(error))
        message = message.replace("Invalid enum value", "Expected a number, got")
        raise RequestError(where, message, expected=expected) from error
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
        raise RequestError(where, "has another nesting", expected=expected)
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
    marks = b""
    for size in reversed(shape or (1,)):
        marks = b"[%b]" % b",".join([marks] * size)
    return marks


def from_bytes(where: str, data: memoryview, element: str, shape: Shape) -> Array:
    """Decode the binary data of an input tensor in a request: little-endian numbers, or strings each after its length.

    `element` is the element type in ONNX's words, such as "float" or "string". A string's length is an unsigned number
    of 4 bytes. `where` names the tensor in errors. The result may share the memory of `data`. Raises a RequestError if
    the bytes do not fit `element` and `shape`.
    """
    count = math.prod(shape)
    if element == "string":
        return _texts(where, data, count).reshape(shape)
    dtype = np.dtype(_NUMPY[element])
    if len(data) != count * dtype.itemsize:
        raise RequestError(where, f"has {len(data):,} bytes",
                           expected=f"{count * dtype.itemsize:,}: {list(shape)} {DATATYPES[element]}")  # fmt: skip
    if element == "bool" and count and np.frombuffer(data, np.uint8).max() > 1:
        raise RequestError(where, "has a byte that is neither 0 nor 1", expected="one byte per boolean")
    # The bytes follow JSON of any length, and some kernels need aligned numbers.
    return np.require(np.frombuffer(data, dtype), requirements="A").reshape(shape)


def _texts(where: str, data: memoryview, count: int) -> Array:
    expected = f"{count:,} strings in UTF-8, each after its length in {_PREFIX} bytes"
    # Check the size first: allocating the announced number of strings could use any amount of memory.
    if count * _PREFIX > len(data):
        raise RequestError(where, f"has {len(data):,} bytes", expected=expected)
    texts, place = np.empty(count, object), 0
    for number in range(count):
        begin = place + _PREFIX
        place = begin + int.from_bytes(data[place:begin], "little")
        if place > len(data):
            raise RequestError(where, f"ends within string {number}", expected=expected)
        try:
            texts[number] = str(data[begin:place], "utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(where, f"string {number} is not UTF-8", expected=expected) from error
    if place != len(data):
        raise RequestError(where, f"has {len(data) - place:,} bytes after its strings", expected=expected)
    return texts


def to_json(array: Array) -> orjson.Fragment:
    flat, dtype = array.reshape(1, -1), _TYPES[array.dtype.kind]
    parts = [
        orjson.dumps(json_columns(dtype, flat[:, begin : begin + _AT_ONCE])[0], option=OPTIONS)[1:-1]
        for begin in range(0, flat.shape[1], _AT_ONCE)
    ]
    return orjson.Fragment(b"[%b]" % b",".join(parts))


def to_bytes(array: Array) -> bytes | memoryview:
    if array.dtype != object:
        return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8).data
    texts = [str(text).encode() for text in array.ravel().tolist()]
    return b"".join(len(text).to_bytes(_PREFIX, "little") + text for text in texts)
