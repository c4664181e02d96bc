"""Readers of streams that are trimmed, deleted, created again, or get other partitions."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import example, given
from hypothesis import strategies as st

from isthmus.features.definition.streams import Kafka, RedisStream
from isthmus.features.errors import DataError, DependencyError
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.streams import readers
from isthmus.features.streams.readers import RedisReader
from tests.broker import broker, change_partitions, create_topic, produce
from tests.objectstore import object_store
from tests.orchestration.streams.buses import await_true
from tests.servers import free_port, redis_cluster

KEY = "stops"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url) as own:
        yield own


class Reading:
    """A reader that may be restarted, and what it has read."""

    def __init__(self, url: str) -> None:
        self.url, self.offsets, self.read = url, dict[str, int](), list[bytes | None]()
        self.passed: int | None = None
        self.skipping = False
        self.restart()

    def restart(self) -> None:
        """Continue from the last events. `--skip-expired` is needed until there are more."""
        self.reader = RedisReader("source stops, stream", RedisStream(KEY), self.url)
        self.reader.passed = self.passed
        self.reader.seek(self.offsets, skip_expired=self.skipping)

    def poll(self, limit: int) -> None:
        events = self.reader.poll(limit, 0.001)
        self.read += [event.value for event in events]
        if events:
            self.offsets, self.passed = {"0": events[-1].offset + 1}, self.reader.passed
            self.skipping = False

    def skip(self) -> None:
        self.skipping = True
        self.restart()


actions = st.lists(
    st.tuples(st.sampled_from(["add", "add", "trim", "delete", "poll", "poll", "restart"]), st.integers(0, 5)),
    max_size=15,
)  # fmt: skip


@example(actions=[("add", 1), ("restart", 0), ("trim", 0), ("poll", 0)])
@example(actions=[("add", 3), ("poll", 5), ("trim", 0), ("restart", 0)])
@example(actions=[("add", 3), ("poll", 2), ("trim", 0), ("restart", 0)])
@example(actions=[("add", 3), ("poll", 2), ("delete", 2), ("add", 1), ("poll", 5), ("trim", 0), ("poll", 1)])
@given(actions=actions)
def test_an_error_means_that_an_unread_entry_was_trimmed(
    url: str, client: redis.Redis, actions: list[tuple[str, int]]
) -> None:
    client.delete(KEY)
    reading = Reading(url)
    count, trimmed, deleted, ignored = 0, set[bytes](), set[bytes](), set[bytes]()

    def lost() -> set[bytes]:
        return trimmed - set(reading.read) - ignored

    def left() -> set[bytes]:
        entries: Any = client.xrange(KEY)
        return {fields[b"event"] for _, fields in entries}

    for action, number in [*actions, ("restart", 0), ("poll", 9), ("poll", 99)]:
        failed = ""
        try:
            match action:
                case "add":
                    for _ in range(number):
                        count += 1
                        client.xadd(KEY, {"event": str(count)}, id=f"{count}-0")
                case "trim" if count:
                    before = left()
                    client.xtrim(KEY, maxlen=number, approximate=False)
                    trimmed |= before - left()
                case "delete" if client.xdel(KEY, f"{number}-0"):
                    deleted.add(str(number).encode())
                case "poll":
                    ignored |= trimmed if reading.reader.passed is None else set()
                    reading.poll(number + 1)
                case "restart":
                    # The first read begins with what is left.
                    ignored |= set() if reading.offsets and not reading.skipping else trimmed
                    reading.restart()
        except DataError as error:
            failed = str(error)
        if failed:
            assert "were trimmed unread" in failed
            assert lost(), actions
            ignored |= lost()
            reading.skip()
        elif action in ("poll", "restart") and not deleted:  # deleted entries may hide that others were trimmed
            assert not lost(), actions
    assert not left() - set(reading.read)
    assert len(set(reading.read)) == len(reading.read)


def test_the_error_has_the_number_and_the_id(url: str, client: redis.Redis) -> None:
    client.delete(KEY)
    reading = Reading(url)
    for n in range(10):
        client.xadd(KEY, {"event": str(n)}, id=f"{n + 1}-0")
    reading.poll(4)
    client.xtrim(KEY, maxlen=6, approximate=False)
    reading.restart()
    client.xtrim(KEY, maxlen=3, approximate=False)
    with pytest.raises(DataError, match=r"stream stops: 3 entries after 4-0 were trimmed unread.*--skip-expired"):
        reading.poll(4)
    with pytest.raises(DataError, match="3 entries after 4-0 were trimmed unread"):
        reading.restart()
    reading.skip()
    reading.poll(4)
    assert reading.read == [b"0", b"1", b"2", b"3", b"7", b"8", b"9"]
    reading.restart()


def test_a_stream_that_was_created_again(url: str, client: redis.Redis) -> None:
    client.delete(KEY)
    reading = Reading(url)
    for n in range(1, 4):
        client.xadd(KEY, {"event": "a"}, id=f"{n}-0")
    reading.poll(4)
    client.delete(KEY)
    with pytest.raises(DataError, match=r"Redis lost entries that were read.*--skip-expired"):
        reading.restart()
    client.xadd(KEY, {"event": "b"}, id="9-0")
    with pytest.raises(DataError, match="Redis lost entries that were read"):
        reading.restart()
    reading.skip()
    reading.poll(4)
    assert reading.read == [b"a", b"a", b"a", b"b"]


@pytest.mark.accept
def test_a_stream_in_a_cluster(tmp_path: Path) -> None:
    with redis_cluster(tmp_path) as ports:
        url = "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)
        with connect(url) as cluster:
            reading = Reading(url)
            for n in range(5):
                cluster.xadd(KEY, {"event": str(n)})
            reading.poll(3)
            reading.restart()
            reading.poll(3)
            cluster.xtrim(KEY, maxlen=0, approximate=False)
            reading.restart()
            assert reading.read == [b"0", b"1", b"2", b"3", b"4"]
            cluster.xadd(KEY, {"event": "5"})
            cluster.xtrim(KEY, maxlen=0, approximate=False)
            with pytest.raises(DataError, match=r"1 entries after .* were trimmed unread"):
                reading.restart()


@pytest.mark.accept
def test_partitions_that_are_added_or_removed_while_a_topic_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_REFRESH_SECONDS", 0.1)
    port, read = free_port(), set[tuple[str, int]]()
    with object_store(tmp_path / "s3") as storage:
        with broker(tmp_path, port, storage) as address:
            create_topic(address, "stops")
            produce(address, "stops", [("A", b"{}")] * 10, lambda n: n % 2)
            reader = readers.KafkaReader("source stops, stream", Kafka("stops", address))
            reader.seek({})

            def poll() -> bool:
                with suppress(DependencyError):  # while the broker starts again
                    read.update((event.partition, event.offset) for event in reader.poll(100, 0.1))
                return reader.ended() == set(reader.partitions())

            await_true(lambda: poll() and len(read) == 10)
        change_partitions(storage, "stops", 4)
        with broker(tmp_path, port, storage):
            await_true(lambda: poll() and len(reader.partitions()) == 4)
            produce(address, "stops", [("A", b"{}")] * 20, lambda n: n % 4)
            await_true(lambda: poll() and len(read) == 30)
            assert read == {(str(n), place) for n in range(4) for place in range(10 if n < 2 else 5)}
        change_partitions(storage, "stops", 1)
        with (
            broker(tmp_path, port, storage),
            pytest.raises(DataError, match=r"partitions 1, 2, 3 no longer exist.*Give the new topic another name"),
        ):
            await_true(lambda: not poll() and False)
        reader.close()
