"""Formats of an answer, and content negotiation (RFC 9110, sections 12.5.1 and 12.5.3)."""

from enum import Enum
from functools import lru_cache

from isthmus.serving.wire.errors import NotAcceptableError


class Format(Enum):
    """Media types of an answer, in our order of preference."""

    JSON = "application/json"
    VALUES = "application/vnd.isthmus.values+json"
    ARROW = "application/vnd.apache.arrow.stream"


@lru_cache(256)
def negotiate(accept: str) -> Format:
    """Choose the format of an answer from the `Accept` header of a request.

    The highest quality wins, then the most specific media type, then the order of `Format`. Returns JSON if no format
    matches, as in Feast. Raises a NotAcceptableError if the header also excludes JSON by a quality of 0.
    """
    ranges = dict(_range(part) for part in accept.lower().split(","))
    best, form = (0.0, 0), None
    for candidate in Format:
        specificity, quality = _quality(ranges, candidate.value)
        if quality > 0 and (quality, specificity) > best:
            best, form = (quality, specificity), candidate
    if form is not None:
        return form
    named, _ = _quality(ranges, Format.JSON.value)
    if named:
        expected = "one of " + ", ".join(candidate.value for candidate in Format)
        raise NotAcceptableError("Accept", f"{accept!r} excludes every available format", expected=expected)
    return Format.JSON


def accepts(accept_encoding: str, coding: str) -> bool:
    return dict(_range(part) for part in accept_encoding.lower().split(",")).get(coding, 0) > 0


def _quality(ranges: dict[str, float], media_type: str) -> tuple[int, float]:
    kind = media_type.partition("/")[0]
    for specificity, name in ((3, media_type), (2, f"{kind}/*"), (1, "*/*")):
        if name in ranges:
            return specificity, ranges[name]
    return 0, 0.0


def _range(part: str) -> tuple[str, float]:
    name, *parameters = (piece.strip() for piece in part.split(";"))
    quality = 1.0
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                quality = float(value)
            except ValueError:
                quality = 1.0
    return name, quality
