"""Results of views' and spines' functions, computed by an engine and checked against the declarations."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.definition import codehash
from isthmus.features.definition.spec import FeatureView, Spine
from isthmus.features.errors import ConfigurationError, DataError, Problem, did_you_mean, one_of
from isthmus.features.types import Int64
from isthmus.features.values.arrow import ARROW, null_elements, wrong_size_rows
from isthmus.transforms.sources import failing_line, first_line, inside
from isthmus.transforms.tables.missing import explain_missing
from isthmus.transforms.views.tiles import EXACT, aggregated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Frames: TypeAlias = "Mapping[str, DataFrame]"
"""DataFrame by source name."""

_CORRECT = "correct it, or its sources' data; nothing was written"
_EXHAUSTED = re.compile("Resources exhausted|Failed to allocate|Java heap space")
_MEMORY = "raise memory_mb in isthmus.toml, or declare a shorter lookback for the view; nothing was written"
_TIMES = ("event_timestamp", "known_at")
_ROLES = dict(zip(_TIMES, ("timestamp", "known"), strict=True))
"""For each time column, the attribute of a source that names it."""


def stream_view(
    view: FeatureView, contract: ViewContract, frames: Frames, within: tuple[int, int] | None = None
) -> Iterator[pa.Table]:
    """Compute the rows of a view for a build: call its function, run the query, and yield the rows in batches.

    `frames` has a DataFrame per source name. The columns are join keys, features, `event_timestamp` and `known_at`, in
    the types of `contract`. `within` limits the event times to [first, end), in microseconds since 1970 UTC. If it is
    None, a result without rows is an error. After any error, discard the batches that were yielded before.

    Raises ConfigurationError with all missing columns and wrong types. Raises DataError if the function or its query
    fails, or a row is invalid: a null key or time, a null in an array, or an array of wrong size. Raises
    DependencyError if the engine lacks a file or module that this process has.
    """
    place, frame = view_frame(view, contract, frames, within)
    checks = RowChecks(place, contract)
    for batch in _batches(place, frame, _remedy(view, frames)):
        if (table := checks.checked(batch)) is not None:
            yield table
    checks.finish(empty=within is not None)


def view_frame(
    view: FeatureView, contract: ViewContract, frames: Frames, within: tuple[int, int] | None = None
) -> tuple[str, "DataFrame"]:
    """Call a view's function; return the place for messages about its rows, and its result, limited to `within`.

    Raises ConfigurationError or DataError like `stream_view`, but computes no rows.
    """
    place, frame = _frame(f"view {view.name}", view, [*contract.keys, *contract.fields], frames)
    if within is not None:
        # Rows without an event time stay: they are an error in every range.
        frame = frame.where(inside(frame["event_timestamp"], *within))
    return place, frame


def source_rows(view: FeatureView, frames: Frames) -> Counter[int]:
    """Count the source rows of a view by day since 1970-01-01; rows without a time are left out. Raises DataError."""
    from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

    counts: Counter[int] = Counter()
    with _explaining(f"view {view.name}", view, frames):
        for source in view.sources:
            if source.timestamp is not None:
                day = F.unix_date(F.to_date(frames[source.name][source.timestamp])).alias("day")
                rows = frames[source.name].groupBy(day).count().where("day IS NOT NULL").toArrow().to_pydict()
                counts.update(dict(zip(rows["day"], rows["count"], strict=True)))
    return counts


class RowChecks:
    """Checks of a view's computed rows: types, array sizes, and nulls in keys and times.

    Several processes can check parts of the rows: `nulls` has the counts to add up, before `finish` is called.
    """

    def __init__(self, place: str, contract: ViewContract) -> None:
        self._place, self._contract = place, contract
        self._columns = [*contract.keys, *contract.fields]
        self._identity = [*(key.name for key in contract.keys), *_TIMES]
        self.nulls = _Nulls(f"view {contract.name}", self._identity)

    def checked(self, batch: pa.Table) -> pa.Table | None:
        """Return a batch in the declared types, with `known_at`; None once a key or time was null. Raises DataError."""
        table = with_known_at(self._contract, _typed(self._place, batch, self._columns, self._identity))
        return table if self.nulls.count(table) else None

    def finish(self, *, empty: bool) -> None:
        """Raise DataError if a key or time was null, or there are no rows although `empty` is False."""
        self.nulls.refuse()
        if self.nulls.rows == 0 and not empty:
            raise _no_row(self._place)


def with_known_at(contract: ViewContract, rows: pa.Table) -> pa.Table:
    """Add `known_at` to rows that lack it: the event time plus the view's delay."""
    if "known_at" in rows.column_names:
        return rows
    known = pc.add(rows["event_timestamp"], pa.scalar(contract.delay, pa.duration("us")))
    return rows.append_column("known_at", known)


