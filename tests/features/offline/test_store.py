import hashlib
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.features.errors import ContractMismatch, DataError, DependencyError, first_line
from isthmus.features.offline.history import table_schema
from isthmus.features.offline.store import OfflineStore, TableWrite
from isthmus.features.types import Array, Float32, Float64, Int32, Int64, String, UnixTimestamp
from isthmus.features.values.rows import RowCodec
from tests.features.support import ALL, columns_of, make_view, same_bits, table, times, values_of

VIEW = make_view({"a": Float64, "b": String}, {"k": String, "n": Int32})


def _rows(count: int = 20, factor: float = 1.0) -> list[dict[str, Any]]:
    return [
        {"k": f"k{n % 5}", "n": n % 3, "_event": n * 1000, "_known": n * 1000 + n % 2, "a": n * factor,
         "b": None if n % 4 else "é"}
        for n in range(count)
    ]  # fmt: skip


def _plain(rows: list[dict[str, Any]], view: Any = VIEW) -> pa.Table:
    return table(view, rows).drop_columns(["content_hash"])


def _files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip


def _read(store: OfflineStore, version: int | None = None, view: Any = VIEW) -> pa.Table:
    with store.reading(view.name):
        history = store.history(view, version)
        assert not isinstance(history.data, pa.Table)
        return history.data.to_table()


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["k"], row["n"], row["_event"], row["_known"]))


@pytest.fixture
def store(tmp_path: Path) -> OfflineStore:
    return OfflineStore(tmp_path / "Ordner mit ü" / "offline")


def test_what_is_written_is_read_sorted_with_content_hashes(store: OfflineStore) -> None:
    assert store.write(store.prepare(VIEW, _plain(_rows()))) == TableWrite(20, 20, 0, changed=True)
    found = _read(store)
    assert found.schema.equals(table_schema(VIEW))
    assert same_bits(found, table(VIEW, _sorted(_rows())))
    assert store.history(VIEW).version == 0


def test_the_same_rows_are_not_written_again(store: OfflineStore) -> None:
    rows = _rows()
    store.write(store.prepare(VIEW, _plain(rows)))
    before = _files(Path(store.root))
    assert store.write(store.prepare(VIEW, _plain(rows))) == TableWrite(20, 0, 0, changed=False)
    random.Random(3).shuffle(rows)
    shuffled = _plain(rows)
    variants = [
        shuffled,
        pa.concat_tables([shuffled[:7], shuffled[7:8], shuffled[8:8], shuffled[8:]]),
        shuffled.select(shuffled.column_names[::-1]),
        shuffled.replace_schema_metadata({"pandas": "x"}),
        shuffled.append_column("extra", pa.nulls(20, pa.int8())),
        shuffled.set_column(0, "k", shuffled["k"].cast(pa.large_string())),
        shuffled.set_column(
            2, "event_timestamp", shuffled["event_timestamp"].cast(pa.timestamp("ns", tz="Asia/Tokyo"))
        ),
    ]
    for variant in variants:
        assert store.write(store.prepare(VIEW, variant)) == TableWrite(20, 0, 0, changed=False)
    assert _files(Path(store.root)) == before


def test_shuffled_rows_make_the_same_table(tmp_path: Path) -> None:
    rows = _rows(50)
    tables = []
    for n in range(3):
        random.Random(n).shuffle(rows)
        store = OfflineStore(tmp_path / str(n))
        store.write(store.prepare(VIEW, _plain(rows)))
        tables.append(_read(store))
    assert same_bits(tables[0], tables[1])
    assert same_bits(tables[0], tables[2])


def test_no_rows(store: OfflineStore) -> None:
    empty = _plain([])
    assert store.write(store.prepare(VIEW, empty)) == TableWrite(0, 0, 0, changed=True)
    no_chunks = pa.table({name: pa.chunked_array([], empty[name].type) for name in empty.column_names})
    assert store.write(store.prepare(VIEW, no_chunks)) == TableWrite(0, 0, 0, changed=False)
    assert len(_read(store)) == 0
    assert store.write(store.prepare(VIEW, _plain(_rows(1)))) == TableWrite(1, 1, 1, changed=True)
    assert store.write(store.prepare(VIEW, empty)) == TableWrite(0, -1, 2, changed=True)


