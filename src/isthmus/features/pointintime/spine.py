"""The forms in which the rows of a spine come: all of them as Arrow batches, none of them whole in memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset as ds

from isthmus.features.errors import DataError
from isthmus.features.pointintime.join import BATCH

FORMS = (
    "a pyarrow Table, RecordBatchReader or Dataset, a pandas DataFrame, a Polars DataFrame or LazyFrame, or a path to "
    "Parquet or CSV"
)
SQL = "a query: one SELECT, and nothing else"


class SpineRows:
    """The rows of a spine, read in order as often as asked, or once if they come from a stream.

    Args:
        schema: the columns.
        read: gives the batches from the first one on.
        path: the file or folder they are read from; None if there is none that stays.
        once: whether they can be read only once.

    Attributes:
        schema: the columns, in types that Parquet has and without metadata.
        path: the file or folder, or None.
    """

    def __init__(
        self,
        schema: pa.Schema,
        read: Callable[[], Iterable[pa.RecordBatch]],
        *,
        path: Path | None = None,
        once: bool = False,
    ) -> None:
        self.schema = pa.schema([pa.field(field.name, _plain(field.type)) for field in schema])
        self.path = path
        self._read, self._once, self._gone = read, once, False

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows.

        Raises:
            DataError: they cannot be read, or were read before and come only once.
        """
        if self._gone:
            raise DataError("spine", "was read to its end already: a stream of batches comes only once",
                            remedy="give it as a table, or as a file")  # fmt: skip
        self._gone = self._once
        with _reading(self.path):
            for batch in self._read():
                columns = [_in(column, field.type) for column, field in zip(batch.columns, self.schema, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


def spine_rows(given: object, keys: Mapping[str, pa.DataType]) -> SpineRows:
    """The rows of a spine in any of its forms.

    Args:
        given: what the user gave.
        keys: types of the join keys, which a CSV file does not tell: "007" may be a text.

    Raises:
        DataError: it has none of the forms, or cannot be read.
    """
    if isinstance(given, str | Path):
        return _file(Path(given), keys)
    if isinstance(given, pa.RecordBatch):
        given = pa.Table.from_batches([given])
    if isinstance(given, pa.Table):
        table = given
        return SpineRows(table.schema, table.to_batches)
    if isinstance(given, ds.Dataset):
        return _dataset(given, None)
    if isinstance(given, pa.RecordBatchReader):
        reader = given
        return SpineRows(reader.schema, lambda: reader, once=True)
    library = type(given).__module__.partition(".")[0]
    if library == "pandas":
        with _reading(None):
            return spine_rows(pa.Table.from_pandas(given, preserve_index=False), keys)
    if library == "polars" and hasattr(given, "collect_batches"):
        return _lazy(given)
    if hasattr(given, "__arrow_c_stream__"):
        with _reading(None):
            return spine_rows(pa.table(given), keys)
    raise DataError("spine", f"is a {type(given).__name__}", expected=FORMS)


def _file(path: Path, keys: Mapping[str, pa.DataType]) -> SpineRows:
    try:
        path = path.resolve()
        there = path.exists()
    except (OSError, ValueError):  # no file can be called so
        there = False
    if not there:
        raise DataError("spine", f"there is no file {str(path)[:200]}", expected=f"a path to Parquet or CSV, or {SQL}")
    with _reading(path):
        if path.is_file() and ".csv" in [suffix.lower() for suffix in path.suffixes]:
            types = {**keys, "event_timestamp": pa.timestamp("us", tz="UTC")}
            form = ds.CsvFileFormat(
                parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
                convert_options=pyarrow.csv.ConvertOptions(column_types=types),
            )
            rows = _dataset(ds.dataset(path, format=form), path)
            return SpineRows(rows.schema, lambda: map(_without_blanks, rows.batches()), path=path)
        data = ds.dataset(path, format="parquet", partitioning="hive")
        if not data.files:
            raise DataError("spine", f"{path} holds no Parquet file")
        return _dataset(data, path)


def _dataset(data: ds.Dataset, path: Path | None) -> SpineRows:
    return SpineRows(
        data.schema, lambda: data.to_batches(batch_size=BATCH, batch_readahead=4, fragment_readahead=1), path=path
    )


def _without_blanks(batch: pa.RecordBatch) -> pa.RecordBatch:
    """An empty cell is no text. Arrow would take "NA" for none, too, which is a key like any other."""
    columns = [
        pc.if_else(pc.equal(column, ""), None, column) if pa.types.is_string(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _lazy(frame: Any) -> SpineRows:
    """A Polars LazyFrame, which is computed anew, in batches, each time it is read."""
    with _reading(None):
        schema = pa.table(frame.head(0).collect()).schema
    return SpineRows(
        schema,
        lambda: (batch for part in frame.collect_batches(maintain_order=True) for batch in pa.table(part).to_batches()),
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type with which a column is joined and written: dictionaries and views are an engine's own."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return kind


def _in(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column in its plain type. Arrow unpacks no dictionary of views, as Polars makes them of categories."""
    if isinstance(column, pa.DictionaryArray):
        column = pa.DictionaryArray.from_arrays(column.indices, _in(column.dictionary, kind))
    return column.cast(kind)


@contextmanager
def _reading(path: Path | None) -> Iterator[None]:
    """Turns what goes wrong while a spine is read into one clear error."""
    where = f"spine {path}" if path else "spine"
    try:
        yield
    except (pa.ArrowException, OSError, TypeError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(where, f"cannot be read ({first})") from error
