"""Errors for former private paths, which name the public module to import instead."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

PUBLIC = {
    "isthmus.distill.decoding": "isthmus.inference",
    "isthmus.distill.device": "isthmus.training",
    "isthmus.distill.export.decoding": "isthmus.inference",
    "isthmus.distill.losses.maps": "isthmus.losses",
    "isthmus.distill.losses.schedule": "isthmus.losses",
    "isthmus.distill.task": "isthmus.tasks",
    "isthmus.features.contract.contract": "isthmus.training",
    "isthmus.features.feast_compute": "isthmus.feast",
    "isthmus.features.feast_offline": "isthmus.feast",
    "isthmus.features.feast_store": "isthmus.feast",
    "isthmus.features.head": "isthmus.inference",
    "isthmus.features.package": "isthmus.tasks",
    "isthmus.features.verdict": "isthmus.project",
    "isthmus.orchestration.api": "isthmus",
    "isthmus.orchestration.build": "isthmus.project",
}
"""Former private module to the public module that has its names."""


def names_in(public: str, package: str) -> Callable[[str], NoReturn]:
    """Return a `__getattr__` for a private package whose names have moved, to tell users where they are now.

    `package` is the name of the private package, and `public` the public module. For names that have moved,
    `__getattr__` raises an ImportError that says where to import them from. For other names, it raises an
    AttributeError.
    """

    def missing(name: str) -> NoReturn:
        if name in import_module(public).__all__:
            raise ImportError(f"{package}.{name} was private and has moved. Import it from {public} instead.")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return missing


class _Moved:
    def find_spec(self, name: str, path: object, target: object = None, /) -> None:
        del path, target
        if name in PUBLIC:
            raise ModuleNotFoundError(
                f"{name} was private and has moved. Import from {PUBLIC[name]} instead.", name=name
            )


def install() -> None:
    """Add an import hook that helps users of old import paths. Call it once, since each call adds another hook.

    Importing a former private module (a key of `PUBLIC`) then raises a ModuleNotFoundError that names the public
    module.
    """
    sys.meta_path.append(_Moved())
