"""Paths, in the form that each library expects: several read patterns, escapes or URLs into a plain name."""

import os
import re
from pathlib import Path

from isthmus.features.errors import ConfigurationError, Problem, RequestError

_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
_DELTA = re.compile(r"%[0-9A-Fa-f]{2}|[][^|\\\x00-\x1f\x7f\ud800-\udfff]")
UNPRINTED = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and bytes that are not UTF-8."""


def is_url(place: object) -> bool:
    """Whether a text begins like a URL, `s3://` for example."""
    return bool(_URL.match(str(place)))


def require_local(where: str, place: Path | str) -> Path:
    """Return a local path.

    Raises:
        RequestError: it is a URL, of which `Path` would make the local folder `s3:`.
    """
    if is_url(place):
        raise RequestError(where, f"{place} is a URL", expected="a local path",
                           remedy="use a local folder, and copy it with the tool of the storage")  # fmt: skip
    return Path(place)


def require_delta(where: str, place: str, remedy: str) -> str:
    """Return the place of a Delta table, or of a folder of them.

    deltalake resolves links, makes a URL of the path and decodes it again, so no other spelling of it would help.

    Raises:
        ConfigurationError: its path has characters with which deltalake panics or reaches another folder.
    """
    url = is_url(place)
    found = _DELTA.search(place if url else os.path.realpath(place)) or (re.search("[#?]", place) if url else None)
    if found:
        problem = Problem("path", f"deltalake cannot use {place!r}, because of the {found[0]!r} in it")
        raise ConfigurationError(where, [problem], remedy=remedy)
    return place
