"""Tables by day: ranges are replaced, everything else stays, and what is not ours is not taken for ours."""

import json
import subprocess
import sys
import textwrap
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.features.days import Days
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError
from isthmus.features.offline.commits import Commit, RowSources
from isthmus.features.offline.history import table_schema
from isthmus.features.offline.pushes import PushLog
from isthmus.features.offline.store import OfflineStore, TableWrite
from isthmus.features.types import Bool, Float64, Int32, Int64, String, UnixTimestamp
from isthmus.features.values.rows import RowCodec
from tests.features.support import DAY, FIRST, LAST, columns_of, make_view, same_bits, table

VIEW = make_view({"a": Float64, "b": String}, {"k": String})
ROOT = Path(__file__).resolve().parents[3]


def rows_of(days: range, factor: float = 1.0, view: Any = VIEW) -> pa.Table:
    """Three rows a day."""
    rows = [
        {"k": f"k{n % 2}", "_event": day * DAY + n, "_known": day * DAY + n + 5, "a": day * factor, "b": str(n)}
        for day in days for n in range(3)
    ]  # fmt: skip
    return table(view, rows).drop_columns(["content_hash"])


def put(store: OfflineStore, rows: pa.Table, within: Days | None = None, view: Any = VIEW, **more: Any) -> TableWrite:
    with store.prepare(view, rows, within, **more) as prepared:
        return store.write(prepared)


def read(store: OfflineStore, view: Any = VIEW) -> tuple[pa.Table, str]:
    history = store.history(view)
    return history.table(), history.fingerprint


def day_files(store: OfflineStore, view: Any = VIEW) -> dict[date, list[str]]:
    adds = pa.table(DeltaTable(store.path(view.table)).get_add_actions(flatten=True))
    found: dict[date, list[str]] = {}
    for day, path in zip(adds["partition.event_day"].to_pylist(), adds["path"].to_pylist(), strict=True):
        found.setdefault(day, []).append(path)
    return found


@pytest.fixture
def store(tmp_path: Path) -> OfflineStore:
    return OfflineStore(tmp_path / "offline")


KEYS = {"s": String, "i": Int32, "t": UnixTimestamp, "f": Bool}
SMALL = make_view({"a": Int64}, KEYS)
ROW = st.tuples(st.sampled_from(["", "a", "ab", "é"]), st.integers(0, 1), st.integers(0, 1), st.booleans(),
                st.integers(0, 5 * DAY - 1), st.integers(0, 3), st.none() | st.integers(0, 3))  # fmt: skip


def _small(rows: list[Any]) -> pa.Table:
    unique = {row[:6]: row for row in rows}.values()
    return table(SMALL, [
        {"s": s, "i": i, "t": t, "f": f, "_event": event, "_known": event + known, "a": a}
        for s, i, t, f, event, known, a in unique
    ]).drop_columns(["content_hash"])  # fmt: skip


@settings(max_examples=15)
@given(
    versions=st.lists(st.lists(ROW, max_size=15), min_size=1, max_size=2),
    ranges=st.lists(st.tuples(st.integers(-1, 5), st.integers(1, 4)), max_size=5),
    seed=st.randoms(),
)
def test_any_ranges_that_cover_everything_make_the_table_of_one_build(
    tmp_path_factory: pytest.TempPathFactory, versions: list[list[Any]], ranges: list[tuple[int, int]], seed: Any
) -> None:
    """Of sources that change between the ranges: in the end, the last content counts."""
    whole = OfflineStore(tmp_path_factory.mktemp("whole"))
    last = _small(versions[-1])
    put(whole, last, view=SMALL)
    parts = OfflineStore(tmp_path_factory.mktemp("parts"))
    covering = [Days(-2, 1), Days(1, 2), Days(2, 6)]
    seed.shuffle(covering)
    for first, length in ranges:
        put(parts, _small(versions[0]), Days(first, first + length), SMALL)
    for days in covering:
        put(parts, last, days, SMALL)
    assert read(parts, SMALL)[1] == read(whole, SMALL)[1]
    assert same_bits(read(parts, SMALL)[0], read(whole, SMALL)[0])
    assert not put(parts, last, view=SMALL).changed
    # And the fingerprint is one of the rows: what a reader finds has it.
    assert parts.commit(SMALL) == parts.commit(SMALL)
    found = parts.commit(SMALL)
    assert found is not None
    assert found.rows == len(last)
    assert sum(day.rows for day in (found.days or {}).values()) == len(last)


