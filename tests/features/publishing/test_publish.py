"""What Redis answers after any sequence of tables, pushes, losses and runs is what comparing everything would leave."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, NoReturn, cast

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.features.clock import Status
from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DependencyError
from isthmus.features.offline.history import LatestRows, ViewHistory, table_schema
from isthmus.features.offline.log import MaterializationLog
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.record import Stamp
from isthmus.features.online.scripts import ANNOUNCE, MANY, announce_arguments, suspects_key
from isthmus.features.online.store import LEASE_SECONDS, OnlineStore
from isthmus.features.publishing.changes import KeyChanges
from isthmus.features.publishing.publish import Publication, publish
from isthmus.features.redis.connection import connect
from isthmus.features.redis.pipeline import Client, run
from isthmus.features.types import Float32, Int64, String
from isthmus.features.values.columns import from_python
from isthmus.features.values.entitykey import entity_key, entity_keys
from isthmus.features.values.rows import RowCodec
from tests.features.support import make_contract, make_view

VIEW = make_view({"a": Int64, "b": Float32}, {"k": String, "n": Int64})
Row = tuple[int, int, int]
"""Event time, known time, value."""


def key_of(number: int) -> tuple[str, int]:
    """Keys whose parts, put together, are the same text."""
    return ("1" * (number % 3 + 1), number // 3)


def features_of(values: list[int]) -> dict[str, Any]:
    return {"a": from_python(values, Int64), "b": from_python([float(value) for value in values], Float32)}


def history_of(rows: dict[int, list[Row]]) -> pa.Table:
    flat = [(*key_of(key), *row) for key, some in rows.items() for row in some]
    k, n, event, known, value = ([row[i] for row in flat] for i in range(5))
    time = pa.timestamp("us", tz="UTC")
    columns = [k, n, pa.array(event, pa.int64()).cast(time), pa.array(known, pa.int64()).cast(time), value,
               [float(a) for a in value]]  # fmt: skip
    names = [name for name in table_schema(VIEW).names if name != "content_hash"]
    return pa.table([pa.array(c) for c in columns], names)


def _content(value: int) -> int:
    return int(RowCodec(VIEW).content(features_of([value]), 1)[0])


def order_of(row: Row) -> tuple[int, int, int]:
    return row[0], row[1], _content(row[2])


@dataclass
class Oracle:
    """What Redis would hold if every run compared every key, and times stood in every row."""

    rows: dict[int, Row] = field(default_factory=dict)
    horizon: int = -(1 << 63)

    def push(self, key: int, row: Row) -> None:
        if key not in self.rows or order_of(row) > order_of(self.rows[key]):
            self.rows[key] = row

    def publish(self, table: dict[int, list[Row]], now: int) -> None:
        known = [row[1] for rows in table.values() for row in rows if row[1] <= now]
        self.horizon = max([self.horizon, *known])
        for key in {*self.rows, *table}:
            usable = [row for row in table.get(key, ()) if row[0] <= now and row[1] <= now]
            stored = self.rows.get(key)
            if stored is not None and stored[1] <= self.horizon:
                stored = None
            best = max([*usable, *([stored] if stored else [])], key=order_of, default=None)
            self.rows.pop(key, None)
            if best is not None:
                self.rows[key] = best


class World:
    """A table and a Redis."""

    def __init__(self, folder: Path, url: str, client: Client, view: ViewContract = VIEW) -> None:
        client.flushall()
        self.offline, self.url, self.client, self.view = OfflineStore(folder), url, client, view
        self.store = OnlineStore(client, make_contract(view))
        self.table: dict[int, list[Row]] = {}
        self.now = 0

    def write(self, table: dict[int, list[Row]]) -> None:
        self.table = table
        self.offline.write(self.offline.prepare(self.view, history_of(table)))

    def publish(self, *, full: bool = False) -> Publication:
        return publish(self.store, self.url, self.offline, self.offline.history(self.view), lambda: self.now, full=full)

    def push(self, key: int, row: Row, accepted: int | None = None) -> None:
        """Pushes a row to the online store; to the history, too, if it says when the push was accepted."""
        k, n = key_of(key)
        event, known = np.array([row[0]], np.int64), np.array([row[1]], np.int64)
        rows: Any = self.view, {"k": [k], "n": [n]}, event, known, features_of([row[2]])
        if accepted is not None:
            names = entity_keys(self.store.contract.project, self.view.keys, {"k": [k], "n": [n]})
            self.store.append(self.view, names, RowCodec(self.view).encode(*rows[2:]), accepted)
        self.store.write(*rows)

    def held(self) -> dict[int, Row]:
        keys = list(range(_KEYS))
        named = [key_of(key) for key in keys]
        answer = self.store.read(self.view, {"k": [k for k, _ in named], "n": [n for _, n in named]}, 1 << 62)
        values = answer.columns["a"].data.tolist()
        there = (answer.event != 0) | (answer.known != 0)
        rows = zip(keys, there.tolist(), answer.event.tolist(), answer.known.tolist(), values, strict=True)
        return {key: (event, known, value) for key, found, event, known, value in rows if found}


_KEYS = 6
_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["restamp all", "restamp some", "change", "correct", "drop", "push", "flush", "lose", "full",
                         "rewind", "nothing"]),
        st.integers(0, _KEYS - 1), st.integers(1, 9), st.booleans(),
    ),
    min_size=1, max_size=7,
)  # fmt: skip


def after(table: dict[int, list[Row]], what: str, key: int, value: int, now: int) -> dict[int, list[Row]]:
    """A later table: every row in it was known by now."""
    table = {k: list(rows) for k, rows in table.items()}
    match what:
        case "restamp all":
            table = {k: [*rows, (now, now, rows[-1][2])] for k, rows in table.items()}
        case "restamp some":
            table = {k: [*rows, (now, now, rows[-1][2])] if (k + key) % 2 else rows for k, rows in table.items()}
        case "change":
            table[key] = [*table.get(key, []), (now - value, now, value)]
        case "correct" if key in table:
            event, known, _ = table[key][-1]
            table[key][-1] = (event, known, value + 100)
        case "drop" if len(table) > 1:
            table.pop(key, None)
        case "rewind" if len(table.get(key, ())) > 1:
            table[key].pop()
    return table


@pytest.mark.accept
@given(first=st.sets(st.integers(0, _KEYS - 1), min_size=1), steps=_STEPS)
def test_runs_over_changes_leave_what_runs_over_everything_leave(
    client: Client, url: str, first: set[int], steps: list[tuple[str, int, int, bool]]
) -> None:
    """The oracle compares everything in every run, and knows no stamps."""
    with TemporaryDirectory() as folder:
        world, oracle = World(Path(folder), url, client), Oracle()
        world.write({key: [(1, 2, key)] for key in first})
        for n, (what, key, value, run) in enumerate([("nothing", 0, 1, True), *steps, ("nothing", 0, 1, True)]):
            world.now = now = 10 * (n + 1)
            table = after(world.table, what, key, value, now - 1)
            if table != world.table:
                world.write(table)
            if what == "push":
                world.push(key, (now - value, now - 1, value + 200))
                oracle.push(key, (now - value, now - 1, value + 200))
            elif what == "flush":
                client.flushall()
                oracle = Oracle()
            elif what == "lose":
                # One row that nobody has told us of: every key is among those that are looked at.
                lost = min(oracle.rows, default=0)
                client.delete(_name(lost))
                oracle.rows.pop(lost, None)
            if run or what in ("flush", "lose", "full"):
                world.publish(full=what == "full")
                oracle.publish(world.table, now)
                if what == "full":
                    oracle.rows = {k: max(rows, key=order_of) for k, rows in world.table.items()}
                assert world.held() == oracle.rows, (n, what)


def _many(event: int, count: int = 2000) -> dict[int, list[Row]]:
    return {key: [(event, event, key)] for key in range(count)}


@pytest.fixture
def world(tmp_path: Path, url: str, client: Client) -> World:
    made = World(tmp_path, url, client)
    made.now = 10
    made.write(_many(5))
    made.publish()
    return made


def _commands(client: Client) -> int:
    stats: Any = client.info("stats")
    return int(stats["total_net_input_bytes"])


def test_only_what_changed_is_sent(world: World, client: Client) -> None:
    world.now = 20
    world.write({**_many(5), 7: [(5, 5, 7), (15, 15, -7)], 2001: [(15, 15, 1)]})
    before = _commands(client)
    done = world.publish()
    assert (done.compared, done.changed, done.written, done.removed) == (2001, 2, 2, 0)
    # A thousand keys are looked at, and none of the others is named.
    assert _commands(client) - before < 150 * 1000
    assert world.publish().written == 0


def test_new_times_of_unchanged_rows_are_told_once(tmp_path: Path, url: str, client: Client) -> None:
    view = replace(VIEW, ttl=60)
    world = World(tmp_path, url, client, view)
    world.now = 10
    world.write(_many(5))
    world.publish()
    world.now = 100
    table = _many(95)
    world.write({**table, 7: [(95, 95, -7)]})
    done = world.publish()
    assert (done.compared, done.changed, done.written, done.expired) == (2000, 1, 1, 0)
    record = world.store.published(view)
    assert record is not None
    assert record.stamp == Stamp(5, 95, 95)
    answer = world.store.read(view, {"k": ["1", "11"], "n": [0, 2]}, 155)
    assert answer.event.tolist() == [95, 95]
    assert answer.status.tolist() == [Status.PRESENT] * 2
    assert world.store.read(view, {"k": ["1"], "n": [0]}, 156).status.tolist() == [Status.EXPIRED]
    # A push that is older than the time that was told does not win over it; a newer one does.
    world.push(0, (50, 101, 1))
    world.push(1, (102, 102, 2))
    answer = world.store.read(view, {"k": ["1", "11"], "n": [0, 0]}, 110)
    assert (answer.event.tolist(), answer.columns["a"].data.tolist()) == ([95, 102], [0, 2])


def test_new_times_that_differ_are_written(world: World) -> None:
    world.now = 100
    world.write({key: [(90 + key % 2, 95, key)] for key in range(2000)})
    done = world.publish()
    assert (done.changed, done.written) == (0, 2000)
    assert world.held() == {key: (90 + key % 2, 95, key) for key in range(_KEYS)}


def test_a_stamp_that_would_lie_is_taken_back(world: World) -> None:
    world.now = 100
    world.write(_many(95))
    world.publish()
    # A correction of the past: its known time lies before the stamp, and so it must not be under it.
    world.now = 110
    world.write({**_many(95), 3: [(4, 4, 33)]})
    world.publish()
    record = world.store.published(VIEW)
    assert record is not None
    assert record.stamp is None
    assert world.held() == {**{key: (95, 95, key) for key in range(_KEYS)}, 3: (4, 4, 33)}


def test_rows_that_others_wrote_are_looked_at_again(world: World) -> None:
    world.push(0, (8, 9, 77))
    world.push(_KEYS, (8, 9, 78))
    assert world.held()[0] == (8, 9, 77)
    # The table has caught up to a time after the push, and does not have it.
    world.now = 30
    world.write({**_many(5), 1: [(5, 5, 1), (25, 25, 1)]})
    world.publish()
    assert world.held()[0] == (5, 5, 0)
    assert world.store.take_suspects(VIEW, 1 << 60) is not None


def test_too_many_rows_of_others_make_a_run_compare_everything(world: World, client: Client) -> None:
    names = [b"%d" % number for number in range(MANY)]
    for start in range(0, MANY, 10_000):
        part = announce_arguments(names[start : start + 10_000], np.zeros(10_000, np.int64))
        run(client, ANNOUNCE, part, [([suspects_key("prod", "traffic")], [])])
    assert client.zcard(suspects_key("prod", "traffic")) == MANY
    world.push(0, (8, 9, 77))
    # The newest stays: it says how fresh the view is.
    assert client.zrange(suspects_key("prod", "traffic"), 0, -1, withscores=True) == [
        (_name(0), 9.0),
        (b"*", np.inf),
    ]
    world.push(0, (7, 8, 76))
    assert client.zrange(suspects_key("prod", "traffic"), 0, -1, withscores=True) == [
        (_name(0), 9.0),
        (b"*", np.inf),
    ]
    _forget(client, 1)
    assert world.publish().written == 1
    # Of all these keys only one has a row that others have written, later than all that the table knows.
    assert client.zrange(suspects_key("prod", "traffic"), 0, -1) == [_name(0)]
    world.now = 30
    world.write({**_many(5), 1: [(5, 5, 1), (25, 25, 1)]})
    assert world.publish().written == 2
    assert world.held()[0] == (5, 5, 0)
    assert client.exists(suspects_key("prod", "traffic")) == 0


@pytest.mark.parametrize(
    "record",
    [b"", b"5 1", b"{}", b'{"contract":1}', b"\xff"],
    ids=["empty", "an earlier form", "no field", "a wrong type", "no text"],
)
def test_a_record_that_cannot_be_read_makes_a_run_compare_everything(
    world: World, client: Client, record: bytes
) -> None:
    client.hset("prod:tables", "traffic", cast("str", record))
    _forget(client, 1)
    done = world.publish()
    assert (done.changed, done.written) == (1, 1)


def _name(key: int) -> bytes:
    return entity_key("prod", list(zip(VIEW.keys, key_of(key), strict=True)))


def _forget(client: Client, count: int) -> None:
    """Delete rows, but not that of key 0, which some tests have pushed: Redis scans keys in an order of its own."""
    for name in sorted(set(client.scan_iter("prod:k,n:*")) - {_name(0)})[:count]:
        client.delete(name)


def test_a_run_that_was_killed_is_followed_by_one_that_compares_everything(world: World, client: Client) -> None:
    record = world.store.published(VIEW)
    assert record is not None
    text = msgspec.json.encode(msgspec.structs.replace(record, pending=True))
    assert world.store.replace(VIEW, world.store.record_text(VIEW), text)
    _forget(client, 1)
    assert world.publish().written == 1


def test_until_when_rows_are_complete_is_known_of_runs_that_were_killed(world: World) -> None:
    class Killed(OnlineStore):
        def write(self, *_: object, **__: object) -> NoReturn:
            raise KeyboardInterrupt

    killed = Killed(world.client, make_contract(VIEW))
    for event in (15, 25):
        world.now = event
        world.write(_many(event - 1, count=2000 + event))
        with pytest.raises(KeyboardInterrupt):
            publish(killed, world.url, world.offline, world.offline.history(VIEW), lambda: world.now)
        record = world.store.published(VIEW)
        assert record is not None
        assert (record.pending, record.horizon, record.complete_until) == (True, event - 1, 5)
    world.publish()
    record = world.store.published(VIEW)
    assert record is not None
    assert (record.pending, record.horizon, record.complete_until) == (False, 24, 24)


def test_keys_that_redis_has_lost_are_found(world: World, client: Client) -> None:
    _forget(client, 40)
    assert world.publish().written == 40
    client.flushall()
    assert world.publish().written == 2000


@pytest.mark.parametrize("policy", ["noeviction", "volatile-lru", "volatile-ttl", "allkeys-lru"])
def test_after_a_restart_rows_are_compared_unless_redis_never_evicts(world: World, client: Client, policy: str) -> None:
    cast("redis.Redis", client).config_set("maxmemory", 1 << 30)
    cast("redis.Redis", client).config_set("maxmemory-policy", policy)
    try:
        record = world.store.published(VIEW)
        assert record is not None
        restarted = msgspec.json.encode(msgspec.structs.replace(record, servers={"another": 0}))
        assert world.store.replace(VIEW, world.store.record_text(VIEW), restarted)
        assert bool(world.store.losses({}).views) == (policy == "allkeys-lru")
        # Feast may have given rows an expiry. Comparing all rows is cheaper than missing one.
        assert world.store.still_holds({"another": 0}) == (policy == "noeviction")
    finally:
        cast("redis.Redis", client).config_set("maxmemory", 0)
        cast("redis.Redis", client).config_set("maxmemory-policy", "noeviction")


def test_a_version_that_is_gone_is_no_obstacle(world: World, tmp_path: Path) -> None:
    world.now = 20
    world.write({**_many(5), 7: [(15, 15, 8)]})
    for file in tmp_path.glob("traffic/**/*.parquet"):
        if str(file.relative_to(tmp_path / "traffic")) not in _files(world):
            file.unlink()
    assert world.publish().changed == 1
    assert world.held()[0] == (5, 5, 0)


def _files(world: World) -> str:
    data: Any = world.offline.history(VIEW).data
    return " ".join(data.files)


def test_runs_at_once_wait_for_each_other(world: World, url: str) -> None:
    world.now = 20
    world.write({key: [(15, 15, key + 1)] for key in range(2000)})
    done: list[Publication] = []

    def run() -> None:
        with connect(url) as own:
            store = OnlineStore(own, make_contract(VIEW))
            done.append(publish(store, url, world.offline, world.offline.history(VIEW), lambda: 20))

    threads = [Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(count.written for count in done) == [0, 0, 2000]
    assert world.held() == {key: (15, 15, key + 1) for key in range(_KEYS)}


def test_who_stood_still_for_too_long_goes_no_further(world: World, client: Client) -> None:
    """The lock of a run is taken away while it writes."""
    world.now = 20
    world.write({key: [(15, 15, key + 1)] for key in range(2000)})
    told: list[int] = []

    def now() -> int:
        told.append(1)
        if len(told) == 2:  # between the record that it began and its first row
            client.delete("prod:tables|traffic|lock")
            _wait(lambda: not client.exists("prod:tables|traffic|lock"), LEASE_SECONDS / 4)
        return 20

    with pytest.raises(DependencyError, match="taken over"):
        publish(world.store, world.url, world.offline, world.offline.history(VIEW), now)
    assert world.publish().written == 2000


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


def test_the_log_says_when_what_became_readable(world: World) -> None:
    world.now = 20
    world.write({**_many(5), 7: [(15, 15, 8)]})
    world.publish()
    first, second = MaterializationLog(world.offline.root).runs(VIEW)
    assert (first.at, first.written, second.at, second.written) == (10, 2000, 20, 1)
    assert first.fingerprint != second.fingerprint
    assert MaterializationLog(world.offline.root).runs(replace(VIEW, code="2")) == []


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(-3, 9), st.integers(-3, 9), st.integers(0, 2)), max_size=12),
    at=st.integers(-3, 9),
)
@settings(max_examples=100)
def test_a_state_is_the_row_that_wins_for_each_key(rows: list[tuple[int, int, int, int]], at: int) -> None:
    unique = {(key, event, known): (key, event, known, value) for key, event, known, value in rows}
    table: dict[int, list[Row]] = {}
    for key, event, known, value in unique.values():
        table.setdefault(key, []).append((event, known, value))
    data = history_of(table)
    contents = [_content(value) for value in data["a"].to_pylist()]
    data = data.append_column("content_hash", pa.array(contents, pa.int64()))
    state = LatestRows.of(ViewHistory(VIEW, data, 0), at)
    expected = {
        key_of(key): max(usable, key=order_of)
        for key, some in table.items()
        if (usable := [row for row in some if row[0] <= at and row[1] <= at])
    }
    parts = state.rows(np.arange(len(state.content)))
    found = {(row["k"], row["n"]): row["a"] for part in parts for row in part.to_pylist()}
    assert found == {key: row[2] for key, row in expected.items()}
    keys = list(zip(state.keys["k"].to_pylist(), state.keys["n"].to_pylist(), strict=True))
    assert dict(zip(keys, zip(state.event.tolist(), state.known.tolist(), strict=True), strict=True)) == {
        key: row[:2] for key, row in expected.items()
    }
    times = [row[1] for some in table.values() for row in some if row[1] <= at]
    assert state.horizon == max(times, default=-(1 << 63))
    changed, moved = KeyChanges(state, state)._changes
    assert not changed.any()
    assert not moved.any()


def test_rows_pushed_before_the_first_run_are_looked_at(tmp_path: Path, url: str, client: Client) -> None:
    world = World(tmp_path, url, client)
    world.now = 10
    world.push(0, (8, 9, 77))
    world.push(_KEYS - 1, (8, 9, 78))
    world.write({0: [(5, 5, 0)], 1: [(5, 5, 1)]})
    world.publish()
    # Both became known after all that the table knows.
    assert world.held() == {0: (8, 9, 77), 1: (5, 5, 1), _KEYS - 1: (8, 9, 78)}
    world.now = 30
    world.write({0: [(5, 5, 0)], 1: [(5, 5, 1), (25, 25, 2)]})
    world.publish()
    assert world.held() == {0: (5, 5, 0), 1: (25, 25, 2)}


def test_a_push_that_a_stamp_would_restamp_is_not_written(world: World) -> None:
    world.now = 100
    world.write(_many(95, _KEYS - 1))
    world.publish()
    world.push(_KEYS - 1, (3, 4, 77))
    assert world.held() == {key: (95, 95, key) for key in range(_KEYS - 1)}


def test_pushed_rows_compete_with_times_that_a_run_tells_at_once(world: World) -> None:
    world.now = 100
    world.write(_many(95))
    # Known later than the table, of an earlier event: the table's new time wins over it.
    world.push(0, (50, 97, 77))
    world.publish()
    assert world.held()[0] == (95, 95, 0)


def test_a_run_in_the_middle_of_a_push_is_followed_by_one_that_looks_again(world: World) -> None:
    class Slow(OnlineStore):
        def _suspect(self, *arguments: Any) -> None:
            super()._suspect(*arguments)
            if world.now == 10:
                world.now = 30
                world.publish()

    world.write({**_many(5), 1: [(25, 25, 1)]})
    event, known = np.array([8], np.int64), np.array([9], np.int64)
    Slow(world.client, make_contract(VIEW)).write(VIEW, {"k": ["1"], "n": [0]}, event, known, features_of([77]))
    assert world.held()[0] == (8, 9, 77)
    world.publish()
    assert world.held()[0] == (5, 5, 0)


def test_a_run_goes_no_further_where_another_one_has_told_of_its_table(world: World, client: Client) -> None:
    """Its process stands still just before its last command, for longer than its lock holds."""
    world.now = 20
    world.write({**_many(5), 0: [(15, 15, 1)]})
    old = world.offline.history(VIEW)

    class Stopped(OnlineStore):
        def servers(self) -> dict[str, int]:
            found = super().servers()
            record = self.published(VIEW)
            if record is not None and record.pending and record.at == 20:
                client.delete("prod:tables|traffic|lock")
                world.now = 30
                world.write({**_many(5), 0: [(15, 15, 2)], 1: [(25, 25, 7)]})
                world.publish()
            return found

    with pytest.raises(DependencyError, match="taken over"):
        publish(Stopped(client, make_contract(VIEW)), world.url, world.offline, old, lambda: 20)
    record = world.store.published(VIEW)
    assert record is not None
    assert (record.at, record.pending) == (30, False)
    assert [run.at for run in MaterializationLog(world.offline.root).runs(VIEW)] == [10, 30]
    # The last words of the run that stood still could have come late.
    _forget(client, 1)
    assert world.publish().written == 1
    assert world.held() == {**{key: (5, 5, key) for key in range(_KEYS)}, 0: (15, 15, 2), 1: (25, 25, 7)}


def test_names_of_another_form_among_those_of_others(world: World, client: Client) -> None:
    """A server under an earlier contract, with other join keys or other types of them, has pushed."""
    for keys in ({"k": Int64, "n": Int64}, {"other": String}, {"k": String, "n": Int64, "z": Int64}):
        before = make_view({"a": Int64, "b": Float32}, dict(keys))
        values: dict[str, Any] = {name: [7 if kind is Int64 else "x"] for name, kind in keys.items()}
        at = np.array([9], np.int64)
        OnlineStore(client, make_contract(before)).write(before, values, at, at, features_of([1]))
    assert client.zcard(suspects_key("prod", "traffic")) == 3
    world.now = 20
    assert world.publish().written == 0
    world.write({**_many(5), 0: [(15, 15, 3)]})
    assert world.publish().written == 1


def test_a_known_time_that_a_double_does_not_hold_is_not_forgotten_too_early(world: World) -> None:
    far = (1 << 54) + 3
    world.now = far + 10
    world.write({**_many(5), 1: [(5, 5, 1), (far, far, 2)]})
    world.publish()
    # Known later than the table by less than what a score tells apart.
    world.push(0, (9, far + 1, 77))
    world.publish()
    assert world.held()[0] == (9, far + 1, 77)
    world.write({**_many(5), 1: [(5, 5, 1), (far, far, 2), (far, far + 1, 3)]})
    world.publish()
    assert world.held()[0] == (5, 5, 0)
