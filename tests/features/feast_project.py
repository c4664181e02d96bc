"""A Feast project of its own for a test: a real registry, and an online store to choose."""

import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    import feast
    import feast.types as ft
    from feast.infra.online_stores.online_store import OnlineStore
    from feast.protos.feast.serving.ServingService_pb2 import FieldStatus
    from feast.protos.feast.types.EntityKey_pb2 import EntityKey
    from feast.protos.feast.types.Value_pb2 import Value
    from feast.value_type import ValueType

DRIVER = feast.Entity(name="driver", join_keys=["driver"], value_type=ValueType.INT64)
CITY = feast.Entity(name="city", join_keys=["city"], value_type=ValueType.STRING)


def isthmus(url: str, **more: str) -> str:
    """The `online_store` of a `feature_store.yaml` that is ours."""
    options = "".join(f", {name}: {value}" for name, value in more.items())
    return f'{{type: isthmus.feast.IsthmusOnlineStore, url: "{url}"{options}}}'


OFFLINE = "{type: isthmus.feast.IsthmusOfflineStore}"
STRICT = OFFLINE.replace("}", ", known_at: created, types: declared}")
ENGINE = "isthmus.feast.IsthmusComputeEngine"
FEASTS_ENGINE = "local"
# With an SQL registry Feast mistakes one state for another whose address in memory it has: only files have versions.
REGISTRY = '{{registry_type: file, path: "{folder}/registry.pb", cache_ttl_seconds: 0}}'


def repository(
    folder: Path, online_store: str, project: str = "prod", *, offline: str = "{type: dask}",
    engine: str = FEASTS_ENGINE, registry: str = "",
) -> feast.FeatureStore:  # fmt: skip
    """Writes `feature_store.yaml` into a folder and opens it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "feature_store.yaml").write_text(
        textwrap.dedent(f"""
        project: {project}
        provider: local
        registry: {registry or REGISTRY.format(folder=folder)}
        offline_store: {offline}
        batch_engine: {engine}
        online_store: {online_store}
        entity_key_serialization_version: 3
        """)
    )
    return feast.FeatureStore(repo_path=str(folder))


def source(folder: Path, name: str = "rows", *, created: bool = True) -> feast.FileSource:
    return feast.FileSource(
        name=name,
        path=str(folder / f"{name}.parquet"),
        timestamp_field="event_timestamp",
        created_timestamp_column="created" if created else "",
    )


def view(
    folder: Path,
    fields: Mapping[str, Any],
    entities: Sequence[feast.Entity] = (DRIVER,),
    *,
    name: str = "stats",
    ttl: timedelta = timedelta(0),
    created: bool = True,
    **more: Any,
) -> feast.FeatureView:
    keys = {ValueType.INT64: ft.Int64, ValueType.STRING: ft.String}
    # An entity without a type has no field: Feast is left to find one.
    schema = [
        feast.Field(name=entity.join_key, dtype=keys[entity.value_type])
        for entity in entities
        if entity.value_type in keys
    ]
    schema += [feast.Field(name=field, dtype=dtype) for field, dtype in fields.items()]
    table = source(folder, f"{name}_rows", created=created)
    return feast.FeatureView(name=name, entities=list(entities), schema=schema, ttl=ttl, source=table, **more)


def frame(rows: int = 0, **columns: Any) -> pd.DataFrame:
    """Rows of a view; true and known since a minute ago if nothing else is said."""
    ago = now() - timedelta(minutes=1)
    rows = rows or max(len(column) for column in columns.values())
    return pd.DataFrame({"event_timestamp": [ago] * rows, "created": [ago] * rows, **columns})


def now() -> datetime:
    return datetime.now(UTC)


def online_store(store: feast.FeatureStore) -> OnlineStore:
    found: OnlineStore = store._get_provider().online_store
    return found


def entity_key(**keys: int | str) -> EntityKey:
    values = [Value(string_val=key) if isinstance(key, str) else Value(int64_val=key) for key in keys.values()]
    return EntityKey(join_keys=list(keys), entity_values=values)


Row = tuple[EntityKey, dict[str, Value], datetime, datetime | None]


def write(store: feast.FeatureStore, rows: Iterable[Row], progress: Callable[[int], Any] | None = None) -> None:
    """Writes rows of the view `stats` as Feast's SDK does."""
    table = store.get_feature_view("stats")
    online_store(store).online_write_batch(store.config, table, list(rows), progress)


def answered(response: Any) -> dict[str, list[tuple[Any, str]]]:
    """Feature name to (value, status) for each row."""
    values = response.to_dict()
    statuses = {
        name: [FieldStatus.Name(status) for status in vector.statuses]
        for name, vector in zip(response.proto.metadata.feature_names.val, response.proto.results, strict=True)
    }
    return {name: list(zip(values[name], statuses[name], strict=True)) for name in values}
