"""Read CSV files as typed Arrow batches. A value depends only on its cell and the declared type of its column."""

import csv
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from isthmus.features.errors import DataError, first_line
from isthmus.features.types import DataType, String
from isthmus.features.values.arrow import ARROW

_REPAIR = "replace it with the complete file, or correct its path"
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
_BLOCK = 1 << 20
_LARGEST_BLOCK = 2**31 - 1
_RAGGED = re.compile(r"Row #(\d+): Expected \d+ columns, got (\d+): (.*)", re.DOTALL)
_END = b"end"
"""Cells of an extra last row. It ends up inside a cell if a quotation mark is not closed."""
_FORMS = {
    "Bool": "true, false, 1 or 0", "Int32": "a whole number of 32 bits", "Int64": "a whole number of 64 bits",
    "Float32": "a number of 32 bits", "Float64": "a number of 64 bits", "String": "text in UTF-8",
    "UnixTimestamp": "a time with its zone, to the microsecond at most, like 2024-01-01T00:00:00Z",
}  # fmt: skip


class CsvFile:
    """A CSV file, plain or compressed (`.gz`, `.bz2`, `.zst`, or alone in a `.zip`). `schema` has the column types."""

    def __init__(
        self,
        path: Path,
        where: str,
        types: Mapping[str, DataType],
        *,
        nulls: Sequence[str] = ("",),
        name: str = "",
        remedy: Callable[[str], str] = str,
    ) -> None:
        """Read the header. Raise DataError if the file is empty or damaged, or two columns have the same name.

        `types` gives column types; names that the file lacks are ignored, and other columns are String. `nulls` are the
        texts of null cells, quoted or not. `where` and `name` place an error; `remedy` gives the remedy for a column.
        """
        self._path, self._where, self._name, self._remedy = path, where, name and f"{name} ", remedy
        self._nulls = pa.array(nulls, pa.string())
        with self._reading(), TextIOWrapper(self._open(), "utf-8-sig", "replace", newline="") as text:
            header = next(filter(None, csv.reader(text)), [])
        if not header or any("\N{REPLACEMENT CHARACTER}" in column for column in header):
            problem = "has a first row that is not UTF-8" if header else "cannot be read as CSV (it is empty)"
            raise self._error(problem, "a first row with the names of the columns")
        if duplicates := sorted({column for column in header if header.count(column) > 1}):
            raise self._error(f"has several columns called {duplicates[0]!r}", "unique column names",
                              "rename them in the first row")  # fmt: skip
        self._kinds = [types.get(column, String).name for column in header]
        self.schema = pa.schema([(column, ARROW[kind]) for column, kind in zip(header, self._kinds, strict=True)])

    def batches(self) -> Iterator[pa.RecordBatch]:
        rows, batches = 0, self._cells()
        last = next(batches)
        for cells in batches:
            yield self._typed(last, rows)
            rows += len(last)
            last = cells
        end = last.slice(len(last) - 1)
        if any(column[0].as_py() != _END for column in end.columns):
            raise self._error(f"ends within a quoted cell of row {rows + len(last)}", "a complete file",
                              "close the quotation mark in that row, or use the complete file")  # fmt: skip
        yield self._typed(last.slice(0, len(last) - 1), rows)

    def _typed(self, cells: pa.RecordBatch, before: int) -> pa.RecordBatch:
        skipped = 0 if before else 1  # the header
        columns = zip(cells.slice(skipped).columns, self.schema.names, self._kinds, strict=True)
        typed = [self._column(column, name, kind, before + skipped) for column, name, kind in columns]
        return pa.RecordBatch.from_arrays(typed, schema=self.schema)

    def _cells(self) -> Iterator[pa.RecordBatch]:
        """Yield the header, the rows and the `_END` row as bytes. The block size grows until the longest row fits."""
        block, done = _BLOCK, 0
        while True:
            read = 0
            try:
                for batch in self._blocks(block):
                    if (read := read + len(batch)) > done:
                        yield batch.slice(max(0, len(batch) - (read - done)))
                        done = read
            except pa.ArrowInvalid as error:
                if "straddling" not in str(error):
                    raise
                if block == _LARGEST_BLOCK:
                    raise self._error("has a row of 2 GiB or more", "shorter rows", "split that row") from error
                block = min(block * 8, _LARGEST_BLOCK)
            else:
                return

    def _blocks(self, size: int) -> Iterator[pa.RecordBatch]:
        names = [str(n) for n in range(len(self._kinds))]
        end = b"\n" + b",".join([_END] * len(names))
        with self._reading(), self._open() as file:
            try:
                # With several threads, Arrow's errors have no row numbers.
                yield from pa.csv.open_csv(
                    pa.PythonFile(_Ended(file, end), "r"),
                    pa.csv.ReadOptions(column_names=names, block_size=size, use_threads=False),
                    pa.csv.ParseOptions(newlines_in_values=True),
                    pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()), null_values=[]),
                )
            except pa.ArrowInvalid as error:
                ragged = _RAGGED.search(str(error))
                if ragged is None:
                    raise
                row, cells, text = ragged.groups()
                problem = f"row {row} has {cells} cells: {text.removesuffix(end.decode())[:80]!r}"
                remedy = "correct that row; a cell with a comma, a quotation mark or a line break needs quotation marks"
                raise self._error(problem, f"{len(names)}, as in the first row", remedy) from None

    def _column(self, cells: pa.Array, name: str, kind: str, before: int) -> pa.Array:
        with suppress(pa.ArrowInvalid):
            return _convert(cells, kind, self._nulls)
        row, count = 0, len(cells)
        while count > 1:
            half = count // 2
            try:
                _convert(cells.slice(row, half), kind, self._nulls)
            except pa.ArrowInvalid:
                count = half
            else:
                row, count = row + half, count - half
        cell = cells[row].as_py().decode(errors="replace")[:80]
        raise self._error(f"row {before + row + 1}, column {name}, is {cell!r}",
                          f"{kind}: {_FORMS[kind]}", self._remedy(name))  # fmt: skip

    def _error(self, problem: str, expected: str, remedy: str = "") -> DataError:
        return DataError(self._where, self._name + problem, expected=expected, remedy=remedy)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, csv.Error, BadZipFile, zlib.error, RuntimeError, OSError, EOFError) as error:
            if isinstance(error, pa.ArrowInvalid) and "straddling" in str(error):
                raise
            raise self._error(f"cannot be read as CSV ({first_line(error)})", "", _REPAIR) from error

    def _open(self) -> Any:
        if self._path.suffix.lower() != ".zip":
            return pa.input_stream(str(self._path), compression=_COMPRESSIONS.get(self._path.suffix.lower()))
        # An open member keeps the file open.
        with ZipFile(self._path) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
            if len(names) != 1:
                problem = f"holds {len(names)} files" + (f" ({', '.join(names[:5])})" if names else "")
                raise self._error(problem, "one CSV file", "put each file into a separate .zip")
            return archive.open(names[0])


