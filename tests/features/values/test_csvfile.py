"""CSV files beside Python's `csv`, and cells beside their types."""

import bz2
import csv
import gzip
import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus import Bool, DataError, Float32, Float64, Int32, Int64, UnixTimestamp
from isthmus.features.types import DataType
from isthmus.features.values import csvfile
from isthmus.features.values.csvfile import CsvFile

PIECES = st.sampled_from(['"', '""', ",", "\n", "\r", "\r\n", "a", "é", " ", 'x"y', "end", '"a\nb"', '"a,""b"'])
CELLS = st.lists(PIECES, max_size=6).map("".join)


def rows(file: Path, **options: Any) -> list[list[Any]]:
    """The header and the rows as they are read, without nulls."""
    read = CsvFile(file, "file", {}, nulls=[], **options)
    return [read.schema.names, *(list(row.values()) for batch in read.batches() for row in batch.to_pylist())]


def python(text: str) -> list[list[str]]:
    return [row for row in csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline="")) if row]


@given(st.lists(PIECES, max_size=40).map("".join), st.integers(4, 40), st.sampled_from(["", "\ufeff"]))
def test_any_text_is_read_as_by_python_or_refused(text: str, block: int, mark: str) -> None:
    """Blocks end everywhere in the text."""
    file = PATHS / "any.csv"
    file.write_bytes((mark + text).encode())
    wanted = python(text)
    with mock.patch.object(csvfile, "_BLOCK", block):
        try:
            found = rows(file)
        except DataError:
            found = []
    if found:
        assert found == wanted
    elif wanted:
        # It is refused for nothing but this; a quotation mark that is not closed takes the next row into its cell.
        ragged, twice = len({len(row) for row in wanted}) > 1, len({*wanted[0]}) < len(wanted[0])
        last = [*wanted[-1][:-1], f"{wanted[-1][-1]}\nend"]
        assert ragged or twice or python(f"{text}\nend") == [*wanted[:-1], last]


@given(st.data())
def test_what_python_writes_is_read_to_the_letter(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 3))
    table = data.draw(st.lists(st.lists(CELLS, min_size=width, max_size=width), max_size=12))
    header = [f"h{n}" for n in range(width)]
    text = io.StringIO()
    end = data.draw(st.sampled_from(["\n", "\r\n", "\r"]))
    # Python quotes only the line breaks that are in the end of a line.
    minimal = end == "\r\n" and data.draw(st.booleans())
    quoting: Any = csv.QUOTE_MINIMAL if minimal else csv.QUOTE_ALL
    writer = csv.writer(text, lineterminator=end, quoting=quoting)
    writer.writerows([header, *table])
    content = text.getvalue().encode()
    name = data.draw(st.sampled_from([*WRAPPED]))
    (PATHS / name).write_bytes(WRAPPED[name](content))
    with mock.patch.object(csvfile, "_BLOCK", data.draw(st.integers(4, 64))):
        assert rows(PATHS / name) == [header, *table]


def zipped(content: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.csv", content)
    return file.getvalue()


WRAPPED: dict[str, Callable[[bytes], bytes]] = {
    "x.csv": bytes, "x.csv.gz": gzip.compress, "x.csv.bz2": bz2.compress, "x.csv.zip": zipped,
    "x.csv.zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    global PATHS
    PATHS = tmp_path_factory.mktemp("csv")


PATHS = Path()


@pytest.mark.parametrize("name", WRAPPED)
def test_line_breaks_beyond_a_block_invent_and_lose_no_row(name: str) -> None:
    table = [[f"user{n}", f"line {n}, {'y' * 80}\r\nsecond"] for n in range(15_000)]
    text = io.StringIO()
    csv.writer(text).writerows([["name", "bio"], *table])
    (PATHS / name).write_bytes(WRAPPED[name](text.getvalue().encode()))
    assert rows(PATHS / name) == [["name", "bio"], *table]


def test_a_row_longer_than_a_block() -> None:
    table = [["a", "x" * 3_000_000], ["b", "\r\n" * 3_000_000], ["c", ""]]
    text = io.StringIO()
    csv.writer(text).writerows([["name", "bio"], *table])
    (PATHS / "long.csv").write_text(text.getvalue(), newline="")
    assert rows(PATHS / "long.csv") == [["name", "bio"], *table]


@pytest.mark.parametrize("text", [b"a,b\n1,\x00\n", "a,b\n1,2\n".encode("utf-16-le"), b'\x0c\nend\n"\0""a"";'])
def test_a_file_with_nul_bytes_is_refused(text: bytes) -> None:
    (PATHS / "nul.csv").write_bytes(text)
    for block in range(1, 20):
        with mock.patch.object(csvfile, "_BLOCK", block), pytest.raises(DataError, match="NUL bytes: save it as UTF-8"):
            rows(PATHS / "nul.csv")


def test_a_folder_is_refused_whatever_its_name() -> None:
    (PATHS / "straddling.csv").mkdir()
    with pytest.raises(DataError, match="cannot be read as CSV"):
        CsvFile(PATHS / "straddling.csv", "file", {})


CONVERTED: list[tuple[DataType, dict[str, Any], list[str]]] = [
    (Int32, {"007": 7, "+5": 5, " -5 ": -5, "": None}, ["2147483648", "5.0", "0x10", "1_0", "--1", "-", "\u0665"]),
    (Int64, {"-9223372036854775808": -(2**63)}, ["9223372036854775808", "12345678901234567890"]),
    (
        Float64,
        {"1e5": 1e5, "+.5": 0.5, "0.1": 0.1, "inf": float("inf"), "1e-400": 0.0},
        ["1e400", "1,5", "0x1p3", "NA"],
    ),
    (Float32, {"16777217": 16777216.0}, ["1e39"]),
    (Bool, {"TRUE": True, "0": False}, ["t", "yes", "2"]),
    (
        UnixTimestamp,
        {"2024-01-01T00:00:00Z": 0, "2024-01-01 01:00:00.000001000+01:00": 1, "2024-01-01 00:00:00+00": 0},
        ["2024-01-01T00:00:00", "2024-01-01", "1704067200", "2024-02-30T00:00:00Z", "2024-01-01T00:00:00.1234567Z"],
    ),
]


@pytest.mark.parametrize("case", range(len(CONVERTED)))
def test_a_cell_is_of_its_type_or_named(case: int) -> None:
    dtype, fine, wrong = CONVERTED[case]
    file, types = PATHS / "typed.csv", {"x": dtype}
    file.write_text("".join(f'"{cell}",1\n' for cell in ["x", *fine]).replace('"x",1', "x,y", 1))
    column = pa.Table.from_batches(CsvFile(file, "file", types).batches())["x"]
    if dtype == UnixTimestamp:
        column = pa.chunked_array([[value - 1_704_067_200_000_000 for value in column.cast(pa.int64()).to_pylist()]])
    assert column.to_pylist() == [*fine.values()]
    for cell in wrong:
        file.write_text("".join(f'"{text}",1\n' for text in ["x", *fine, cell, *fine]).replace('"x",1', "x,y", 1))
        with pytest.raises(DataError) as caught:
            list(CsvFile(file, "file", types, remedy="do {}".format).batches())
        assert str(caught.value).startswith(f"file: row {len(fine) + 2}, column x, is {cell!r}; expected {dtype}: ")
        assert str(caught.value).endswith(". Do x")
