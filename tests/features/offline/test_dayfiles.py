"""Day files that several processes write are the table that one process writes, to the bit."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import Days
from isthmus.features.errors import DataError
from isthmus.features.offline.dayfiles import DayFile, DayFiles
from isthmus.features.offline.pushes import ACCEPTED, CONTRACT, PushLog
from isthmus.features.offline.spool import DaySpool
from isthmus.features.offline.store import OfflineStore, TableWrite
from isthmus.features.types import Float64, Int64, String
from tests.features.support import ALL, DAY, make_view, same_bits, table, values_of

VIEW = make_view({"a": Float64, "b": String}, {"k": Int64})
EVERY = make_view(ALL, {"k": Int64}, name="every")
NOW = 5 * DAY


def rows(view: ViewContract, days: Sequence[int], factor: float = 1.0) -> pa.Table:
    """Two rows a day, of which every third has no text."""
    plain = [
        {"k": key, "_event": day * DAY + key, "_known": day * DAY + 9, "a": (1 + day) * factor,
         "b": None if day % 3 else "é"}
        for day in days for key in (1, 2)
    ]  # fmt: skip
    return table(view, plain).drop_columns(["content_hash"])


def by_processes(
    store: OfflineStore, view: ViewContract, computed: pa.Table, count: int, within: Days | None = None
) -> DayFiles:
    """What `count` processes write, each of other days, in the order in which their tasks might end."""
    target = store.day_target(view, within, NOW)
    day = computed["event_timestamp"].cast(pa.int64()).to_numpy() // DAY
    days: dict[int, DayFile] = {}
    ahead = pushed = replaced = 0
    parts = [computed.filter(pa.array(day % count == n)) for n in reversed(range(count))]
    for part in parts:
        with DaySpool() as spool:
            spool.add(part)
            built, files = target.write(spool)
        days |= {file.day: file for file in files}
        ahead, pushed, replaced = ahead + built.ahead, pushed + built.pushed, replaced + built.replaced
    with DaySpool() as none:
        built, files = target.write(none, pushed=[day for day in target.pushed if day not in days])
    days |= {file.day: file for file in files}
    counts = (pushed + built.pushed, replaced + built.replaced)
    return DayFiles(days, ahead + built.ahead, counts)


def push(store: OfflineStore, view: ViewContract, pushed: pa.Table, first: int) -> None:
    pushed = pushed.append_column(ACCEPTED, pa.array(np.full(len(pushed), NOW)))
    pushed = pushed.append_column(CONTRACT, pa.array([view.hash] * len(pushed)))
    PushLog(store.root, view.table).append(pushed, np.arange(first, first + len(pushed)), intact=True)


def require_same(view: ViewContract, one: OfflineStore, many: OfflineStore) -> None:
    here, there = (store.history(view) for store in (one, many))
    assert same_bits(here.table(), there.table())
    assert here.version == there.version
    assert replace(here.commit, written=0) == replace(there.commit, written=0)
    many.require_unaltered(there)


def write(store: OfflineStore, view: ViewContract, computed: Any, within: Days | None = None) -> tuple[TableWrite, int]:
    with store.prepare(view, computed, within, now=NOW) as prepared:
        return store.write(prepared), prepared.ahead


@pytest.mark.parametrize("count", [1, 3])
def test_a_table_by_several_processes_is_that_by_one(tmp_path: Path, count: int) -> None:
    one, many = OfflineStore(tmp_path / "one"), OfflineStore(tmp_path / "many ü")
    # A new table, the same rows, changed and removed days, a range, pushed rows, and a definition with other columns.
    steps = [(range(7), 1.0, None), (range(7), 1.0, None), (range(1, 9), 2.0, None), (range(3, 5), 3.0, Days(2, 6))]
    for days, factor, within in steps:
        computed = rows(VIEW, days, factor)
        here = write(one, VIEW, computed, within)
        assert write(many, VIEW, by_processes(many, VIEW, computed, count, within), within) == here
        require_same(VIEW, one, many)
    for store in (one, many):
        # Known only by a push: a day of its own, a key, and a row that beats a built one or loses to it.
        push(store, VIEW, pa.concat_tables([rows(VIEW, [20]), rows(VIEW, [4, 8], 7.0)]), 0)
    here = write(one, VIEW, rows(VIEW, range(9)))
    assert here[0].pushed >= 2 <= here[1]
    assert write(many, VIEW, by_processes(many, VIEW, rows(VIEW, range(9)), count)) == here
    require_same(VIEW, one, many)
    wider = make_view({"a": Float64, "b": String, "c": Int64}, {"k": Int64}, code="2")
    computed = rows(VIEW, range(9)).append_column("c", pa.array(range(18), pa.int64()))
    assert write(many, wider, by_processes(many, wider, computed, count)) == write(one, wider, computed)
    require_same(wider, one, many)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, DAY - 1), values_of(ALL)), min_size=1, max_size=6,
                unique_by=lambda row: row[:2]))  # fmt: skip
def test_every_value_is_stored_to_the_bit(drawn: list[tuple[int, int, dict[str, Any]]]) -> None:
    plain = [{"k": 1, "_event": day * DAY + at, "_known": day * DAY + at, **values} for day, at, values in drawn]
    computed = table(EVERY, plain).drop_columns(["content_hash"])
    with tempfile.TemporaryDirectory() as folder:
        one, many = OfflineStore(f"{folder}/one"), OfflineStore(f"{folder}/many")
        write(one, EVERY, computed)
        write(many, EVERY, by_processes(many, EVERY, computed, 2))
        require_same(EVERY, one, many)


def test_the_log_has_the_statistics_of_the_files(tmp_path: Path) -> None:
    store = OfflineStore(tmp_path)
    write(store, VIEW, by_processes(store, VIEW, rows(VIEW, [0, 1]), 1))
    adds = pa.table(DeltaTable(store.path(VIEW.table)).get_add_actions(flatten=True)).sort_by("partition.event_day")
    assert adds["num_records"].to_pylist() == [2, 2]
    assert adds["null_count.b"].to_pylist() == [0, 2]
    assert adds["min.event_timestamp"].cast(pa.int64()).to_pylist() == [1, DAY + 1]
    assert adds["max.event_timestamp"].cast(pa.int64()).to_pylist() == [2, DAY + 2]
    # Every reader of Delta tables finds the rows.
    assert len(DeltaTable(store.path(VIEW.table)).to_pyarrow_table()) == 4


def test_another_writer_between_the_files_and_the_commit_is_a_conflict(tmp_path: Path) -> None:
    store = OfflineStore(tmp_path)
    write(store, VIEW, rows(VIEW, range(4)))
    files = by_processes(store, VIEW, pa.concat_tables([rows(VIEW, range(3)), rows(VIEW, [3], 5.0)]), 2)
    write(store, VIEW, rows(VIEW, range(4), 2.0))
    # The files leave out days that had the same rows.
    with pytest.raises(DataError, match="another process wrote to it at the same moment"):
        store.prepare(VIEW, files)
    files = by_processes(store, VIEW, rows(VIEW, range(4), 3.0), 2)
    with store.prepare(VIEW, files) as prepared:
        write(store, VIEW, rows(VIEW, range(4), 4.0))
        with pytest.raises(DataError, match="another process wrote to it at the same moment"):
            store.write(prepared)
    assert store.history(VIEW).table()["a"].to_pylist()[-1] == 16.0


def test_files_without_a_commit_are_no_part_of_the_table_until_a_full_vacuum(tmp_path: Path) -> None:
    store = OfflineStore(tmp_path)
    write(store, VIEW, rows(VIEW, range(3)))
    before = store.history(VIEW)
    by_processes(store, VIEW, rows(VIEW, range(3), 2.0), 2)
    assert store.history(VIEW).commit == before.commit
    assert same_bits(store.history(VIEW).table(), before.table())
    delta, options = DeltaTable(store.path(VIEW.table)), {"retention_hours": 0, "enforce_retention_duration": False}
    assert len(delta.vacuum(dry_run=False, full=True, **options)) == 3  # type: ignore[arg-type]  # options are shared
    assert same_bits(store.history(VIEW).table(), before.table())


def test_a_process_that_sees_another_folder_is_refused(tmp_path: Path) -> None:
    store = OfflineStore(tmp_path / "here")
    with store.day_target(VIEW, None, NOW).probed() as target:
        target.require_access()
        with pytest.raises(OSError, match="_probe-"):
            replace(target, root=str(tmp_path)).require_access()
    assert list((tmp_path / "here").iterdir()) == []
