"""Runs what a declaration declares, and holds the result against it before anyone stores it."""

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features import code
from isthmus.features.columns import ARROW, null_elements
from isthmus.features.contract import Column, ViewContract
from isthmus.features.errors import ConfigurationError, DataError, Problem
from isthmus.features.spec import FeatureView, Spine
from isthmus.features.types import SCALARS, Array
from isthmus.transforms.sources import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Frames: TypeAlias = "Mapping[str, DataFrame]"
"""Source name to its DataFrame."""

SPARK = {
    "Bool": "boolean",
    "Int32": "int",
    "Int64": "bigint",
    "Float32": "float",
    "Float64": "double",
    "UnixTimestamp": "timestamp",
    "String": "string",
    "Bytes": "binary",
}
SPARK |= {Array(scalar).name: f"array<{SPARK[scalar.name]}>" for scalar in SCALARS}
"""What an engine calls each data type."""

_CORRECT = "correct it, or what its sources hold; nothing was written"
_TIME = pa.timestamp("us", tz="UTC")


def compute_view(view: FeatureView, contract: ViewContract, frames: Frames) -> pa.Table:
    """The rows of a view: keys, `event_timestamp`, `known_at` and features, in the types of the contract.

    Args:
        view: the declaration.
        contract: its canonical form.
        frames: a DataFrame per source name.

    Raises:
        ConfigurationError: the result lacks a declared column or has another type; every such column is named.
        DataError: the transform failed, returned no row, or has null or duplicate keys and times.
    """
    table = _compute(f"view {view.name}", view, [*contract.keys, *contract.fields], frames)
    if "known_at" not in table.column_names:
        known = pc.add(table["event_timestamp"], pa.scalar(contract.delay, pa.duration("us")))
        table = table.append_column("known_at", known)
    identity = [*(key.name for key in contract.keys), "event_timestamp", "known_at"]
    _require_values(f"view {view.name}", table, identity)
    _require_unique(f"view {view.name}", table, identity)
    return table


def compute_spine(spine: Spine, columns: Sequence[Column], frames: Frames) -> pa.Table:
    """The rows of a spine: its keys, request fields and label, `event_timestamp` and `known_at`, in order of time.

    Args:
        spine: the declaration.
        columns: keys, request fields and label.
        frames: a DataFrame per source name.

    Raises:
        ConfigurationError: the result lacks a declared column or has another type; every such column is named.
        DataError: the function failed, returned no row, or has null times.
    """
    table = _compute(f"spine {spine.name}", spine, columns, frames, needs_known=True)
    _require_values(f"spine {spine.name}", table, ["event_timestamp", "known_at"])
    # Rows of one moment come from the engine in no particular order: all columns decide, so that the order is fixed.
    order = ["event_timestamp", *(name for name in table.column_names if name != "event_timestamp")]
    return table.sort_by([(name, "ascending") for name in order]).combine_chunks()


def _compute(
    where: str,
    declaration: FeatureView | Spine,
    columns: Sequence[Column],
    frames: Frames,
    *,
    needs_known: bool = False,
) -> pa.Table:
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame

    function = declaration.function
    assert function is not None  # noqa: S101 - a contract without functions does not compile
    place = f"{where} ({code.location(function)})"
    try:
        frame = function(**{source.name: frames[source.name] for source in declaration.sources})
    except Exception as error:  # the user's own code may raise anything
        found = f"its function failed{_line(error, function)} with {type(error).__name__}: {first_line(error)}"
        raise DataError(place, found, remedy=_CORRECT) from error
    if not isinstance(frame, DataFrame):
        problem = Problem(place, f"its function returned {type(frame).__name__}", "a PySpark DataFrame")
        raise ConfigurationError("definitions.py", [problem])
    try:
        frame = _times(declaration, frame)
        _check_schema(place, frame, columns, needs_known=needs_known)
        times = [name for name in ("event_timestamp", "known_at") if name in frame.columns]
        table = frame.select(*(column.name for column in columns), *times).toArrow()
    except PySparkException as error:
        raise DataError(place, f"the engine refused it: {first_line(error)}", remedy=_CORRECT) from error
    if table.num_rows == 0:
        raise DataError(place, "returned no row", expected="at least one", remedy="look at its sources and filters")
    for name in table.column_names:
        if nulls := null_elements(table[name]):
            raise DataError(
                place, f"the arrays of column {name} hold {nulls} nulls", expected="no null in an array",
                remedy="leave them out with array_compact, or make the array null",
            )  # fmt: skip
    types = {column.name: ARROW[column.dtype.name] for column in columns} | dict.fromkeys(times, _TIME)
    return table.cast(pa.schema([(name, types[name]) for name in table.column_names]))


