"""Explain request bodies that are not valid JSON, and refuse duplicate names."""

import json
import re
from typing import Any

import msgspec

from isthmus.features.errors import RequestError
from isthmus.serving.wire.errors import UnreadableError

FAILURES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that decoding raises for bytes that are not JSON, not UTF-8, or nested too deeply."""

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_OBJECTS = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_LIST_OF_OBJECTS = re.compile(rb"\[\s*\{")
_POSITION = re.compile(r"\(byte (\d+)\)")
_BARE = re.compile(rb"-?(?:NaN|Infinity)")
_NAME = re.compile(rb'(?<!\\)"([^"\\]*)"\s*:')
_FIRST = re.compile(
    rb"""(?<!\\)(?:\\\\)*                                     # an escape begins here
    (\\u d[89ab][0-9a-f]{2})                                  # the first half of a pair
    (?! \\u d[c-f][0-9a-f]{2} | \\?u?d?[c-f]?[0-9a-f]?\Z)     # without the second, which was not cut off either
    """,
    re.IGNORECASE | re.VERBOSE,
)
_SECOND = re.compile(rb"(\\ud[c-f][0-9a-f]{2})", re.IGNORECASE)
_NEAR = 64
"""Bytes to search before the position of an error for its cause: a body may be long."""


def require_distinct(body: bytes) -> None:
    """Raise a RequestError if an object in a JSON body repeats a name: parsers silently keep the last value.

    Call it after decoding, for an object whose values are scalars, lists, objects of lists, or lists of such objects.
    """
    accounted = 0
    for member in _OBJECT.decode(body).values():
        text = bytes(member)
        accounted += 1
        if _LIST_OF_OBJECTS.match(text):
            for item in _OBJECTS.decode(text):
                accounted += len(item) + sum(_colons(bytes(value)) for value in item.values())
        else:
            accounted += _colons(text)
    # Each member has one colon, also a member that decoding dropped. A name may contain a colon too, so check
    # fully.
    if body.count(b":") > accounted:
        # Keep numbers as text: Python refuses to parse very long ones.
        json.loads(body, object_pairs_hook=_distinct, parse_int=str)


def _colons(text: bytes) -> int:
    """Count the colons of a JSON value, without members that decoding drops because their name is repeated."""
    if text[:1] != b"{":
        return text.count(b":")
    columns = _OBJECT.decode(text).values()
    return len(columns) + sum(bytes(column).count(b":") for column in columns)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise RequestError(f"body, {name!r}", "appears twice", expected="each name once")
        names.add(name)
    return dict(pairs)


def unreadable(where: str, text: bytes, error: Exception) -> UnreadableError:
    message, expected = str(error), "JSON in UTF-8"
    position = _POSITION.search(message)
    at = int(position[1]) if position else len(text)
    # In -NaN the parser has consumed the minus as the sign of a number.
    bare = _BARE.match(text, at - (text[at - 1 : at] == b"-"))
    if isinstance(error, UnicodeDecodeError):
        # The error's own position is relative to a string, so decode again.
        try:
            text.decode()
        except UnicodeDecodeError as first:
            message = f"byte {first.start} of its text, 0x{text[first.start]:02x}, is not UTF-8"
    elif bare:
        word = bare[0].decode()
        # The last string before a list of numbers is its name.
        end = text.rfind(b'"', 0, bare.start())
        if name := _NAME.match(text, text.rfind(b'"', 0, max(end, 0))):
            where = f"{where}, {name[1].decode(errors='replace')!r}"
        message = f"{word} is not valid JSON (byte {bare.start()})"
        expected = f'a number; "{word}", in quotes, where a Float32 or Float64 is expected'
    elif isinstance(error, msgspec.DecodeError) and (lone := _lone(message, text, at)) and lone.start(1) < at:
        message = f"{lone[1].decode()} is half of a surrogate pair (byte {lone.start(1)})"
    return UnreadableError(where, message, expected=expected)


def _lone(message: str, text: bytes, at: int) -> re.Match[bytes] | None:
    # msgspec reports a first half near the end as truncated because the second half would not fit.
    return ("surrogate" in message and _SECOND.match(text, at - 6)) or _FIRST.search(text, at - _NEAR)
