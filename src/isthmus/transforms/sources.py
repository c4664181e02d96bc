"""Sources as DataFrames. CSV, tables and queries are copied to Parquet first, so every engine sees the same values."""

import hashlib
import inspect
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from isthmus.features import clock
from isthmus.features.days import DAY, FIRST, LAST, Days
from isthmus.features.definition.spec import Source
from isthmus.features.errors import ConfigurationError, DataError, Problem, did_you_mean, one_of
from isthmus.features.files import (
    UNPRINTED,
    installed_path,
    is_url,
    move_atomically,
    publish,
    require_delta,
    scratch_folder,
    write_atomically,
)
from isthmus.features.streams.events import EventLog
from isthmus.features.values.arrow import ARROW
from isthmus.features.values.csvfile import CsvFile
from isthmus.transforms.tables import delta, iceberg, parquet, sql
from isthmus.transforms.tables.missing import explain_missing
from isthmus.transforms.tables.stored import Store
from isthmus.transforms.tables.table import SourceTable, Within

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

Options: TypeAlias = Mapping[str, str]
_NONE: Options = {}
_READ_AS_TEXT = "correct the cell; or read the column as text, types={{{!r}: String}}, and convert it in the transform"
_REPAIR = "restore the complete file, or correct the source's path"
_NAMES = {kind: name for name, kind in ARROW.items()}
_SAIL_NAME, _SAIL_PART = re.compile(r"ObjectName\(\[.*?\]\)"), re.compile(r'Identifier\("(.*?)"\)')
_UNREAD = re.compile(r"[\\|]|%[0-9A-Fa-f]{2}|" + UNPRINTED.pattern)
_SKIPPED = re.compile(r"^[_.]|[=:]|" + _UNREAD.pattern)
_STACK = "Traceback (most recent call last):"


class NoRowsError(DataError):
    """The source has no rows yet."""


@dataclass(frozen=True, slots=True)
class Landed:
    """Local Parquet copies of a source's rows.

    Attributes:
        file: copy of the source's data; None if the engine reads them itself.
        content: fingerprint of the data then; None if unknown.
        events: copy of the events of the source's stream; None without any.
        offsets: next offset of each partition after these events.
    """

    file: Path | None
    content: str | None
    events: Path | None = None
    offsets: Mapping[str, int] = field(default_factory=dict)


def needs_copy(source: Source, *, cluster: bool = False) -> bool:
    """Return True if `land` must copy a source to a local Parquet file before an engine can read it.

    True for Delta and Iceberg tables, SQL queries, and URLs of `parquet.SCHEMES`. `cluster` says that the engine is a
    Spark Connect server. Such an engine reads these URLs itself, so the result is False for them.
    """
    return not source.path or (source.path.startswith(parquet.SCHEMES) and not cluster)


def land(source: Source, root: Path, within: Within, folder: Path, options: Options = _NONE) -> Landed:
    """Copy the rows of a table, SQL query or URL to `folder/NAME.parquet`, replacing it, for a build to read.

    With a time range `within`, copies the rows whose `source.timestamp` is in the range or null. The range is widened
    to whole seconds. Copies all rows if the range is None or the source declares no `timestamp`. Relative paths start
    from `root`. `options` are the storage options for URLs.

    Raises NoRowsError if the source has no rows at all, and DataError if the table or a value cannot be copied. Raises
    ConfigurationError if the address is not set, or a time column is missing or has no time zone. Raises
    DependencyError if the storage, database or catalog does not answer, or its library is missing.
    """
    file = folder / f"{source.name}.parquet"
    with _opened(source, root, options) as table:
        _check_times(source, _spark_types(table.schema))
        rows = parquet.write(source.name, table, source.timestamp, _whole_seconds(within), file)
        if rows == 0 and not any(map(len, table.batches(None, None))):
            raise NoRowsError(f"source {source.name}", f"{table.place} has no rows", remedy="add data before a build")
        return Landed(file, _hash(table.version))