def test_a_range_replaces_its_days_and_no_other(store: OfflineStore) -> None:
    put(store, rows_of(range(10)))
    before = day_files(store)
    assert put(store, rows_of(range(10), 2.0), Days(3, 6)) == TableWrite(30, 0, 1, changed=True)
    after = day_files(store)
    epoch = date(1970, 1, 1).toordinal()
    same = {date.fromordinal(epoch + n) for n in (0, 1, 2, 6, 7, 8, 9)}
    assert {day for day in before if before[day] == after[day]} == same
    values = read(store)[0]
    assert values["a"].to_pylist() == [n * (2.0 if 3 <= n < 6 else 1.0) for n in range(10) for _ in range(3)]
    # A day without rows disappears; rows outside of the range are nobody's business.
    assert put(store, rows_of(range(4, 20), 2.0), Days(3, 6)) == TableWrite(27, -3, 2, changed=True)
    assert len(day_files(store)) == 9
    assert same_bits(store.history(VIEW, 0).table(), store.history(VIEW, 0).table())
    assert len(store.history(VIEW, 0).table()) == 30


def test_only_days_that_differ_are_written(store: OfflineStore) -> None:
    put(store, rows_of(range(10)))
    before = day_files(store)
    rows = rows_of(range(10)).to_pylist()
    rows[13]["a"] = 99.0
    assert put(store, pa.Table.from_pylist(rows, rows_of(range(1)).schema)).version == 1
    after = day_files(store)
    assert [str(day) for day in before if before[day] != after[day]] == ["1970-01-05"]
    log = sorted((Path(store.path(VIEW.table)) / "_delta_log").glob("*.json"))[-1].read_text().splitlines()
    assert sorted(next(iter(json.loads(line))) for line in log) == ["add", "commitInfo", "remove"]
    assert put(store, rows_of(range(10)), Days(0, 3)) == TableWrite(30, 0, 1, changed=False)


def test_a_digest_says_which_rows_a_day_holds(store: OfflineStore) -> None:
    """Neighboring texts, keys and days do not flow into each other."""
    view = make_view({"a": Int64}, {"x": String, "y": String})
    fingerprints = set()
    for x, y in (("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", "")):
        for day in (0, 1):
            rows = table(view, [{"x": x, "y": y, "_event": day * DAY, "_known": day * DAY, "a": 1}])
            put(store, rows.drop_columns(["content_hash"]), view=view)
            fingerprints.add(read(store, view)[1])
    assert len(fingerprints) == 8


def test_a_scan_leaves_other_days_alone(store: OfflineStore) -> None:
    put(store, rows_of(range(10)))
    data = store.history(VIEW).data
    assert not isinstance(data, pa.Table)
    wanted = pa.dataset.field("event_timestamp") < pa.scalar(DAY, pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    assert len(list(data.get_fragments(filter=wanted))) == 1
    assert data.to_table(filter=wanted).num_rows == 3


def test_a_part_is_refused_in_a_table_of_another_contract(store: OfflineStore) -> None:
    put(store, rows_of(range(10)))
    other = make_view({"a": Float64, "b": String}, {"k": String}, code="2")
    with pytest.raises(ContractMismatch, match=r"days outside the range .*Run `isthmus build traffic` without"):
        store.prepare(other, rows_of(range(10)), Days(0, 3))
    assert put(store, rows_of(range(10)), view=other) == TableWrite(30, 0, 1, changed=True)
    assert day_files(store) == day_files(store, other)
    log = sorted((Path(store.path(VIEW.table)) / "_delta_log").glob("*.json"))[-1].read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in log] == ["commitInfo"], "the same rows are not written again"
    assert put(store, rows_of(range(10)), Days(0, 3), other) == TableWrite(30, 0, 1, changed=False)