def returns_known(view: FeatureView, contract: ViewContract, frames: Frames) -> bool:
    """Return True if a view's function returns `known_at`, and False if it is `event_timestamp` plus the view's delay.

    Raises the same errors as `stream_view`, but computes no rows.
    """
    if view.tiling is not None:
        return False
    _, frame = _frame(f"view {view.name}", view, [*contract.keys, *contract.fields], frames)
    return "known_at" in frame.columns


def compute_spine(spine: Spine, columns: Sequence[Column], frames: Frames) -> pa.Table:
    """Compute a spine (the training examples): call its function, run the query, and return all rows.

    `columns` are the keys, request fields and label in the contract. The result has them, `event_timestamp` and
    `known_at`. `frames` has a DataFrame per source name. All rows are in memory. Rows are sorted by `event_timestamp`,
    then by the other columns. Keys may be null, but not times.

    Raises ConfigurationError with all missing columns and wrong types. Raises DataError if the function or query fails
    or returns no rows, a row is invalid, or a label was known before `event_timestamp`. Raises DependencyError if the
    engine lacks a file or module that this process has.
    """
    place, frame = _frame(f"spine {spine.name}", spine, columns, frames)
    return sorted_spine(spine.name, place, columns, _batches(place, frame, _remedy(spine, frames)))


def spine_frame(spine: Spine, columns: Sequence[Column], frames: Frames) -> tuple[str, "DataFrame"]:
    """Call a spine's function; return the place for messages about its rows, and its result, as for `view_frame`."""
    return _frame(f"spine {spine.name}", spine, columns, frames)


def sorted_spine(name: str, place: str, columns: Sequence[Column], tables: Iterable[pa.Table]) -> pa.Table:
    """Check all rows of a spine, and sort them; raises the errors of `compute_spine` about rows."""
    where, tables = f"spine {name}", [table for table in tables if len(table)]
    if not tables:
        raise _no_row(place)
    table = _typed(place, pa.concat_tables(tables), columns, ["event_timestamp"])
    nulls = _Nulls(where, _TIMES)
    nulls.count(table)
    nulls.refuse()
    _require_later(where, table)
    # Engines return rows of the same time in any order, so sort by all columns.
    order = ["event_timestamp", *(name for name in table.column_names if name != "event_timestamp")]
    parts = [part for name in order for part in _sortable(table[name])]
    names = [f"{n}" for n in range(len(parts))]
    by = [(name, "ascending") for name in names]
    return table.take(pc.sort_indices(pa.table(parts, names), by)).combine_chunks()


class _WantsRowsError(BaseException):
    """Ends a user's function that makes the engine compute. Not an Exception: `except Exception` must not catch it."""


def analyze(spark: Any, declaration: FeatureView | Spine, columns: Sequence[Column], frames: Frames) -> None:
    """Check the columns that the function of a view or spine returns, for `isthmus apply`, without computing rows.

    `columns` are the expected columns, and `frames` has a DataFrame per source name. If the function itself makes the
    engine compute, for example to count rows, stops it there and does not check its result. No other thread can compute
    with the session `spark` during the call. Raises ConfigurationError with all missing columns and wrong types, and
    DataError if the function fails or the engine rejects the query.
    """
    client = spark.client
    kind = "view" if isinstance(declaration, FeatureView) else "spine"

    computing = False

    def refuse() -> None:
        nonlocal computing
        computing = True
        raise _WantsRowsError

    # Every request to compute starts with this call; requests for names and types do not.
    client._execute_plan_request_with_metadata = refuse
    try:
        _frame(f"{kind} {declaration.name}", declaration, columns, frames)
    except (_WantsRowsError, ConfigurationError, DataError):
        # A bare `except` or a `finally` in the function may have replaced the error.
        if not computing:
            raise
    finally:
        del client._execute_plan_request_with_metadata


