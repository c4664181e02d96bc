"""The tables of the online benchmark, and a Feast and an Isthmus project over them, in one Redis."""

import contextlib
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

if TYPE_CHECKING:
    from feast import FeatureStore

START = datetime(2026, 6, 1, tzinfo=UTC)
VIEWS = {"stats": 20, "wide": 200}
"""Number of float32 features (`f0`, `f1`, …) by view; the key is `user_id`."""


def write_tables(folder: Path, rows: dict[str, int]) -> dict[str, pa.Table]:
    """Write one row per user and view to `NAME.parquet`. The same arguments give the same values."""
    tables = {}
    for seed, (view, features) in enumerate(VIEWS.items()):
        chance = np.random.default_rng(seed)
        columns: dict[str, Any] = {"user_id": np.arange(rows[view])}
        columns |= {f"f{n}": chance.standard_normal(rows[view], dtype=np.float32) for n in range(features)}
        at = np.datetime64(START.replace(tzinfo=None), "us") + chance.integers(0, 3_600_000_000, rows[view])
        table = pa.table({**columns, "event_timestamp": pa.array(at, pa.timestamp("us", tz="UTC"))})
        pq.write_table(table, folder / f"{view}.parquet")
        tables[view] = table
    return tables


def feast_project(folder: Path, tables: Path, redis: str, *, best_writes: bool = False) -> "FeatureStore":
    """Create and apply a Feast repository over the tables; `best_writes` sets Feast's options for fast writes."""
    import yaml
    from feast import Entity, FeatureStore, FeatureView, Field, FileSource, ValueType
    from feast.types import Float32

    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "project": "bench",
        "registry": str(folder / "registry.db"),
        "provider": "local",
        "online_store": {"type": "redis", "connection_string": redis, "skip_dedup": best_writes},
        "offline_store": {"type": "file"},
        "materialization": {"online_write_batch_size": 10_000} if best_writes else {},
        "entity_key_serialization_version": 3,
    }
    (folder / "feature_store.yaml").write_text(yaml.safe_dump(settings))
    store = FeatureStore(repo_path=str(folder))
    user = Entity(name="user_id", join_keys=["user_id"], value_type=ValueType.INT64)
    views = [
        FeatureView(
            name=view,
            entities=[user],
            schema=[Field(name=f"f{n}", dtype=Float32) for n in range(features)],
            source=FileSource(name=f"{view}_table", path=str(tables / f"{view}.parquet"),
                              timestamp_field="event_timestamp"),
            ttl=timedelta(0),
        )
        for view, features in VIEWS.items()
    ]  # fmt: skip
    with contextlib.redirect_stdout(sys.stderr):
        store.apply([user, *views])
    return store


DEFINITIONS = """\
from pyspark.sql import DataFrame

from isthmus import Entity, Field, Float32, Int64, Source, transform

user = Entity("user", join_keys={{"user_id": Int64}})
stats_table = Source("stats_table", path="{tables}/stats.parquet", timestamp="event_timestamp")
wide_table = Source("wide_table", path="{tables}/wide.parquet", timestamp="event_timestamp")


@transform(entities=[user], sources=[stats_table], schema=[Field(f"f{{n}}", Float32) for n in range(20)], ttl=None)
def stats(stats_table: DataFrame) -> DataFrame:
    return stats_table


@transform(entities=[user], sources=[wide_table], schema=[Field(f"f{{n}}", Float32) for n in range(200)], ttl=None)
def wide(wide_table: DataFrame) -> DataFrame:
    return wide_table
"""


def our_project(folder: Path, tables: Path, redis: str, port: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "isthmus.toml").write_text(
        f'[project]\nname = "bench"\n\n[stores]\nonline = "redis://{redis}"\n\n[server]\nport = {port}\n'
    )
    (folder / "definitions.py").write_text(DEFINITIONS.format(tables=tables))
    return folder
