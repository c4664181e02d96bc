"""Parquet as every engine reads it alike: the types of a table's rows, and the names of files."""

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pyarrow as pa

from isthmus.features.errors import DataError, first_line
from isthmus.features.files import is_url
from isthmus.transforms.tables.table import Table, Within

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PATTERN = re.compile(r"[*?\[\]{}\\]")
_ROWS = 262_144
"""Rows of a group, which is what is in memory."""
_SIGNED = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20)}
_LARGE = {pa.large_string(): pa.string(), pa.string_view(): pa.string(), pa.large_binary(): pa.binary(),
          pa.binary_view(): pa.binary(), pa.null(): pa.string(), pa.float16(): pa.float32()}  # fmt: skip


def read(spark: "SparkSession", *places: str, schema: str | None = None) -> "DataFrame":
    """Return the rows of files or folders, named by local paths or URLs. A local path is never a pattern."""
    if any(_PATTERN.search(place) and not is_url(place) for place in places):
        # Sail names the version of Spark that it stands for, but answers a query with its own. It reads patterns in
        # plain paths, and escapes in URLs; Apache Spark reads patterns everywhere, and no escapes in URLs.
        apache = str(spark.sql("SELECT version()").collect()[0][0]).startswith(spark.version)
        places = tuple(
            place if is_url(place) else _PATTERN.sub(r"\\\g<0>", place) if apache else f"file://{quote(place)}"
            for place in places
        )
    return (spark.read if schema is None else spark.read.schema(schema)).parquet(*places)


def schema(source: str, table: Table) -> pa.Schema:
    """The columns of a table as engines read them.

    Raises:
        DataError: engines do not read the type of a column.
    """
    fields = [(field.name, _type(field.type), field.nullable) for field in table.schema]
    unread = [f"{field.name} ({field.type})" for field in table.schema if _type(field.type) is None]
    if unread:
        raise DataError(
            f"source {source}", f"{table.place} has columns that Spark does not read: {', '.join(unread)}",
            expected="times in microseconds, numbers, texts, bytes, and lists of these",
            remedy="leave them out, or cast them, in the query or in a view of the table",
        )  # fmt: skip
    return pa.schema([pa.field(name, dtype, nullable) for name, dtype, nullable in fields])


def write(source: str, table: Table, column: str | None, within: Within, file: Path) -> int:
    """Writes the rows whose `column` lies within, and those without a time; returns how many.

    Raises:
        DataError: the table cannot be read, or the file cannot be written.
    """
    # Late: with it comes pandas, which takes a third of a second.
    from pyarrow import parquet

    from isthmus.features.offline.scan import in_lots

    columns, rows = schema(source, table), 0
    try:
        with parquet.ParquetWriter(file, columns) as writer:
            for lot in in_lots(table.batches(column, within), _ROWS):
                writer.write_table(
                    pa.table(
                        [_plain(part).cast(to) for part, to in zip(lot.columns, columns.types, strict=True)], columns
                    )
                )
                rows += len(lot)
    except (OSError, pa.ArrowException) as error:
        problem = f"{table.place} cannot be brought to {file.parent} ({first_line(error)})"
        raise DataError(f"source {source}", problem, remedy="mend that, then run it again") from error
    return rows


def empty(columns: pa.Schema) -> bytes:
    """A file with these columns and no row."""
    from pyarrow import parquet

    file = pa.BufferOutputStream()
    parquet.write_table(columns.empty_table(), file)
    return bytes(file.getvalue())


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)


def _type(dtype: pa.DataType) -> pa.DataType | None:
    """The type in which engines read this one; None if there is none."""
    if isinstance(dtype, pa.BaseExtensionType):
        # PostgreSQL's numeric is its text, a UUID its bytes.
        return _type(dtype.storage_type)
    if pa.types.is_dictionary(dtype):
        return _type(dtype.value_type)
    if pa.types.is_timestamp(dtype):
        return None if dtype.unit == "ns" else pa.timestamp("us", tz=dtype.tz and "UTC")
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype):
        element = _type(dtype.value_type)
        return None if element is None else pa.list_(element)
    if pa.types.is_struct(dtype):
        parts = [(field.name, _type(field.type)) for field in dtype]
        return None if None in dict(parts).values() else pa.struct(parts)
    if pa.types.is_fixed_size_binary(dtype):
        return pa.binary()
    if pa.types.is_time(dtype) or pa.types.is_duration(dtype) or pa.types.is_interval(dtype):
        return None
    return _SIGNED.get(dtype) or _LARGE.get(dtype) or dtype
