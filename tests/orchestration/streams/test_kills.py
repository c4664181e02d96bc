"""`isthmus stream`, its broker and its Redis are killed at random moments: no event is lost, and none counts twice."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import redis

from isthmus.features.errors import DataError
from isthmus.features.streams.events import OFFSET, PARTITION, EventLog
from isthmus.orchestration.frames import event_log
from isthmus.orchestration.streams.stream import stream
from isthmus.orchestration.tables.materialize import materialize
from tests.broker import broker, create_topic, delete_topic, produce
from tests.objectstore import object_store
from tests.orchestration.streams.buses import Buses, as_json, await_true, shuffled, stops
from tests.servers import free_port, redis_server

EVENTS = stops(600)
ARCHIVE, LATER = EVENTS.slice(0, 200), EVENTS.slice(200)
PARTS = ("stream", "broker", "redis")


class Killable:
    """A process that can be killed with SIGKILL and started again. `start` is a context manager that runs it."""

    def __init__(self, start: Callable[[], AbstractContextManager[Any]]) -> None:
        self._start, self._running = start, start()
        self.kills = 0

    def __enter__(self) -> "Killable":
        self._running.__enter__()
        return self

    def kill(self, gone: float) -> None:
        """Kill the process, and start it again after some seconds."""
        self._running.__exit__(None, None, None)
        self.kills += 1
        time.sleep(gone)
        self._running = self._start()
        self._running.__enter__()

    def __exit__(self, *_: object) -> None:
        self._running.__exit__(None, None, None)


@contextmanager
def isthmus_stream(buses: Buses, log: Path) -> Iterator[None]:
    command = [str(Path(sys.executable).with_name("isthmus")), "stream", "--project", str(buses.root)]
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        yield
        assert process.poll() is None, log.read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def log_of(buses: Buses) -> EventLog:
    project = buses.project
    return event_log(project, project.definitions.views["crowding"].sources[0])


def read(buses: Buses) -> int:
    return sum(log_of(buses).read_until().offsets.values())


@pytest.mark.accept
@pytest.mark.parametrize(
    ("kills", "victims"),
    [(5, PARTS[:1]), (5, PARTS[1:2]), (6, PARTS), pytest.param(50, PARTS, marks=pytest.mark.slowest)],
)
def test_kills_lose_and_repeat_nothing(tmp_path: Path, kills: int, victims: tuple[str, ...]) -> None:
    buses, rng, arriving = Buses(tmp_path / "buses"), random.Random(kills), as_json(shuffled(LATER))
    port, kafka_port = free_port(), free_port()
    address, url = f"127.0.0.1:{kafka_port}", f"redis://127.0.0.1:{port}"
    server = ["--port", str(port), "--bind", "127.0.0.1", "--appendonly", "yes"]
    with object_store(tmp_path / "s3") as storage:
        parts = {
            "broker": Killable(lambda: broker(tmp_path, kafka_port, storage)),
            "redis": Killable(lambda: redis_server(tmp_path / "redis", *server, client=redis.Redis(port=port))),
            "stream": Killable(lambda: isthmus_stream(buses, tmp_path / "log")),
        }
        with parts["broker"], parts["redis"]:
            create_topic(address, "stops")
            project = buses.write(f"Kafka('stops', {address!r})", ARCHIVE, url)
            stream(project, once=True)
            with parts["stream"]:
                for n in range(kills):
                    produce(address, "stops", arriving[n * len(arriving) // kills : (n + 1) * len(arriving) // kills])
                    time.sleep(rng.uniform(0, 4))
                    parts[rng.choice(victims)].kill(rng.uniform(0, 1))
                await_true(lambda: read(buses) == len(arriving))
            assert sum(part.kills for part in parts.values()) == kills
            assert all(parts[name].kills for name in victims)
            status = stream(project, once=True)["stops"]
            assert status.unreadable == 0
            assert buses.rows() == buses.oracle(EVENTS)
            written = materialize(project, full=True)["crowding"]
            assert (written.changed, written.written, written.removed) == (0, 0, 0)
            batches = log_of(buses).rows(pa.schema([PARTITION, OFFSET]))
            places = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
            assert len(places) == len(set(places)) == len(arriving)


def test_a_broker_that_comes_back_without_its_events(tmp_path: Path) -> None:
    buses, port = Buses(tmp_path / "buses"), free_port()
    with broker(tmp_path, port) as address:
        create_topic(address, "stops")
        project = buses.write(f"Kafka('stops', {address!r})", ARCHIVE)
        produce(address, "stops", as_json(LATER.slice(0, 200).to_pylist()))
        assert stream(project, once=True)["stops"].events == 200
    with broker(tmp_path, port):
        with pytest.raises(DataError, match=r"the topic does not exist at .*the events read so far are kept"):
            stream(project, once=True)
        create_topic(address, "stops", 1)
        with pytest.raises(DataError, match=r"partitions 1 no longer exist: .*Give the new topic another name"):
            stream(project, once=True)
    with broker(tmp_path, port):
        create_topic(address, "stops", 3)
        produce(address, "stops", as_json(LATER.slice(0, 9).to_pylist()))
        with pytest.raises(DataError, match=r"partition \d ends at \d, but \d+ events were read: it was created again"):
            stream(project, once=True)
        create_topic(address, "again", 3)
        produce(address, "again", as_json(LATER.slice(150).to_pylist()))
        project = buses.write(f"Kafka('again', {address!r})", ARCHIVE)
        assert stream(project, once=True)["stops"].events == 250
    assert buses.rows() == buses.oracle(EVENTS)
    written = materialize(project, full=True)["crowding"]
    assert (written.changed, written.written, written.removed) == (0, 0, 0)


def test_a_topic_that_got_more_partitions_between_two_runs(tmp_path: Path) -> None:
    buses = Buses(tmp_path / "buses")
    rows = as_json(LATER.to_pylist())
    with broker(tmp_path) as address:
        create_topic(address, "stops")
        project = buses.write(f"Kafka('stops', {address!r})", ARCHIVE)
        produce(address, "stops", rows[:200], lambda n: n % 2)
        assert stream(project, once=True)["stops"].events == 200
        # The broker cannot add partitions. A new topic with the same events looks the same to its readers.
        delete_topic(address, "stops")
        create_topic(address, "stops", 4)
        produce(address, "stops", rows[:200], lambda n: n % 2)
        produce(address, "stops", rows[200:], lambda n: n % 4)
        status = stream(project, once=True)["stops"]
        assert (status.events, sorted(status.lag)) == (200, ["0", "1", "2", "3"])
    assert buses.rows() == buses.oracle(EVENTS)