def test_features_come_and_go_and_another_type_needs_a_version(store: OfflineStore) -> None:
    put(store, rows_of(range(3)))
    wider = make_view({"a": Float64, "b": String, "c": Int64}, {"k": String})
    more = rows_of(range(3)).append_column("c", pa.array(range(9)))
    put(store, more, view=wider)
    assert read(store, wider)[0].schema.equals(table_schema(wider))
    assert read(store, wider)[0]["c"].to_pylist() == [0, 2, 1, 3, 5, 4, 6, 8, 7]
    put(store, rows_of(range(3)))
    assert read(store)[0].column_names == table_schema(VIEW).names
    retyped = make_view({"a": Int64, "b": String}, {"k": String})
    rows = rows_of(range(3)).set_column(3, "a", pa.array(range(9)))
    with pytest.raises(ConfigurationError, match=r"traffic, a: its table holds double; expected int64.*version=2"):
        store.prepare(retyped, rows)
    second = type(retyped).from_dict("traffic", {**retyped.as_dict(), "version": 2})
    assert store.path(second.table).endswith("/traffic.v2")
    put(store, rows, view=second)
    assert read(store, second)[0]["a"].to_pylist() == [0, 2, 1, 3, 5, 4, 6, 8, 7]
    assert read(store)[0]["a"].to_pylist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]


def test_events_of_every_year_that_has_a_date(store: OfflineStore) -> None:
    view = make_view({"a": Int64})
    rows = [{"k": 1, "_event": at, "_known": 0, "a": 1} for at in (FIRST, -1, 0, LAST)]
    put(store, table(view, rows).drop_columns(["content_hash"]), view=view)
    assert same_bits(read(store, view)[0], table(view, rows))
    put(store, table(view, rows[:3]).drop_columns(["content_hash"]), Days.parse("9999-01-01", "9999-12-31"), view)
    late = [{**rows[0], "_event": LAST + 1}]
    with pytest.raises(DataError, match=r"event_timestamp: 253402300800000000 .* no date; expected the years 1 to"):
        put(store, table(view, late).drop_columns(["content_hash"]), view=view)


# --- what others did to the table


def _old_table(store: OfflineStore) -> pa.Table:
    """A table as it was before there were days."""
    rows = rows_of(range(4))
    columns = [{"a": row["a"], "b": row["b"]} for row in rows.to_pylist()]
    content = RowCodec(VIEW).content(columns_of(VIEW, columns), len(rows))
    rows = rows.append_column(table_schema(VIEW).field("content_hash"), pa.array(content))
    metadata = {"isthmus.contract": VIEW.hash, "isthmus.fingerprint": "ab" * 32, "isthmus.rows": str(len(rows))}
    write_deltalake(store.path(VIEW.table), rows, commit_properties=CommitProperties(custom_metadata=metadata))
    return rows


def test_a_table_from_before_there_were_days_can_be_read_and_is_rebuilt_once(store: OfflineStore) -> None:
    rows = _old_table(store)
    assert same_bits(read(store)[0], rows)
    assert read(store)[1] == "ab" * 32
    with pytest.raises(ContractMismatch, match=r"built by an earlier version of Isthmus.*`isthmus build traffic`"):
        store.prepare(VIEW, rows_of(range(4)), Days(0, 2))
    assert put(store, rows_of(range(4))) == TableWrite(12, 0, 1, changed=True)
    assert len(day_files(store)) == 4
    assert put(store, rows_of(range(4)), Days(0, 2)).version == 1
    assert same_bits(store.history(VIEW, 0).table(), rows)


def test_a_foreign_optimize_and_vacuum_change_nothing(store: OfflineStore) -> None:
    put(store, rows_of(range(3)))
    put(store, rows_of(range(3), 2.0), Days(1, 2))
    before, built = read(store), store.history(VIEW).commit.written
    foreign = DeltaTable(store.path(VIEW.table))
    for day in range(3):
        foreign.optimize.compact(partition_filters=[("event_day", "=", f"1970-01-0{day + 1}")])
    foreign.optimize.z_order(["k"])
    foreign.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert DeltaTable(store.path(VIEW.table)).version() > 1
    assert read(store)[1] == before[1]
    assert read(store)[0].sort_by([("event_timestamp", "ascending")]) == before[0].sort_by(
        [("event_timestamp", "ascending")]
    )
    assert store.history(VIEW).commit.written == built
    assert not put(store, rows_of(range(3), 2.0), Days(1, 2)).changed
    assert put(store, rows_of(range(3), 3.0), Days(1, 2)).changed


