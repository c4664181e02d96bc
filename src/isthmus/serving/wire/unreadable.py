"""What is said of bytes that are no JSON in UTF-8. A request that can be read does not come here."""

import re

import msgspec

from isthmus.serving.wire.errors import UnreadableError

FAILURES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are no JSON, no UTF-8, or nested without end."""

_POSITION = re.compile(r"\(byte (\d+)\)")
_BARE = re.compile(rb"-?(?:NaN|Infinity)")
_NAME = re.compile(rb'(?<!\\)"([^"\\]*)"\s*:')
_FIRST = re.compile(
    rb"""(?<!\\)(?:\\\\)*                                     # what follows is an escape
    (\\u d[89ab][0-9a-f]{2})                                  # the first half of a pair
    (?! \\u d[c-f][0-9a-f]{2} | \\?u?d?[c-f]?[0-9a-f]?\Z)     # without the second, which was not cut off either
    """,
    re.IGNORECASE | re.VERBOSE,
)
_SECOND = re.compile(rb"(\\ud[c-f][0-9a-f]{2})", re.IGNORECASE)
_NEAR = 64
"""Bytes before the place of an error in which its cause is looked for: a body may be long."""


def unreadable(where: str, text: bytes, error: Exception) -> UnreadableError:
    """The refusal of a part of a request.

    Args:
        where: the part: the body, or one of its columns.
        text: its JSON, which positions are counted in.
        error: what decoding raised, one of `FAILURES`.
    """
    found, expected = str(error), "JSON in UTF-8"
    position = _POSITION.search(found)
    at = int(position[1]) if position else len(text)
    # What stands before NaN has been read as the sign of a number.
    bare = _BARE.match(text, at - (text[at - 1 : at] == b"-"))
    if isinstance(error, UnicodeDecodeError):
        # Its own position is within one string.
        try:
            text.decode()
        except UnicodeDecodeError as first:
            found = f"byte {first.start} of its text, 0x{text[first.start]:02x}, is not UTF-8"
    elif bare:
        word = bare[0].decode()
        # The last text before a list of numbers is its name.
        end = text.rfind(b'"', 0, bare.start())
        if name := _NAME.match(text, text.rfind(b'"', 0, max(end, 0))):
            where = f"{where}, {name[1].decode(errors='replace')!r}"
        found = f"{word} is no JSON (byte {bare.start()})"
        expected = f'a number; "{word}", in quotes, where a Float32 or Float64 is expected'
    elif isinstance(error, msgspec.DecodeError) and (lone := _lone(found, text, at)) and lone.start(1) < at:
        found = f"{lone[1].decode()} is half of a surrogate pair (byte {lone.start(1)})"
    return UnreadableError(where, found, expected=expected)


def _lone(found: str, text: bytes, at: int) -> re.Match[bytes] | None:
    """Half of a pair of surrogates before the place of an error: a second half stands right before it."""
    # A first half near the end is called truncated: the second would not fit.
    return ("surrogate" in found and _SECOND.match(text, at - 6)) or _FIRST.search(text, at - _NEAR)