def read(
    spark: "SparkSession", source: Source, root: Path, staging: Path, landed: Landed | None = None,
    store: Store | None = None,
) -> "DataFrame":  # fmt: skip
    """Return a source as a DataFrame of the engine's session `spark`, to pass to the functions of views and spines.

    `landed` is the copy that `land` made of a table or query. Without it, the DataFrame of a table or query has the
    right columns but no rows, which suffices to check a function. Relative paths start from `root`. A local file that
    engines cannot read unchanged, such as CSV, is converted to Parquet (or linked under another name) in the folder
    `staging`, where later calls find it. With `store`, copies go on to its folder, from which executors read them.

    Raises ConfigurationError if the file or a declared column is missing, the folder is a Delta table, or a time column
    has no time zone. Raises NoRowsError if a local file or folder has no rows, and DataError if the file cannot be
    read. Raises DependencyError if the Python package with the file is not installed, or the engine cannot open the
    file.
    """
    from pyspark.errors import PySparkException

    place = source.path
    if landed is not None and landed.file is not None:
        place = str(landed.file)
    elif not place:
        place = str(_columns(source, root, staging))
    elif not is_url(place):
        place = str(_parquet(source, root, staging))
    try:
        with explain_missing(f"source {source.name}"):
            frame = _frame(spark, place, staging, store)
            types = dict(frame.dtypes)
    except PySparkException as error:
        problem = f"{place} cannot be read by the engine ({first_line(error)})"
        raise DataError(f"source {source.name}", problem, remedy=_REPAIR) from error
    if not types:
        # For Sail, a URL without a file is a table without columns.
        problem = f"{place} cannot be read by the engine (nothing found)"
        raise DataError(f"source {source.name}", problem, remedy=_REPAIR)
    _check_times(source, types)
    if source.stream is None:
        return frame
    if landed is not None and landed.events is not None:
        events = _frame(spark, str(landed.events), staging, store)
        frame = frame.unionByName(events.select([name for name in frame.columns if name in events.columns]), True)
    # Producers send events again, and the data may have events of the stream.
    return frame.distinct()


def _frame(spark: "SparkSession", place: str, staging: Path, store: Store | None) -> "DataFrame":
    """Return a DataFrame of Parquet files, from the store if they are a copy in the project's state folder."""
    from pyarrow.parquet import read_schema

    file = Path(place)
    if store is None or not file.is_relative_to(staging.parent) or not file.is_file():
        return parquet.read(spark, place)
    return store.read(spark, store.copy(file), read_schema(file))


