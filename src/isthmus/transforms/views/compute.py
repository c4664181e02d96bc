"""Runs what a declaration declares, and holds the result against it before anyone stores it."""

import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features import clock
from isthmus.features.contract.contract import Column, ViewContract
from isthmus.features.definition import codehash
from isthmus.features.definition.spec import FeatureView, Spine
from isthmus.features.errors import ConfigurationError, DataError, Problem
from isthmus.features.values.columns import ARROW, null_elements, other_sizes
from isthmus.transforms.sources import first_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Frames: TypeAlias = "Mapping[str, DataFrame]"
"""Source name to its DataFrame."""

_CORRECT = "correct it, or what its sources hold; nothing that was being computed was written"
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
    table = pa.concat_tables(stream_view(view, contract, frames))
    _require_unique(f"view {view.name}", table, [*(key.name for key in contract.keys), "event_timestamp", "known_at"])
    return table


def stream_view(
    view: FeatureView, contract: ViewContract, frames: Frames, within: tuple[int, int] | None = None
) -> Iterator[pa.Table]:
    """The rows of a view as the engine hands them out, so that they need not fit into memory together.

    Args:
        view: the declaration.
        contract: its canonical form.
        frames: a DataFrame per source name.
        within: microseconds from which on, and before which, the event of a row must lie; None for all rows, of which
            there must be one.

    Raises:
        ConfigurationError: the result lacks a declared column or has another type; every such column is named.
        DataError: the transform failed, returned no row, or has nulls in keys and times.
    """
    where = f"view {view.name}"
    columns = [*contract.keys, *contract.fields]
    place, frame = _frame(where, view, columns, frames)
    if within is not None:
        event = frame["event_timestamp"]
        # A row without an event time is in no range, and an error in every one.
        frame = frame.where(event.isNull() | (event >= clock.moment(within[0])) & (event < clock.moment(within[1])))
    identity = [*(key.name for key in contract.keys), "event_timestamp", "known_at"]
    nulls = _Nulls(where, identity)
    for table in _batches(place, frame):
        table = _typed(place, table, columns, identity)
        if "known_at" not in table.column_names:
            known = pc.add(table["event_timestamp"], pa.scalar(contract.delay, pa.duration("us")))
            table = table.append_column("known_at", known)
        if nulls.look(table):
            yield table
    nulls.refuse()
    if nulls.rows == 0 and within is None:
        raise _no_row(place)


def compute_spine(spine: Spine, columns: Sequence[Column], frames: Frames) -> pa.Table:
    """The rows of a spine: its keys, request fields and label, `event_timestamp` and `known_at`, in order of time.

    Args:
        spine: the declaration.
        columns: keys, request fields and label.
        frames: a DataFrame per source name.

    Raises:
        ConfigurationError: the result lacks a declared column or has another type; every such column is named.
        DataError: the function failed, returned no row, has null times, or labels that were known before the question.
    """
    table = _compute(f"spine {spine.name}", spine, columns, frames, needs_known=True)
    nulls = _Nulls(f"spine {spine.name}", ["event_timestamp", "known_at"])
    nulls.look(table)
    nulls.refuse()
    _require_later(f"spine {spine.name}", table)
    # Rows of one moment come from the engine in no particular order: all columns decide, so that the order is fixed.
    order = ["event_timestamp", *(name for name in table.column_names if name != "event_timestamp")]
    parts = [part for name in order for part in _sortable(table[name])]
    names = [f"{n}" for n in range(len(parts))]
    by = [(name, "ascending") for name in names]
    return table.take(pc.sort_indices(pa.table(parts, names), by)).combine_chunks()


def _require_later(where: str, table: pa.Table) -> None:
    early = table.filter(pc.less(table["known_at"], table["event_timestamp"]))
    if len(early):
        asked, known = (early[name][0].as_py().isoformat() for name in ("event_timestamp", "known_at"))
        raise DataError(
            where, f"{len(early)} labels that were known before the question, as one of {known}, asked at {asked}",
            expected="known_at at event_timestamp or later: what is known by then may be among the features",
            remedy="ask earlier, or correct known_at",
        )  # fmt: skip


def _sortable(column: pa.ChunkedArray) -> list[pa.ChunkedArray]:
    """A column, or the elements of its arrays, which are of one size: Arrow knows no order of arrays."""
    if not pa.types.is_list(column.type):
        return [column]
    most = pc.max(pc.list_value_length(column)).as_py() or 0
    return [pc.is_null(column), *(pc.list_element(column, place) for place in range(most))]


