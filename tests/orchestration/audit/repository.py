"""A Feast repository with a file and SQLite, as a team has it, and ways to plant faults in it."""

import hashlib
import sqlite3
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.features.feast_project import CITY, DRIVER, entity_key, now

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    import feast
    import feast.types as ft
    from feast import BigQuerySource, FileSource
    from feast.infra.key_encoding_utils import serialize_entity_key
    from feast.protos.feast.core.Registry_pb2 import Registry
    from feast.protos.feast.types.Value_pb2 import Value
    from feast.type_map import python_values_to_proto_values

__all__ = [
    "CITY", "DRIVER", "BigQuerySource", "FileSource", "Registry", "Value", "entity_key", "feast", "ft", "now",
    "python_values_to_proto_values", "serialize_entity_key",
]  # fmt: skip
"""What the tests use of Feast."""

KEYS, HOURS = 40, 5
FIELDS = {"trips": ft.Int64, "rate": ft.Float64, "name": ft.String}
SQLITE = "{type: sqlite, path: online.db}"
DAY = timedelta(days=1)


def rows(hours: int = HOURS) -> pd.DataFrame:
    """A row for each driver and hour, created ten minutes after its event. Some names are null."""
    random, ends = np.random.default_rng(1), now().replace(microsecond=0) - timedelta(minutes=20)
    count = KEYS * hours
    data = pd.DataFrame(
        {
            "driver": np.tile(np.arange(KEYS), hours),
            "event_timestamp": [ends - timedelta(hours=hours - 1 - n // KEYS) for n in range(count)],
            "trips": random.integers(0, 1000, count),
            "rate": random.random(count),
            "name": [f"n{n}" if n % 7 else None for n in range(count)],
        }
    )
    return data.assign(created=data["event_timestamp"] + timedelta(minutes=10))


def build(folder: Path, data: pd.DataFrame, *, ttl: timedelta = DAY, online: str = SQLITE) -> Path:
    """Writes the rows, applies the view `stats`, and materializes it as Feast does. All paths are relative."""
    folder.mkdir(parents=True, exist_ok=True)
    data.to_parquet(folder / "rows.parquet", coerce_timestamps="us")
    settings = f"project: prod\nprovider: local\nregistry: registry.pb\nonline_store: {online}\n"
    (folder / "feature_store.yaml").write_text(f"{settings}entity_key_serialization_version: 3\n")
    store = feast.FeatureStore(repo_path=str(folder))
    source = FileSource(
        name="rows", path="rows.parquet", timestamp_field="event_timestamp", created_timestamp_column="created"
    )
    fields = [feast.Field(name=name, dtype=dtype) for name, dtype in {"driver": ft.Int64, **FIELDS}.items()]
    view = feast.FeatureView(name="stats", entities=[DRIVER], schema=fields, ttl=ttl, source=source)
    store.apply([DRIVER, view, feast.FeatureService(name="drivers", features=[view[["rate", "trips"]]])])
    store.materialize(now() - timedelta(days=900), now())
    return folder


def change(folder: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(folder / "online.db") as connection:
        connection.execute(statement.replace("TABLE", '"prod_stats"'), values)
    connection.close()


def key_bytes(driver: int) -> bytes:
    return serialize_entity_key(entity_key(driver=driver), 3)


def put(folder: Path, driver: int, feature: str, **value: Any) -> None:
    """Writes a value of an online row."""
    change(folder, "UPDATE TABLE SET value = ? WHERE entity_key = ? AND feature_name = ?",
           Value(**value).SerializeToString(), key_bytes(driver), feature)  # fmt: skip


def rewrite(folder: Path, edit: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """Changes the source after the materialization."""
    file = folder / "rows.parquet"
    edit(pd.read_parquet(file)).to_parquet(file, coerce_timestamps="us")


def digest(folder: Path) -> dict[str, str]:
    """The hash of every file of a repository, also of journals and caches that were not there before."""
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*")) if file.is_file()
    }  # fmt: skip
