"""What Feast's offline store writes: rows to a source, tables to a saved dataset."""

import fcntl
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import write_deltalake

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    from feast import FileSource
    from feast.data_format import DeltaFormat

from isthmus.features.errors import DataError
from isthmus.features.feast import files as feast_files
from isthmus.features.feast.sources import Source
from isthmus.features.feast.values import moments
from isthmus.features.files import publish, write_atomically


def append(source: Source, table: pa.Table) -> None:
    """Appends rows to a source. A reader, or a crash, meets all of them or none.

    Raises:
        ValueError: the rows have other columns than the source.
        DataError: a column has another type than the source's, or the source cannot be read.
    """
    with _alone(source):
        wanted = source.data.schema
        # pandas gives its index along.
        names = [name for name in table.column_names if not name.startswith("__index_level_")]
        if names != wanted.names:
            raise ValueError(
                f"The input pyarrow table has the incorrect columns {names}. The columns are "
                f"expected to be {wanted.names}, in this order."
            )
        rows = _like(table, wanted, source)
        filesystem, path = feast_files.filesystem_of(source.files, source.path)
        if isinstance(source.files.file_format, DeltaFormat):
            write_deltalake(path, rows, mode="append", storage_options=feast_files.options(source.files))
        elif path.endswith(".parquet") or Path(path).is_file():
            with source.reading():
                content = _parquet(pa.concat_tables([source.data.to_table(), rows]))
            if filesystem is None:
                write_atomically(Path(path), content)
            else:
                with filesystem.open_output_stream(path) as stream:
                    stream.write(content)
        elif filesystem is None:
            write_atomically(Path(path) / f"{uuid.uuid4().hex}.parquet", _parquet(rows))
        else:
            pq.write_table(rows, f"{path}/{uuid.uuid4().hex}.parquet", filesystem=filesystem)


def save(table: pa.Table, target: FileSource, path: str) -> None:
    """Writes a table to a Parquet file, a folder of one, or a Delta table: whole, or not at all."""
    filesystem, inside = feast_files.filesystem_of(target, path)
    if isinstance(target.file_format, DeltaFormat):
        write_deltalake(
            path, table, mode="overwrite", schema_mode="overwrite", storage_options=feast_files.options(target)
        )
    elif filesystem is not None:
        pq.write_table(table, inside if inside.endswith(".parquet") else f"{inside}/0.parquet", filesystem=filesystem)
    elif inside.endswith(".parquet"):
        write_atomically(Path(inside), _parquet(table))
    else:
        publish(Path(inside), lambda folder: pq.write_table(table, folder / "0.parquet"))


def _like(table: pa.Table, wanted: pa.Schema, source: Source) -> pa.Table:
    """Rows in the types of a source, without what pandas says of them."""
    columns = []
    for field in wanted:
        column = table[field.name]
        try:
            if pa.types.is_timestamp(field.type):
                column = moments(column, f"{source.where}, column {field.name}")
            columns.append(column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"{source.where}, column {field.name}", f"a value does not fit ({error})",
                            expected=str(field.type)) from None  # fmt: skip
    return pa.table(columns, schema=wanted)


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


@contextmanager
def _alone(source: Source) -> Iterator[None]:
    """Lets one process at a time append to a local file: each writes what it has read, and more."""
    path = Path(source.path)
    if "://" in source.path or not path.is_file():
        yield
        return
    with (path.parent / f".{path.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
