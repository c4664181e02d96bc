"""Public modules that import their names on first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(public: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a public module, so that importing it loads no private module yet.

    A private module is imported when one of its names is used. `names` maps the path of each private module to its
    public names, separated by spaces. `public` is the name of the public module, for the AttributeError about an
    unknown name.
    """
    homes = {name: home for home, text in names.items() for name in text.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {public!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load, lambda: sorted(homes)