def _require_later(where: str, table: pa.Table) -> None:
    early = table.filter(pc.less(table["known_at"], table["event_timestamp"]))
    if len(early):
        event, known = (early[name][0].as_py().isoformat() for name in _TIMES)
        raise DataError(
            where, f"{len(early)} labels were known before event_timestamp, for example at {known}, before {event}",
            expected="known_at at event_timestamp or later: values known earlier may be among the features",
            remedy="correct event_timestamp or known_at",
        )  # fmt: skip


def _sortable(column: pa.ChunkedArray) -> list[pa.ChunkedArray]:
    # Arrow does not sort by arrays: their elements are columns, null beyond the end of an array.
    if not pa.types.is_list(column.type):
        return [column]
    size = pc.max(pc.list_value_length(column)).as_py() or 0
    padded = pc.list_slice(column, 0, size or 1, return_fixed_size_list=True)
    return [pc.is_null(column), *(pc.list_element(padded, place) for place in range(size))]


def _frame(
    where: str, declaration: FeatureView | Spine, columns: Sequence[Column], frames: Frames
) -> tuple[str, "DataFrame"]:
    place, frame = _call(where, declaration, frames)
    with _explaining(place, declaration, frames):
        if isinstance(declaration, FeatureView) and declaration.tiling is not None:
            keys = [column for column in columns if column.name in _join_keys(declaration)]
            events = _events_to_aggregate(place, frame, keys, declaration, frames)
            frame = aggregated(events, [key.name for key in keys], declaration.tiling)
        _check_schema(place, frame, columns, declaration, frames)
        times = [name for name in _TIMES if name in frame.columns]
        return place, frame.select(*(column.name for column in columns), *times)


def _call(where: str, declaration: FeatureView | Spine, frames: Frames) -> tuple[str, "DataFrame"]:
    """Call a user's function. Return where it is, and its result with the standard names of time columns."""
    from pyspark.sql import DataFrame

    function = declaration.function
    assert function is not None  # noqa: S101 - a contract without functions does not compile
    place = f"{where} ({codehash.location(function)})"
    try:
        frame = function(**{source.name: frames[source.name] for source in declaration.sources})
    except Exception as error:  # user code may raise anything
        failure = f"its function failed{failing_line(error, function)} with {type(error).__name__}: "
        message, expected = _explained(first_line(error), declaration, frames)
        raise DataError(place, failure + message, expected=expected, remedy=_remedy(declaration, frames)) from error
    if not isinstance(frame, DataFrame):
        problem = Problem(place, f"its function returned {type(frame).__name__}", "a PySpark DataFrame")
        raise ConfigurationError("definitions.py", [problem])
    with _explaining(place, declaration, frames):
        columns, renamed = frame.columns, dict[str, str]()
        for source in declaration.sources:
            for name, standard in zip((source.timestamp, source.known), _TIMES, strict=True):
                if name in columns and name not in renamed and standard not in (*columns, *renamed.values()):
                    renamed[name] = standard
        return place, frame.withColumnsRenamed(renamed) if renamed else frame


@contextmanager
def _explaining(place: str, declaration: FeatureView | Spine, frames: Frames) -> Iterator[None]:
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        message, expected = _explained(first_line(error), declaration, frames)
        raise DataError(
            place, f"the engine refused it: {message}", expected=expected, remedy=_remedy(declaration, frames)
        ) from error


def _join_keys(view: FeatureView) -> set[str]:
    return {key for entity in view.entities for key in entity.join_keys}