def _compute(
    where: str,
    declaration: FeatureView | Spine,
    columns: Sequence[Column],
    frames: Frames,
    *,
    needs_known: bool = False,
) -> pa.Table:
    place, frame = _frame(where, declaration, columns, frames, needs_known=needs_known)
    tables = [table for table in _batches(place, frame) if len(table)]
    if not tables:
        raise _no_row(place)
    return _typed(place, pa.concat_tables(tables), columns, ["event_timestamp"])


def _frame(
    where: str,
    declaration: FeatureView | Spine,
    columns: Sequence[Column],
    frames: Frames,
    *,
    needs_known: bool = False,
) -> tuple[str, "DataFrame"]:
    """What the function makes of its sources, held against the declaration; and the place to name in an error."""
    from pyspark.errors import PySparkException
    from pyspark.sql import DataFrame

    function = declaration.function
    assert function is not None  # noqa: S101 - a contract without functions does not compile
    place = f"{where} ({codehash.location(function)})"
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
        return place, frame.select(*(column.name for column in columns), *times)
    except PySparkException as error:
        said = first_line(error)
        raise DataError(place, f"the engine refused it: {said}", expected=_resolvable(said, declaration, frames),
                        remedy=_CORRECT) from error  # fmt: skip


def _resolvable(said: str, declaration: FeatureView | Spine, frames: Frames) -> str:
    """The columns of the sources, where an engine misses one."""
    if not re.search("cannot (be resolved|resolve attribute)", said):
        return ""
    there = (f"{source.name} has {', '.join(frames[source.name].columns)}" for source in declaration.sources)
    return f"columns that there are: {'; '.join(there)}"


def _batches(place: str, frame: "DataFrame") -> Iterator[pa.Table]:
    """The rows as they come from the engine: `toArrow` would hold all of them before the first one is seen."""
    from pyspark.errors import PySparkException

    plan: Any = frame
    client = plan._session.client
    try:
        for found in client.to_table_as_iterator(plan._plan.to_proto(client), plan._plan.observations):
            if isinstance(found, pa.Table):
                yield found
    except PySparkException as error:
        raise DataError(place, f"the engine refused it: {first_line(error)}", remedy=_CORRECT) from error


def _no_row(place: str) -> DataError:
    return DataError(place, "returned no row", expected="at least one", remedy="look at its sources and filters")


def _typed(place: str, table: pa.Table, columns: Sequence[Column], identity: Sequence[str]) -> pa.Table:
    """The rows in the types of the contract.

    Args:
        place: the view or spine and its function, for a message.
        table: rows of the right columns.
        columns: what the contract says of them.
        identity: columns that tell, as far as they are there, which row it is.
    """
    for name in table.column_names:
        if nulls := null_elements(table[name]):
            raise DataError(
                place, f"the arrays of column {name} hold {nulls} nulls", expected="no null in an array",
                remedy="leave them out with array_compact, or make the array null",
            )  # fmt: skip
    for column in columns:
        if column.size is not None and (others := other_sizes(table[column.name], column.size)):
            first = others[0]
            row = ", ".join(f"{name}={table[name][first]}" for name in identity if name in table.column_names)
            found = f"column {column.name} has {len(table[column.name][first])} elements at {row}"
            raise DataError(
                place, found + (f", and another size in {len(others) - 1:,} more rows" if len(others) > 1 else ""),
                expected=f"{column.size} elements, as declared", remedy="make the array null, or leave the row out",
            )  # fmt: skip
    types = {column.name: ARROW[column.dtype.name] for column in columns}
    types |= dict.fromkeys(("event_timestamp", "known_at"), _TIME)
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
        wanted = column.dtype.spark
        if column.name not in types:
            expected = f"one of type {wanted} beside {', '.join(names)}"
            problems.append(Problem(place, f"its result has no column {column.name!r}", expected))
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


class _Nulls:
    """Counts the nulls of columns that must have none, over all batches: the first such column is refused."""

    def __init__(self, where: str, names: Sequence[str]) -> None:
        self.where, self.names, self.rows = where, names, 0
        self.count = dict.fromkeys(names, 0)
        self.first: dict[str, int] = {}

    def look(self, table: pa.Table) -> bool:
        """Takes a batch into account; whether all batches were free of nulls so far."""
        for name in self.names:
            if table[name].null_count:
                self.count[name] += table[name].null_count
                self.first.setdefault(name, self.rows + pc.index(pc.is_null(table[name]), True).as_py())
        self.rows += len(table)
        return not self.first

    def refuse(self) -> None:
        """Raises a DataError if there was one."""
        for name in self.names:
            if self.count[name]:
                raise DataError(
                    self.where,
                    f"column {name} is null in {self.count[name]} of {self.rows} rows, first in row {self.first[name]}",
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
