"""The plug-in classes for Feast, by the names that a `feature_store.yaml` uses, and all that talks to Feast.

Each class is loaded on access: a feature server that needs the online store does not load the offline one.
"""

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

import typeguard


# Half of the time of importing Feast goes into compiling its classes anew, with checks of the types of arguments. This
# room has checked them. This import comes before those of all modules of the room.
class _TorchOnDemand(ModuleType):
    """In place of Feast's module, which imports torch at once: 1.4 s, for answers as tensors that few ask for."""

    @staticmethod
    def get_torch() -> ModuleType:
        return import_module("torch")


if "feast" not in sys.modules:
    sys.modules["feast.torch_wrapper"] = _TorchOnDemand("feast.torch_wrapper")
_typechecked = typeguard.typechecked
typeguard.typechecked = lambda target: target  # type: ignore[assignment]  # its overloads are for other uses
try:
    with warnings.catch_warnings():
        # Feast's dependencies warn of their own deprecations.
        warnings.simplefilter("ignore")
        import_module("feast")
finally:
    typeguard.typechecked = _typechecked

_MODULES = {"IsthmusComputeEngine": "compute", "IsthmusOfflineStore": "offline", "IsthmusOnlineStore": "online"}
"""The module of each class, and of its configuration, whose name ends with Config."""


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name.removesuffix("Config"))
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