def _times(declaration: FeatureView | Spine, frame: "DataFrame") -> "DataFrame":
    """Gives the time columns of a source their standard names, where the function kept them as they were."""
    for source in declaration.sources:
        for own, standard in ((source.timestamp, "event_timestamp"), (source.known, "known_at")):
            if own is not None and own in frame.columns and standard not in frame.columns:
                frame = frame.withColumnRenamed(own, standard)
    return frame


def _check_schema(place: str, frame: "DataFrame", columns: Sequence[Column], *, needs_known: bool) -> None:
    types = dict(frame.dtypes)
    names = frame.columns
    problems = [
        Problem(place, f"its result has {names.count(name)} columns named {name!r}", "one")
        for name in dict.fromkeys([*(column.name for column in columns), "event_timestamp", "known_at"])
        if names.count(name) > 1
    ]
    for column in columns:
        wanted = SPARK[column.dtype.name]
        if column.name not in types:
            problems.append(Problem(place, f"its result has no column {column.name!r}", f"one of type {wanted}"))
        elif types[column.name] != wanted:
            found = f"its column {column.name!r} has type {types[column.name]}"
            problems.append(Problem(place, found, f"{wanted}, because it is declared as {column.dtype.name}"))
    for name in ("event_timestamp", "known_at"):
        if name not in types:
            if name == "event_timestamp" or needs_known:
                problems.append(Problem(place, f"its result has no column {name!r}", "one of type timestamp"))
        elif types[name] == "timestamp_ntz":
            problems.append(Problem(place, f"its column {name!r} has no time zone (timestamp_ntz)",
                                    "timestamp; convert it with to_utc_timestamp"))  # fmt: skip
        elif types[name] != "timestamp":
            problems.append(Problem(place, f"its column {name!r} has type {types[name]}", "timestamp"))
    if problems:
        raise ConfigurationError("definitions.py", problems)


def _require_values(where: str, table: pa.Table, names: Sequence[str]) -> None:
    for name in names:
        if table[name].null_count:
            row = pc.index(pc.is_null(table[name]), True).as_py()
            raise DataError(
                where, f"column {name} is null in {table[name].null_count} of {len(table)} rows, first in row {row}",
                expected="no null in keys and times", remedy="filter such rows in the transform",
            )  # fmt: skip


def _require_unique(where: str, table: pa.Table, names: Sequence[str]) -> None:
    counted = table.select(names).group_by(names).aggregate([([], "count_all")])
    surplus = len(table) - len(counted)
    if surplus:
        doubled = counted.filter(pc.greater(counted["count_all"], 1)).sort_by([(name, "ascending") for name in names])
        row = ", ".join(f"{name}={doubled[name][0]}" for name in names)
        raise DataError(
            where, f"{surplus} rows have the key and times of another row, first {row}",
            expected="one row per key, event_timestamp and known_at", remedy="aggregate in the transform",
        )  # fmt: skip


def _line(error: BaseException, function: Callable[..., Any]) -> str:
    """In which line of the function's file it failed; nothing if it failed before its first line."""
    file = inspect.unwrap(function).__code__.co_filename
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" in line {lines[-1]}" if lines else ""
