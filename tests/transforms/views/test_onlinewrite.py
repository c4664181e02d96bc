"""Runs of executors leave in Redis what runs of this process leave, to the bit, whatever happened before."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isthmus import DependencyError
from isthmus.features.offline.history import ViewHistory, table_schema
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.changes import Find, ViewChanges, WriteSelection
from isthmus.features.publishing.publish import Publication, publish
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.redis.pipeline import Client
from isthmus.features.types import Int64, String
from isthmus.features.values.arrow import from_arrow
from isthmus.transforms import engine
from isthmus.transforms.tables.stored import Store
from isthmus.transforms.views import onlinewrite
from tests.features.support import ALL, latest, make_contract, make_view, same_bits, table
from tests.servers import redis_cluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

VIEW = make_view({name: ALL[name] for name in ALL}, {"store": String, "n": Int64}, ttl=50)
NARROW = make_view({"a": Int64}, {"k": Int64}, name="narrow")
ENGINES = ["sail", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.accept])]


@pytest.fixture(scope="module", params=ENGINES)
def spark(request: pytest.FixtureRequest) -> "Iterator[SparkSession]":
    with engine.session(request.param) as session:
        yield session


@pytest.fixture(params=["one server", pytest.param("cluster", marks=pytest.mark.accept)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "cluster":
        with redis_cluster(tmp_path / "cluster") as ports:
            yield f"redis+cluster://127.0.0.1:{ports[0]}"
    else:
        with EmbeddedRedis(tmp_path / "redis") as server:
            yield server.url


_VALUES = {"bool": True, "int32": -1, "int64": 1 << 62, "float32": -0.0, "float64": float("nan"),
           "unixtimestamp": -1, "string": "é", "bytes": b"\0"}  # fmt: skip
_VALUES |= {f"array_{name}": [value, value] for name, value in _VALUES.items()}


def _rows(count: int) -> pa.Table:
    chance = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for n in range(count):
        moment = {"_event": int(chance.integers(0, 4)), "_known": int(chance.integers(0, 4))}
        given = {name: None if chance.random() < 0.1 else value for name, value in _VALUES.items()}
        rows.append({"store": f"s{n % 7}", "n": int(chance.integers(0, count // 4)), **moment, **given})
    unique = {(row["store"], row["n"], row["_event"], row["_known"]): row for row in rows}
    return table(VIEW, list(unique.values()))


def _frame(spark: "SparkSession", rows: pa.Table, folder: Path) -> "DataFrame":
    pq.write_table(rows, folder / "rows.parquet")
    return Store(str(folder), {}).read(spark, ["rows.parquet"], table_schema(VIEW))


def test_latest_is_what_the_embedded_store_says(spark: "SparkSession", tmp_path: Path) -> None:
    rows, times = _rows(2000), (-1, 1, 3)
    frame, known = _frame(spark, rows, tmp_path), rows["known_at"].cast(pa.int64()).to_numpy()
    found = onlinewrite.latest(VIEW, [(frame, at) for at in times]).toArrow()
    for side, at in enumerate(times):
        one = found.filter(pa.compute.equal(found["_side"], side))
        assert max((until for until in one["_until"].to_pylist() if until is not None), default=-1) == max(
            known[known <= at], default=-1
        )
        expected = latest(ViewHistory(VIEW, rows, 0), at)
        shown = one.filter(one["_shown"]).select(expected.column_names)
        order = [("store", "ascending"), ("n", "ascending")]
        assert same_bits(shown.sort_by(order), expected.sort_by(order))


def test_an_engine_reads_the_files_of_each_version(spark: "SparkSession", tmp_path: Path) -> None:
    store = OfflineStore(tmp_path)
    for values in (range(50), range(1, 49)):
        rows = table(NARROW, [{"k": k, "_event": 1, "_known": 1, "a": k} for k in values]).drop_columns("content_hash")
        past = store.history(NARROW, store.write(store.prepare(NARROW, rows)).version)
        read = onlinewrite.rows_of(spark, Store(store.root, {}), past).toArrow().sort_by("k")
        assert read["k"].to_pylist() == read["a"].to_pylist() == list(values)
        keys = onlinewrite.rows_of(spark, Store(store.root, {}), past, values=False).toArrow()
        assert "a" not in keys.column_names
        assert sorted(keys["k"].to_pylist()) == list(values)


def test_an_engine_that_lacks_a_file_does_not_take_it_for_empty(spark: "SparkSession", tmp_path: Path) -> None:
    """For example, a server without the shared folder: the run would remove all rows from Redis."""
    store = OfflineStore(tmp_path)
    store.write(store.prepare(NARROW, table(NARROW, [{"k": 1, "a": 1, "_event": 0, "_known": 0}])))
    history = store.history(NARROW)
    find = onlinewrite.finder(spark, Store(store.root, {}), make_contract(NARROW), "redis://127.0.0.1:1")
    (tmp_path / NARROW.table / history.files[0]).unlink()
    with pytest.raises(DependencyError, match=r"writing narrow to Redis .*part-"), find(history, 1, None) as parts:
        parts.facts(None)


class World:
    """A table whose rows a run writes to Redis: here or, with `find`, on executors."""

    def __init__(self, client: Client, url: str, offline: OfflineStore, find: Find | None) -> None:
        self.client, self.url, self.offline, self.find = client, url, offline, find
        self.store = OnlineStore(client, make_contract(VIEW))

    def publish(self, version: int, at: int, *, full: bool = False) -> Publication:
        past = self.offline.history(VIEW, version)
        counts = publish(self.store, self.url, self.offline, past, lambda: at, full=full, find=self.find)
        return msgspec.structs.replace(counts, seconds=0.0)

    def push(self, rows: pa.Table) -> None:
        keys = {"store": rows["store"].to_pylist(), "n": rows["n"].to_pylist()}
        values = {field.name: from_arrow(rows[field.name], field.dtype) for field in VIEW.fields}
        event, known = (rows[name].cast(pa.int64()).to_numpy() for name in ("event_timestamp", "known_at"))
        self.store.write(VIEW, keys, event, known, values)

    def lose(self, chance: np.random.Generator, *, stop: bool = False) -> None:
        names = sorted(name for names in self.store.names(VIEW) for name in names)
        for name in {names[int(n)] for n in chance.integers(0, len(names), 4)}:
            self.client.hdel(name, VIEW.online_name)
        if stop and (record := self.store.published(VIEW)) is not None:
            text = msgspec.json.encode(msgspec.structs.replace(record, pending=True))
            self.store.replace(VIEW, self.store.record_text(VIEW), text)

    def held(self) -> tuple[object, ...]:
        """All that Redis has, except which keys are sampled and which process it is."""
        names = sorted({name for names in self.store.names(VIEW) for name in names})
        rows = [(name, self.client.hgetall(name)) for name in names]
        record = self.store.published(VIEW)
        suspects = self.client.zrange(self.store._suspects(VIEW).decode(), 0, -1, withscores=True)
        return rows, record and msgspec.structs.replace(record, servers={}), suspects


def _versions(offline: OfflineStore, chance: np.random.Generator) -> list[int]:
    """Versions of a table: rows change, come and go, and move to the same time or to times of their own."""
    rows = {(f"s{n % 5}", n): [(1, 2, n)] for n in range(60)}
    versions = []
    for turn in range(8):
        for key in [key for key in rows if chance.random() < 0.1]:
            del rows[key]
        for n in chance.integers(0, 80, 6):
            rows.setdefault((f"s{n % 5}", int(n)), []).append((turn, turn + int(chance.integers(0, 3)), int(n) + turn))
        if turn in (2, 6):
            rows = {key: [*past[:-1], (10 * turn, 10 * turn, past[-1][2])] for key, past in rows.items()}
        if turn in (4, 7):
            rows = {key: [*past[:-1], (turn + key[1] % 3, turn + 2, past[-1][2])] for key, past in rows.items()}
        content = [
            {"store": store, "n": n, "_event": event, "_known": known, **_VALUES, "int32": value}
            for (store, n), past in rows.items() for event, known, value in {row[:2]: row for row in past}.values()
        ]  # fmt: skip
        written = table(VIEW, content).drop_columns("content_hash")
        versions.append(offline.write(offline.prepare(VIEW, written)).version)
    return versions


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.accept)])
def test_executors_leave_what_one_process_leaves(spark: "SparkSession", tmp_path: Path, url: str, seed: int) -> None:
    offline, chance = OfflineStore(tmp_path / "offline"), np.random.default_rng(seed)
    versions = _versions(offline, chance)
    find = onlinewrite.finder(spark, Store(offline.root, {}), make_contract(VIEW), url)
    with EmbeddedRedis(tmp_path / "other") as here, connect(here.url) as own, connect(url) as client:
        worlds = [World(own, here.url, offline, None), World(client, url, offline, find)]
        stamps, kinds = set(), ["push", "lose", "stop", "full", "old", "distrust", "later", ""]
        for turn, version in enumerate(versions):
            for kind in ("", kinds[turn % len(kinds)], *([str(chance.choice(kinds))] if seed else [])):
                done, state = [], chance.bit_generator.state
                for world in worlds:
                    chance.bit_generator.state = state
                    if kind == "push":
                        world.push(_rows(40).slice(int(chance.integers(0, 30)), 5))
                    elif kind in ("lose", "stop"):
                        world.lose(chance, stop=kind == "stop")
                    elif kind == "distrust":
                        world.store.distrust(VIEW)
                    past = versions[max(0, turn - 2)] if kind == "old" else version
                    done.append(world.publish(past, 10 * turn + 3 + 5 * (kind == "later"), full=kind == "full"))
                assert done[0] == done[1], (turn, kind)
                assert worlds[0].held() == worlds[1].held(), (turn, kind)
                record = worlds[1].store.published(VIEW)
                assert record is not None
                stamps.add(record.stamp)
    assert len(stamps) > 1  # some runs stored common times


def test_a_version_that_is_removed_meanwhile_is_not_compared(spark: "SparkSession", tmp_path: Path, url: str) -> None:
    offline = OfflineStore(tmp_path / "offline")
    versions = _versions(offline, np.random.default_rng(0))
    find, removed = onlinewrite.finder(spark, Store(offline.root, {}), make_contract(VIEW), url), list[str]()

    def late(
        history: ViewHistory, at: int, base: tuple[ViewHistory, int] | None
    ) -> AbstractContextManager[ViewChanges]:
        for file in {*(base[0].files if base else ())} - {*history.files} - {*removed}:
            (Path(offline.path(VIEW.table)) / file).unlink()
            removed.append(file)
        return find(history, at, base)

    with connect(url) as client:
        world = World(client, url, offline, late)
        for version, at in zip(versions[:2], (10, 13), strict=True):
            world.publish(version, at)
        assert removed
        world.find = None
        counts = world.publish(versions[1], 13, full=True)
        assert (counts.written, counts.removed) == (0, 0)


def test_tasks_of_a_run_that_was_killed_write_no_more(spark: "SparkSession", tmp_path: Path, url: str) -> None:
    """An engine may go on with them after another run has begun."""
    offline = OfflineStore(tmp_path / "offline")
    versions = _versions(offline, np.random.default_rng(0))
    find = onlinewrite.finder(spark, Store(offline.root, {}), make_contract(VIEW), url)
    with connect(url) as client:
        world = World(client, url, offline, None)
        world.publish(versions[0], 10)
        record = world.store.record_text(VIEW)
        with find(offline.history(VIEW, versions[0]), 10, None) as parts:
            world.publish(versions[1], 13)
            held = world.held()
            for act in (lambda: parts.write(WriteSelection(record, 1 << 62), lambda: None),
                        lambda: parts.remove_others(record, 1 << 62)):  # fmt: skip
                with pytest.raises(DependencyError, match="another materialization has taken over"):
                    act()
            assert world.held()[:2] == held[:2]
            # Some of their rows may have come before they noticed.
            world.lose(np.random.default_rng(0))
            assert world.publish(versions[1], 13).compared > 0
            assert world.held() == held


def test_no_password_is_shown(spark: "SparkSession", tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    offline, url = OfflineStore(tmp_path), "redis://me:hunter2@127.0.0.1:1/0"
    past = offline.history(VIEW, _versions(offline, np.random.default_rng(0))[0])
    find = onlinewrite.finder(spark, Store(offline.root, {}), make_contract(VIEW), url)
    with find(past, 3, None) as parts:
        where = r"writing traffic to Redis at redis://\S*127.0.0.1:1/0: redis://\S*127.0.0.1:1/0 on executor \S+: "
        with pytest.raises(DependencyError, match=where + "does not answer") as caught:
            parts.facts(None)
        assert "hunter2" not in str(caught.value)
        assert "way to Redis" in caught.value.remedy
        assert isinstance(parts, onlinewrite._Executors)
        parts.rows.mapInArrow(parts.task, "result string").explain(extended=True)
    shown = capfd.readouterr()
    assert "hunter2" not in shown.out + shown.err
