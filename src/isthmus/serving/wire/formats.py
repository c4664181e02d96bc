"""The forms of an answer, and which of them a caller accepts (RFC 9110, sections 12.5.1 and 12.5.3)."""

from enum import Enum
from functools import lru_cache

from isthmus.serving.wire.errors import NotAcceptableError


class Format(Enum):
    """A format by its media type; in the order of preference where a caller has none."""

    JSON = "application/json"
    VALUES = "application/vnd.isthmus.values+json"
    ARROW = "application/vnd.apache.arrow.stream"


@lru_cache(256)
def negotiate(accept: str) -> Format:
    """The format to answer in.

    Unknown media types do not count; a caller who accepts nothing else is answered in JSON, as Feast does.
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
        raise NotAcceptableError("Accept", f"{accept!r} refuses every form of the answer", expected=expected)
    return Format.JSON


def accepts(accept_encoding: str, coding: str) -> bool:
    """Whether a caller who sends this takes a body in a content coding."""
    return dict(_range(part) for part in accept_encoding.lower().split(",")).get(coding, 0) > 0


def _quality(ranges: dict[str, float], media_type: str) -> tuple[int, float]:
    """How exactly a media type is named, from 3 to 0 for not at all, and how much it is wanted."""
    kind = media_type.partition("/")[0]
    for specificity, name in ((3, media_type), (2, f"{kind}/*"), (1, "*/*")):
        if name in ranges:
            return specificity, ranges[name]
    return 0, 0.0


def _range(part: str) -> tuple[str, float]:
    """A media range or a coding, and its quality; 1 if that is not a number."""
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
