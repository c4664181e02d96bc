"""Upkeep of a table: no row changes, kept versions stay whole, and what is gone is said to be gone."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.features.days import Days
from isthmus.features.errors import DataError
from isthmus.features.offline.delta import VersionGoneError
from isthmus.features.offline.log import Materialization, MaterializationLog
from isthmus.features.offline.pushes import ACCEPTED, CONTRACT, PushLog
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.served import ServedJoin, served_history
from isthmus.features.values.arrow import micros
from isthmus.orchestration.maintenance import upkeep
from isthmus.orchestration.maintenance.upkeep import TableUpkeep
from tests.features.offline.test_ranges import ROOT, VIEW, put, read, rows_of
from tests.features.support import DAY, same_bits

SECONDS = 86_400.0
LATER = 100 * SECONDS


@pytest.fixture
def store(tmp_path: Path) -> OfflineStore:
    return OfflineStore(tmp_path / "offline")


def maintained(
    store: OfflineStore, needed: Collection[int] = (), *, days: float = 90, later: float = LATER
) -> TableUpkeep:
    result = upkeep.maintain(store.stored(VIEW.table), days, needed, now=time.time() + later)
    assert result is not None
    return result


def pushed(store: OfflineStore, day: int, n: int) -> None:
    rows = rows_of(range(day, day + 1)).slice(0, 1)
    event = pa.array([day * DAY + 100 + n]).cast(rows["event_timestamp"].type)
    for name in ("event_timestamp", "known_at"):
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), event)
    rows = rows.append_column(ACCEPTED, pa.array([0])).append_column(CONTRACT, pa.array([VIEW.hash]))
    assert store.extend(VIEW, rows) == 1


def in_order(rows: pa.Table) -> pa.Table:
    return rows.sort_by([(name, "ascending") for name in ("event_timestamp", "known_at", "k")]).combine_chunks()


def entries(store: OfflineStore) -> list[str]:
    return sorted(file.name for file in (Path(store.path(VIEW.table)) / "_delta_log").iterdir())


def files(store: OfflineStore) -> set[str]:
    return {str(file) for file in Path(store.path(VIEW.table)).rglob("*.parquet") if "_delta_log" not in str(file)}


def test_a_log_without_entries_is_left_alone(store: OfflineStore) -> None:
    put(store, rows_of(range(4)))
    DeltaTable(store.path(VIEW.table)).create_checkpoint()
    for file in (Path(store.path(VIEW.table)) / "_delta_log").glob("*.json"):
        file.unlink()
    before = files(store)
    with pytest.raises(DataError, match="no entries"):
        maintained(store)
    assert files(store) == before


def test_a_log_that_begins_after_its_checkpoint_keeps_all_files(store: OfflineStore) -> None:
    put(store, rows_of(range(4)))
    DeltaTable(store.path(VIEW.table)).create_checkpoint()
    put(store, rows_of(range(5)))
    (Path(store.path(VIEW.table)) / "_delta_log" / f"{0:020}.json").unlink()
    before = read(store)
    assert maintained(store, later=0).deleted == 0
    assert read(store) == before


def test_small_files_are_merged_once_and_no_row_changes(store: OfflineStore) -> None:
    put(store, rows_of(range(4)))
    for n in range(8):
        pushed(store, n % 2, n)
    before, commit = read(store), store.commit(VIEW)
    done = maintained(store, later=0)
    assert (done.merged, done.deleted, done.entries) == (10, 0, 0)
    assert read(store)[1] == before[1]
    assert same_bits(in_order(read(store)[0]), in_order(before[0]))
    assert store.commit(VIEW) == commit
    version = store.history(VIEW).version
    assert maintained(store, later=0).merged == 0
    assert store.history(VIEW).version == version, "without work, there is no commit"
    assert not put(store, rows_of(range(4)), Days(2, 4)).changed
    assert put(store, rows_of(range(4), 2.0), Days(2, 4)).changed


def test_versions_stay_for_their_days_and_while_they_are_needed(store: OfflineStore) -> None:
    past = {}
    for n in range(1, 8):
        put(store, rows_of(range(4), float(n)), Days(n % 3 + 1, n % 3 + 2) if n > 1 else None)
        past[n - 1] = store.history(VIEW, n - 1).table()
    space = upkeep.space(store.stored(VIEW.table))
    assert maintained(store, later=0) == TableUpkeep(merged=0, deleted=0, entries=0, freed=0, space=space)
    for version, rows in past.items():
        assert same_bits(store.history(VIEW, version).table(), rows)
    done = maintained(store, {2, 4})
    assert done.deleted > 0
    assert done.entries > 0
    for version in (2, 4, 6):
        assert same_bits(store.history(VIEW, version).table(), past[version])
        store.require_unaltered(store.history(VIEW, version))
    for version in (0, 1, 3, 5):
        with pytest.raises(
            VersionGoneError, match=rf"offline table of traffic: version {version} was removed.*keep_days"
        ):
            store.history(VIEW, version)
    assert maintained(store, {2, 4}).deleted == 0
    assert put(store, rows_of(range(4), 9.0), Days(1, 2)).version == 7
    assert done.space.versions == 3


STEP = st.tuples(st.integers(1, 3), st.floats(1, 9), st.booleans(), st.floats(0, 30))


@settings(max_examples=15)
@given(steps=st.lists(STEP, min_size=1, max_size=12), days=st.floats(1, 60), needed=st.sets(st.integers(0, 14)))
def test_any_history_keeps_what_was_current_lately(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, float, bool, float]], days: float, needed: set[int]
) -> None:
    """Compared with a list of all versions and the ages at which they were replaced."""
    store = OfflineStore(tmp_path_factory.mktemp("any"))
    put(store, rows_of(range(4)))
    ages, past = [sum(step[3] for step in steps)], [store.history(VIEW).table()]
    for day, factor, push, passed in steps:
        ages.append(ages[-1] - passed)
        if push:
            pushed(store, day, len(ages))
        else:
            put(store, rows_of(range(4), factor), Days(day, day + 1))
        if (version := store.history(VIEW).version) == len(past):
            past.append(store.history(VIEW).table())
        else:
            ages.pop(-2 if passed == 0 else -1)
        assert version == len(past) - 1
    log, now = Path(store.path(VIEW.table)) / "_delta_log", time.time()
    for version, age in enumerate(ages):
        os.utime(log / f"{version:020}.json", (now - age * SECONDS,) * 2)
    for file in files(store):
        os.utime(file, (now - 1000 * SECONDS,) * 2)
    for _ in range(2):
        upkeep.maintain(store.stored(VIEW.table), days, needed, now=now)
        for version, rows in enumerate(past):
            replaced = ages[version + 1] if version + 1 < len(ages) else -1.0
            if replaced < days or version in needed:
                assert same_bits(store.history(VIEW, version).table(), rows), (version, replaced)
            else:
                with pytest.raises(VersionGoneError):
                    store.history(VIEW, version)
    assert same_bits(in_order(read(store)[0]), in_order(past[-1]))


def test_deltalake_itself_removes_no_version(store: OfflineStore) -> None:
    """By default, it deletes entries older than 30 days whenever it writes a checkpoint."""
    put(store, rows_of(range(2)))
    first = read(store)[0]
    for file in (Path(store.path(VIEW.table)) / "_delta_log").iterdir():
        os.utime(file, (time.time() - 40 * SECONDS,) * 2)
    for n in range(101):
        put(store, rows_of(range(2), n + 2.0), Days(1, 2))
    assert any("checkpoint" in name for name in entries(store))
    assert same_bits(store.history(VIEW, 0).table(), first)
    done = maintained(store, {0})
    assert done.entries > 95
    assert same_bits(store.history(VIEW, 0).table(), first)
    assert len(entries(store)) == 5, "two versions with their checkpoints, and the pointer to the last"


def test_files_of_killed_builds_go_in_time(store: OfflineStore) -> None:
    put(store, rows_of(range(2)))
    orphan = next(Path(file) for file in files(store)).with_name("part-x.parquet")
    orphan.write_bytes(b"x")
    assert maintained(store, later=0).deleted == 0
    assert maintained(store).deleted == 1
    assert not orphan.exists()


def materialized(store: OfflineStore, at: int) -> None:
    history = store.history(VIEW)
    MaterializationLog(store.root).append(
        Materialization(VIEW.name, VIEW.hash, history.version, history.fingerprint, at, at, at, 1)
    )


def test_what_was_served_before_the_kept_versions_is_refused(store: OfflineStore) -> None:
    for n in range(1, 5):
        put(store, rows_of(range(4), float(n)), Days(0, 2) if n > 1 else None)
        materialized(store, (10 + n) * DAY)
    whole = served_history(store, VIEW)

    def spine(day: float) -> pa.Table:
        times = pa.array([int(day * DAY)] * 2).cast(pa.timestamp("us", "UTC"))
        return pa.table({"k": ["k0", "k1"], "event_timestamp": times})

    def joined(day: float) -> pa.Table:
        rows = spine(day)
        join = ServedJoin(rows.schema, store, [store.history(VIEW)])
        return pa.Table.from_batches(join.batches(rows.to_batches()), join.schema)

    expected = {day: joined(day) for day in (11.5, 13.0, 13.5, 20.0)}
    maintained(store, {2, 3})
    for day in (13.0, 13.5, 20.0):
        assert same_bits(joined(day), expected[day])
    with pytest.raises(DataError, match=r"served before 1970-01-14 00:00 UTC is not known any more, and 2 of 2 times"):
        joined(11.5)
    later = served_history(store, VIEW)
    assert later.since == 13 * DAY
    assert int(micros(whole.table()["event_timestamp"]).min()) == 11 * DAY
    MaterializationLog(store.root).append(Materialization(VIEW.name, VIEW.hash, 1, "", 0, 0, 15 * DAY, 1))
    with pytest.raises(VersionGoneError, match="version 1 was removed"):
        joined(20.0)


def test_a_version_that_a_training_set_keeps_leaves_later_runs_readable(store: OfflineStore) -> None:
    for n in range(1, 6):
        put(store, rows_of(range(4), float(n)), Days(2, 4) if n > 1 else None)
        materialized(store, (10 + n) * DAY)
    whole = served_history(store, VIEW).table()
    maintained(store, {0, 3})
    past = served_history(store, VIEW)
    assert past.since == 14 * DAY
    times = micros(past.table()["event_timestamp"])
    assert set(times.tolist()) == {14 * DAY, 15 * DAY}, "version 0 says nothing about the time after its run"
    last = pa.compute.equal(whole["event_timestamp"], pa.scalar(15 * DAY).cast(whole["event_timestamp"].type))
    assert same_bits(in_order(past.table().filter(pa.array(times == 15 * DAY))), in_order(whole.filter(last)))


def test_pushes_that_began_after_versions_were_removed(store: OfflineStore) -> None:
    def push(accepted: int) -> None:
        rows = rows_of(range(1)).slice(0, 1)
        rows = rows.append_column(ACCEPTED, pa.array([accepted])).append_column(CONTRACT, pa.array([VIEW.hash]))
        place = PushLog(store.root, VIEW.table).last_position() + 1
        assert PushLog(store.root, VIEW.table).append(rows, np.array([place]), intact=True) == 1

    for n in range(1, 5):
        put(store, rows_of(range(4), float(n)), Days(0, 2) if n > 1 else None)
        materialized(store, (10 + n) * DAY)
    maintained(store, {2})
    push(13 * DAY + 1)
    assert served_history(store, VIEW).since == 13 * DAY
    push(13 * DAY)
    with pytest.raises(VersionGoneError, match="version 1 was removed"):
        served_history(store, VIEW)


def test_more_days_than_before_keep_what_is_left(store: OfflineStore) -> None:
    """A longer time may begin at a version whose successors are gone."""
    for n in range(1, 8):
        put(store, rows_of(range(4), float(n)), Days(n % 3 + 1, n % 3 + 2) if n > 1 else None)
    kept, now = store.history(VIEW, 5).table(), time.time()
    log = Path(store.path(VIEW.table)) / "_delta_log"
    for version, age in enumerate((80, 70, 69, 68, 67, 40, 5)):
        os.utime(log / f"{version:020}.json", (now - age * SECONDS,) * 2)
    for file in files(store):
        os.utime(file, (now - 75 * SECONDS,) * 2)
    for days in (30, 60):
        upkeep.maintain(store.stored(VIEW.table), days, {1}, now=now)
        assert same_bits(store.history(VIEW, 5).table(), kept), days


def test_a_table_that_another_tool_vacuumed_says_so(store: OfflineStore) -> None:
    put(store, rows_of(range(2)))
    put(store, rows_of(range(2), 2.0), Days(1, 2))
    expected = read(store)[0]
    DeltaTable(store.path(VIEW.table)).vacuum(0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(VersionGoneError, match=r"version 0 was removed \(part-.* is missing\).*no other tool"):
        store.history(VIEW, 0)
    assert same_bits(read(store)[0], expected)
    assert maintained(store, {0}).deleted == 0
    assert same_bits(read(store)[0], expected)


KILLED = """
import sys, time
from isthmus.orchestration.maintenance import upkeep
from tests.orchestration.maintenance.test_upkeep import VIEW, OfflineStore
print("ready", flush=True)
sys.stdin.read(1)
upkeep.maintain(OfflineStore(sys.argv[1]).stored(VIEW.table), 90, {5, 60}, now=time.time() + 100 * 86400)
"""


def same(store: OfflineStore, fingerprint: str, past: dict[int, pa.Table], newest: pa.Table) -> None:
    assert read(store)[1] == fingerprint
    assert same_bits(in_order(read(store)[0]), newest)
    for version, rows in past.items():
        assert same_bits(store.history(VIEW, version).table(), rows)


@pytest.mark.accept
def test_a_kill_at_any_moment_changes_no_value_and_the_next_run_finishes(tmp_path: Path) -> None:
    chance, finished = random.Random(7), 0
    for turn in range(20):
        store = OfflineStore(tmp_path / str(turn))
        put(store, rows_of(range(4)))
        for n in range(60):
            put(store, rows_of(range(4), n + 2.0), Days(n % 3 + 1, n % 3 + 2))
        for n in range(8):
            pushed(store, n % 4, n)
        expected = {version: store.history(VIEW, version).table() for version in (5, 60)}, in_order(read(store)[0])
        fingerprint = read(store)[1]
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), store.root], cwd=ROOT,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
        with process:
            assert process.stdout is not None
            assert process.stdin is not None
            assert process.stdout.readline() == "ready\n"
            process.stdin.write("x")
            process.stdin.flush()
            time.sleep(chance.uniform(0, 0.12))
            process.send_signal(signal.SIGKILL)
        finished += process.returncode == 0

        same(store, fingerprint, *expected)
        maintained(store, {5, 60})
        same(store, fingerprint, *expected)
        left = maintained(store, {5, 60})
        assert (left.merged, left.deleted, left.entries) == (0, 0, 0)
        with pytest.raises(VersionGoneError):
            store.history(VIEW, 30)
    assert finished < 20, "at least one was killed in the middle"


FULL = """
import resource, signal, sys, time
from isthmus.features.errors import DataError
from isthmus.orchestration.maintenance import upkeep
from tests.orchestration.maintenance.test_upkeep import VIEW, OfflineStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    print(upkeep.maintain(OfflineStore(sys.argv[1]).stored(VIEW.table), 90, {1}, now=time.time() + 100 * 86400))
except DataError as error:
    print(error)