def _events_to_aggregate(
    place: str, frame: "DataFrame", keys: Sequence[Column], view: FeatureView, frames: Frames
) -> "DataFrame":
    """Select the columns that the tiles need from the result of the view's function, and check their types."""
    from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

    assert view.tiling is not None  # noqa: S101 - only such views
    types, numbers = dict(frame.dtypes), [Column(name, Int64) for name in view.tiling.columns]
    known_names = [source.known for source in view.sources if source.known not in (None, source.timestamp)]
    known = "known_at" if known_names or "known_at" in types else "event_timestamp"
    problems = [
        Problem(place, f"its column {name!r} has type {types[name]}",
                "an integer, because sums of other numbers depend on their order",
                "cast it to a whole number of a smaller unit, such as cents or milliseconds")
        for name in view.tiling.summed if types.get(name, "bigint") not in EXACT
    ]  # fmt: skip
    if known_names and known not in types:
        problems.append(Problem(place, f"its result has no column {known_names[0]!r}, when an event became known",
                                f"{known_names[0]} or known_at", "return it"))  # fmt: skip
    if problems:
        raise ConfigurationError("definitions.py", problems)
    # Columns that are missing get the message for a missing feature.
    values = {column.name: F.col(f"`{column.name}`") for column in numbers if column.name in types}
    values |= {name: F.when(values[name].isNotNull(), True) for name in values.keys() - view.tiling.summed}
    frame = frame.withColumns({name: value.cast("bigint") for name, value in values.items()}) if values else frame
    frame = frame if known == "event_timestamp" else frame.drop("event_timestamp").withColumnRenamed(known, _TIMES[0])
    _check_schema(place, frame, [*keys, *numbers], view, frames)
    return frame.select(*(column.name for column in (*keys, *numbers)), frame[_TIMES[0]].alias("known_at"))


def tile_events(view: FeatureView, contract: ViewContract, frames: Frames) -> pa.Table:
    """Compute the events that a view with tiles aggregates: join keys, aggregated columns, and `known_at`.

    Raises the same errors as `stream_view`.
    """
    place, frame = _call(f"view {view.name}", view, frames)
    with _explaining(place, view, frames):
        frame = _events_to_aggregate(place, frame, contract.keys, view, frames)
    nulls = _Nulls(f"view {view.name}", [*(key.name for key in contract.keys), "known_at"])
    tables = [table for table in _batches(place, frame, _remedy(view, frames)) if nulls.count(table)]
    nulls.refuse()
    types = {key.name: ARROW[key.dtype.name] for key in contract.keys} | {"known_at": ARROW["UnixTimestamp"]}
    schema = pa.schema([(name, types.get(name, pa.int64())) for name in frame.columns])
    return pa.concat_tables(tables).cast(schema) if tables else schema.empty_table()


def _remedy(declaration: FeatureView | Spine, frames: Frames) -> str:
    texts = _texts(declaration, frames)
    return f"{_CORRECT}. {texts[0].upper()}{texts[1:]}" if texts else _CORRECT


def _texts(declaration: FeatureView | Spine, frames: Frames) -> str:
    undeclared = [
        f"{name} of {source.name}"
        for source in declaration.sources
        if source.csv
        for name, kind in frames[source.name].dtypes
        if kind == "string" and name not in source.types
    ]
    hint = "a column of a CSV file is text unless types= of its source declares it: "
    return hint + ", ".join(undeclared) if undeclared else ""


def _explained(message: str, declaration: FeatureView | Spine, frames: Frames) -> tuple[str, str]:
    message = message.rstrip(".")
    if not re.search("cannot (be resolved|resolve attribute)|ATTRIBUTE_NOT_SUPPORTED", message):
        return message, ""
    columns = {source.name: frames[source.name].columns for source in declaration.sources}
    unknown = re.search("`([^`]+)`", message)
    message += did_you_mean(unknown[1], chain(*columns.values())) if unknown and "Did you mean" not in message else ""
    listed = "; ".join(f"{name} has {', '.join(names)}" for name, names in columns.items())
    return message, f"an existing column: {listed}"


def _batches(place: str, frame: "DataFrame", remedy: str) -> Iterator[pa.Table]:
    from pyspark.errors import PySparkException

    plan: Any = frame
    client = plan._session.client
    try:
        with explain_missing(place):
            for batch in client.to_table_as_iterator(plan._plan.to_proto(client), plan._plan.observations):
                if isinstance(batch, pa.Table):
                    yield batch
    except PySparkException as error:
        line = first_line(error)
        remedy = _MEMORY if _EXHAUSTED.search(line) else remedy
        raise DataError(place, f"the engine refused it: {line}", remedy=remedy) from error


def _no_row(place: str) -> DataError:
    return DataError(place, "returned no rows", expected="at least one", remedy="check its sources and filters")


