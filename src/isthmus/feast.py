"""The classes that a `feature_store.yaml` names: the online store, the offline store and the compute engine."""

from typing import TYPE_CHECKING

from isthmus.lazy import lazily

if TYPE_CHECKING:
    from isthmus.features.feast.compute import IsthmusComputeEngine, IsthmusComputeEngineConfig
    from isthmus.features.feast.offline import IsthmusOfflineStore, IsthmusOfflineStoreConfig
    from isthmus.features.feast.online import IsthmusOnlineStore, IsthmusOnlineStoreConfig

__all__ = [
    "IsthmusComputeEngine",
    "IsthmusComputeEngineConfig",
    "IsthmusOfflineStore",
    "IsthmusOfflineStoreConfig",
    "IsthmusOnlineStore",
    "IsthmusOnlineStoreConfig",
]
if not TYPE_CHECKING:  # with `__getattr__`, type checkers would accept misspelled names
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "isthmus.features.feast.compute": "IsthmusComputeEngine IsthmusComputeEngineConfig",
            "isthmus.features.feast.offline": "IsthmusOfflineStore IsthmusOfflineStoreConfig",
            "isthmus.features.feast.online": "IsthmusOnlineStore IsthmusOnlineStoreConfig",
        },
    )
