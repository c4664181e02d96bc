"""A project whose events arrive on a stream: stops of buses, counted over two hours."""

import json
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.project import Project

BEGIN = datetime(2024, 3, 1, tzinfo=UTC)
SCHEMA = pa.schema([
    ("bus", pa.string()), ("at", pa.timestamp("us", "UTC")), ("known", pa.timestamp("us", "UTC")),
    ("riders", pa.int64()), ("delay", pa.float64()),
])  # fmt: skip

DEFINITIONS = '''\
"""How full were the last stops of a bus?"""

from datetime import timedelta

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from isthmus import (
    Avro, Count, Entity, FeatureService, Field, FileStream, Float64, Int64, Json, Kafka, Max, Mean, Min, Protobuf,
    RedisStream, Source, String, Sum, aggregate, transform,
)

stops = Source(
    "stops", path="data/stops.parquet", timestamp="at", known="known", stream={stream}, lateness=timedelta(minutes=20),
)
bus = Entity("bus", join_keys={{"bus": String}})
'''
RECOMPUTED = '''

@transform(
    entities=[bus], sources=[stops], ttl=None, lookback=timedelta(hours=4),
    schema=[Field("stops", Int64), Field("riders", Int64), Field("delay", Float64)],
)
def crowding(stops: DataFrame) -> DataFrame:
    """Stops, riders and the longest delay of the last two hours, every five minutes."""
    tick = F.timestamp_seconds(F.ceil(F.unix_seconds("known") / 300) * 300)
    ticks = stops.groupBy("bus", tick.alias("event_timestamp")).agg(
        F.count("*").alias("stops"), F.sum("riders").alias("riders"), F.max("delay").alias("delay")
    )
    window = Window.partitionBy("bus").orderBy(F.unix_seconds("event_timestamp")).rangeBetween(1 - 7200, 0)
    return ticks.select(
        "bus", "event_timestamp", F.sum("stops").over(window).alias("stops"),
        F.sum("riders").over(window).alias("riders"), F.max("delay").over(window).alias("delay"),
    )


service = FeatureService("crowding", features=[crowding])
'''
TILED = '''

@aggregate(
    entities=[bus], sources=[stops], ttl=None, lookback=timedelta(hours=4), tick=timedelta(minutes=5),
    tiles=[Count(name="stops"), Sum("riders", "riders"), Mean("riders"), Min("seconds"), Max("seconds")],
    windows=[timedelta(minutes=10), timedelta(hours=2)],
)
def crowding(stops: DataFrame) -> DataFrame:
    """Stops and riders, and the shortest and the longest delay."""
    return stops.withColumn("seconds", F.floor(F.col("delay") * 60))


service = FeatureService("crowding", features=[crowding])
'''


@dataclass(frozen=True)
class Buses:
    root: Path
    engine: str = "sail"
    view: str = RECOMPUTED

    def write(self, stream: str, archive: pa.Table, redis: str = "embedded") -> Project:
        (self.root / "data" / "in").mkdir(parents=True, exist_ok=True)
        pq.write_table(archive, self.root / "data" / "stops.parquet")
        (self.root / "definitions.py").write_text((DEFINITIONS + self.view).format(stream=stream))
        settings = (
            f'engine = "{self.engine}"\n[project]\nname = "buses"\n[stores]\nonline = "{redis}"\nhistory_seconds = 1\n'
        )
        (self.root / "isthmus.toml").write_text(settings)
        apply(self.project)
        return self.project

    @property
    def project(self) -> Project:
        return Project(self.root)

    def rows(self) -> list[dict[str, Any]]:
        contract = self.project.definitions.contract.views["crowding"]
        table = self.project.offline_store().history(contract).table()
        rows: list[dict[str, Any]] = table.sort_by([("bus", "ascending"), ("event_timestamp", "ascending")]).to_pylist()
        return rows

    def oracle(self, events: pa.Table) -> list[dict[str, Any]]:
        """The rows of a build of the events, in a project of its own without a stream."""
        other = Buses(self.root.parent / f"{self.root.name}-oracle", view=self.view)
        project = other.write("None", distinct(events))
        from isthmus.orchestration.tables.build import build

        build(project)
        return other.rows()


def distinct(events: pa.Table) -> pa.Table:
    return events.group_by(events.column_names, use_threads=False).aggregate([])


def stops(count: int, seed: int = 0) -> pa.Table:
    rng = random.Random(seed)
    rows = []
    for n in range(count):
        at = BEGIN + timedelta(seconds=n * 40)
        rows.append({"bus": rng.choice("ABCDE"), "at": at, "known": at + timedelta(seconds=rng.randrange(300)),
                     "riders": rng.randrange(60), "delay": rng.choice([None, 0.5, rng.random() * 30])})  # fmt: skip
    return pa.Table.from_pylist(rows, SCHEMA)


def shuffled(events: pa.Table, seed: int = 0, minutes: int = 20) -> list[dict[str, Any]]:
    """The events out of order by up to `minutes`, a hundredth of them twice, and a hundredth later by hours."""
    rng, arriving = random.Random(seed), []
    for row in events.to_pylist():
        late = rng.uniform(3600, 4 * 3600) if rng.random() < 0.01 else rng.uniform(0, minutes * 60)
        arriving += [(row["known"] + timedelta(seconds=late), row)] * (2 if rng.random() < 0.01 else 1)
    return [row for _, row in sorted(arriving, key=lambda pair: pair[0])]


def as_json(rows: Iterable[dict[str, Any]]) -> list[tuple[str, bytes]]:
    return [
        (row["bus"], json.dumps({k: v.isoformat() if isinstance(v, datetime) else v for k, v in row.items()}).encode())
        for row in rows
    ]


def await_true(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