def _typed(place: str, table: pa.Table, columns: Sequence[Column], identity: Sequence[str]) -> pa.Table:
    for name in table.column_names:
        if nulls := null_elements(table[name]):
            raise DataError(
                place, f"the arrays of column {name} hold {nulls} nulls", expected="no nulls in an array",
                remedy="remove them with array_compact, or make the array null",
            )  # fmt: skip
    for column in columns:
        if column.size is not None and (misfits := wrong_size_rows(table[column.name], column.size)):
            first = misfits[0]
            row = ", ".join(f"{name}={table[name][first]}" for name in identity if name in table.column_names)
            size = f"column {column.name} has {len(table[column.name][first])} elements at {row}"
            raise DataError(
                place, size + (f", and another size in {len(misfits) - 1:,} more rows" if len(misfits) > 1 else ""),
                expected=f"{column.size} elements, as declared", remedy="make the array null, or drop the row",
            )  # fmt: skip
    types = {column.name: ARROW[column.dtype.name] for column in columns}
    types |= dict.fromkeys(_TIMES, ARROW["UnixTimestamp"])
    return table.cast(pa.schema([(name, types[name]) for name in table.column_names]))


def _check_schema(
    place: str, frame: "DataFrame", columns: Sequence[Column], declaration: FeatureView | Spine, frames: Frames
) -> None:
    types = dict(frame.dtypes)
    names = frame.columns
    problems = [
        Problem(place, f"its result has {names.count(name)} columns named {name!r}", "one")
        for name in dict.fromkeys([*(column.name for column in columns), *_TIMES])
        if names.count(name) > 1
    ]
    undeclared = [name for name in names if name not in {*_TIMES, *(column.name for column in columns)}]
    for column in columns:
        expected = column.dtype.spark
        if column.name not in types:
            missing = f"its result has no column {column.name!r}{did_you_mean(column.name, undeclared)}"
            beside = f"one of type {expected} beside {', '.join(names)}"
            problems.append(Problem(place, missing, beside, "return it, or correct the declaration"))
        elif types[column.name] != expected:
            wrong = f"its column {column.name!r} has type {types[column.name]}"
            because, remedy = (
                f"{expected}, because it is declared as {column.dtype.name}",
                "cast it, or declare its type",
            )
            if types[column.name] == "string" and (texts := _texts(declaration, frames)):
                remedy += f", like types={{{column.name!r}: {column.dtype}}} in a source; {texts}"
            problems.append(Problem(place, wrong, because, remedy))
    for name in _TIMES:
        if name not in types:
            if name == "event_timestamp" or isinstance(declaration, Spine):
                role = _ROLES[name]
                named = dict.fromkeys(time for source in declaration.sources if (time := getattr(source, role)))
                remedy = f"return it, or name the column in the source: {role}="
                if named:
                    remedy = f"return it, or the column that the source names by {role}=: {one_of(named)}"
                problems.append(Problem(place, f"its result has no column {name!r}", "one of type timestamp", remedy))
        elif types[name] != "timestamp":
            zone = "has no time zone (timestamp_ntz)" if types[name] == "timestamp_ntz" else f"has type {types[name]}"
            remedy = "convert it with to_utc_timestamp, a number with timestamp_seconds, _millis or _micros"
            if types[name] == "string" and (texts := _texts(declaration, frames)):
                remedy = f"declare it, like types={{{name!r}: UnixTimestamp}} in a source; {texts}"
            problems.append(Problem(place, f"its column {name!r} {zone}", "timestamp", remedy))
    if problems:
        raise ConfigurationError("definitions.py", problems)


class _Nulls:
    def __init__(self, where: str, names: Sequence[str]) -> None:
        self.where, self.rows = where, 0
        self.nulls = dict.fromkeys(names, 0)
        self.first: dict[str, int] = {}

    def count(self, table: pa.Table) -> bool:
        for name in self.nulls:
            if table[name].null_count:
                self.nulls[name] += table[name].null_count
                self.first.setdefault(name, self.rows + pc.index(pc.is_null(table[name]), True).as_py())
        self.rows += len(table)
        return not self.first

    def refuse(self) -> None:
        for name, count in self.nulls.items():
            if count:
                first = f", first in row {self.first[name]}" if name in self.first else ""
                nulls = f"column {name} is null in {count} of {self.rows} rows{first}"
                remedy = "filter such rows in the transform"
                raise DataError(self.where, nulls, expected="no nulls in keys and times", remedy=remedy)
