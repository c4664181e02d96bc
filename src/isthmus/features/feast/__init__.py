"""The plug-in classes for Feast, by the names that a `feature_store.yaml` uses, and all that talks to Feast.

Each class is loaded when it is read: a feature server that needs the online store does not load the offline one.
"""

from importlib import import_module
from typing import Any

_PLACES = {
    "IsthmusComputeEngine": "compute",
    "IsthmusComputeEngineConfig": "compute",
    "IsthmusOfflineStore": "offline",
    "IsthmusOfflineStoreConfig": "offline",
    "IsthmusOnlineStore": "online",
    "IsthmusOnlineStoreConfig": "online",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
