"""Raw data as DataFrames.

Parquet is read by the engine itself. CSV is first turned into Parquet, once per content: every engine then sees the
same types and the same microseconds, also of a file inside a `.zip`, which Spark cannot open.
"""

import hashlib
import importlib.util
import io
import re
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet

from isthmus.features import clock
from isthmus.features.days import FIRST, LAST
from isthmus.features.definition.spec import Source
from isthmus.features.errors import ConfigurationError, DataError, DependencyError, Problem
from isthmus.features.files import write_atomically

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_PACKAGE = "package:"
_REPAIR = "bring the whole file there, or correct the source's path"
_SAIL_NAME, _SAIL_PART = re.compile(r"ObjectName\(\[.*?\]\)"), re.compile(r'Identifier\("(.*?)"\)')
_STACK = "Traceback (most recent call last):"


def read(spark: "SparkSession", source: Source, root: Path, staging: Path) -> "DataFrame":
    """The DataFrame of a source.

    Args:
        spark: the session to read with.
        source: the declaration.
        root: folder that relative paths start from.
        staging: folder that holds what CSV files were turned into.

    Raises:
        ConfigurationError: the file is missing, or a declared time column is missing or has no time zone.
        DataError: the file is empty or damaged, or the engine cannot read it.
        DependencyError: the Python package that holds the file is not installed.
    """
    from pyspark.errors import PySparkException

    place = source.path
    if "://" not in place:
        path = file = _locate(source, root)
        if path.is_file() and path.suffix.lower() in (".csv", ".zip", ".gz"):
            file = _stage(source, path, staging)
        _require_rows(source, path, file)
        place = str(file)
    try:
        frame = spark.read.parquet(place)
        types = dict(frame.dtypes)
    except PySparkException as error:
        found = f"{place} cannot be read by the engine ({first_line(error)})"
        raise DataError(f"source {source.name}", found, remedy=_REPAIR) from error
    if not types:
        # Sail takes a URL where nothing is for a table without columns.
        found = f"{place} cannot be read by the engine (there is nothing)"
        raise DataError(f"source {source.name}", found, remedy=_REPAIR)
    _check_times(source, types)
    return frame


def narrow(frame: "DataFrame", source: Source, first: int, end: int) -> "DataFrame":
    """The rows of a source from one moment to before another, in microseconds, by its `timestamp` column.

    Rows without a time stay, as do all rows of a source that declares no such column.
    """
    if source.timestamp is None:
        return frame
    time = frame[source.timestamp]
    low, high = (clock.moment(min(max(at, FIRST), LAST)) for at in (first, end))
    return frame.where(time.isNull() | (time >= low) & (time < high))


def content(source: Source, root: Path) -> str | None:
    """What tells the content of a source from what it held before: its files' names, sizes and times of change.

    None for a source elsewhere, of which nobody can say it.
    """
    if "://" in source.path:
        return None
    path = _locate(source, root)
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    seen = [(str(file.relative_to(path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def first_line(error: BaseException) -> str:
    """What an error says in one line: engines append their plans and stacks to it, or hide it at a stack's end."""
    lines = str(error).strip().splitlines()
    if _STACK in lines:
        # The stack of a Python worker: its last entry is followed by the exception.
        lines = [line for line in lines[lines.index(_STACK) + 1 :] if not line.startswith(" ")]
    return _SAIL_NAME.sub(_named, lines[0]) if lines else type(error).__name__


def _named(found: re.Match[str]) -> str:
    """A name that Sail writes as it keeps it, as Spark writes it."""
    return f"`{'.'.join(_SAIL_PART.findall(found[0]))}`"


def _locate(source: Source, root: Path) -> Path:
    if source.path.startswith(_PACKAGE):
        name, _, rest = source.path.removeprefix(_PACKAGE).partition("/")
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise DependencyError(
                f"source {source.name}", f"the Python package {name}, which holds its file, is not installed",
                remedy=f"install it with: pip install {name}",
            )  # fmt: skip
        path = Path(spec.submodule_search_locations[0]) / rest
    else:
        path = root / source.path
    if not path.exists():
        problem = Problem(f"source {source.name}", f"there is no {path}", "an existing file or folder")
        raise ConfigurationError("definitions.py", [problem], remedy="correct its path or bring the file there")
    return path


def _stage(source: Source, path: Path, staging: Path) -> Path:
    where = f"source {source.name}"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(where, f"{path} cannot be read ({error.strerror})") from error
    digest = hashlib.sha256(content + repr(tuple(source.null_values)).encode()).hexdigest()[:16]
    staged = staging / f"{source.name}-{digest}.parquet"
    if staged.exists():
        return staged
    try:
        if path.suffix.lower() == ".zip":
            content = _only_file(where, path, content)
        stream = pa.input_stream(io.BytesIO(content), compression="gzip" if path.suffix.lower() == ".gz" else None)
        options = pa.csv.ConvertOptions(null_values=list(source.null_values), strings_can_be_null=True)
        table = pa.csv.read_csv(stream, convert_options=options)
        rows = pa.BufferOutputStream()
        pa.parquet.write_table(_without_null_type(table), rows, coerce_timestamps="us")
    except (pa.ArrowException, zipfile.BadZipFile, zlib.error, RuntimeError, OSError, EOFError) as error:
        raise DataError(where, f"{path} cannot be read as CSV ({first_line(error)})", remedy=_REPAIR) from error
    write_atomically(staged, rows.getvalue())
    return staged


def _only_file(where: str, path: Path, content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
        if len(names) != 1:
            found = f"{path} holds {len(names)} files" + (f" ({', '.join(names[:5])})" if names else "")
            raise DataError(where, found, expected="one CSV file", remedy="put each file into a .zip of its own")
        return archive.read(names[0])


def _without_null_type(table: pa.Table) -> pa.Table:
    """A column without any value has no type of its own, which Apache Spark cannot read: text it is."""
    fields = [field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in table.schema]
    return table.cast(pa.schema(fields))


def _require_rows(source: Source, path: Path, file: Path) -> None:
    """Opens `file`; errors name `path`, which it was made from."""
    where = f"source {source.name}"
    try:
        dataset = pa.dataset.dataset(file, format="parquet")
        rows = dataset.count_rows()
    except (pa.ArrowException, OSError) as error:
        raise DataError(where, f"{path} cannot be read as Parquet ({first_line(error)})", remedy=_REPAIR) from error
    if rows == 0:
        raise DataError(where, f"{path} holds no row", remedy="bring the data there before a build")
    fine = [field.name for field in dataset.schema if pa.types.is_timestamp(field.type) and field.type.unit == "ns"]
    if fine:
        raise DataError(
            where, f"{path} holds times in nanoseconds ({', '.join(fine)}), which Spark does not read",
            expected="microseconds", remedy='write it with coerce_timestamps="us", as pyarrow and pandas name it',
        )  # fmt: skip


def _check_times(source: Source, types: dict[str, str]) -> None:
    problems = []
    for role, column in (("timestamp", source.timestamp), ("known", source.known)):
        if column is not None and column not in types:
            problems.append(Problem(f"source {source.name}, {role}", f"no column {column!r}", _columns(types)))
        elif column is not None and types[column] != "timestamp":
            problems.append(Problem(f"source {source.name}, {role}", f"column {column!r} has type {types[column]}",
                                    "timestamp, with a time zone"))  # fmt: skip
    if problems:
        raise ConfigurationError("definitions.py", problems)


def _columns(types: dict[str, str]) -> str:
    return "one of " + ", ".join(types)
