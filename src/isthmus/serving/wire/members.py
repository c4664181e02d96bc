"""The members of a request's objects: a name that is given twice is refused, since parsers keep the last in silence."""

import json
from typing import Any

import msgspec

from isthmus.features.errors import RequestError

_BRACE = ord("{")
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def require_distinct(body: bytes) -> None:
    """Refuses a request that names a field or a column twice.

    Args:
        body: JSON that has been decoded: an object whose members are plain, lists, or objects of columns.

    Raises:
        RequestError: a name is given twice.
    """
    accounted = 0
    for member in _OBJECT.decode(body).values():
        text = bytes(member)
        accounted += 1
        if text[0] == _BRACE:
            columns = _OBJECT.decode(text).values()
            accounted += len(columns)
            for column in columns:
                accounted += bytes(column).count(b":")
        else:
            accounted += text.count(b":")
    # Each member has a colon of its own, and so has one that decoding has dropped.
    if body.count(b":") > accounted:
        _compare(body)


def _compare(body: bytes) -> None:
    """Looks closely: there may also be a colon in a name."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = set()
        for name, _ in pairs:
            if name in names:
                raise RequestError(f"body, {name!r}", "is given twice", expected="each name once")
            names.add(name)
        return dict(pairs)

    json.loads(body, object_pairs_hook=distinct)
