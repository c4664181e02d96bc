"""Parquet files that every engine reads with the same result: copies of tables' rows, and files of other writers."""

import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import pyarrow as pa

from isthmus.features.definition.spec import Source
from isthmus.features.errors import ConfigurationError, DataError, Problem, extra, first_line
from isthmus.features.files import is_url
from isthmus.features.offline.delta import storage_files
from isthmus.transforms.tables.table import SourceTable, Within, reading

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_PATTERN = re.compile(r"[*?\[\]{}\\]")
_NULL = "__HIVE_DEFAULT_PARTITION__"
_ROWS = 262_144
"""Rows of a row group, which are in memory at once."""
_SIGNED = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20)}
_LARGE = {pa.large_string(): pa.string(), pa.string_view(): pa.string(), pa.large_binary(): pa.binary(),
          pa.binary_view(): pa.binary(), pa.null(): pa.string(), pa.float16(): pa.float32(),
          pa.date64(): pa.date32()}  # fmt: skip
_PLAIN = (pa.large_string(), pa.large_binary(), pa.string_view(), pa.binary_view())
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
_COARSER = ("write the file with pyarrow's or pandas' coerce_timestamps='us', allow_truncated_timestamps=True, "
            "which cuts these times to microseconds")  # fmt: skip


def read(spark: "SparkSession", *places: str, schema: str | None = None) -> "DataFrame":
    """Return a DataFrame of Parquet files or folders. The engine reads the rows only when it runs a query.

    `places` are local paths or URLs. Unlike `spark.read.parquet`, takes `*` and similar characters of a local path
    literally. `schema` lists the columns in SQL, such as "`age` bigint". Without it, the engine opens the files now to
    find the columns.
    """
    if any(_PATTERN.search(place) and not is_url(place) for place in places):
        # Sail reads patterns in plain paths, and escapes in URLs. Spark reads patterns everywhere, and no escapes.
        apache = is_apache(spark)
        places = tuple(
            place if is_url(place) else _PATTERN.sub(r"\\\g<0>", place) if apache else f"file://{quote(place)}"
            for place in places
        )
    return (spark.read if schema is None else spark.read.schema(schema)).parquet(*places)


def is_apache(spark: "SparkSession") -> bool:
    """Return whether an engine is Apache Spark, and not Sail."""
    # Sail reports the version of Spark that it emulates, but answers a query with its own version.
    return str(spark.sql("SELECT version()").collect()[0][0]).startswith(spark.version)


def schema(source: str, table: SourceTable) -> pa.Schema:
    fields = [(field.name, _type(field.type), field.nullable) for field in table.schema]
    unread = [f"{field.name} ({field.type})" for field in table.schema if _type(field.type) is None]
    if unread:
        raise DataError(
            f"source {source}", f"{table.place} has columns that Spark does not read: {', '.join(unread)}",
            expected="times in microseconds, numbers, texts, bytes, or lists of these",
            remedy="drop or cast them at their writer, in the query, or in a view of the table",
        )  # fmt: skip
    return pa.schema([pa.field(name, dtype, nullable) for name, dtype, nullable in fields])


def write(source: str, table: SourceTable, column: str | None, within: Within, file: Path) -> int:
    """Copy the rows of a table to the Parquet file `file`, in types that every engine reads. Return the number of rows.

    With both a time column `column` and a range `within`, copies only rows in that range or without a time, as in
    `SourceTable.batches`. `source` is the name of the source, for errors. Replaces the file. After an error, an
    incomplete file may remain. Raises DataError if the rows cannot be read or written, and DependencyError if the
    storage or database does not answer.
    """
    columns = schema(source, table)
    batches = (_converted(source, table, batch, columns) for batch in table.batches(column, within))
    try:
        return _write(columns, batches, file)
    except (OSError, pa.ArrowException) as error:
        problem = f"{table.place} cannot be copied to {file.parent} ({first_line(error)})"
        raise DataError(f"source {source}", problem, remedy="fix the cause, then try again") from error


def write_batches(columns: pa.Schema, batches: Iterable[pa.RecordBatch], file: Path) -> Path:
    _write(columns, batches, file)
    return file


def content(columns: pa.Schema, batches: Iterable[pa.RecordBatch]) -> bytes:
    file = pa.BufferOutputStream()
    _write(columns, batches, file)
    return bytes(file.getvalue())


def _write(columns: pa.Schema, batches: Iterable[pa.RecordBatch], file: Path | pa.NativeFile) -> int:
    # A late import: it loads pandas, which takes a third of a second.
    from pyarrow import parquet

    from isthmus.features.offline.scan import rebatch

    rows = 0
    with parquet.ParquetWriter(file, columns) as writer:
        for lot in rebatch(batches, _ROWS):
            writer.write_table(lot)
            rows += len(lot)
    return rows


def fragments_of(paths: str | Sequence[str], filesystem: Any = None) -> list[Any]:
    import pyarrow.dataset as ds

    # Arrow's nanoseconds would not hold all times of an INT96.
    form = ds.ParquetFileFormat(read_options=ds.ParquetReadOptions(coerce_int96_timestamp_unit="us"))
    data = ds.dataset(paths, format=form, filesystem=filesystem)
    return sorted(data.get_fragments(), key=lambda fragment: str(fragment.path))