def test_any_change_is_a_new_version_and_the_old_one_stays(store: OfflineStore) -> None:
    store.write(store.prepare(VIEW, _plain(_rows())))
    negative_zero = _rows()
    negative_zero[0]["a"] = -0.0
    assert store.write(store.prepare(VIEW, _plain(negative_zero))) == TableWrite(20, 0, 1, changed=True)
    assert store.write(store.prepare(VIEW, _plain(_rows(25)))) == TableWrite(25, 5, 2, changed=True)
    later = [{**row, "_known": row["_known"] + 1} for row in _rows(25)]
    assert store.write(store.prepare(VIEW, _plain(later))) == TableWrite(25, 0, 3, changed=True)
    for version, rows in enumerate([_rows(), negative_zero, _rows(25), later]):
        assert same_bits(_read(store, version), table(VIEW, _sorted(rows)))
        assert store.history(VIEW, version).version == version


def test_duplicates_are_refused_with_their_key_and_nothing_is_written(store: OfflineStore) -> None:
    rows = _rows()
    twice = [*rows, {**rows[7], "a": 99.0}, {**rows[7], "a": 100.0}, {**rows[8]}]
    with pytest.raises(DataError) as caught:
        store.write(store.prepare(VIEW, _plain(twice)))
    assert (
        "3 rows have the key and times of another row, first k=k2, n=1, event_timestamp=1970-01-01 00:00:00.007"
        in str(caught.value)
    )
    assert not Path(store.root).exists()
    store.write(store.prepare(VIEW, _plain(rows)))
    before = _files(Path(store.root))
    with pytest.raises(DataError):
        store.write(store.prepare(VIEW, _plain(twice)))
    assert _files(Path(store.root)) == before


def test_rows_that_differ_in_one_part_of_their_identity_are_no_duplicates(store: OfflineStore) -> None:
    row = {"k": "1", "n": 11, "_event": 0, "_known": 0, "a": 1.0, "b": ""}
    rows = [row, {**row, "k": "11", "n": 1}, {**row, "n": 12}, {**row, "_event": 1}, {**row, "_known": 1}]
    assert store.write(store.prepare(VIEW, _plain(rows))).rows == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["known_at"]), "known_at: there are 0 columns"),
        (lambda t: t.drop_columns(["a"]), "column a: there are 0 columns"),
        (lambda t: t.drop_columns(["k"]), "column k: there are 0 columns"),
        (lambda t: t.set_column(0, "k", pa.nulls(20, pa.string())), "k"),
        (lambda t: t.set_column(2, "event_timestamp", pa.nulls(20, times([]).type)), "event_timestamp"),
        (lambda t: t.set_column(1, "n", pa.array([1 << 40] * 20)), "1099511627776"),
        (lambda t: t.set_column(4, "a", pa.array(["x"] * 20)), "a"),
        (lambda t: t.append_column("a", t["a"]), "column a: there are 2 columns"),
        (
            lambda t: t.set_column(2, "event_timestamp", pc.cast(t["event_timestamp"], pa.timestamp("us"))),
            "event_timestamp",
        ),
    ],
)
def test_rows_of_another_form_are_a_data_error_and_nothing_is_written(
    store: OfflineStore, change: Any, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        store.write(store.prepare(VIEW, change(_plain(_rows()))))
    assert "traffic" in str(caught.value)
    assert message in str(caught.value)
    assert not Path(store.root).exists()


def test_the_content_hash_is_that_of_the_stored_value(store: OfflineStore) -> None:
    view = make_view({"t": UnixTimestamp, "i": Int64})
    seconds = pa.array([7], pa.int64()).cast(pa.timestamp("s", tz="UTC"))
    rows = pa.table(
        {"k": [1], "event_timestamp": times([0]), "known_at": times([0]), "t": seconds, "i": pa.array([5], pa.int8())}
    )
    store.write(store.prepare(view, rows))
    expected = RowCodec(view).content(columns_of(view, [{"t": 7_000_000, "i": 5}]), 1)
    assert _read(store, view=view)["content_hash"].to_pylist() == expected.tolist()


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(rows=st.lists(values_of(ALL), max_size=6), seed=st.randoms())
def test_every_value_is_stored_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], seed: random.Random
) -> None:
    view = make_view(ALL)
    store = OfflineStore(tmp_path_factory.mktemp("offline"))
    full = [{"k": n, "_event": -n, "_known": n, **row} for n, row in enumerate(rows)]
    store.write(store.prepare(view, _plain(full, view)))
    # Rows stand in the order of their days: all but the first are of 1969.
    assert same_bits(_read(store, view=view), table(view, [*full[1:], *full[:1]]))
    assert not store.write(store.prepare(view, _plain(seed.sample(full, len(full)), view))).changed


