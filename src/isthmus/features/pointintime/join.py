"""The point-in-time join of a spine: for each row, the values of each view that were valid at the row's own time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.features.clock import Status
from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DataError
from isthmus.features.offline.history import ViewHistory, status_column
from isthmus.features.offline.scan import Scan, rebatch
from isthmus.features.pointintime.asof import AsOfQueries
from isthmus.features.values.arrow import ARROW, micros
from isthmus.features.values.columns import Ints

PASS = 1 << 20
"""Spine rows per pass over the histories."""

BATCH = 1 << 16
"""Rows of a result batch; the last batch of a pass may have fewer."""

_LABELS = pa.array([status.label for status in Status if status != Status.DAMAGED])
_LABEL = pa.dictionary(pa.int8(), pa.string())
_TIME = ARROW["UnixTimestamp"]
_EARLIEST, _LATEST = -(1 << 63), (1 << 63) - 1


def point_in_time(spine: pa.Table, histories: Sequence[ViewHistory], threads: int = 2) -> pa.Table:
    """Add to each spine row (training example) the values that each view had at the row's `event_timestamp`.

    `histories` are the views' tables, from `OfflineStore.history`. Return all rows in order, with the columns
    `<view>__<feature>` and `<view>__status`: present, null, expired or not_found. A null key matches no row. `threads`
    is the number of CPU threads. All rows are in memory; use `Join` for streams. Raises DataError if the spine cannot
    be joined to the tables, or a value does not fit its type.
    """
    join = Join(spine.schema, histories, threads=threads)
    return pa.Table.from_batches(join.batches(spine.to_batches()), join.schema)


class Join:
    """Adds the values that views had at each row's time to a stream of spine rows (training examples).

    One block of each of `threads` histories is in memory at a time. Raises DataError if the spine lacks a column, a
    column has another type than the view's key, or names would collide.

    Args:
        features: names of the features to join, in order, by view name; None for all features of all views.
        status: add a status column per view. Without it, rows too old for all spine rows are not read.
        threads: number of CPU threads, and of views joined at once.
        rows: spine rows per pass over the histories; all of them are in memory.
        reading: context for reading the table of that name, entered for several views at once.

    Attributes:
        schema: columns of the result.
    """

    def __init__(  # noqa: PLR0913 - options of a join, by name
        self,
        spine: pa.Schema,
        histories: Sequence[ViewHistory],
        *,
        features: Mapping[str, Sequence[str]] | None = None,
        status: bool = True,
        threads: int = 2,
        rows: int = PASS,
        reading: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._rows, self._reading, self._threads = rows, reading, threads
        self._views = [_ViewJoin(history, features[history.view.name] if features else None, status, threads)
                       for history in histories]  # fmt: skip
        check(spine, [(join.view, [field.name for field in join.added]) for join in self._views])
        added = [field for join in self._views for field in join.added]
        self.schema = pa.schema([*spine, *added], metadata=spine.metadata)

    def batches(self, spine: Iterable[pa.RecordBatch], first: int = 0) -> Iterator[pa.RecordBatch]:
        for rows in rebatch(spine, self._rows):
            yield from self._joined(rows, first)
            first += len(rows)

    def _joined(self, spine: pa.Table, first: int) -> Iterator[pa.RecordBatch]:
        at = moments(spine, first)

        def answer(join: _ViewJoin) -> _Answers:
            keys = join.keys(spine, first)
            with self._reading(join.view.table):
                return join.answers(keys, at)

        with ThreadPoolExecutor(self._threads) as pool:
            answers = list(pool.map(answer, self._views))
        for start in range(0, len(spine), BATCH):
            columns = [_combined(column) for column in spine.slice(start, BATCH).columns]
            for view_answers in answers:
                columns += view_answers.columns(slice(start, start + BATCH))
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


class _ViewJoin:
    def __init__(self, history: ViewHistory, features: Sequence[str] | None, status: bool, threads: int) -> None:
        self.view = view = history.view
        self._history, self._status, self._threads = history, status, threads
        by_name = {column.name: column for column in view.fields}
        self._fields = [by_name[name] for name in (by_name if features is None else features)]
        self.added = [pa.field(view.full_name(column.name), ARROW[column.dtype.name]) for column in self._fields]
        if status:
            self.added.append(pa.field(status_column(view), _LABEL))

    def keys(self, spine: pa.Table, first: int) -> list[pa.ChunkedArray]:
        return [cast(spine, column.name, ARROW[column.dtype.name], first) for column in self.view.keys]

    def answers(self, keys: Sequence[pa.ChunkedArray], at: Ints) -> "_Answers":
        view = self.view
        scan = self._scan(at)
        places, events = self._places(scan, keys, at)
        # Unsigned ages: the difference between the first moment and the last overflows int64.
        old = np.zeros(len(at), bool) if view.ttl is None else (at.view(np.uint64) - events.view(np.uint64)) > view.ttl
        valid = (places >= 0) & ~old
        distinct, inverse = np.unique(places[valid], return_inverse=True)
        read = view.fields if self._status else self._fields
        rows = scan.rows(distinct, [column.name for column in read])
        row_of = np.full(len(at), -1)
        row_of[valid] = inverse
        codes = None
        if self._status:
            empty = reduce(pc.and_, [rows[column.name].is_null() for column in read]).to_numpy()
            codes = np.where(places < 0, np.int8(Status.NOT_FOUND), np.int8(Status.EXPIRED))
            codes[valid] = np.where(empty, np.int8(Status.NULL), np.int8(Status.PRESENT))[inverse]
        values = [rows[column.name].cast(ARROW[column.dtype.name]) for column in self._fields]
        return _Answers([_combined(column) for column in values], row_of, codes)

    def _places(self, scan: Scan, keys: Sequence[pa.ChunkedArray], at: Ints) -> tuple[Ints, Ints]:
        # Content hashes are read only for rows with equal key and times, which offline tables never hold.
        queries = AsOfQueries(keys, at, lambda places: scan.rows(places, ["content_hash"])["content_hash"].to_numpy())
        names = [column.name for column in self.view.keys]
        for first, rows in scan.blocks([*names, "event_timestamp", "known_at"]):
            event, known = micros(rows["event_timestamp"]), micros(rows["known_at"])
            queries.offer([rows[name] for name in names], event, known, first)
        return queries.answers()

    def _scan(self, at: Ints) -> Scan:
        last = pa.scalar(int(at.max(initial=_EARLIEST)), _TIME)
        condition = (ds.field("event_timestamp") <= last) & (ds.field("known_at") <= last)
        if not self._status and self.view.ttl is not None:
            # Statistics of a table may be truncated to milliseconds.
            oldest = int(at.min(initial=_LATEST)) - self.view.ttl - 1000
            condition &= ds.field("event_timestamp") >= pa.scalar(max(oldest, _EARLIEST), _TIME)
        texts = [column.name for column in self.view.keys if column.dtype.name in ("String", "Bytes")]
        return Scan(self._history.data, texts, condition, self._threads)


@dataclass(frozen=True)
class _Answers:
    """The distinct matching rows of a view, and the index into them for each spine row, or -1."""

    values: Sequence[pa.Array]
    rows: Ints
    codes: "np.ndarray[Any, np.dtype[np.int8]] | None"

    def columns(self, part: slice) -> list[pa.Array]:
        rows = self.rows[part]
        indices = pa.array(rows, mask=rows < 0)
        columns = [_combined(column.take(indices)) for column in self.values]
        if self.codes is not None:
            columns.append(_labels(self.codes[part]))
        return columns


def _combined(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column if isinstance(column, pa.Array) else column.combine_chunks()


def _labels(codes: "np.ndarray[Any, np.dtype[np.int8]]") -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(codes), _LABELS)


def apply_ttl(
    view: ViewContract, requested_at: pa.ChunkedArray, event: pa.ChunkedArray, present: pa.ChunkedArray,
    rows: pa.Table | Mapping[str, pa.ChunkedArray],
) -> dict[str, pa.ChunkedArray]:  # fmt: skip
    """Set features that are older than the view's ttl to null, after a join that ignored the ttl.

    Return features and status (present, null, expired or not_found) by column name.

    Args:
        view: definition of the view, with its ttl.
        requested_at: time at which each row was requested.
        event: event time of each row that was found.
        present: True where a row was found.
        rows: features of these rows, by full name `<view>__<feature>`.
    """
    at = requested_at.cast(_TIME).cast(pa.int64())
    age = pc.subtract(at, pc.fill_null(event.cast(pa.int64()), 0))
    expired = pc.and_(present, pc.greater(age, view.ttl) if view.ttl is not None else False)
    valid = pc.and_(present, pc.invert(expired))
    columns, empty = {}, valid
    for column in view.fields:
        name = view.full_name(column.name)
        columns[name] = pc.if_else(valid, rows[name], pa.scalar(None, ARROW[column.dtype.name]))
        empty = pc.and_(empty, rows[name].is_null())
    status = pc.case_when(
        pc.make_struct(empty, valid, expired),
        Status.NULL.label,
        Status.PRESENT.label,
        Status.EXPIRED.label,
        Status.NOT_FOUND.label,
    )
    columns[status_column(view)] = pc.cast(status, pa.string())
    return columns


def check(spine: pa.Schema, parts: Sequence[tuple[ViewContract, Sequence[str]]]) -> None:
    """Raise DataError unless a spine (table of training examples) with this schema can be joined to views.

    The spine must have `event_timestamp` and all join keys, in fitting types, and none of the columns that the join
    adds. `parts` has pairs of a view and the names of the columns that the join adds for it.
    """
    if "event_timestamp" not in spine.names:
        raise DataError("spine", "has no column event_timestamp", remedy="give each row's time this name")
    if spine.names.count("event_timestamp") > 1:
        raise DataError("spine", "has two columns event_timestamp", expected="one")
    time = spine.field("event_timestamp").type
    if not pa.types.is_timestamp(time) or time.tz is None:
        raise DataError("spine, event_timestamp", f"has type {time}", expected="a timestamp with a time zone",
                        remedy="add a time zone; in pandas, pandas.to_datetime(times, utc=True)")  # fmt: skip
    names = list(spine.names)
    for view, added in parts:
        for column in view.keys:
            if names.count(column.name) > 1:
                raise DataError("spine", f"has two columns {column.name}", expected="one")
            if column.name not in spine.names:
                raise DataError("spine", f"has no column {column.name}", expected=f"every key of {view.name}")
            actual, expected = spine.field(column.name).type, ARROW[column.dtype.name]
            if not _fits(actual.value_type if pa.types.is_dictionary(actual) else actual, expected):
                raise DataError(f"spine, {column.name}", f"has type {actual}", expected=str(expected),
                                remedy=f"cast it to {expected}")  # fmt: skip
        if clash := sorted({*added} & {*names}):
            raise DataError("spine", f"has a column {clash[0]}",
                            expected="column names that differ from features, and each view once")  # fmt: skip
        names += added


def _fits(actual: pa.DataType, expected: pa.DataType) -> bool:
    integers = pa.types.is_integer(actual) and pa.types.is_integer(expected)
    texts = pa.types.is_string(expected) and (pa.types.is_large_string(actual) or pa.types.is_string_view(actual))
    blobs = pa.types.is_binary(expected) and (pa.types.is_large_binary(actual) or pa.types.is_binary_view(actual))
    times = pa.types.is_timestamp(actual) and actual.tz is not None and pa.types.is_timestamp(expected)
    # A column of nulls has no type; its rows match nothing.
    return bool(actual == expected or pa.types.is_null(actual) or integers or texts or blobs or times)


def moments(spine: pa.Table, first: int) -> Ints:
    times = spine["event_timestamp"]
    if times.null_count:
        row = first + pc.index(times.is_null(), True).as_py()
        raise DataError("spine, event_timestamp", f"is null in row {row}", expected="no nulls")
    return micros(cast(spine, "event_timestamp", pa.timestamp("us", tz="UTC"), first))


def cast(spine: pa.Table, name: str, expected: pa.DataType, first: int) -> pa.ChunkedArray:
    column = spine[name]
    try:
        return column.cast(expected)
    except pa.ArrowInvalid as error:
        row = first + _misfit(column, expected)
        raise DataError(f"spine, {name}", f"has a value in row {row} that does not fit ({error})",
                        expected=str(expected)) from None  # fmt: skip


def _misfit(column: pa.ChunkedArray, expected: pa.DataType) -> int:
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            column.slice(low, middle - low).cast(expected)
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low
