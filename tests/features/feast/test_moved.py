"""The class paths of version 0.1 in a user's `feature_store.yaml`."""

import sys

import pytest
from feast.importer import import_class

from isthmus.features import feast


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("feast_store", "IsthmusOnlineStore"),
        ("feast_store", "IsthmusOnlineStoreConfig"),
        ("feast_offline", "IsthmusOfflineStore"),
        ("feast_offline", "IsthmusOfflineStoreConfig"),
        ("feast_compute", "IsthmusComputeEngine"),
        ("feast_compute", "IsthmusComputeEngineConfig"),
    ],
)
def test_an_old_class_path_leads_to_the_class_and_warns(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"isthmus.features.{module}", raising=False)
    with pytest.warns(DeprecationWarning, match=rf"isthmus.features.{module} has moved: use isthmus.features.feast\."):
        found = import_class(f"isthmus.features.{module}", name)
    assert found is getattr(feast, name)
    if name.endswith("Config"):
        options = {"url": "redis://localhost"} if name == "IsthmusOnlineStoreConfig" else {}
        assert found(type=f"isthmus.features.{module}.{name.removesuffix('Config')}", **options)
