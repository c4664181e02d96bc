"""Pushed rows in the history: beside builds in any order, and beside runs that were killed at any step."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
import redis
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.days import Days
from isthmus.features.errors import DataError, DependencyError
from isthmus.features.offline import pushes as log
from isthmus.features.offline.canonical import canonical
from isthmus.features.offline.history import table_schema
from isthmus.features.offline.pushes import PushLog
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online import pushes
from isthmus.features.online.pushes import APPEND, Entry, append_arguments, require_room, stream, waiting
from isthmus.features.publishing.collect import CollectedPushes, collect, decode_entries
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.redis.pipeline import Client, ask, run
from isthmus.features.redis.routing import total
from isthmus.features.types import Int64, String
from isthmus.features.values.arrow import from_arrow, micros
from isthmus.features.values.entitykey import entity_keys
from isthmus.features.values.rows import RowCodec
from tests.features.support import ALL, DAY, VALUES, columns_of, make_view, table, values_of
from tests.servers import free_port, redis_server

VIEW = make_view({"a": Int64, "b": String}, {"k": Int64, "c": String})
DAYS = 4
KEY_TYPES = ("bool", "int32", "int64", "unixtimestamp", "string", "bytes")
PROJECT = "prod"
Row = tuple[int, int, int, int]
"""Key, event time, known time, value."""
KILLS = int(os.environ.get("TEST_KILLS", "1"))


def plain(rows: list[Row]) -> list[dict[str, Any]]:
    return [{"k": k, "c": "ü" * k, "_event": event, "_known": known, "a": a, "b": None if a % 2 else str(a)}
            for k, event, known, a in rows]  # fmt: skip


def arrow(rows: list[Row]) -> pa.Table:
    return table(VIEW, plain(rows)) if rows else table_schema(VIEW).empty_table()


def content(rows: list[Row]) -> list[int]:
    return RowCodec(VIEW).content(columns_of(VIEW, plain(rows)), len(rows)).tolist() if rows else []


def packed(rows: list[Row], view: Any = VIEW) -> tuple[list[bytes], list[bytes]]:
    event, known = (np.array([row[n] for row in rows], np.int64) for n in (1, 2))
    keys = {name: [row[name] for row in plain(rows)] for name in ("k", "c")}
    return entity_keys(PROJECT, VIEW.keys, keys), RowCodec(view).encode(event, known, columns_of(view, plain(rows)))


def push(client: Client, rows: list[Row], view: Any = VIEW, limit: int = 10**6) -> None:
    """What the server does before it writes the rows."""
    key = stream(PROJECT, view.table)
    with translate_errors("redis://there"):
        counts = run(client, APPEND, append_arguments(*packed(rows, view), 7, limit), [([key], [])])
    require_room(view.table, total([counts]), len(rows))


def history(store: OfflineStore) -> dict[tuple[int, int, int], int]:
    """Key and times to the content hash; a key with the same times twice fails here."""
    rows = store.history(VIEW).table()
    store.require_unaltered(store.history(VIEW))
    columns = [rows["k"].to_pylist(), micros(rows["event_timestamp"]).tolist(), micros(rows["known_at"]).tolist()]
    found = dict(zip(zip(*columns, strict=True), rows["content_hash"].to_pylist(), strict=True))
    assert len(found) == len(rows)
    return found


@dataclass
class Oracle:
    """History is what the last builds have computed and all pushes; of one key and times, the greatest content."""

    computed: list[Row] = field(default_factory=list)
    pushed: list[Row] = field(default_factory=list)

    def build(self, rows: list[Row], within: Days | None) -> None:
        outside = [row for row in self.computed if within is not None and row[1] // DAY not in within]
        self.computed = outside + rows

    def history(self) -> dict[tuple[int, int, int], int]:
        found: dict[tuple[int, int, int], int] = {}
        rows = self.computed + self.pushed
        for row, hashed in zip(rows, content(rows), strict=True):
            found[row[:3]] = max(hashed, found.get(row[:3], 0))
        return found


def require_log(store: OfflineStore, oracle: Oracle) -> None:
    rows = PushLog(store.root, VIEW.table).rows(VIEW)
    columns = rows["k"], pa.array(micros(rows["event_timestamp"])), pa.array(micros(rows["known_at"])), rows["a"]
    logged, pushed = Counter(zip(*(c.to_pylist() for c in columns), strict=True)), Counter(oracle.pushed)
    assert logged.keys() == pushed.keys()
    assert logged <= pushed


def build(store: OfflineStore, rows: list[Row], within: Days | None = None) -> Any:
    with store.prepare(VIEW, arrow(rows), within) as ready:
        return store.write(ready)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server, connect(server.url) as connected:
        yield connected


@pytest.fixture
def store(tmp_path: Path, client: Client) -> OfflineStore:
    client.flushall()
    return OfflineStore(tmp_path)


def left(client: Client, store: OfflineStore) -> list[Entry]:
    """What waits in the stream, without the last row that a finished run has brought."""
    last = PushLog(store.root, VIEW.table).last_position()
    entries = waiting(client, PROJECT, VIEW.table, 100)
    return entries[1:] if entries and entries[0].place == last else entries


def brought(client: Client, store: OfflineStore, **options: Any) -> CollectedPushes:
    return collect(client, PROJECT, store, VIEW.table, [VIEW], **options)


TIMES = st.integers(0, 3 * DAYS - 1).map(lambda n: n * DAY // 3)
ROWS = st.lists(st.tuples(st.integers(0, 2), TIMES, st.integers(0, 2), st.integers(0, 3)), max_size=6)
ONCE = ROWS.map(lambda rows: list({row[:3]: row for row in rows}.values()))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), ROWS.filter(bool)),
        st.tuples(st.just("build"), ONCE),
        st.tuples(st.just("range"), ONCE, st.integers(0, DAYS - 1), st.integers(1, DAYS)),
        st.tuples(st.sampled_from(["collect", "log", "table", "restored"])),
    ),
    min_size=1,
    max_size=8,
)


@given(STEPS, st.integers(1, 3))
def test_history_is_what_builds_compute_and_all_that_was_pushed(
    tmp_path_factory: pytest.TempPathFactory, client: Client, steps: list[Any], files: int
) -> None:
    """Also where a run is killed after the log or the table, and where Redis comes back older than both."""
    client.flushall()
    store, oracle = OfflineStore(tmp_path_factory.mktemp("store")), Oracle()
    entries: list[Entry] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isthmus.features.offline.store.FILES", files)
        patch.setattr(log, "FILES", files)
        for name, *rest in [*steps, ("build", []) if not oracle.computed else ("collect",), ("collect",)]:
            before = left(client, store)
            last = PushLog(store.root, VIEW.table).last_position()
            intact = last < 0 or pushes.holds(client, PROJECT, VIEW.table, last)
            match name:
                case "push":
                    push(client, rest[0])
                    oracle.pushed += rest[0]
                    entries += left(client, store)[len(before) :]
                case "build":
                    build(store, rest[0])
                    oracle.build(rest[0], None)
                case "range" if store.commit(VIEW) is not None:
                    within = Days(rest[1], rest[1] + rest[2])
                    rows = [row for row in rest[0] if row[1] // DAY in within]
                    build(store, rows, within)
                    oracle.build(rows, within)
                case "log" | "table" if before:
                    rows = decode_entries(PROJECT, VIEW, before)
                    places = np.array([entry.place for entry in before])
                    PushLog(store.root, VIEW.table).append(rows, places, intact=intact)
                    if name == "table":
                        store.extend(VIEW, PushLog(store.root, VIEW.table).to_view(VIEW, rows))
                case "restored":
                    # An older state: what was collected since is there again, and ids that were given are given again.
                    client.delete(stream(PROJECT, VIEW.table))
                    for number, entry in enumerate(entries, 1):
                        fields: Any = {b"k": entry.name, b"r": entry.row, b"a": entry.accepted}
                        client.xadd(stream(PROJECT, VIEW.table), fields, id=f"0-{number}")
                case "collect":
                    assert (brought(client, store, lot=2).lost_after is None) == intact
                    assert brought(client, store) == CollectedPushes()
                    if store.commit(VIEW) is not None:
                        assert history(store) == oracle.history()
    assert history(store) == oracle.history()
    # Nothing is in the log more often than it was pushed; the table is what a build of the same rows would have left.
    require_log(store, oracle)
    fingerprint = store.history(VIEW).fingerprint
    assert not build(store, oracle.computed).changed
    assert store.history(VIEW).fingerprint == fingerprint


EVERY = make_view(ALL, {f"k_{name}": ALL[name] for name in KEY_TYPES}, name="every")
KEYED = st.tuples(*(VALUES[column.dtype.name] for column in EVERY.keys))


@given(st.lists(st.tuples(KEYED, st.integers(-DAY, DAY), values_of(ALL)), min_size=1, max_size=5))
def test_a_row_of_every_type_is_in_the_history_what_it_was_in_redis(rows: list[Any]) -> None:
    keys = {column.name: [row[0][n] for row in rows] for n, column in enumerate(EVERY.keys)}
    event = np.array([row[1] for row in rows], np.int64)
    block = RowCodec(EVERY).encode(event, event, columns_of(EVERY, [row[2] for row in rows]))
    names = entity_keys(PROJECT, EVERY.keys, keys)
    entries = [Entry(n, *pair, 7) for n, pair in enumerate(zip(names, block, strict=True))]
    logged = decode_entries(PROJECT, EVERY, entries)
    rebuilt = canonical(EVERY, PushLog("nowhere", EVERY.table).to_view(EVERY, logged))
    assert sorted(rebuilt["content_hash"].to_pylist()) == sorted(logged["content_hash"].to_pylist())
    columns = {c.name: from_arrow(logged[c.name], c.dtype).tolist(c.dtype) for c in EVERY.keys}
    assert entity_keys(PROJECT, EVERY.keys, columns) == names


def test_a_build_keeps_what_only_a_push_knew_and_says_what_it_replaces(store: OfflineStore, client: Client) -> None:
    build(store, [(0, 0, 0, 1)])
    base = store.base(VIEW)
    push(client, [(0, 0, 0, 1), (1, 5, 6, 2), (2, DAY, DAY, 3)])
    assert brought(client, store) == CollectedPushes(3, 3, 2)
    assert store.base(VIEW) == base != store.history(VIEW).fingerprint, "nothing of what the build has left is outdated"
    written = build(store, [(0, 0, 0, 1), (1, 5, 6, 2)])
    assert (written.pushed, written.replaced, written.rows, written.changed) == (1, 2, 3, False)
    written = build(store, [], Days(0, 1))
    assert (written.pushed, written.replaced, written.rows) == (2, 0, 3)
    assert store.extendable(VIEW) is not None


def test_a_push_with_the_times_of_a_row_is_added_or_outdone_as_the_time_rules_say(
    store: OfflineStore, client: Client
) -> None:
    for number, (there, sent) in enumerate([(0, 0), (0, 1), (1, 0)]):
        client.flushall()
        fresh = OfflineStore(f"{store.root}/{number}")
        build(fresh, [(0, 0, 0, there)])
        push(client, [(0, 0, 0, sent), (1, 0, 0, 1)])
        brought(client, fresh)
        winner = max(content([(0, 0, 0, there), (0, 0, 0, sent)]))
        assert history(fresh) == {(0, 0, 0): winner, (1, 0, 0): content([(1, 0, 0, 1)])[0]}


def test_a_push_before_there_is_a_table_waits_in_the_log(store: OfflineStore, client: Client) -> None:
    push(client, [(1, 5, 6, 2)])
    assert brought(client, store) == CollectedPushes(1, 1, 0)
    assert store.commit(VIEW) is None
    assert build(store, []).pushed == 1
    assert list(history(store)) == [(1, 5, 6)]


def test_a_table_of_another_contract_gets_the_rows_by_its_next_build(store: OfflineStore, client: Client) -> None:
    earlier = make_view({"a": Int64}, {"k": Int64, "c": String}, code="0")
    with store.prepare(earlier, table(earlier, plain([(0, 0, 0, 1)]))) as ready:
        store.write(ready)
    push(client, [(1, 5, 6, 2)])
    push(client, [(2, 5, 6, 2)], earlier)
    assert collect(client, PROJECT, store, VIEW.table, [VIEW, earlier]) == CollectedPushes(2, 2, 2)
    assert len(store.history(earlier).table()) == 3
    assert build(store, []).pushed == 2
    rows = store.history(VIEW).table().select(["k", "a", "b"]).sort_by("k").to_pylist()
    assert rows == [{"k": 1, "a": 2, "b": "2"}, {"k": 2, "a": 2, "b": None}]


def test_many_small_collections_leave_few_files(store: OfflineStore, client: Client) -> None:
    build(store, [(0, 0, 0, 1)])
    for n in range(log.FILES + 5):
        push(client, [(1, n, n, n)])
        brought(client, store)
    assert len(history(store)) == log.FILES + 6
    assert len(DeltaTable(store.path(VIEW.table)).file_uris()) < log.FILES
    assert len(DeltaTable(PushLog(store.root, VIEW.table).path).file_uris()) < log.FILES


def test_too_many_that_wait_are_refused_all_of_them(store: OfflineStore, client: Client) -> None:
    push(client, [(n, n, n, n) for n in range(3)], limit=4)
    with pytest.raises(
        DependencyError, match=r"history of traffic: 3 pushed rows wait for it; 2 more exceed the limit"
    ):
        push(client, [(n, n, n, n) for n in range(2)], limit=4)
    assert brought(client, store).rows == 3


def entries(client: Client, name: bytes) -> list[Any]:
    return cast("list[Any]", client.xrange(name))


def poison() -> dict[str, dict[bytes, bytes]]:
    """Entries that no collection can read, by what is wrong with them."""
    (gone,), (other,) = packed([(1, 5, 6, 2)], replace(VIEW, code="2"))
    (name,), (row,) = packed([(3, 5, 6, 2)])
    (_,), (late,) = packed([(3, 2**62, 6, 2)])
    (_,), (unknown,) = packed([(3, 5, -(2**62), 2)])
    return {
        "a definition that is gone": {b"k": gone, b"r": other, b"a": b"7"},
        "a damaged row": {b"k": name, b"r": row[:-1] + b"!", b"a": b"7"},
        "half a row": {b"k": name, b"r": row[:20], b"a": b"7"},
        "a key that ends": {b"k": name[:-1], b"r": row, b"a": b"7"},
        "a key of other types": {b"k": name.replace(b"i", b"s", 1), b"r": row, b"a": b"7"},
        "no key": {b"k": b"", b"r": row, b"a": b"7"},
        "an event without a date": {b"k": name, b"r": late, b"a": b"7"},
        "a known time without a date": {b"k": name, b"r": unknown, b"a": b"7"},
        "accepted never": {b"k": name, b"r": row, b"a": b"yesterday"},
        "another program": {b"another": b"program"},
    }


def test_what_cannot_be_read_is_set_aside_and_keeps_no_row_waiting(store: OfflineStore, client: Client) -> None:
    build(store, [(0, 0, 0, 1)])
    planted = poison()
    for n, fields in enumerate(planted.values()):
        client.xadd(stream(PROJECT, VIEW.table), dict(fields))  # type: ignore[arg-type]
        push(client, [(10 + n, 5, 6, n)])
    result = brought(client, store)
    assert (result.rows, result.aside, result.why) == (len(planted), len(planted), "is not a row")
    assert len(history(store)) == 1 + len(planted)
    assert [fields for _, fields in entries(client, pushes.unreadable_stream(PROJECT, VIEW.table))] == [
        *planted.values()
    ]
    assert brought(client, store) == CollectedPushes()
    # Once its definition is known again, a row that was set aside is brought.
    pushes.put_back(client, PROJECT, VIEW.table)
    result = collect(client, PROJECT, store, VIEW.table, [VIEW, replace(VIEW, code="2")])
    assert (result.rows, result.aside) == (1, len(planted) - 3)
    assert len(history(store)) == 2 + len(planted)
    assert len(entries(client, pushes.unreadable_stream(PROJECT, VIEW.table))) == len(planted) - 1


@pytest.mark.accept
def test_a_run_that_is_killed_while_it_sets_rows_aside_loses_none(
    store: OfflineStore, client: Client, tmp_path: Path
) -> None:
    build(store, [(0, 0, 0, 1)])
    (name,), (row,) = packed([(3, 5, 6, 2)])
    for n in range(120):
        client.xadd(stream(PROJECT, VIEW.table), {b"k": name, b"r": row[:-1] + b"%c" % (n + 100), b"a": b"7"})
        push(client, [(10 + n, 5, 6, n)])
    there = {fields[b"r"] for _, fields in entries(client, stream(PROJECT, VIEW.table))}
    url = f"unix://{cast('redis.Redis', client).connection_pool.connection_kwargs['path']}"
    program = (
        "from dataclasses import replace\nfrom isthmus.features.offline.store import OfflineStore\n"
        "from isthmus.features.publishing.collect import collect\n"
        "from isthmus.features.redis.connection import connect\n"
        "from tests.features.publishing.test_collect import PROJECT, VIEW\n"
        f"collect(connect({url!r}), PROJECT, OfflineStore({str(tmp_path)!r}), VIEW.table, [VIEW])"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as child:
        while client.xlen(pushes.unreadable_stream(PROJECT, VIEW.table)) < 40:
            assert child.poll() is None
        child.kill()
    assert 40 <= client.xlen(pushes.unreadable_stream(PROJECT, VIEW.table)) < 120, "killed in the middle"
    brought(client, store)
    aside = [fields[b"r"] for _, fields in entries(client, pushes.unreadable_stream(PROJECT, VIEW.table))]
    assert len(aside) == len(set(aside)) == 120
    assert set(aside) < there
    assert len(history(store)) == 121


@pytest.mark.parametrize("jumped", [2**41, 9_999_999_999_999, 2**62], ids=str)
def test_a_clock_of_redis_that_jumps_loses_no_row_and_stops_nothing(
    store: OfflineStore, client: Client, jumped: int
) -> None:
    build(store, [(0, 0, 0, 1)])
    push(client, [(1, 5, 6, 2)])
    assert brought(client, store).rows == 1
    push(client, [(2, 5, 6, 2)])
    (name,), (row,) = packed([(3, 5, 6, 2)])
    for count in (0, 2**22):
        client.xadd(stream(PROJECT, VIEW.table), {b"k": name, b"r": row, b"a": b"7"}, id=f"{jumped}-{count}")
    push(client, [(4, 5, 6, 2), (5, 5, 6, 2)])
    waits = pushes.backlog(ask(client, pushes.backlog_commands(PROJECT, VIEW.table)))
    assert waits.rows == 5
    assert brought(client, store).rows == 5
    push(client, [(6, 5, 6, 2)])
    assert brought(client, store) == CollectedPushes(1, 1, 1)
    assert [k for k, *_ in sorted(history(store))] == [0, 1, 2, 3, 4, 5, 6]
    last = PushLog(store.root, VIEW.table).last_position()
    assert abs(pushes.appended_at(last) / 1e6 - time.time()) < 60, "ids go by the clock again"


def test_more_rows_than_a_millisecond_may_have_are_collected(store: OfflineStore, client: Client) -> None:
    build(store, [(0, 0, 0, 1)])
    ahead = int(time.time() * 1000) + 10**10
    (name,), (row,) = packed([(3, 5, 6, 2)])
    client.xadd(stream(PROJECT, VIEW.table), {b"k": name, b"r": row, b"a": b"7"}, id=f"{ahead}-{2**22 - 2}")
    push(client, [(n, 5, 6, 2) for n in range(4, 7)])
    assert brought(client, store, lot=2).rows == 4
    push(client, [(7, 5, 6, 2)])
    assert brought(client, store) == CollectedPushes(1, 1, 1)


def test_entries_that_cannot_be_given_other_ids_stay(store: OfflineStore, client: Client) -> None:
    many: dict[Any, Any] = {b"%d" % n: b"" for n in range(4500)}
    client.xadd(stream(PROJECT, VIEW.table), many, id=f"{2**41}-0")
    with pytest.raises(DependencyError, match="that another program overwrote"), translate_errors("redis://there"):
        brought(client, store)
    assert client.xlen(stream(PROJECT, VIEW.table)) == 1


def test_a_damaged_log_or_table_loses_nothing(store: OfflineStore, client: Client) -> None:
    build(store, [(0, 0, 0, 1)])
    push(client, [(1, 5, 6, 2)])
    brought(client, store)
    push(client, [(2, 5, 6, 2)])
    places = [Path(store.path(VIEW.table)), Path(PushLog(store.root, VIEW.table).path)]
    commits = [max(place.rglob("*.json")) for place in places]
    for file in (*(next(place.rglob("*.parquet")) for place in places), *commits):
        data = file.read_bytes()
        file.write_bytes(data[:-5])
        with pytest.raises(DataError, match="cannot be read"):
            brought(client, store)
        file.write_bytes(data)
    assert brought(client, store).added == 1
    assert len(history(store)) == 3


def test_a_first_row_that_is_in_the_log_alone_reaches_the_table(store: OfflineStore, client: Client) -> None:
    """The stream begins with it, as with the row that a finished run leaves there."""
    build(store, [(0, 0, 0, 1)])
    commit = max(Path(store.path(VIEW.table)).rglob("*.json"))
    whole = commit.read_bytes()
    for rows in (1, 2):
        # The second time in a Redis that was emptied.
        push(client, [(rows, 5, 6, 2)])
        commit.write_bytes(whole[:-5])
        with pytest.raises(DataError, match="cannot be read"):
            brought(client, store)
        commit.write_bytes(whole)
        assert PushLog(store.root, VIEW.table).last_position() == waiting(client, PROJECT, VIEW.table, 9)[-1].place
        assert brought(client, store).added == 1
        assert brought(client, store) == CollectedPushes()
        assert len(history(store)) == 1 + rows
        client.flushall()
        commit = max(Path(store.path(VIEW.table)).rglob("*.json"))
        whole = commit.read_bytes()


def test_a_collection_whose_table_cannot_be_written_is_run_again(store: OfflineStore, client: Client) -> None:
    build(store, [])
    push(client, [(1, 5, 6, 2)])
    table = Path(store.path(VIEW.table))
    (table / "event_day=1970-01-01").write_text("in the way")
    with pytest.raises(DataError, match=r"offline table of traffic: .* cannot be written .*then try again$"):
        brought(client, store)
    (table / "event_day=1970-01-01").unlink()
    assert brought(client, store).added == 1


def test_a_run_ends_though_pushes_go_on(store: OfflineStore, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of the view wait for it."""
    build(store, [])
    push(client, [(0, 5, 6, 2), (1, 5, 6, 2), (2, 5, 6, 2)])
    real, more = pushes.trim, iter(range(3, 9))

    def trim(*arguments: Any) -> int:
        push(client, [(next(more), 5, 6, 2)])
        return real(*arguments)

    monkeypatch.setattr(pushes, "trim", trim)
    assert brought(client, store, lot=2) == CollectedPushes(3, 3, 3)
    assert len(left(client, store)) == 2
    assert brought(client, store).added == 2


