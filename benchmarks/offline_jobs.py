"""Run one point-in-time join in its own process: `python offline_jobs.py CASE FOLDER OUT [--cutoff]`.

Each job is prepared (imports, sessions, registries) and then timed: reading Parquet, joining, and returning an Arrow
table. Without `--cutoff` a correction counts from its event time, with it from its creation time.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from offline_data import COLUMNS, FEATURES, KEYS, TTL_DAYS, VIEWS

if TYPE_CHECKING:
    from isthmus.features.contract.schema import ViewContract

Job = Callable[[], pa.Table]
TTL = timedelta(days=TTL_DAYS)
MICROS = TTL // timedelta(microseconds=1)
SPARK = {  # the settings of Feast's own template, for a small machine
    "spark.master": "local[2]",
    "spark.driver.memory": "4g",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.ui.enabled": "false",
    # The same as in our engine: by default the JVM would use more cores than it has.
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cutoff", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        job = JOBS[options.case](options.folder, Path(name), options.cutoff, stack)
        began = time.perf_counter()
        result = job()
        seconds = time.perf_counter() - began
        memory = peak_mb()
        pq.write_table(result, options.out)
    print(json.dumps({"seconds": round(seconds, 3), "peak_mb": round(memory)}))


def peak_mb() -> float:
    """Return the peak resident memory of this process and its children, summed."""
    total = 0.0
    for member in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            lines = Path(f"/proc/{member.pid}/status").read_text().splitlines()
            total += sum(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3
    return total


def embedded(folder: Path, scratch: Path, cutoff: bool, stack: contextlib.ExitStack) -> Job:
    from isthmus.features.offline.history import ViewHistory
    from isthmus.features.pointintime.join import point_in_time

    del scratch, stack

    def run() -> pa.Table:
        # The offline store reads text keys as dictionaries, too.
        histories = [ViewHistory(_view(name), _table(folder, name, cutoff, read_dictionary=KEYS), 0) for name in VIEWS]
        return point_in_time(pq.read_table(folder / "spine.parquet"), histories)

    return run


def _table(folder: Path, name: str, cutoff: bool, **how: Any) -> pa.Table:
    rows = pq.read_table(folder / f"{name}.parquet", **how)
    created = rows["created"]
    known = created if cutoff else rows["event_timestamp"]
    rows = rows.drop_columns("created").append_column("known_at", known)
    return rows.append_column("content_hash", created.cast(pa.int64()))


def by_executors(engine: str) -> Callable[[Path, Path, bool, contextlib.ExitStack], Job]:
    """Prepare our join by an engine, whose executors join parts of the spine with table files."""

    def prepare(folder: Path, scratch: Path, cutoff: bool, stack: contextlib.ExitStack) -> Job:
        from isthmus.features.pointintime.spine import SpineRows
        from isthmus.transforms.engine import session
        from isthmus.transforms.tables.stored import Store
        from isthmus.transforms.views.executorset import JoinedViews, StoredSpine, write_parts

        files = {name: scratch / name / "rows.parquet" for name in VIEWS}
        for name, path in files.items():
            path.parent.mkdir(exist_ok=True)
            pq.write_table(_table(folder, name, cutoff), path)
        store = Store(str(scratch), {})
        spark = stack.enter_context(session(engine))
        spark.range(1).toArrow()
        views = [(_view(name), [files[name].name], [column.name for column in _view(name).fields]) for name in VIEWS]

        def run() -> pa.Table:
            rows = pq.read_table(folder / "spine.parquet")
            spine = StoredSpine.write(SpineRows(rows.schema, rows.to_batches), store)
            write_parts(spark, spine, JoinedViews(views, status=True), store)
            return pa.Table.from_batches(spine.joined())

        return run

    return prepare


def _view(name: str) -> "ViewContract":
    from isthmus.features.contract.schema import Column, ViewContract
    from isthmus.features.types import Float32, String

    fields = tuple(Column(f"f{n}", Float32) for n in range(FEATURES))
    return ViewContract(name, ("user",), tuple(Column(key, String) for key in KEYS), fields, MICROS, 0, ("source",), "")


def feast(kind: str) -> Callable[[Path, Path, bool, contextlib.ExitStack], Job]:
    def prepare(folder: Path, scratch: Path, cutoff: bool, stack: contextlib.ExitStack) -> Job:
        import pandas as pd
        from feast import Entity, FeatureStore, FeatureView, Field, FileSource, RepoConfig, ValueType
        from feast.types import Float32, String

        del stack
        source: Any = FileSource
        options: dict[str, str] = {}
        if kind == "spark":
            from feast.infra.offline_stores.contrib.spark_offline_store.spark_source import SparkSource
            from pyspark.sql import SparkSession

            SparkSession.builder.config(  # Feast uses the active session
                map={**SPARK, "spark.sql.warehouse.dir": str(scratch / "warehouse")}
            ).getOrCreate().range(1).count()
            source, options = SparkSource, {"file_format": "parquet"}
        config = RepoConfig(
            project="pit", registry=str(scratch / "registry.db"), provider="local", offline_store={"type": kind},
            online_store={"type": "sqlite", "path": str(scratch / "online.db")}, repo_path=str(scratch),
            entity_key_serialization_version=3,
        )  # fmt: skip
        store = FeatureStore(config=config)
        entities = [Entity(name=key, join_keys=[key], value_type=ValueType.STRING) for key in KEYS]
        schema = [Field(name=f"f{n}", dtype=Float32) for n in range(FEATURES)]
        schema += [Field(name=key, dtype=String) for key in KEYS]
        views = []
        for name in VIEWS:
            times = {"timestamp_field": "event_timestamp", "created_timestamp_column": "created"}
            table = source(name=f"{name}_source", path=str(folder / f"{name}.parquet"), **times, **options)
            views.append(FeatureView(name=name, entities=entities, ttl=TTL, schema=schema, source=table))
        store.apply([*entities, *views])

        def run() -> pa.Table:
            spine = pd.read_parquet(folder / "spine.parquet")
            features = [column.replace("__", ":") for column in COLUMNS]
            job = store.get_historical_features(
                spine, features, full_feature_names=True, filter_by_created_timestamp=cutoff
            )
            return job.to_arrow()

        return run

    return prepare


def polars(folder: Path, scratch: Path, cutoff: bool, stack: contextlib.ExitStack) -> Job:
    """Prepare Polars' `join_asof`, which supports one time column only."""
    import polars as pl

    del scratch, cutoff, stack

    def run() -> pa.Table:
        found = pl.read_parquet(folder / "spine.parquet").sort("event_timestamp")
        for name in VIEWS:
            rows = pl.read_parquet(folder / f"{name}.parquet").sort("event_timestamp", "created").drop("created")
            rows = rows.rename({f"f{n}": f"{name}__f{n}" for n in range(FEATURES)})
            found = found.join_asof(rows, on="event_timestamp", by=KEYS, tolerance=TTL, check_sortedness=False)
        return found.to_arrow()

    return run


