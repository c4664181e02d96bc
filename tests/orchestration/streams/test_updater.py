"""Rows of streamed events against the oracle: one build of all events, whatever their order, restarts and builds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus import (
    Count,
    Entity,
    FeatureView,
    Field,
    Int64,
    Max,
    Mean,
    Min,
    Source,
    String,
    Sum,
    aggregate,
)  # fmt: skip
from isthmus.features import clock
from isthmus.features.contract.schema import Contract
from isthmus.features.days import LAST
from isthmus.features.definition.compile import compile_contract
from isthmus.features.offline.canonical import declared_schema
from isthmus.features.offline.commits import RowSources, StreamPosition
from isthmus.features.offline.history import LatestRows
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.changes import key_values
from isthmus.features.publishing.publish import publish
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.values.arrow import micros
from isthmus.orchestration.streams.updater import ViewUpdater
from isthmus.transforms import engine
from isthmus.transforms.views.compute import stream_view
from isthmus.transforms.views.events import events_frame

MINUTE = 60_000_000
START = 19_000 * 86_400_000_000
REACH = timedelta(hours=5)
NOW = START + 400 * 86_400_000_000

stops = Source("stops", path="unused", timestamp="at", known="known")
bus = Entity("bus", join_keys={"bus": String})
SCHEMA = pa.schema([
    pa.field("bus", pa.string()), pa.field("at", pa.timestamp("us", "UTC"), nullable=False),
    pa.field("known", pa.timestamp("us", "UTC"), nullable=False), pa.field("n", pa.int64()),
])  # fmt: skip


def rolling(stops: DataFrame) -> DataFrame:
    """Sums of the last two hours by known time: a row per ten minutes with an event."""
    tick = F.timestamp_seconds(F.ceil(F.unix_seconds("known") / 600) * 600)
    ticks = stops.groupBy("bus", tick.alias("event_timestamp")).agg(F.sum("n").alias("n"), F.count("*").alias("rows"))
    window = Window.partitionBy("bus").orderBy(F.unix_seconds("event_timestamp")).rangeBetween(1 - 7200, 0)
    sums = (F.sum(name).over(window).alias(name) for name in ("n", "rows"))
    return ticks.select("bus", "event_timestamp", *sums)


def outcomes(stops: DataFrame) -> DataFrame:
    """A row per event time, known when the last of its events is: later rows may have earlier event times."""
    return stops.groupBy("bus", F.col("at").alias("event_timestamp"), F.col("known").alias("known_at")).agg(
        F.sum("n").alias("n"), F.count("*").alias("rows")
    )


def expiring(stops: DataFrame) -> DataFrame:
    """A row when an event enters the last hour, and one when it leaves: rows without an event at their time."""
    entering = stops.select("bus", F.col("known").alias("event_timestamp"), "n", F.lit(1).alias("rows"))
    end = (F.col("known") + F.expr("INTERVAL 1 HOUR")).alias("event_timestamp")
    changes = entering.union(stops.select("bus", end, -F.col("n"), F.lit(-1))).groupBy("bus", "event_timestamp")
    return changes.agg(F.sum("n").alias("n"), F.sum("rows").cast("bigint").alias("rows"))


def last_of_hour(stops: DataFrame) -> DataFrame:
    """Only the latest event of an hour has a row: a late event removes the row of an earlier one."""
    hour = F.floor(F.unix_seconds("known") / 3600)
    newest = Window.partitionBy("bus", hour).orderBy(F.col("known").desc(), F.col("at").desc(), F.col("n").desc())
    rows = stops.withColumn("hour", hour).withColumn("place", F.row_number().over(newest)).where("place = 1")
    end = F.timestamp_seconds((F.col("hour") + 1) * 3600).alias("event_timestamp")
    return rows.select("bus", end, "n", F.col("place").cast("bigint").alias("rows"))


def few_stops(stops: DataFrame) -> DataFrame:
    """Only the rows with less than two events in the last two hours: an event removes later rows of its key."""
    return rolling(stops).where("rows < 2")


def view_of(function: Any, **options: Any) -> FeatureView:
    schema = [Field("n", Int64), Field("rows", Int64)]
    return FeatureView(function.__name__, [bus], schema, [stops], None, function=function, lookback=REACH, **options)


@aggregate(
    entities=[bus], sources=[stops], tiles=[Sum("n", "n"), Count(name="rows"), Mean("n"), Min("n"), Max("n")],
    windows=[timedelta(minutes=30), timedelta(hours=2)], tick=timedelta(minutes=10), ttl=None, lookback=REACH,
)  # fmt: skip
def tiles(stops: DataFrame) -> DataFrame:
    """The same windows and more, from partial results."""
    return stops


DELAY = timedelta(minutes=20)
VIEWS = {function.__name__: view_of(function) for function in (rolling, outcomes, expiring, few_stops)}
VIEWS["tiles"] = tiles
VIEWS["last_of_hour"] = view_of(last_of_hour, delay=DELAY)
QUICK = {"outcomes", "few_stops", "tiles"}
CONTRACT: Contract = compile_contract("buses", VIEWS.values())


@dataclass
class Parts:
    spark: Any
    url: str
    folder: Path


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    folder = tmp_path_factory.mktemp("streams")
    with engine.session("sail") as spark, EmbeddedRedis(folder / "redis") as redis:
        yield Parts(spark, redis.url, folder)


Arriving = tuple[str, int, int, int, int]
events = st.lists(
    st.tuples(
        st.sampled_from("ab"), st.integers(0, 120), st.integers(0, 20), st.integers(0, 3),  # key, at, known - at, value
            st.integers(0, 60),  # how much later than its known time it arrives
    ),
    min_size=1, max_size=12,
)  # fmt: skip
sizes = st.lists(st.integers(1, 4), min_size=12, max_size=12)
actions = st.lists(
    st.sampled_from(["", "", "", "save", "restart", "crash", "flush", "build"]), min_size=12, max_size=12
)  # fmt: skip


class Bus:
    """A stream of events, and the view that it feeds."""

    def __init__(self, parts: Parts, view: FeatureView, behind: int | None = None) -> None:
        self.behind, self.now = behind, START if behind is not None else NOW
        self.parts, self.view, self.contract = parts, view, CONTRACT.views[view.name]
        self.offline = OfflineStore(parts.folder / uuid4().hex)
        self.client: Any = connect(parts.url)
        self.client.flushall()
        self.online = OnlineStore(self.client, CONTRACT)
        self.events, self.read, self.watermark = SCHEMA.empty_table(), 0, START
        self.build()
        self.start()

    def compute(self) -> pa.Table:
        frame = self.parts.spark.createDataFrame(self.events).distinct()
        return pa.concat_tables(list(stream_view(self.view, self.contract, {"stops": frame}, (0, LAST))))

    def build(self) -> None:
        rows = self.compute() if len(self.events) else declared_schema(self.contract).empty_table()
        origin = RowSources(position=StreamPosition(None, {"stops": {"0": len(self.events)}}))
        with self.offline.prepare(self.contract, rows, origin=origin, now=NOW) as ready:
            self.offline.write(ready)

    def publish(self, *, full: bool = False) -> None:
        history = self.offline.history(self.contract)
        publish(self.online, self.parts.url, self.offline, history, lambda: self.now, full=full)

    def start(self) -> None:
        self.publish()
        self.lane = ViewUpdater(self.view, self.contract, stops, self.offline, self.online, lambda: self.now)
        commit = self.offline.commit(self.contract)
        assert commit is not None
        assert commit.origin.position is not None
        position = commit.origin.position
        known = micros(self.events["known"])
        watermark = int(known.max(initial=START)) + 1 if position.watermark is None else position.watermark
        self.lane.open(self.frames, self.load, watermark)
        done = position.offsets["stops"]["0"]
        if done < len(self.events):
            self.lane.add(self.events.slice(done))
        self.lane.emit(self.watermark)
        if done < len(self.events):
            self._save()
            self.publish(full=True)
            self.lane.incomplete = False

    @contextmanager
    def frames(self, events: pa.Table, without: pa.Table) -> Iterator[Any]:
        with events_frame(self.parts.spark, events, self.parts.folder, without) as frame:
            yield {"stops": frame}

    def load(self, first: int, known: int | None) -> pa.Table:
        wanted = micros(self.events["at"]) >= first
        if known is not None:
            wanted |= micros(self.events["known"]) >= known
        return self.events.filter(pa.array(wanted))

    def receive(self, rows: list[dict[str, Any]], lateness: int) -> None:
        if not rows:
            return
        new = pa.Table.from_pylist(rows, SCHEMA)
        self.events = pa.concat_tables([self.events, new])
        self.watermark = max(self.watermark, int(micros(new["known"]).max()) - lateness)
        if self.behind is not None:  # the producers' clocks are ahead of ours
            self.now = max(self.now, int(micros(new["known"]).max()) - self.behind * MINUTE)
        self.lane.add(new)
        self.lane.emit(self.watermark)
        self.lane.publish_due()
        if self.lane.incomplete:
            self.start()

    def act(self, action: str) -> None:
        match action:
            case "save":
                self.save()
            case "restart":
                self.save()
                self.start()
            case "crash":
                self.start()
            case "flush":
                self.flush()
            case "build":
                self.build()
                self.start()

    def flush(self) -> None:
        self.lane.flush(self._save)

    def _save(self) -> bool:
        self.lane.save({"0": len(self.events)})
        return True

    def save(self) -> None:
        self._save()


def moment(minutes: int) -> datetime:
    return clock.moment(START + minutes * MINUTE)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.accept) for name in VIEWS]
)
@example(
    # The second event of the key is known earlier than the first, whose row has an earlier event time.
    events=[("a", 0, 3, 0, 0), ("a", 78, 0, 0, 0)],
    sizes=[1] * 12,
    actions=[""] * 12,
    lateness=60,
    behind=None,
    days=True,
)
@example(
    # The last event is late, but does not change the rows with an earlier event time that are not saved yet.
    events=[("a", 78, 0, 0, 0), ("a", 1, 3, 0, 0), ("a", 1, 4, 0, 0)],
    sizes=[1] * 12, actions=[""] * 12, lateness=0, behind=None, days=True,
)  # fmt: skip
@given(
    events=events, sizes=sizes, actions=actions, lateness=st.sampled_from([0, 7, 60]),
    behind=st.sampled_from([None, 4, 90]), days=st.booleans(),
)  # fmt: skip
def test_rows_equal_one_build_of_all_events(
    parts: Parts, name: str, events: list[Arriving], sizes: list[int], actions: list[str], lateness: int,
    behind: int | None, days: bool,
) -> None:  # fmt: skip
    bus = Bus(parts, VIEWS[name], behind)
    # Only rows with the time of their event may become known long after it.
    unit = 240 if days and name == "outcomes" else 7
    rows = [
        {"bus": key, "at": moment(at * 9), "known": moment(at * 9 + late * unit), "n": n}
        for key, at, late, n, _ in sorted(events, key=lambda event: event[1] + event[2] + event[4])
    ]
    for size, action in zip(sizes, actions, strict=True):
        bus.receive(rows[:size], lateness * MINUTE)
        rows = rows[size:]
        bus.act(action)
    bus.receive(rows, lateness * MINUTE)
    bus.flush()
    bus.save()
    bus.now = NOW
    bus.lane.publish_due()
    oracle = OfflineStore(parts.folder / uuid4().hex)
    with oracle.prepare(bus.contract, bus.compute(), now=NOW) as ready:
        oracle.write(ready)
    expected, streamed = oracle.history(bus.contract), bus.offline.history(bus.contract)
    order = [(column, "ascending") for column in ("bus", "event_timestamp", "known_at")]
    assert streamed.table().sort_by(order).to_pylist() == expected.table().sort_by(order).to_pylist()
    assert streamed.fingerprint == expected.fingerprint
    latest = LatestRows.of(expected, NOW)
    keys = key_values(bus.contract, latest.keys)
    name = bus.contract.fields[0].name
    found = bus.online.read(bus.contract, keys, NOW).columns[name].tolist(Int64)
    stored = (row for part in latest.rows(np.arange(len(latest.place))) for row in part.to_pylist())
    assert dict(zip(keys["bus"], found, strict=True)) == {row["bus"]: row[name] for row in stored}
    assert sorted(bus.online.keys(bus.contract)["bus"]) == sorted(keys["bus"])
