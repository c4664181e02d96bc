"""CSV files as typed Arrow batches. A value depends on its cell and on its column's declared type, and on nothing else.

The first row names the columns. Lines without a character are not rows, as for Python's `csv`.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from isthmus.features.errors import DataError
from isthmus.features.types import DataType
from isthmus.features.values.arrow import ARROW

_BLOCK = 1 << 20
_LARGEST_BLOCK = 2**31 - 1
_END = b"end"
"""The cells of a row after the last one: it is a part of a cell whose quotation mark is not closed."""
_FORMS = {
    "Bool": "true, false, 1 or 0", "Int32": "a whole number of 32 bits", "Int64": "a whole number of 64 bits",
    "Float32": "a number", "Float64": "a number", "String": "text in UTF-8",
    "UnixTimestamp": "a time with its zone, in microseconds, like 2024-01-01T00:00:00Z",
}  # fmt: skip


class CsvFile:
    """A CSV file whose columns have declared types; a column without one is String.

    Attributes:
        schema: names and types of the columns.
    """

    def __init__(
        self,
        open_file: Callable[[], pa.NativeFile],
        where: str,
        types: Mapping[str, DataType],
        *,
        nulls: Sequence[str] = ("",),
        remedy: str = "",
    ) -> None:
        """Read the header.

        Args:
            open_file: opens the file, decompressed.
            where: what messages call the file.
            types: column name to type; names that the file does not have are ignored.
            nulls: texts of cells that are null, quoted or not.
            remedy: for a cell that is not of its column's type.

        Raises:
            DataError: the file is empty, or two columns have the same name.
        """
        self._open, self._where, self._nulls, self._remedy = open_file, where, pa.array(nulls, pa.string()), remedy
        with TextIOWrapper(open_file(), "utf-8-sig", "replace", newline="") as text:
            try:
                header = next(filter(None, csv.reader(text)), [])
            except csv.Error as error:
                raise DataError(where, f"its first row cannot be read ({error})", expected="CSV") from error
        if not header or any("\N{REPLACEMENT CHARACTER}" in name for name in header):
            found = "its first row is not UTF-8" if header else "is empty"
            raise DataError(where, found, expected="a first row with the names of the columns")
        if twice := sorted({name for name in header if header.count(name) > 1}):
            raise DataError(where, f"several columns are called {twice[0]!r}", expected="a name of its own for each",
                            remedy="rename them in the first row")  # fmt: skip
        self._types = {name: types.get(name) for name in header}
        self.schema = pa.schema([(name, ARROW[dtype.name if dtype else "String"]) for name, dtype in self._types.items()])

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Read the rows, in order.

        Raises:
            DataError: a row has more or fewer cells than the header, a cell is not of its column's type, or the last
                quoted cell does not end. It names the row; the header is row 1.
        """
        rows = 0
        last: pa.RecordBatch | None = None
        for cells in self._cells():
            if last is not None:
                yield self._typed(last, rows)
                rows += len(last)
            last = cells
        end = last.slice(len(last) - 1)
        if any(column[0].as_py() != _END for column in end.columns):
            raise DataError(self._where, f"a quotation mark in row {rows + len(last)} is not closed",
                            expected="a complete file", remedy="correct that row, or bring the complete file")  # fmt: skip
        yield self._typed(last.slice(0, len(last) - 1), rows)

    def _typed(self, cells: pa.RecordBatch, before: int) -> pa.RecordBatch:
        skipped = 0 if before else 1  # the header
        columns = zip(cells.slice(skipped).columns, self._types.items(), strict=True)
        typed = [self._column(column, name, dtype, before + skipped) for column, (name, dtype) in columns]
        return pa.RecordBatch.from_arrays(typed, schema=self.schema)

    def _cells(self) -> Iterator[pa.RecordBatch]:
        """Read the header, the rows and the row of `_END`, as bytes. A row longer than a block makes the blocks grow."""
        block, done = _BLOCK, 0
        while True:
            read = 0
            try:
                for batch in self._blocks(block):
                    if (read := read + len(batch)) > done:
                        yield batch.slice(max(0, len(batch) - (read - done)))
                        done = read
            except pa.ArrowInvalid as error:
                if "straddling" not in str(error) or block == _LARGEST_BLOCK:
                    raise
                block = min(block * 8, _LARGEST_BLOCK)
            else:
                return

    def _blocks(self, size: int) -> Iterator[pa.RecordBatch]:
        names = [str(n) for n in range(len(self._types))]
        ragged: list[pa.csv.InvalidRow] = []

        def refuse(row: pa.csv.InvalidRow) -> str:
            ragged.append(row)
            return "error"

        try:
            # Only a single thread knows the numbers of rows.
            yield from pa.csv.open_csv(
                pa.PythonFile(_Ended(self._open(), b"\n" + b",".join([_END] * len(names))), "r"),
                pa.csv.ReadOptions(column_names=names, block_size=size, use_threads=False),
                pa.csv.ParseOptions(newlines_in_values=True, invalid_row_handler=refuse),
                pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.binary()), null_values=[]),
            )
        except pa.ArrowInvalid as error:
            if not ragged:
                raise
            row = ragged[0]
            raise DataError(
                self._where, f"row {row.number} has {row.actual_columns} cells: {row.text[:80]!r}",
                expected=f"{len(names)} cells, as in the first row",
                remedy="correct the row; a cell with commas, quotes or line breaks needs quotes around it",
            ) from error  # fmt: skip

    def _column(self, cells: pa.Array, name: str, dtype: DataType | None, before: int) -> pa.Array:
        kind = dtype.name if dtype else "String"
        with suppress(pa.ArrowInvalid):
            return _convert(cells, kind, self._nulls)
        row, rest = 0, len(cells)
        while rest > 1:
            half = rest // 2
            try:
                _convert(cells.slice(row, half), kind, self._nulls)
            except pa.ArrowInvalid:
                rest = half
            else:
                row, rest = row + half, rest - half
        cell = cells[row].as_py().decode(errors="replace")[:80]
        raise DataError(f"{self._where}, row {before + row + 1}, column {name}", f"cell {cell!r}",
                        expected=_FORMS[kind] + (f", because it is declared as {kind}" if dtype else ""),
                        remedy=self._remedy)  # fmt: skip


class _Ended:
    """A file with more bytes behind its own."""

    closed = False

    def __init__(self, file: pa.NativeFile, end: bytes) -> None:
        self._file, self._end = file, end

    def read(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        # Arrow drops a line feed at the beginning of a block if the block before ends with a carriage return.
        while data.endswith(b"\r") and (more := self._file.read(1)):
            data += more
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
        # Zeros below a microsecond are no finer time.
        texts = pc.replace_substring_regex(texts, r"(\.\d{6})0+(\D|$)", r"\1\2")
    elif kind in ("Int32", "Int64", "Float32", "Float64"):
        texts = pc.replace_substring_regex(texts, r"^\+([0-9.])", r"\1")
        # Arrow would take 0x10 for 16, and 1e400 for infinity.
        other = pc.match_substring_regex(texts, r"^[+-]?0[xX]")
        if kind.startswith("Float"):
            named = pc.match_substring_regex(texts, "(?i)inf")
            other = pc.and_(pc.is_inf(texts.cast(ARROW[kind])), pc.invert(named))
        if pc.any(other).as_py():
            raise pa.ArrowInvalid("another number")
    return texts.cast(ARROW[kind])