def duckdb_asof(folder: Path, scratch: Path, cutoff: bool, stack: contextlib.ExitStack) -> Job:
    """Prepare DuckDB's ASOF join over the last correction of each row, in plain SQL."""
    import duckdb

    del scratch, cutoff, stack
    query, chosen = f"FROM '{folder}/spine.parquet' e", ["e.*"]
    for name in VIEWS:
        age = f"epoch_us(e.event_timestamp) - epoch_us({name}.event_timestamp)"
        chosen += [f"CASE WHEN {age} <= {MICROS} THEN {name}.f{n} END AS {name}__f{n}" for n in range(FEATURES)]
        query += f"""
            ASOF LEFT JOIN (
                FROM '{folder}/{name}.parquet' QUALIFY row_number() OVER (
                    PARTITION BY store_id, user_id, event_timestamp ORDER BY created DESC) = 1) {name}
            ON e.store_id = {name}.store_id AND e.user_id = {name}.user_id
            AND e.event_timestamp >= {name}.event_timestamp"""
    return lambda: duckdb.connect().sql(f"SELECT {', '.join(chosen)} {query}").to_arrow_table()


def duckdb_range(folder: Path, scratch: Path, cutoff: bool, stack: contextlib.ExitStack) -> Job:
    """Prepare a range join: the greatest of all rows in the time range. It is the reference for all results."""
    import duckdb

    del scratch, stack
    spine = f"'{folder}/spine.parquet'"
    known = "AND f.created <= e.event_timestamp" if cutoff else ""
    query = f"FROM {spine}"
    for name in VIEWS:
        picked = ", ".join(f"best.f{n} AS {name}__f{n}" for n in range(FEATURES))
        query += f"""
            LEFT JOIN (
                SELECT row_id, {picked} FROM (
                    SELECT row_id, arg_max(f, (f.event_timestamp, f.created)) AS best
                    FROM {spine} e JOIN '{folder}/{name}.parquet' f
                    ON e.store_id = f.store_id AND e.user_id = f.user_id {known}
                    AND epoch_us(e.event_timestamp) - epoch_us(f.event_timestamp) BETWEEN 0 AND {MICROS}
                    GROUP BY row_id)) USING (row_id)"""  # noqa: S608 - names of this file
    return lambda: duckdb.connect().sql(query).to_arrow_table()


JOBS: dict[str, Callable[[Path, Path, bool, contextlib.ExitStack], Job]] = {
    "embedded": embedded,
    "sail": by_executors("sail"),
    "spark": by_executors("spark"),
    "feast_file": feast("file"),
    "feast_duckdb": feast("duckdb"),
    "feast_spark": feast("spark"),
    "polars": polars,
    "duckdb_asof": duckdb_asof,
    "duckdb_range": duckdb_range,
}


if __name__ == "__main__":
    main()