def test_what_another_machine_has_collected_is_not_lost(
    store: OfflineStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lock is between them: one may remove what was last for the other."""
    build(store, [])
    push(client, [(0, 5, 6, 2)])
    brought(client, store)
    push(client, [(1, 5, 6, 2), (2, 5, 6, 2)])
    real, turns, other = pushes.holds, iter([True]), list[CollectedPushes]()

    def holds(*arguments: Any) -> bool:
        if next(turns, False):
            other.append(brought(client, store))
        return real(*arguments)

    monkeypatch.setattr(pushes, "holds", holds)
    assert brought(client, store) == CollectedPushes()
    assert other == [CollectedPushes(2, 2, 2)]
    assert len(history(store)) == 3


def test_ids_rise_whatever_the_clock_does(store: OfflineStore, client: Client) -> None:
    """Redis goes on from the last id if its clock steps back; an emptied Redis has ids of later, not of before."""
    build(store, [])
    client.xadd(stream(PROJECT, VIEW.table), {"k": "", "r": "", "a": "0"}, id=f"{(1 << 41) - 9}-7")
    client.xtrim(stream(PROJECT, VIEW.table), maxlen=0, approximate=False)
    push(client, [(1, 5, 6, 2), (1, 5, 7, 2)])
    first, second = waiting(client, PROJECT, VIEW.table, 9)
    assert second.place == first.place + 1 == (((1 << 41) - 9) << 22) + 9
    assert brought(client, store) == CollectedPushes(2, 2, 2)
    lost = CollectedPushes(2, 1, 1, lost_after=((1 << 41) - 9) * 1000)
    client.flushall()
    push(client, [(2, 5, 6, 2), (1, 5, 7, 2)])
    assert brought(client, store) == lost, "its ids are lower, so rows are looked up by what they say"
    push(client, [(3, 5, 6, 2)])
    assert brought(client, store) == CollectedPushes(1, 1, 1), "ids go on from where they were"
    assert len(history(store)) == 4
    client.flushall()
    assert brought(client, store).lost_after == lost.lost_after
    assert brought(client, store) == CollectedPushes(), "which is said once"


def test_a_redis_that_goes_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    store, oracle, port = OfflineStore(tmp_path / "store"), Oracle(), free_port()
    build(store, [])

    def running() -> AbstractContextManager[Any]:
        arguments = ["--port", str(port), "--bind", "127.0.0.1", "--appendonly", "yes", "--appendfsync", "always"]
        return redis_server(tmp_path / "redis", *arguments, client=redis.Redis(port=port))

    with running() as server, connect(f"redis://127.0.0.1:{port}") as client:
        for n in range(40):
            rows = [(k, n, n, k) for k in range(50)]
            push(client, rows)
            oracle.pushed += rows
        timer = threading.Timer(0.3, server.kill)
        timer.start()

        def endlessly() -> None:
            while True:
                brought(client, store, lot=20)

        with pytest.raises(DependencyError, match="does not answer"), translate_errors("redis://there"):
            endlessly()
        timer.join()
    with running(), connect(f"redis://127.0.0.1:{port}") as client:
        assert brought(client, store).lost_after is None
    assert history(store) == oracle.history()
    require_log(store, oracle)


COLLECTOR = """
import importlib, sys
from isthmus.features.offline.store import OfflineStore
from isthmus.features.publishing.collect import collect
from isthmus.features.redis.connection import connect
url, root, module, name, project = sys.argv[1:]
view = getattr(importlib.import_module(module), name)
with connect(url) as client:
    print("ready", flush=True)
    while True:
        collect(client, project, OfflineStore(root), view.table, [view], lot=40)
"""


@contextmanager
def collector(
    url: str, root: str, module: str = __name__, name: str = "VIEW", project: str = PROJECT
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that collects again and again, in small lots."""
    command = [sys.executable, "-c", COLLECTOR, url, root, module, name, project]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_collector_killed_at_any_moment_loses_nothing_and_has_nothing_twice(
    tmp_path: Path, store: OfflineStore
) -> None:
    chance, oracle = random.Random(5), Oracle()
    with EmbeddedRedis(tmp_path / "redis") as server, connect(server.url) as client:
        build(store, [])
        for _ in range(KILLS):
            with collector(server.url, store.root) as child:
                until = time.monotonic() + chance.uniform(0, 0.4)
                while time.monotonic() < until:
                    rows = [
                        (chance.randrange(50), chance.randrange(2 * DAY), 0, chance.randrange(9)) for _ in range(30)
                    ]
                    push(client, rows)
                    oracle.pushed += rows
                os.kill(child.pid, signal.SIGKILL)
        brought(client, store)
        assert history(store) == oracle.history()
        require_log(store, oracle)
        assert not build(store, []).changed, "the rows of an undisturbed run, to the digest of each day"