"""


@pytest.mark.accept
@pytest.mark.parametrize("size", [0, 700, 2000, 4000])
def test_a_full_disk_loses_nothing(store: OfflineStore, size: int) -> None:
    put(store, rows_of(range(4)))
    for n in range(8):
        put(store, rows_of(range(4), n + 2.0), Days(n % 3 + 1, n % 3 + 2))
        pushed(store, n % 4, n)
    expected, needed = in_order(read(store)[0]), store.history(VIEW, 1).table()
    before = len(files(store))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(FULL), store.root, str(size)], cwd=ROOT,
                          capture_output=True, text=True, check=False, timeout=60)  # fmt: skip
    assert "cannot be written (" in done.stdout, (done.stdout, done.stderr)
    assert "its rows are unchanged: fix the cause, then try again" in done.stdout.lower()
    assert len(files(store)) < before + 8, "versions that are not needed were deleted first"
    assert same_bits(in_order(read(store)[0]), expected)
    assert same_bits(store.history(VIEW, 1).table(), needed)
    maintained(store, {1})
    left = maintained(store, {1})
    assert (left.merged, left.deleted, left.entries) == (0, 0, 0)
    assert same_bits(in_order(read(store)[0]), expected)
    assert same_bits(store.history(VIEW, 1).table(), needed)
