"""The plug-in classes for Feast, by the names that a `feature_store.yaml` uses, and all that talks to Feast.

Each class is loaded on access: a feature server that needs the online store does not load the offline one.
"""

import warnings
from importlib import import_module
from typing import Any

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations. This import comes before those of all modules of the room.
    warnings.simplefilter("ignore")
    import_module("feast")

_MODULES = {"IsthmusComputeEngine": "compute", "IsthmusOfflineStore": "offline", "IsthmusOnlineStore": "online"}
"""The module of each class, and of its configuration, whose name ends with Config."""


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name.removesuffix("Config"))
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
