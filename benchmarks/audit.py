"""Measure `isthmus audit` of a Feast repository of 20 views with a million rows each, in Parquet and SQLite.

The repository is clean, so that every value is compared with no finding. Its rows are written to SQLite as Feast's
store writes them, without Feast: `feast materialize` would take hours.
"""

import json
import os
import resource
import sqlite3
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from result import at_least, at_most, options_parser, report

from isthmus.features.feast.existing import encoding  # before Feast, which it imports faster

import feast  # isort: skip
import feast.types as ft  # isort: skip

VIEWS, ROWS, QUICK, SECONDS, GIB = 20, 1_000_000, 50_000, 300.0, 2.0
_PER_KEY = 4
_FIELDS = {"trips": ft.Int64, "rate": ft.Float64, "city": ft.String}
_COMMAND = (sys.executable, "-c", "from isthmus.orchestration.cli.cli import main; main()")
_TABLE = (
    "(entity_key BLOB, feature_name TEXT, value BLOB, value_text TEXT, vector_value BLOB, event_ts timestamp, "
    "created_ts timestamp, PRIMARY KEY(entity_key, feature_name))"
)


def main() -> int:
    parser = options_parser(__doc__, "fewer rows")
    parser.add_argument("--views", type=int, default=VIEWS)
    parser.add_argument("--rows-per-key", type=int, default=_PER_KEY)
    options = parser.parse_args()
    rows = QUICK if options.quick else ROWS
    with TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        write(folder, options.views, rows, rows // options.rows_per_key)
        began = time.perf_counter()
        done = subprocess.run([*_COMMAND, "audit", str(folder), "--json"], stdout=subprocess.PIPE, check=True)
        seconds = time.perf_counter() - began
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    audited = json.loads(done.stdout)
    compared = sum(view["compared"] for view in audited["views"].values())
    comparisons = [
        at_least("values compared", "values", compared, options.views * rows // options.rows_per_key * len(_FIELDS)),
        at_most(f"audit of {options.views} views x {rows:,} rows", "s", round(seconds, 1), SECONDS),
        at_most("its memory", "GiB", round(memory, 2), GIB),
    ]
    return report("audit", comparisons, as_json=options.json, quick=options.quick)


def write(folder: Path, views: int, rows: int, keys: int) -> None:
    """Write a repository whose online store has the latest row of each key."""
    random, now = np.random.default_rng(0), datetime.now(UTC).replace(microsecond=0)
    ages = rows // keys - 1 - np.arange(rows) // keys
    event = np.int64(now.timestamp() - 60) - ages * 3600
    table = pa.table({
        "driver": np.arange(rows) % keys, "trips": random.integers(0, 1000, rows), "rate": random.random(rows),
        "city": np.char.add("city ", random.integers(0, 5000, rows).astype(str)),
        "event_timestamp": pa.array(event * 1_000_000).cast(pa.timestamp("us", "UTC")),
    })  # fmt: skip
    pq.write_table(table, folder / "view0.parquet")
    latest = table.slice(rows - keys)
    key_bytes = encoding.entity_keys({"driver": (latest["driver"], ft.Int64)}, "").to_pylist()
    values = {name: encoding.encode(latest[name], dtype, "").to_pylist() for name, dtype in _FIELDS.items()}
    times = event[rows - keys :].tolist()
    with sqlite3.connect(folder / "online.db") as connection:
        for n in range(views):
            connection.execute(f'CREATE TABLE "bench_view{n}" {_TABLE}')
            if n:
                os.link(folder / "view0.parquet", folder / f"view{n}.parquet")
                connection.execute(f'INSERT INTO "bench_view{n}" SELECT * FROM "bench_view0"')  # noqa: S608
                continue
            written = ((key_bytes[i], name, values[name][i], None, None, times[i], None)
                       for i in range(keys) for name in _FIELDS)  # fmt: skip
            connection.executemany('INSERT INTO "bench_view0" VALUES (?, ?, ?, ?, ?, ?, ?)', written)
    (folder / "feature_store.yaml").write_text(
        "project: bench\nprovider: local\nregistry: registry.pb\nonline_store: {type: sqlite, path: online.db}\n"
        "entity_key_serialization_version: 3\n"
    )
    driver = feast.Entity(name="driver", join_keys=["driver"], value_type=feast.ValueType.INT64)
    fields = [feast.Field(name=name, dtype=dtype) for name, dtype in {"driver": ft.Int64, **_FIELDS}.items()]
    declared = [
        feast.FeatureView(
            name=f"view{n}", entities=[driver], schema=fields, ttl=timedelta(days=1),
            source=feast.FileSource(name=f"rows{n}", path=f"view{n}.parquet", timestamp_field="event_timestamp"),
        )
        for n in range(views)
    ]  # fmt: skip
    feast.FeatureStore(repo_path=str(folder)).apply([driver, *declared])


if __name__ == "__main__":
    sys.exit(main())
