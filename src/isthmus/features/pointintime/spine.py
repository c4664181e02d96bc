"""The forms of a spine that users may pass, read as streams of Arrow batches."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from isthmus.features.errors import DataError, first_line
from isthmus.features.files import require_local
from isthmus.features.offline.scan import rebatch
from isthmus.features.pointintime.join import BATCH
from isthmus.features.types import DataType, String
from isthmus.features.values.arrow import ARROW
from isthmus.features.values.csvfile import CsvFile

FORMS = (
    "a pyarrow Table, RecordBatchReader or Dataset, a pandas DataFrame, a Polars DataFrame or LazyFrame, or a path to "
    "Parquet or CSV"
)
_AS_TABLE = "correct the cell; or read the file yourself, convert column {}, and pass the table"
SQL = "a query: a single SELECT statement"


class SpineRows:
    """The rows of a spine (table of training examples). `count` is their number, or None if unknown before reading.

    With `once`, `read` works a single time, and so does `batches`.
    """

    def __init__(
        self,
        schema: pa.Schema,
        read: Callable[[], Iterable[pa.RecordBatch]],
        *,
        path: Path | None = None,
        once: bool = False,
        count: int | None = None,
    ) -> None:
        self.schema = pa.schema([pa.field(field.name, _plain_type(field.type)) for field in schema])
        self.path, self.count = path, count
        self._read, self._once, self._exhausted = read, once, False

    def batches(self) -> Iterator[pa.RecordBatch]:
        if self._exhausted:
            raise DataError("spine", "is a stream that was already read",
                            remedy="pass a table or a file instead")  # fmt: skip
        self._exhausted = self._once
        with _reading(self.path):
            for batch in self._read():
                columns = [_plain(column, field.type) for column, field in zip(batch.columns, self.schema, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


class HashedSpine:
    """Counts and hashes the rows of a spine (training examples) as they are read, and writes them to `file` if set."""

    def __init__(self, spine: SpineRows, file: Path | pa.NativeFile | None = None) -> None:
        self._spine, self._file = spine, file
        self._hash = hashlib.sha256(spine.schema.to_string().encode())
        self.rows = 0

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def read(self) -> str:
        """Read all rows of the spine, write them to `file` if it is set, and return their hash. Call this only once."""
        deque(self.batches(), maxlen=0)
        return self.sha256

    def batches(self) -> Iterator[pa.RecordBatch]:
        with ExitStack() as open_files:
            file = self._file and open_files.enter_context(pa.ipc.new_stream(self._file, self._spine.schema))
            for rows in rebatch(self._spine.batches(), BATCH):
                for batch in rows.combine_chunks().to_batches():
                    self._hash.update(batch.serialize())
                    self.rows += len(batch)
                    if file:
                        file.write_batch(batch)
                    yield batch


def spine_rows(spine: object, types: Mapping[str, DataType]) -> SpineRows:
    """Open a spine (table of training examples) in any form that users may pass, to read it in batches.

    `spine` is an Arrow, pandas or Polars table, or a local path to Parquet or CSV; `FORMS` lists all forms. `types` has
    feature types for columns of a CSV file. Its other columns are text. Raises DataError if the spine has another form
    or cannot be opened, and RequestError if it is a URL.
    """
    if isinstance(spine, str | Path):
        return _file(require_local("spine", spine), types)
    if isinstance(spine, pa.RecordBatch):
        spine = pa.Table.from_batches([spine])
    if isinstance(spine, pa.Table):
        return SpineRows(spine.schema, spine.to_batches, count=len(spine))
    if isinstance(spine, ds.Dataset):
        return _dataset(spine, None)
    if isinstance(spine, pa.RecordBatchReader):
        reader = spine
        return SpineRows(reader.schema, lambda: reader, once=True)
    library = type(spine).__module__.partition(".")[0]
    if library == "polars" and hasattr(spine, "collect_batches"):
        return _lazy(spine)
    with _reading(None):
        if library == "pandas":
            return spine_rows(pa.Table.from_pandas(spine, preserve_index=False), types)
        if hasattr(spine, "__arrow_c_stream__"):
            return spine_rows(pa.table(spine), types)
    raise DataError("spine", f"is a {type(spine).__name__}", expected=FORMS)


def _file(path: Path, types: Mapping[str, DataType]) -> SpineRows:
    try:
        path = path.resolve()
        exists = path.exists()
    except (OSError, ValueError):  # not a valid file name
        exists = False
    if not exists:
        raise DataError("spine", f"file {str(path)[:200]} not found", expected=f"a path to Parquet or CSV, or {SQL}")
    with _reading(path):
        if path.is_file() and ".csv" in [suffix.lower() for suffix in path.suffixes]:
            file = CsvFile(path, f"spine {path}", types, remedy=_AS_TABLE.format)
            return SpineRows(file.schema, file.batches, path=path)
        # For a file, Arrow would turn parent folders with a "=" in their names into columns.
        data = ds.dataset(path, format="parquet", partitioning=None if path.is_file() else "hive")
        if not data.files:
            raise DataError("spine", f"{path} contains no Parquet file")
        # Arrow would use only the first file's columns, and guess the types of folder columns.
        columns = pa.unify_schemas(
            [part.physical_schema for part in data.get_fragments()], promote_options="permissive"
        )
        folders = [name for name in data.schema.names if name not in columns.names]
        named = pa.schema([(name, ARROW[types.get(name, String).name]) for name in folders])
        partitioning = ds.partitioning(named, flavor="hive")
        columns = pa.unify_schemas([columns, named])
        return _dataset(ds.dataset(path, columns, format="parquet", partitioning=partitioning), path)


def _dataset(data: ds.Dataset, path: Path | None) -> SpineRows:
    return SpineRows(
        data.schema, lambda: data.to_batches(batch_size=BATCH, batch_readahead=4, fragment_readahead=1), path=path
    )


def _lazy(frame: Any) -> SpineRows:
    with _reading(None):
        schema = pa.table(frame.head(0).collect()).schema
    return SpineRows(
        schema,
        lambda: (batch for part in frame.collect_batches(maintain_order=True) for batch in pa.table(part).to_batches()),
    )


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return kind


def _plain(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast a column. Arrow cannot cast a dictionary of views, which Polars uses for categories."""
    if isinstance(column, pa.DictionaryArray):
        column = pa.DictionaryArray.from_arrays(column.indices, _plain(column.dictionary, kind))
    return column.cast(kind)


@contextmanager
def _reading(path: Path | None) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, TypeError, ValueError) as error:
        raise DataError(f"spine {path}" if path else "spine", f"cannot be read ({first_line(error)})") from error
