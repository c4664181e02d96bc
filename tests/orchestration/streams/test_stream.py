"""`isthmus stream` against a build of the same events, with real brokers."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import redis
from confluent_kafka import Producer
from deltalake import write_deltalake

from isthmus.features import clock
from isthmus.features.days import Days
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from isthmus.features.online.store import OnlineStore
from isthmus.features.pointintime.served import served_history
from isthmus.features.projectstatus import StreamStatus
from isthmus.features.redis.connection import connect
from isthmus.features.streams.formats import StreamEvent
from isthmus.features.types import Int64
from isthmus.features.values.columns import from_python
from isthmus.features.values.entitykey import entity_keys
from isthmus.features.values.rows import RowCodec
from isthmus.orchestration.apply.apply import apply
from isthmus.orchestration.frames import event_log
from isthmus.orchestration.project import Project
from isthmus.orchestration.recording.collect import collect
from isthmus.orchestration.recording.replay import replay, require_same
from isthmus.orchestration.recording.storedrows import from_history
from isthmus.orchestration.server.collect import collect as collect_pushes
from isthmus.orchestration.streams.stream import stream
from isthmus.orchestration.tables.build import build, build_range
from isthmus.orchestration.tables.materialize import materialize
from isthmus.orchestration.verification.verify import verify
from tests.broker import broker, create_topic, produce
from tests.orchestration.server.served import served
from tests.orchestration.streams.buses import BEGIN, Buses, as_json, await_true, distinct, shuffled, stops
from tests.servers import free_port, redis_server
from tests.transforms.connect import connect_server


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with broker(tmp_path_factory.mktemp("broker")) as address:
        yield address


EVENTS = stops(600)
ARCHIVE, LATER = EVENTS.slice(0, 200), EVENTS.slice(200)


class Source:
    """A stream of one kind with its declaration."""

    def __init__(self, kind: str, buses: Buses, kafka: str) -> None:
        self.kind, self.buses, self.kafka, self.sent = kind, buses, kafka, 0
        self.topic = f"stops-{id(self)}"
        self.declared = {
            "kafka": f"Kafka({self.topic!r}, {kafka!r})",
            "redis": 'RedisStream("incoming")',
            "files": 'FileStream("data/in")',
        }[kind]
        if kind == "kafka":
            create_topic(kafka, self.topic)

    def send(self, events: list[tuple[str, bytes]]) -> None:
        self.sent += 1
        match self.kind:
            case "kafka":
                produce(self.kafka, self.topic, events)
            case "redis":
                with self.buses.project.redis() as url, redis.Redis.from_url(url) as client:
                    for _, value in events:
                        client.xadd("incoming", {"event": value})
            case "files":
                folder = self.buses.root / "data" / "in"
                (folder / ".writing").write_bytes(b"\n".join(value for _, value in events) + b"\n")
                (folder / ".writing").rename(folder / f"{self.sent:04}.jsonl")


@pytest.mark.parametrize("kind", ["kafka", "redis", "files"])
def test_history_and_redis_equal_a_build(tmp_path: Path, kafka: str, kind: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source(kind, buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    with project.redis():  # stays for the whole test
        arriving = as_json(shuffled(LATER))
        half = len(arriving) // 2
        source.send(arriving[:half])
        first = stream(project, once=True)["stops"]
        source.send([*arriving[half:], ("A", b"{"), ("A", b'{"bus": 3}')])
        second = stream(project, once=True)["stops"]
        assert (first.events, second.events) == (half, len(arriving) - half + 2)
        assert second.unreadable == 2
        assert buses.rows() == buses.oracle(EVENTS)
        # A build of the events in both places computes the same rows, and Redis has them already.
        assert not build(project)["crowding"].changed
        written = materialize(project, full=True)["crowding"]
        assert (written.changed, written.written, written.removed) == (0, 0, 0)


def test_events_may_be_read_again(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("kafka", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    source.send(as_json(LATER.to_pylist()))
    assert stream(project, once=True)["stops"].events == len(LATER)
    assert stream(project, once=True)["stops"].events == 0
    source.send(as_json(LATER.to_pylist()))  # the producer was restarted
    again = stream(project, once=True)["stops"]
    assert again.events == len(LATER)
    assert buses.rows() == buses.oracle(EVENTS)


def test_an_event_of_the_future_and_one_from_long_ago(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    future = {**LATER.to_pylist()[0], "known": BEGIN.replace(year=2099)}
    old = {**LATER.to_pylist()[1], "at": BEGIN.replace(year=2023), "known": BEGIN.replace(year=2023)}
    source.send(as_json([*LATER.to_pylist(), future, old]))
    status = stream(project, once=True)["stops"]
    assert (status.unreadable, status.events) == (1, len(LATER) + 2)
    log = event_log(project, project.definitions.views["crowding"].sources[0])
    assert log.unreadable()["reason"].to_pylist() == ["known is in the future"]
    assert buses.rows() == buses.oracle(pa.concat_tables([EVENTS, pa.Table.from_pylist([old], EVENTS.schema)]))


def test_unreadable_events_can_be_retried(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared.replace('data/in"', 'data/in", format=Json(times="us")'), ARCHIVE)
    source.send(as_json(LATER.to_pylist()))
    assert stream(project, once=True)["stops"].unreadable == len(LATER)
    project = buses.write(source.declared, ARCHIVE)
    said: list[str] = []
    stream(project, once=True, retry=True, say=said.append)
    assert f"stops: {len(LATER)} unreadable events are readable now, 0 are not" in said
    assert buses.rows() == buses.oracle(EVENTS)


def test_events_that_become_readable_change_rows_that_were_saved(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared.replace('data/in"', 'data/in", format=Json(times="us")'), ARCHIVE)
    micros = [
        {**row, **{name: int(row[name].timestamp() * 1e6) for name in ("at", "known")}} for row in LATER.to_pylist()
    ]
    source.send(as_json(micros[::2]) + as_json(LATER.to_pylist()[1::2]))
    assert stream(project, once=True)["stops"].unreadable == len(LATER) // 2
    project = buses.write(source.declared, ARCHIVE)
    said: list[str] = []
    stream(project, once=True, retry=True, say=said.append)
    assert f"stops: {len(LATER) // 2} unreadable events are readable now, 0 are not" in said
    assert buses.rows() == buses.oracle(EVENTS)
    written = materialize(project, full=True)["crowding"]
    assert (written.changed, written.written, written.removed) == (0, 0, 0)


def test_files_that_appear_later(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    source.sent = 9
    source.send(as_json(LATER.slice(0, 200).to_pylist()))
    with project.redis():
        following = Following(project)
        await_true(lambda: following_read_all(buses, 200))
        source.sent = 1  # a name that sorts before the first one
        source.send(as_json(LATER.slice(200).to_pylist()))
        await_true(lambda: following_read_all(buses, 400))
        following.stop()
        stream(project, once=True)
    assert buses.rows() == buses.oracle(EVENTS)


@pytest.mark.accept
def test_spark_connect_computes_the_same_rows(tmp_path: Path, kafka: str) -> None:
    with connect_server(tmp_path / "spark.log") as url:
        buses = Buses(tmp_path / "buses", url)
        source = Source("kafka", buses, kafka)
        project = buses.write(source.declared, ARCHIVE)
        source.send(as_json(shuffled(LATER)))
        stream(project, once=True)
        same_as(buses, EVENTS)


def test_events_that_expired_before_they_were_read(tmp_path: Path) -> None:
    # librdkafka's broker for tests drops the oldest events beyond five megabytes.
    producer = Producer({"bootstrap.servers": "none", "test.mock.num.brokers": 1, "log_level": 0})
    servers = ",".join(f"{broker.host}:{broker.port}" for broker in producer.list_topics(timeout=10).brokers.values())

    def send(events: pa.Table, padding: int = 0) -> None:
        for _, value in as_json(events.to_pylist()):
            producer.produce("stops", value[:-1] + b', "padding": "' + b"x" * padding + b'"}', partition=0)
        assert producer.flush(30) == 0

    buses = Buses(tmp_path / "buses")
    project = buses.write(f"Kafka('stops', {servers!r})", ARCHIVE)
    send(LATER.slice(0, 100))
    stream(project, once=True)
    send(LATER.slice(100, 200), 50_000)
    send(LATER.slice(300))
    with pytest.raises(DataError, match=r"partition 0: events 100 to \d+ have expired.*--skip-expired"):
        stream(project, once=True)
    pq.write_table(EVENTS.slice(0, 500), buses.root / "data" / "stops.parquet")
    stream(project, once=True, skip_expired=True)
    same_as(buses, EVENTS)


def test_a_redis_stream_that_was_trimmed(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("redis", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    with project.redis() as url, redis.Redis.from_url(url) as client:
        source.send(as_json(LATER.slice(0, 100).to_pylist()))
        stream(project, once=True)
        client.xtrim("incoming", maxlen=0, approximate=False)  # all of them were read
        source.send(as_json(LATER.slice(100, 100).to_pylist()))
        assert stream(project, once=True)["stops"].events == 100
        source.send(as_json(LATER.slice(200).to_pylist()))
        client.xtrim("incoming", maxlen=150, approximate=False)
        with pytest.raises(DataError, match=r"incoming: 50 entries after \d+-\d+ were trimmed unread.*--skip-expired"):
            stream(project, once=True)
        pq.write_table(EVENTS.slice(0, 450), buses.root / "data" / "stops.parquet")
        assert stream(project, once=True, skip_expired=True)["stops"].events == 150
        assert stream(project, once=True)["stops"].events == 0
        same_as(buses, EVENTS)


@pytest.mark.accept
def test_reading_waits_for_the_schema_registry(tmp_path: Path, kafka: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/schemas/ids/7"
            body = {"schema": "{}", "schemaType": "JSON"} if found else {"error_code": 40403}
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None: ...

    port, buses = free_port(), Buses(tmp_path / "buses")
    source = Source("kafka", buses, kafka)
    declared = source.declared.replace(")", f", Json(registry='http://me:word@127.0.0.1:{port}'))")
    with pytest.raises(ConfigurationError, match="has a user in its URL"):
        buses.write(declared, ARCHIVE)
    project = buses.write(declared.replace("me:word@", ""), ARCHIVE)
    framed = [(key, b"\0\0\0\0\x07" + value) for key, value in as_json(LATER.to_pylist())]
    unknown = [("A", b"\0\0\0\0\x08{}"), ("A", b"{}")]
    source.send([*framed, *unknown])
    with project.redis():
        following = Following(project)
        following.await_text(f"the schema registry http://127.0.0.1:{port} does not answer")
        assert not following_read_all(buses, len(framed) + 2)
        with HTTPServer(("127.0.0.1", port), Handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,)).start()
            await_true(lambda: following_read_all(buses, len(framed) + 2))
            following.stop()
            stream(project, once=True)
            server.shutdown()
        log = event_log(project, project.definitions.views["crowding"].sources[0])
        assert sorted(log.unreadable()["reason"].to_pylist()) == [
            "does not begin with the id of a schema", "the schema registry does not have schemas/ids/8",
        ]  # fmt: skip
        same_as(buses, EVENTS)


def same_as(buses: Buses, events: pa.Table) -> None:
    """The table and Redis are those of one build."""
    assert buses.rows() == buses.oracle(events)
    written = materialize(buses.project, full=True)["crowding"]
    assert (written.changed, written.written, written.removed) == (0, 0, 0)


def test_another_stream_is_read_from_its_beginning(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    source.send(as_json(LATER.slice(0, 250).to_pylist()))
    stream(project, once=True)
    (buses.root / "data" / "new").mkdir()
    lines = b"\n".join(value for _, value in as_json(LATER.slice(250).to_pylist()))
    (buses.root / "data" / "new" / "0001.jsonl").write_bytes(lines)
    project = buses.write('FileStream("data/new")', ARCHIVE)
    assert stream(project, once=True)["stops"].events == 150
    assert stream(project, once=True)["stops"].events == 0
    same_as(buses, EVENTS)


def test_equal_rows_of_the_data_are_one_event_before_and_after_the_first_streamed_one(
    tmp_path: Path, kafka: str
) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, pa.concat_tables([ARCHIVE, ARCHIVE.slice(0, 50)]))
    build(project)
    assert buses.rows() == buses.oracle(ARCHIVE)
    source.send(as_json(LATER.to_pylist()))
    stream(project, once=True)
    same_as(buses, EVENTS)


def test_the_data_may_gain_a_column(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    source.send(as_json(LATER.slice(0, 200).to_pylist()))
    stream(project, once=True)
    project = buses.write(source.declared, ARCHIVE.append_column("driver", pa.array(["x"] * len(ARCHIVE))))
    source.send(as_json(LATER.slice(200).to_pylist()))
    stream(project, once=True)
    same_as(buses, EVENTS)


def test_an_event_without_its_key_is_set_aside_if_the_view_does_not_filter_it(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    nameless = {**LATER.to_pylist()[0], "bus": None}
    source.send([*as_json(LATER.to_pylist()), ("A", as_json([nameless])[0][1])])
    assert stream(project, once=True)["stops"].unreadable == 1
    same_as(buses, EVENTS)


def test_a_filter_of_null_keys_lets_their_events_in(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    nameless = [{**row, "bus": None} for row in LATER.slice(0, 3).to_pylist()]
    source.send([*as_json(LATER.slice(0, 200).to_pylist()), *(("A", as_json([row])[0][1]) for row in nameless)])
    assert stream(project, once=True)["stops"].unreadable == 3
    definitions = buses.root / "definitions.py"
    definitions.write_text(definitions.read_text().replace("stops.groupBy(", 'stops.where("bus IS NOT NULL").groupBy('))
    apply(buses.project)
    source.send([*as_json(LATER.slice(200).to_pylist()), ("A", as_json([{**nameless[0], "riders": 9}])[0][1])])
    status = stream(buses.project, once=True, retry=True)["stops"]
    assert status.unreadable == 0
    same_as(buses, EVENTS)


def test_a_column_whose_type_changed_is_refused(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    source.send(as_json(LATER.to_pylist()))
    stream(project, once=True)
    place = ARCHIVE.column_names.index("riders")
    wider = ARCHIVE.set_column(place, "riders", ARCHIVE["riders"].cast(pa.float64()))
    pq.write_table(wider, buses.root / "data" / "stops.parquet")
    with pytest.raises(DataError, match="column riders: has type double, and its events were stored as int64"):
        stream(project, once=True)


def test_a_view_with_few_rows_may_follow_a_stream(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    buses.write(source.declared, ARCHIVE)
    definitions = buses.root / "definitions.py"
    definitions.write_text(definitions.read_text().replace("stops.groupBy(", 'stops.where("riders > 57").groupBy('))
    apply(buses.project)
    source.send(as_json(LATER.to_pylist()))
    stream(buses.project, once=True)
    other = Buses(tmp_path / "other")
    other.write("None", distinct(EVENTS.filter(pc.greater(EVENTS["riders"], 57))))
    build(other.project)
    assert buses.rows() == other.rows()


def test_rows_of_the_data_without_a_known_time_are_no_events(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    open_end = pa.Table.from_pylist([{**row, "known": None} for row in ARCHIVE.slice(150).to_pylist()], ARCHIVE.schema)
    project = buses.write(source.declared, ARCHIVE.slice(0, 150))
    source.send(as_json(LATER.to_pylist()))
    pq.write_table(pa.concat_tables([ARCHIVE.slice(0, 150), open_end]), buses.root / "data" / "stops.parquet")
    definitions = buses.root / "definitions.py"
    filtered = definitions.read_text().replace("stops.groupBy(", 'stops.where("known IS NOT NULL").groupBy(')
    definitions.write_text(filtered)
    apply(buses.project)
    project = buses.project
    stream(project, once=True)
    assert buses.rows() == buses.oracle(pa.concat_tables([ARCHIVE.slice(0, 150), LATER]))


def test_a_view_of_a_delta_table_that_cannot_follow_a_stream_is_refused_when_it_starts(
    tmp_path: Path, kafka: str
) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    buses.write(source.declared, ARCHIVE)
    write_deltalake(buses.root / "data" / "table", ARCHIVE)
    definitions = buses.root / "definitions.py"
    text = definitions.read_text().replace('path="data/stops.parquet"', 'delta="data/table"')
    definitions.write_text(text)
    apply(buses.project)
    source.send(as_json(LATER.to_pylist()))
    stream(buses.project, once=True)
    same_as(buses, EVENTS)
    definitions.write_text(text.replace('Window.partitionBy("bus")', "Window.partitionBy(F.lit(1))"))
    apply(buses.project)
    with pytest.raises(ConfigurationError, match="depend on events of other keys"):
        stream(buses.project, once=True)


def test_a_build_of_days_includes_events_that_were_read_since(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    build(project)
    days = Days.parse("2024-03-01", "2024-03-02")
    build_range(project, within=days)
    log = event_log(project, project.definitions.views["crowding"].sources[0])
    log.append(
        LATER, [StreamEvent("0001.jsonl", n, b"") for n in range(len(LATER))], [], 0, lambda known: max(known.values())
    )
    build_range(project, within=days)
    assert buses.rows() == buses.oracle(EVENTS)


def test_a_full_materialization_beside_a_stream_does_not_undo_its_rows(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    text = (buses.root / "isthmus.toml").read_text()
    (buses.root / "isthmus.toml").write_text(text.replace("history_seconds = 1", "history_seconds = 600"))
    with project.redis():
        following = Following(buses.project)
        following.await_text("reading stops")
        source.send(as_json(LATER.to_pylist()))
        await_true(lambda: following_read_all(buses, 400))
        materialize(buses.project, full=True)
        following.await_text("in Redis were replaced")
        following.stop()
        stream(buses.project, once=True)
        same_as(buses, EVENTS)


def test_files_may_be_removed_once_they_were_read(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    source.send(as_json(LATER.slice(0, 200).to_pylist()))
    stream(project, once=True)
    (buses.root / "data" / "in" / "0001.jsonl").unlink()
    source.send(as_json(LATER.slice(200).to_pylist()))
    stream(project, once=True)
    same_as(buses, EVENTS)


def test_pushed_rows_stay_when_a_late_event_corrects_others(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    view = project.definitions.contract.views["crowding"]
    with project.redis() as url, connect(url) as client:
        stream(project, once=True)
        at = clock.micros(BEGIN + timedelta(hours=2, seconds=7))
        values = {column.name: from_python([7], column.dtype) for column in view.fields}
        row = RowCodec(view).encode(np.array([at]), np.array([at]), values)
        names = entity_keys("buses", view.keys, {"bus": ["A"]})
        OnlineStore(client, project.applied()).append(view, names, row, clock.now())
        collect_pushes(project)
        pushed = [row for row in buses.rows() if row["stops"] == row["riders"] == 7]
        assert len(pushed) == 1
        source.send(as_json(LATER.to_pylist()))
        late = {**LATER.to_pylist()[0], "bus": "A", "at": BEGIN, "known": BEGIN + timedelta(hours=1)}
        source.send(as_json([late]))
        stream(project, once=True)
    later = pa.concat_tables([EVENTS, pa.Table.from_pylist([late], EVENTS.schema)])
    assert [row for row in buses.rows() if row not in pushed] == buses.oracle(later)
    assert pushed[0] in buses.rows()


@pytest.mark.accept
def test_one_process_reads_a_source(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("files", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    command = [str(Path(sys.executable).with_name("isthmus")), "stream", "--project", str(buses.root)]
    with project.redis():
        both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        try:
            await_true(lambda: any(process.poll() is not None for process in both))
            refused, reading = sorted(both, key=lambda process: process.poll() is None)
            assert refused.returncode == 2
            assert refused.stderr is not None
            assert refused.stderr.read() == (
                "isthmus: source stops: another `isthmus stream` reads it. "
                "Stop it first; one process reads all views of a source\n"
            )
            source.send(as_json(LATER.to_pylist()))
            await_true(lambda: following_read_all(buses, len(LATER)))
            again = subprocess.run([*command, "--once"], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
            assert (again.returncode, "another `isthmus stream` reads it" in again.stderr) == (2, True)
            reading.send_signal(signal.SIGTERM)
            assert reading.wait(60) == 0
        finally:
            for process in both:
                process.kill()
                process.communicate()
        stream(project, once=True)
        same_as(buses, EVENTS)


def test_a_topic_that_is_gone(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    project = buses.write(f"Kafka('none', {kafka!r})", ARCHIVE)
    with pytest.raises(DataError, match="the topic does not exist"):
        stream(project, once=True)


def test_the_verdict_recorded_answers_and_sets_as_served_include_streamed_rows(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("kafka", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    with (buses.root / "isthmus.toml").open("a") as settings:
        settings.write("[server.record]\n")
    project = buses.project
    arriving = as_json(shuffled(LATER))
    body = {"feature_service": "crowding", "entities": {"bus": list("ABCDE")}}
    answers: list[tuple[int, list[Any]]] = []
    with project.redis(), served(project, model=False) as http:
        for n in range(5):
            source.send(arriving[n * len(arriving) // 5 : (n + 1) * len(arriving) // 5])
            stream(project, once=True)
            answer = http.post("/get-online-features", json=body).json()
            place = answer["metadata"]["feature_names"].index("riders")
            answers.append((project.now(), answer["results"][place]["values"]))
        assert len({str(values) for _, values in answers}) > 3
        assert verify(project).passed
    collect(project)
    first, end = (clock.moment(at) for at in (answers[0][0] - 10**10, answers[-1][0] + 10**10))
    report = replay(project, first=first, end=end)
    require_same(report)
    assert report.answers == 5
    view = project.applied().views["crowding"]
    history = served_history(project.offline_store(), view)
    for at, values in answers:
        rows = from_history(history, view, {"bus": list("ABCDE")}, np.full(5, at))
        assert rows.columns["riders"].tolist(Int64) == values


class Following:
    """`isthmus stream` in a thread of the test."""

    def __init__(self, project: Project) -> None:
        self.said: list[str] = []
        self.stopped, self.status = threading.Event(), dict[str, StreamStatus]()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(project,))
        self._thread.start()

    def _run(self, project: Project) -> None:
        try:
            self.status = stream(project, say=self.said.append, stopped=self.stopped)
        except BaseException as error:  # noqa: BLE001 - raised by `stop`
            self.error = error

    def stop(self) -> dict[str, StreamStatus]:
        self.stopped.set()
        self._thread.join(60)
        if self.error:
            raise self.error
        return self.status

    def await_text(self, text: str, seconds: float = 60) -> None:
        await_true(lambda: any(text in said for said in self.said), seconds)


def test_rows_follow_events_builds_and_definitions(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("kafka", buses, kafka)
    project = buses.write(source.declared, ARCHIVE)
    arriving = as_json(shuffled(LATER))
    third = len(arriving) // 3
    with project.redis():
        following = Following(project)
        try:
            following.await_text("reading stops")
            source.send(arriving[:third])
            status = project.state / "streams" / "stops.json"
            await_true(lambda: status.exists() and f'"events":{third},' in status.read_text())
            build(project)  # while events arrive
            source.send(arriving[third : 2 * third])
            text = (buses.root / "definitions.py").read_text()
            (buses.root / "definitions.py").write_text(text.replace("1 - 7200", "1 - 3600"))
            apply(buses.project)
            following.await_text("the definitions were applied again")
            source.send(arriving[2 * third :])
            await_true(lambda: following_read_all(buses, len(arriving)))
        finally:
            following.stop()
        stream(buses.project, once=True)
        other = Buses(tmp_path / "other")
        other.write("None", distinct(EVENTS))
        text = (other.root / "definitions.py").read_text()
        (other.root / "definitions.py").write_text(text.replace("1 - 7200", "1 - 3600"))
        apply(other.project)
        build(other.project)
        assert buses.rows() == other.rows()
        written = materialize(buses.project, full=True)["crowding"]
        assert (written.changed, written.written, written.removed) == (0, 0, 0)


def following_read_all(buses: Buses, count: int) -> bool:
    project = buses.project
    log = event_log(project, project.definitions.views["crowding"].sources[0])
    return sum(log.read_until().offsets.values()) == count


@pytest.mark.accept
def test_redis_may_lose_everything_and_be_gone_for_a_while(tmp_path: Path, kafka: str) -> None:
    buses = Buses(tmp_path / "buses")
    source = Source("kafka", buses, kafka)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = redis.Redis(port=port)
    server = ["--port", str(port), "--bind", "127.0.0.1"]
    project = buses.write(source.declared, ARCHIVE, f"redis://127.0.0.1:{port}")
    arriving = as_json(shuffled(LATER))
    half = len(arriving) // 2
    with redis_server(tmp_path / "first", *server, client=client):
        following = Following(project)
        following.await_text("reading stops")
        source.send(arriving[:half])
        await_true(lambda: following_read_all(buses, half))
        client.flushall()
        following.await_text("in Redis were replaced")
        await_true(lambda: len(client.keys("*")) > 5)
    source.send(arriving[half:])
    following.await_text("trying again")
    with redis_server(tmp_path / "second", *server, client=client):
        await_true(lambda: following_read_all(buses, len(arriving)))
        following.stop()
        stream(project, once=True)
        assert buses.rows() == buses.oracle(EVENTS)
        written = materialize(project, full=True)["crowding"]
        assert (written.changed, written.written, written.removed) == (0, 0, 0)


@pytest.mark.accept
def test_a_broker_that_starts_later(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    buses = Buses(tmp_path / "buses")
    project = buses.write(f"Kafka('stops', '127.0.0.1:{port}')", ARCHIVE)
    with project.redis(), pytest.raises(DependencyError, match="does not answer"):
        stream(project, once=True)
    following = Following(project)
    following.await_text("trying again")
    with broker(tmp_path, port) as address:
        create_topic(address, "stops")
        produce(address, "stops", as_json(LATER.to_pylist()))
        await_true(lambda: following_read_all(buses, len(LATER)))
        following.stop()
        stream(project, once=True)
    same_as(buses, EVENTS)
