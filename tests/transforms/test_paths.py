"""Every name of a file or folder reads that file or folder, by every engine."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.definition.spec import Source
from isthmus.features.errors import ConfigurationError, DataError
from isthmus.transforms import engine, sources
from isthmus.transforms.tables import sql

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ODD = "*?[]{}\\^|%#=:;&$!'\"`~<>+,@ ._-\n\t\x01\x7fé漢1aA2F"
NAME = st.text(st.sampled_from(ODD), min_size=1, max_size=24).filter(lambda name: name not in (".", ".."))


def _write(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pq.write_table(pa.table({"x": [value]}), file)


def _read(spark: "SparkSession", path: Path, root: Path) -> list[int]:
    frame = sources.read(spark, Source("rows", path=str(path)), root, root / "staging")
    assert frame.columns == ["x"]
    return sorted(row.x for row in frame.collect())


@given(folder=NAME, name=NAME, other=NAME)
def test_any_name_is_read(sail: "SparkSession", folder: str, name: str, other: str) -> None:
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        # Folders with "=" in their names are partitions, as a folder that is read shows them; hidden files are none.
        place = root / f"{folder}" / "in"
        _write(place / f"a{name}", 1)
        if f"b{other}" != f"a{name}":
            _write(place / f"b{other}", 2)
        for decoy in ("a", "aa", "a1", "b"):
            if not (place.parent / "out" / decoy).exists():
                _write(place.parent / "out" / decoy, -1)
        assert _read(sail, place / f"a{name}", root) == [1]
        assert _read(sail, place, root) == [1, 2]


ALL_ODD = "q*?[1]{a,b}\\^|%2F%#=:' \"\n\x01é.parquet"
DECOYS = ("q1.parquet", "qa.parquet", "q.parquet")


@pytest.mark.parametrize("start", ["", "_", "."])
def test_all_odd_characters_at_once(sail: "SparkSession", start: str, tmp_path: Path) -> None:
    _check_all(sail, start, tmp_path)


@pytest.mark.accept
@pytest.mark.parametrize("start", ["", "_", "."])
def test_all_odd_characters_at_once_in_apache_spark(start: str, tmp_path: Path) -> None:
    with engine.session("spark") as spark:
        _check_all(spark, start, tmp_path)


def _check_all(spark: "SparkSession", start: str, root: Path) -> None:
    _write(root / (start + ALL_ODD), 1)
    _write(root / "f" / "b=1.parquet", 2)
    _write(root / "f" / "c:1.parquet", 3)
    for decoy in DECOYS:
        _write(root / decoy, -1)
    assert _read(spark, root / (start + ALL_ODD), root) == [1]
    assert _read(spark, root / "f", root) == [2, 3]
    # A file that arrives later is found.
    _write(root / "f" / "d.parquet", 4)
    assert _read(spark, root / "f", root) == [2, 3, 4]


def test_a_partition_stays_a_column(sail: "SparkSession", tmp_path: Path) -> None:
    _write(tmp_path / "f" / "day=1" / "b=1.parquet", 2)
    frame = sources.read(sail, Source("rows", path="f"), tmp_path, tmp_path / "staging")
    assert [(row.x, str(row.day)) for row in frame.collect()] == [(2, "1")]


def test_a_folder_for_null_is_null(sail: "SparkSession", tmp_path: Path) -> None:
    for value, folder in enumerate(("city=__HIVE_DEFAULT_PARTITION__", "city=New%20York", "city=007")):
        _write(tmp_path / "f" / folder / "x.parquet", value)
    frame = sources.read(sail, Source("rows", path="f"), tmp_path, tmp_path / "staging")
    assert sorted((row.x, row.city) for row in frame.collect()) == [(0, None), (1, "New York"), (2, "007")]


def test_a_file_without_rows_has_no_say_in_a_type(sail: "SparkSession", tmp_path: Path) -> None:
    _write(tmp_path / "f" / "a.parquet", 1)
    pq.write_table(pa.table({"x": pa.array([], pa.string())}), tmp_path / "f" / "b.parquet")
    assert _read(sail, tmp_path / "f", tmp_path) == [1]


def test_a_delta_source_in_such_a_folder_is_refused_before_it_is_opened(sail: "SparkSession", tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"source rows: path: deltalake cannot open .*Rename the folder"):
        sources.read(sail, Source("rows", delta="data/sales[1]"), tmp_path, tmp_path / "staging")
    assert not (tmp_path / "data").exists()


def test_duckdb_does_not_open_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAW", "duckdb:a\\b.duckdb")
    (tmp_path / "a\\b.duckdb").touch()
    source = Source("rows", sql="SELECT 1 AS x", connection="RAW")
    with pytest.raises(DataError, match=r"DuckDB reads the .* Rename"), sql.open_table(source, tmp_path):
        pass
