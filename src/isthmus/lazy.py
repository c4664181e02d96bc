"""Public modules that import their names on first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(public: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions to assign to `__getattr__` and `__dir__` of a public module.

    `__getattr__` imports the private module of a name on each access, and raises an AttributeError for an unknown name.

    Args:
        public: name of the public module, for errors.
        names: private module to the names that it defines, separated by spaces.
    """
    homes = {name: home for home, text in names.items() for name in text.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {public!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load, lambda: sorted(homes)