@pytest.mark.parametrize("what", ["append", "delete", "none of ours"])
def test_rows_that_another_tool_wrote_are_refused(store: OfflineStore, what: str) -> None:
    path = store.path(VIEW.table)
    if what == "none of ours":
        write_deltalake(path, rows_of(range(3)))
    else:
        put(store, rows_of(range(3)))
    if what == "append":
        write_deltalake(path, DeltaTable(path).to_pyarrow_table(), mode="append")
    if what == "delete":
        DeltaTable(path).delete("a = 1.0")
    operation = {"append": "WRITE", "delete": "DELETE", "none of ours": "WRITE"}[what]
    for step in (store.history, lambda view: store.prepare(view, rows_of(range(3)))):
        with pytest.raises(DataError, match=rf"offline table of traffic: .* by another tool \({operation}\).*Remove"):
            step(VIEW)


# --- two writers, a full disk


def test_of_two_writers_the_second_is_refused(store: OfflineStore) -> None:
    put(store, rows_of(range(6)))
    with (
        store.prepare(VIEW, rows_of(range(6), 2.0), Days(0, 2)) as first,
        store.prepare(VIEW, rows_of(range(6), 3.0), Days(4, 6)) as second,
    ):
        store.write(first)
        expected = read(store)
        with pytest.raises(DataError, match="another process wrote to it at the same moment"):
            store.write(second)
    assert read(store)[1] == expected[1]
    assert put(store, rows_of(range(6), 3.0), Days(4, 6)).changed
    fresh = OfflineStore(Path(store.root).parent / "fresh")
    with fresh.prepare(VIEW, rows_of(range(2))) as first, fresh.prepare(VIEW, rows_of(range(3))) as second:
        fresh.write(first)
        with pytest.raises(DataError, match="another process wrote to it at the same moment"):
            fresh.write(second)
    assert len(read(fresh)[0]) == 6


FULL = """
import resource, signal, sys
import numpy as np
from isthmus.features.errors import DataError
from isthmus.features.offline.log import Materialization, MaterializationLog
from isthmus.features.offline.pushes import PushLog
from isthmus.features.offline.store import OfflineStore
from tests.features.offline.test_ranges import VIEW, Days, put, rows_of
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
for write in (
    lambda: put(OfflineStore(sys.argv[1]), rows_of(range(6), 2.0), Days(0, 3)),
    lambda: MaterializationLog(sys.argv[1]).append(Materialization(VIEW.name, VIEW.hash, 0, "", 0, 0, 0, 0)),
    lambda: PushLog(sys.argv[1], VIEW.table).append(rows_of(range(3)), np.arange(9), intact=True),
):
    try:
        write()
    except DataError as error:
        print(error)
"""


@pytest.mark.accept
def test_a_full_disk_leaves_the_table_as_it_was(store: OfflineStore) -> None:
    put(store, rows_of(range(6)))
    expected = read(store)
    for size in (0, 700, 2000):
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(FULL), store.root, str(size)], cwd=ROOT,
                              capture_output=True, text=True, check=False, timeout=60)  # fmt: skip
        assert "offline table of traffic" in done.stdout, (size, done.stdout, done.stderr)
        assert "log of materializations" in done.stdout
        assert "pushed rows of traffic" in done.stdout
        assert done.stdout.count("cannot be written (") == 3
        assert done.stdout.count(" are unchanged") == 3
        assert PushLog(store.root, VIEW.table).last_position() == -1
        assert read(store)[1] == expected[1]
        assert same_bits(read(store)[0], expected[0])
    assert put(store, rows_of(range(6), 2.0), Days(0, 3)).changed


# --- what a commit says


def test_a_commit_says_again_what_it_was_told(store: OfflineStore) -> None:
    origin = RowSources({"orders": {"n": "bigint"}}, "abc")
    put(store, rows_of(range(4)), Days(0, 2), origin=origin, now=3 * DAY)
    put(store, rows_of(range(4)), Days(2, 3), origin=origin, done=[Days(7, 9)], now=3 * DAY)
    found = store.commit(VIEW)
    assert found is not None
    assert (found.origin, found.done, found.until) == (origin, (Days(0, 3), Days(7, 9)), 3 * DAY)
    assert Commit.read(found.metadata() | {"timestamp": str(found.written)}) == found
    put(store, rows_of(range(4)), Days(3, 4), origin=RowSources({"orders": {"m": "int"}}, "other"), now=2 * DAY)
    later = store.commit(VIEW)
    assert later is not None
    assert later.done == (Days(3, 4),), "what was built from other content does not count"
    assert later.until == 3 * DAY
    assert later.origin.schemas == {"orders": {"n": "bigint", "m": "int"}}