def test_a_null_within_an_array_is_refused_and_nothing_is_written(store: OfflineStore) -> None:
    view = make_view({"a": Array(Float32)})
    rows = pa.table(
        {"k": [1, 2], "event_timestamp": times([0, 0]), "known_at": times([0, 0]), "a": [[1.0, None], None]}
    )
    with pytest.raises(DataError, match="column a: its arrays hold 1 nulls"):
        store.prepare(view, rows)
    assert not Path(store.root).exists()


def test_another_contract_is_a_mismatch_until_the_table_is_written_under_it(store: OfflineStore) -> None:
    other = make_view({"a": Float64, "b": String}, {"k": String, "n": Int32}, code="2")
    store.write(store.prepare(VIEW, _plain(_rows())))
    with pytest.raises(ContractMismatch) as caught:
        store.history(other)
    assert VIEW.hash[:12] in str(caught.value)
    assert other.hash[:12] in str(caught.value)
    assert store.write(store.prepare(other, _plain(_rows()))) == TableWrite(20, 0, 1, changed=True)
    assert same_bits(_read(store, view=other), _read(store, 0))
    with pytest.raises(ContractMismatch):
        store.history(VIEW)
    with pytest.raises(ContractMismatch):
        store.history(other, 0)


def test_a_contract_with_other_columns_replaces_the_table(store: OfflineStore) -> None:
    other = make_view({"c": Int64}, {"m": Int64})
    store.write(store.prepare(VIEW, _plain(_rows())))
    rows = [{"m": 1, "_event": 0, "_known": 0, "c": 5}]
    store.write(store.prepare(other, _plain(rows, other)))
    assert same_bits(_read(store, view=other), table(other, rows))
    assert same_bits(_read(store, 0), table(VIEW, _sorted(_rows())))


def test_no_table_and_no_version(store: OfflineStore) -> None:
    with pytest.raises(DataError, match=r"offline table of traffic: nothing at .*isthmus build"):
        store.history(VIEW)
    store.write(store.prepare(VIEW, _plain(_rows())))
    with pytest.raises(DataError, match="traffic"):
        store.history(VIEW, 7)


def _data(folder: Path) -> Path:
    (path,) = pa.table(DeltaTable(folder).get_add_actions())["path"].to_pylist()
    return folder / str(path)


def _log(folder: Path) -> Path:
    return max((folder / "_delta_log").glob("*.json"))