def land_events(source: Source, log: EventLog, within: Within, folder: Path) -> Path | None:
    """Copy the events of a source's stream to `folder/NAME-events.parquet`; return None if there are none.

    With a time range `within`, copies at least the events in the range. Raises DataError if the table of events is
    damaged, and DependencyError if object storage does not answer.
    """
    schema = log.schema()
    if schema is None:
        return None
    days = None if within is None else Days(within[0] // DAY, -(-within[1] // DAY))
    return parquet.write_batches(schema, log.rows(schema, days), folder / f"{source.name}-events.parquet")


def require_readable(source: Source, root: Path, staging: Path) -> None:
    """Check without an engine that a source can be read, for `isthmus apply`. Raise the error that a build would raise.

    Do not call it for URLs. Checks local files, and the columns of tables and queries, but not the time columns of a
    folder. Opens tables and databases. Writes Parquet files to the folder `staging`, which `read` uses later. Relative
    paths start from `root`. Raises ConfigurationError, NoRowsError, DataError or DependencyError.
    """
    from pyarrow.parquet import read_schema

    file = _parquet(source, root, staging) if source.path else _columns(source, root, staging)
    # Only the engine knows the columns of a folder, since its files may differ.
    if file.is_file():
        _check_times(source, _spark_types(read_schema(file)))


def columns(source: Source, root: Path) -> dict[str, str]:
    """Return the type of each column of a source, such as "Int64", by column name.

    Reads a local file, the footers of a folder's files, or the schema of a table or query. Relative paths start from
    `root`. A type that features cannot have appears under its name in Arrow. Do not call it for URLs. Raises
    ConfigurationError if a file is missing, and Arrow's errors for a damaged file.
    """
    if source.path:
        path = _locate(source, root)
        if path.is_file() and source.csv:
            schema = CsvFile(path, f"source {source.name}", source.column_types, name=str(path)).schema
        else:
            schema = parquet.ParquetFiles(
                source.name, str(path), None, parquet.fragments_of(str(path)), _folder(path)
            ).schema
    else:
        with _opened(source, root, _NONE) as table:
            schema = parquet.schema(source.name, table)
    return {field.name: _NAMES.get(field.type, str(field.type)) for field in schema}


def narrow(frame: "DataFrame", source: Source, first: int, end: int) -> "DataFrame":
    return frame if source.timestamp is None else frame.where(inside(frame[source.timestamp], first, end))


def inside(time: "Column", first: int, end: int) -> "Column":
    """Return the condition that a time is null or in [first, end). Limits outside the years 1 to 9999 are ignored."""
    condition = time.isNotNull()
    if first > FIRST:
        condition &= time >= clock.moment(first)
    if end <= LAST:
        condition &= time < clock.moment(end)
    return time.isNull() | condition


def content(source: Source, root: Path, options: Options = _NONE) -> str | None:
    """Return a fingerprint that changes with a source, so that a build can skip views of unchanged sources.

    Does not read the rows. Uses the names, sizes and times of files, the version of a table, or the result of
    `version_sql`. Returns None if changes cannot be detected: for a PostgreSQL query without `version_sql`, and for a
    URL that is not of `parquet.SCHEMES`. Relative paths start from `root`. `options` are the storage options for URLs.

    Raises ConfigurationError if a local file, or the variable with a database address, is missing. Raises DataError for
    a damaged table, and DependencyError if a server does not answer.
    """
    if source.sql:
        return _hash(sql.version(source, root))
    if needs_copy(source):
        with _opened(source, root, options) as table:
            return _hash(table.version)
    if is_url(source.path):
        return None
    path = _locate(source, root)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    # Include the types. Otherwise, tables from types guessed by earlier versions would count as current.
    return _hash(repr([*stats, _types(source)] if source.csv else stats))


@contextmanager
def _opened(source: Source, root: Path, options: Options) -> Iterator[SourceTable]:
    if source.path:
        with parquet.open_table(source, options) as table:
            yield table
    elif source.delta:
        url = is_url(source.delta)
        place = require_delta(
            f"source {source.name}", source.delta if url else str(root / source.delta), "rename the folder of the table"
        )
        with delta.open_table(source, place, options if url else {}) as table:
            yield table
    else:
        with iceberg.open_table(source) if source.iceberg else sql.open_table(source, root) as table:
            yield table


def _columns(source: Source, root: Path, staging: Path) -> Path:
    with _opened(source, root, _NONE) as table:
        columns = parquet.schema(source.name, table)
    file = staging / f"{source.name}-{_hash(str(columns))}.parquet"
    if not _touch(file):
        write_atomically(file, parquet.content(columns, []))
    return file


def _touch(file: Path) -> bool:
    """Touch a staged file, so that `isthmus maintain` keeps it for a day. Return False if it is missing."""
    with suppress(OSError):  # it is missing or belongs to another user
        os.utime(file)
    return file.exists()


def _whole_seconds(within: Within) -> Within:
    # Spark truncates a file's statistics to milliseconds: a range within one millisecond would miss the file.
    second = 1_000_000
    return within and (within[0] // second * second, -(-within[1] // second) * second)


def _hash(version: str | None) -> str | None:
    return None if version is None else hashlib.sha256(version.encode()).hexdigest()


def _spark_types(schema: pa.Schema) -> dict[str, str]:
    types = {field.name: field.type for field in schema}
    zones = {name: getattr(dtype, "tz", None) for name, dtype in types.items() if pa.types.is_timestamp(dtype)}
    spark = {name: "timestamp" if zone else "timestamp_ntz" for name, zone in zones.items()}
    return {name: str(dtype) for name, dtype in types.items()} | spark


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if _STACK in lines:
        # The stack of a Python worker ends with the exception.
        lines = [line for line in lines[lines.index(_STACK) + 1 :] if not line.startswith(" ")]
    return _SAIL_NAME.sub(_named, lines[0]) if lines else type(error).__name__


def failing_line(error: BaseException, function: Callable[..., Any] | None) -> str:
    file = inspect.unwrap(function).__code__.co_filename if function else None
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]}" if lines else ""


def _named(name: re.Match[str]) -> str:
    # Sail shows its internal form of a name; this is Spark's.
    return f"`{'.'.join(_SAIL_PART.findall(name[0]))}`"