class ParquetFiles:
    """Parquet files as one table, with all their columns, in types that hold the values of every file.

    Below the folder `root`, which ends with a slash for local files, folders named `column=value` add text columns.
    `fragments` is the result of `fragments_of`. `version` identifies the rows; None if unknown.
    """

    def __init__(self, source: str, place: str, version: str | None, fragments: Sequence[Any], root: str) -> None:
        self.place, self.version, self._source, self._root, self._fragments = place, version, source, root, fragments

    @cached_property
    def _footers(self) -> list[Any]:
        with ThreadPoolExecutor(16) as threads:
            return list(threads.map(lambda fragment: fragment.metadata, self._fragments))

    @property
    def paths(self) -> list[str]:
        return [str(fragment.path) for fragment in self._fragments]

    @property
    def rows(self) -> int:
        return sum(footer.num_rows for footer in self._footers)

    @cached_property
    def uniform(self) -> bool:
        kinds = [_kinds(fragment, footer) for fragment, footer in zip(self._fragments, self._footers, strict=True)]
        if any(_NULL in path for path in self.paths):
            return False  # Sail takes it for a text
        return all(map(_is_read, kinds[0].values())) and all(other == kinds[0] for other in kinds)

    @cached_property
    def schema(self) -> pa.Schema:
        examples: dict[str, dict[pa.DataType, str]] = {}
        empty: dict[str, pa.DataType] = {}
        for fragment, footer in zip(self._fragments, self._footers, strict=True):
            for name, kind in _kinds(fragment, footer).items():
                plain = _type(kind) or kind
                types = examples.setdefault(name, {})
                if not pa.types.is_null(kind):
                    empty[name] = plain
                    if not _without_values(footer, name):
                        types.setdefault(plain, fragment.path)
            for name in self._partition(fragment):
                examples.setdefault(name, {}).setdefault(pa.string(), fragment.path)
        return pa.schema(
            [
                (name, self._one(name, kinds) if kinds else empty.get(name, pa.string()))
                for name, kinds in examples.items()
            ]
        )

    def batches(self, column: str | None, within: Within) -> Iterator[pa.RecordBatch]:
        for fragment in self._fragments:
            wanted = _condition(fragment.physical_schema, column, within) if column and within else None
            with reading(self._source, self.place):
                for batch in fragment.to_batches(filter=wanted, batch_readahead=2):
                    for name, value in self._partition(fragment).items():
                        batch = batch.append_column(name, pa.repeat(pa.scalar(value, pa.string()), len(batch)))
                    yield batch

    def _partition(self, fragment: Any) -> Mapping[str, str | None]:
        """Return the columns of a file's folder names, `column=value`, as text: engines guess types differently."""
        folders = fragment.path.removeprefix(self._root).split("/")[:-1]
        pairs = [folder.partition("=") for folder in folders if "=" in folder]
        return {name: None if value == _NULL else unquote(value) for name, _, value in pairs}

    def _one(self, name: str, kinds: Mapping[pa.DataType, str]) -> pa.DataType:
        # Whole numbers may be mixed with decimals or floating-point numbers, if the values fit.
        groups = {next((n for n, test in enumerate(_NUMBERS) if test(kind)), kind) for kind in kinds} - {0}
        if len(kinds) > 1 and groups not in (set(), {1}, {2}):
            (first, at), (second, other) = list(kinds.items())[:2]
            raise DataError(
                f"source {self._source}, column {name}", f"has type {first} in {at} and {second} in {other}",
                expected="one type in all files", remedy=f"rewrite the second file with {name} cast to {first}",
            )  # fmt: skip
        return reduce(_wider, kinds)


def _wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    if pa.types.is_floating(one) != pa.types.is_floating(other):
        return pa.float64()
    fields = [pa.schema([("", kind)]) for kind in (one, other)]
    return pa.unify_schemas(fields, promote_options="permissive").field(0).type


def _kinds(fragment: Any, footer: Any) -> dict[str, pa.DataType]:
    """Return the types of a file's columns. INT96 is a timestamp, as in Spark, which wrote it."""
    moments = {column.path for column in map(footer.schema.column, range(footer.num_columns))
               if column.physical_type == "INT96"}  # fmt: skip
    kinds = {field.name: field.type for field in fragment.physical_schema}
    if hint := (footer.metadata or {}).get(b"ARROW:schema"):
        # Sail uses the written type of such a column; pyarrow reads it as days.
        written = pa.ipc.read_schema(pa.py_buffer(b64decode(hint)))
        kinds |= {field.name: field.type for field in written if pa.types.is_date64(field.type)}
    return kinds | {name: pa.timestamp("ns", tz="UTC") for name in moments & kinds.keys()}


def _is_read(kind: pa.DataType) -> bool:
    """Return True if converting is useless: engines read the type as `_type` says, or cannot read it at all."""
    if pa.types.is_timestamp(kind):
        return bool(kind.unit != "ns")
    return _type(kind) in (kind, None) or kind in _PLAIN or pa.types.is_fixed_size_binary(kind)