def _flatten(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def _empty(folder: Path) -> None:
    for file in folder.glob("*"):
        file.unlink()


DAMAGE: dict[str, Any] = {
    "data file removed": lambda folder: _data(folder).unlink(),
    "data file truncated": lambda folder: _data(folder).write_bytes(_data(folder).read_bytes()[:-100]),
    "data file emptied": lambda folder: _data(folder).write_bytes(b""),
    "data file overwritten": lambda folder: _data(folder).write_bytes(bytes(_data(folder).stat().st_size)),
    "log truncated": lambda folder: _log(folder).write_bytes(_log(folder).read_bytes()[:-50]),
    "log emptied": lambda folder: _log(folder).write_bytes(b""),
    "log is no JSON": lambda folder: _log(folder).write_bytes(b"\0" * 300),
    "logs removed": lambda folder: _empty(folder / "_delta_log"),
    "log folder is a file": lambda folder: _flatten(folder / "_delta_log"),
}


@pytest.mark.parametrize("commits", [1, 2])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_table_is_a_data_error_with_its_path_and_remedy(
    store: OfflineStore, damage: str, commits: int
) -> None:
    for commit in range(commits):
        store.write(store.prepare(VIEW, _plain(_rows(20 + commit))))
    folder = Path(store.path(VIEW.name))
    DAMAGE[damage](folder)
    with pytest.raises(DataError) as caught:
        _read(store)
    assert str(folder) in str(caught.value)
    assert "isthmus build" in str(caught.value)
    shutil.rmtree(folder)
    assert store.write(store.prepare(VIEW, _plain(_rows()))).version == 0
    assert same_bits(_read(store), table(VIEW, _sorted(_rows())))


@pytest.mark.parametrize("damage", ["data file removed", "data file truncated", "data file emptied"])
def test_a_write_does_not_take_a_damaged_table_for_done(store: OfflineStore, damage: str) -> None:
    store.write(store.prepare(VIEW, _plain(_rows())))
    DAMAGE[damage](Path(store.path(VIEW.name)))
    with pytest.raises(DataError, match="remove that folder"):
        store.write(store.prepare(VIEW, _plain(_rows())))


def test_a_lost_last_commit_is_the_version_before(store: OfflineStore) -> None:
    # A Delta log without its last file is a whole table: the one before that commit.
    store.write(store.prepare(VIEW, _plain(_rows(20))))
    store.write(store.prepare(VIEW, _plain(_rows(21))))
    _log(Path(store.path(VIEW.name))).unlink()
    assert store.history(VIEW).version == 0
    assert len(_read(store)) == 20
    assert store.write(store.prepare(VIEW, _plain(_rows(21)))) == TableWrite(21, 1, 1, changed=True)


WRITER = """
import sys
import pyarrow as pa, numpy as np
from isthmus.features.offline.store import OfflineStore
from tests.features.offline.test_store import VIEW, big
store = OfflineStore(sys.argv[1])
rows = big(1.0)
print("ready", flush=True)
store.write(store.prepare(VIEW, rows))
"""


def big(offset: float) -> pa.Table:
    numbers = np.arange(60_000)
    return pa.table({
        "k": pa.array(numbers % 100).cast(pa.string()), "n": pa.array(numbers % 7, pa.int32()),
        "event_timestamp": times(numbers.tolist()), "known_at": times(numbers.tolist()),
        "a": numbers + offset, "b": pa.array(numbers).cast(pa.string()),
    })  # fmt: skip


@pytest.mark.accept
def test_a_killed_writer_leaves_the_old_rows_and_a_rerun_finishes(store: OfflineStore, tmp_path: Path) -> None:
    store.write(store.prepare(VIEW, big(0.0)))
    old = _read(store)
    undisturbed = OfflineStore(tmp_path / "other")
    undisturbed.write(undisturbed.prepare(VIEW, big(1.0)))
    new = _read(undisturbed)
    root = Path(__file__).resolve().parents[3]
    chance = random.Random(11)
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), store.root], stdout=subprocess.PIPE, cwd=root
        )
        with writer:
            assert writer.stdout
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(chance.uniform(0, 0.25))
            writer.send_signal(signal.SIGKILL)
        found = _read(store)
        assert found.equals(old) or found.equals(new)
    store.write(store.prepare(VIEW, big(1.0)))
    assert _read(store).equals(new)
    assert not store.write(store.prepare(VIEW, big(1.0))).changed


@pytest.mark.parametrize(
    ("url", "known"),
    [("az://shop/tables", {}), ("abfss://c@account.dfs.core.windows.net/t", {"AZURE_STORAGE_ACCOUNT_KEY": "a"}),
     ("gs://shop/tables", {"GOOGLE_SERVICE_ACCOUNT": "nowhere.json"})],
)  # fmt: skip
def test_other_clouds_without_credentials_are_not_available(
    url: str, known: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "GOOGLE_SERVICE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DependencyError, match=r"is not available .* check storage_options"):
        OfflineStore(url).commit(VIEW)


def test_an_answer_of_azure_is_one_sentence() -> None:
    xml = "<Error><Code>ContainerNotFound</Code><Message>It does not exist.\nRequestId:1\nTime:2</Message></Error>"
    assert first_line(OSError(f"Error performing GET\n{xml}")) == "ContainerNotFound: It does not exist."