class _Ended:
    """A file with extra bytes at its end."""

    closed = False

    def __init__(self, file: IO[bytes], end: bytes) -> None:
        self._file, self._end = file, end

    def read(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        # Arrow drops a line feed at the beginning of a block if the block before ends with a carriage return.
        while data.endswith(b"\r") and (more := self._file.read(1)):
            data += more
        if b"\0" in data:  # Arrow may then take a line break in quotation marks for the end of a row
            raise pa.ArrowInvalid("it has NUL bytes: save it as UTF-8")
        if not data:
            data, self._end = self._end, b""
        return data

    def close(self) -> None:
        self._file.close()


def _convert(cells: pa.Array, kind: str, nulls: pa.Array) -> pa.Array:
    texts = cells.cast(pa.string())
    if kind not in ("String", "Bytes"):
        texts = pc.ascii_trim_whitespace(texts)
    texts = pc.if_else(pc.is_in(texts, nulls), None, texts)
    if kind == "UnixTimestamp":
        # Drop trailing zeros below a microsecond: they do not make the time finer.
        texts = pc.replace_substring_regex(texts, r"(\.\d{6})0+(\D|$)", r"\1\2")
    elif kind in ("Int32", "Int64", "Float32", "Float64"):
        texts = pc.replace_substring_regex(texts, r"^\+([0-9.])", r"\1")
        # Arrow would read 0x10 as 16, and 1e400 as infinity.
        invalid = pc.match_substring_regex(texts, r"^[+-]?0[xX]")
        if kind.startswith("Float"):
            named = pc.match_substring_regex(texts, "(?i)inf")
            invalid = pc.and_(pc.is_inf(texts.cast(ARROW[kind])), pc.invert(named))
        if pc.any(invalid).as_py():
            raise pa.ArrowInvalid("not a decimal number")
    return texts.cast(ARROW[kind])