def _without_values(footer: Any, name: str) -> bool:
    for column in range(footer.num_columns):
        if footer.schema.column(column).path == name:
            groups = [footer.row_group(n) for n in range(footer.num_row_groups)]
            parts = [(group.num_rows, group.column(column).statistics) for group in groups]
            return all(not rows or (part and part.has_null_count and part.null_count == rows) for rows, part in parts)
    return False


def _condition(columns: pa.Schema, name: str, within: tuple[int, int]) -> Any:
    import pyarrow.compute as pc

    kind = columns.field(name).type if name in columns.names else None
    if kind is None or not pa.types.is_timestamp(kind):
        return None
    limit = (2**63 - 1) // (1000 if kind.unit == "ns" else 1)
    first, end = (pa.scalar(max(-limit, min(at, limit)), pa.timestamp("us", tz=kind.tz)) for at in within)
    time = pc.field(name)
    return time.is_null() | (time >= first) & (time < end)


def _converted(source: str, table: SourceTable, batch: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
    parts = []
    for field in columns:
        n = batch.schema.get_field_index(field.name)
        if n < 0 or batch.column(n).null_count == len(batch):
            parts.append(pa.nulls(len(batch), field.type))
            continue
        try:
            parts.append(_plain(batch.column(n)).cast(field.type))
        except pa.ArrowException as error:
            problem = f"{table.place} has a value that does not fit ({first_line(error)})"
            fine = isinstance(table, ParquetFiles) and "timestamp[ns" in str(batch.schema.field(n).type)
            remedy = _COARSER if fine else "cast it at its writer, or in the query"
            where = f"source {source}, column {field.name}"
            raise DataError(where, problem, expected=str(field.type), remedy=remedy) from error
    return pa.RecordBatch.from_arrays(parts, schema=columns)


def _plain(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column.type, pa.BaseExtensionType) else column


def _type(dtype: pa.DataType) -> pa.DataType | None:
    if isinstance(dtype, pa.BaseExtensionType):
        # PostgreSQL's numeric is its text, a UUID its bytes.
        return _type(dtype.storage_type)
    if pa.types.is_dictionary(dtype):
        return _type(dtype.value_type)
    if pa.types.is_timestamp(dtype):
        return pa.timestamp("us", tz=dtype.tz and "UTC")
    if pa.types.is_decimal(dtype):
        return pa.decimal128(dtype.precision, dtype.scale) if dtype.precision <= 38 else None
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


SCHEMES = ("s3://", "s3a://", "gs://", "az://", "abfs://", "abfss://")


class _Objects(ParquetFiles):
    def __init__(self, source: Source, options: Mapping[str, str]) -> None:
        import pyarrow.fs as fs

        folder, _, name = source.path.rstrip("/").rpartition("/")
        if folder.endswith("/"):  # the whole bucket
            folder, name = source.path, ""
        storage = storage_files(folder, options)
        info = storage.get_file_info(name)
        if info.type != fs.FileType.File:
            info = storage.get_file_info(fs.FileSelector(name, allow_not_found=True, recursive=True))
        files = [each for each in (info if isinstance(info, list) else [info]) if each.type == fs.FileType.File]
        if any("/_delta_log/" in f"/{each.path[len(name) :]}" for each in files):
            # Read as Parquet, it would include deleted rows.
            problem = Problem(f"source {source.name}", f"{source.path} is a Delta table", f'delta="{source.path}"')
            raise ConfigurationError("definitions.py", [problem], remedy="name it with delta= instead of path=")
        files = sorted((each for each in files if _is_data(each.path[len(name) :])), key=lambda each: each.path)
        if not files:
            raise DataError(f"source {source.name}", f"{source.path} not found",
                            remedy="correct path= of the source, or create the file")  # fmt: skip
        version = repr([(each.path, each.size, each.mtime_ns) for each in files])
        fragments = fragments_of([each.path for each in files], filesystem=storage)
        super().__init__(source.name, source.path, version, fragments, name)

    @cached_property
    def _footers(self) -> list[Any]:
        with reading(self._source, self.place):
            return super()._footers


@contextmanager
def open_table(source: Source, options: Mapping[str, str]) -> Iterator[SourceTable]:
    """Open the Parquet file at the URL `source.path`, or all files in and below that folder, for a `with` block.

    Skips files and folders whose names start with "_" or ".". `options` are the storage options. Raises
    ConfigurationError for a Delta table, and DataError if there are no files. Raises DependencyError if the storage
    does not answer or deltalake is not installed. Rows are read within the block, where the same errors may be raised,
    and DataError for a damaged file.
    """
    with extra("offline"):
        import deltalake  # noqa: F401 - only whether it is installed
    with reading(source.name, source.path):
        table = _Objects(source, options)
    yield table


def _is_data(path: str) -> bool:
    # Like engines, skip `_SUCCESS`, `_temporary` and hidden files at any depth.
    return not any(part.startswith(("_", ".")) for part in path.split("/"))
