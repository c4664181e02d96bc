"""Tell the user's modules from the standard library, from Isthmus, and from installed distributions."""

import functools
import os
import sys
import sysconfig
import types
from importlib import metadata
from pathlib import Path
from typing import Any

_INSTALLED = tuple(
    Path(path).resolve() for path in map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
)
_SITES = {"site-packages", "dist-packages"}
_OWN = Path(__file__).resolve().parents[2]


def is_users_module(value: Any) -> bool:
    if not isinstance(value, types.ModuleType):
        return False
    # A namespace package has only a `__path__`.
    return any(map(is_users_file, [getattr(value, "__file__", None), *getattr(value, "__path__", ())]))


@functools.cache
def is_users_file(file: str | None) -> bool:
    if not file or file.startswith("<frozen "):
        return False
    path = Path(file).resolve()
    if not _SITES.isdisjoint(path.parts) or any(path.is_relative_to(place) for place in (*_INSTALLED, _OWN)):
        return False
    # As found on the path, without following links: that is what a distribution lists.
    places = ((entry, os.path.relpath(file, entry)) for entry in map(os.path.abspath, sys.path))
    return not any(name in _listed_files(entry) for entry, name in places if not name.startswith(os.pardir))


@functools.cache
def _listed_files(entry: str) -> frozenset[str]:
    """Return the modules that distributions list in a folder or archive. Editable installs list no code."""
    names = set()
    for distribution in metadata.distributions(path=[entry]):
        for line in (distribution.read_text("RECORD") or "").splitlines():
            name = line.rpartition(",")[0].rpartition(",")[0].strip('"').removesuffix("/__init__.py")
            names |= {name, f"{name}c", f"{name}/__init__.py", f"{name}/__init__.pyc"}
    return frozenset(names)
