"""Public modules that import their names on first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(public: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a public module.

    They import a private module when one of its names is used. `names` maps each private module to its public names,
    separated by spaces. For an unknown name, `__getattr__` raises an AttributeError that contains `public`, the name of
    the public module.
    """
    homes = {name: home for home, text in names.items() for name in text.split()}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {public!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load, lambda: sorted(homes)