def _parquet(source: Source, root: Path, staging: Path) -> Path:
    path = file = _locate(source, root)
    if (path / "_delta_log").is_dir():
        # Read as Parquet, it would include deleted rows.
        problem = Problem(f"source {source.name}", f"{path} is a Delta table", f'delta="{source.path}"')
        raise ConfigurationError("definitions.py", [problem], remedy="name it with delta= instead of path=")
    # Messages show the original path, not the staged file.
    where = f"source {source.name}"
    if is_csv := path.is_file() and source.csv:
        file = _stage(source, path, staging)
    try:
        files = parquet.ParquetFiles(source.name, str(path), None, parquet.fragments_of(str(file)), _folder(path))
        rows = files.rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(where, f"{path} cannot be read as Parquet ({first_line(error)})", remedy=_REPAIR) from error
    if rows == 0:
        raise NoRowsError(where, f"{path} has no rows", remedy="add data before a build")
    if is_csv:
        return file
    if files.uniform:
        return _plainly_named(source, file, files.paths, staging)
    staged = staging / f"{source.name}-{_hash(f'{path} {content(source, root)}')}.parquet"
    if not _touch(staged):
        staging.mkdir(parents=True, exist_ok=True)
        with scratch_folder(staging, source.name) as folder:
            parquet.write(source.name, files, None, None, folder / "rows")
            move_atomically(folder / "rows", staged)
    return staged


def _folder(path: Path) -> str:
    return f"{path if path.is_dir() else path.parent}/"


def _plainly_named(source: Source, path: Path, files: Sequence[str], staging: Path) -> Path:
    """Return the path of the Parquet files, or of a folder with links to them that every engine can read.

    Sail skips files of a folder whose names contain "=", and reads a backslash, "%2F" or a final "|" as a slash. Apache
    Spark cannot open files with ":". Both skip files that start with "_" or ".", even if named explicitly.
    """
    single = path.is_file()
    if not _UNREAD.search(str(path)) and not any(
        _SKIPPED.search(Path(file).name) for file in ([str(path)] if single else files)
    ):
        return path
    linked = staging / f"{source.name}-{_hash(repr([str(path), *files]))}"

    def link(folder: Path) -> None:
        for number, file in enumerate(files):
            place = folder / ("" if single else os.path.relpath(Path(file).parent, path)) / f"{number:08}.parquet"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file)

    if not linked.exists():
        publish(linked, link)
    return linked


def _locate(source: Source, root: Path) -> Path:
    path = installed_path(source.path, f"source {source.name}") or root / source.path
    if not path.exists():
        there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        problem = f"{path} not found{did_you_mean(path.name, there)}"
        missing = Problem(f"source {source.name}", problem, "an existing file or folder")
        raise ConfigurationError("definitions.py", [missing], remedy="correct its path, or create the file")
    return path


def _stage(source: Source, path: Path, staging: Path) -> Path:
    where = f"source {source.name}"
    try:
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256")
    except OSError as error:
        raise DataError(where, f"{path} cannot be read ({error.strerror})") from error
    digest.update(repr((_types(source), tuple(source.null_values))).encode())
    staged = staging / f"{source.name}-{digest.hexdigest()[:16]}.parquet"
    if not _touch(staged):
        types, nulls = source.column_types, source.null_values
        file = CsvFile(path, where, types, nulls=nulls, name=str(path), remedy=_READ_AS_TEXT.format)
        names = file.schema.names
        unknown = [
            Problem(f"{where}, types", f"no column {column!r}{did_you_mean(column, names)}", one_of(names))
            for column in source.types
            if column not in names
        ]
        if unknown:
            raise ConfigurationError("definitions.py", unknown)
        write_atomically(staged, parquet.content(file.schema, file.batches()))
    return staged


def _types(source: Source) -> list[tuple[str, str]]:
    return sorted((column, dtype.name) for column, dtype in source.column_types.items())


def _check_times(source: Source, types: dict[str, str]) -> None:
    problems = []
    for role, column in (("timestamp", source.timestamp), ("known", source.known)):
        where = f"source {source.name}, {role}"
        if column is not None and column not in types:
            found = f"no column {column!r}{did_you_mean(column, types)}"
            remedy = f"correct {role}= of the source, or leave it out"
            problems.append(Problem(where, found, one_of(types), remedy))
        elif column is not None and types[column] != "timestamp":
            found = f"column {column!r} has type {types[column]}"
            remedy = f"write it with a time zone; or leave {role}= out, and let the transforms convert the column"
            problems.append(Problem(where, found, "timestamp, with a time zone", remedy))
    if problems:
        raise ConfigurationError("definitions.py", problems)
