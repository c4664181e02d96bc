"""The point-in-time join: what each view answered at each row's own moment.

`asof` finds the places of the rows that answer, from keys and times alone; content hashes are read only where two rows
have the same key and times, which the offline store's own tables do not hold. The values are taken from those places by
Arrow, to the bit. `join_naively` says the same without any of it.

`latest` asks DuckDB, which sees keys, times and content hashes only: its windows make 0.0 of -0.0 and one NaN of all
NaNs.
"""

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

from isthmus.features import clock
from isthmus.features.clock import Status
from isthmus.features.contract.contract import ViewContract
from isthmus.features.offline.history import ViewHistory, connection, status_column, table_schema
from isthmus.features.offline.scan import Scan, in_lots
from isthmus.features.pointintime.asof import Integers, Questions
from isthmus.features.pointintime.questions import cast, check, moments
from isthmus.features.values.columns import ARROW, micros

PASS = 1 << 20
"""Rows of a spine for which each history is read once."""

BATCH = 1 << 16
"""Rows of a batch of the result; the last one of a pass may have fewer."""

_LABELS = pa.array([status.label for status in Status])
_LABEL = pa.dictionary(pa.int8(), pa.string())
_EARLIEST, _LATEST = -(1 << 63), (1 << 63) - 1


def point_in_time(spine: pa.Table, histories: Sequence[ViewHistory], threads: int = 2) -> pa.Table:
    """Joins views to a spine by the time rules.

    Args:
        spine: one row per question, with `event_timestamp` (timestamp with time zone, no nulls) and the join keys. A
            null key is no key of any row: the view finds nothing.
        histories: the views to join.
        threads: CPU threads.

    Returns:
        The spine's rows, all of them, in order, followed by `<view>__<feature>` columns and a `<view>__status` column
        (present, null, expired, not_found) for each view.

    Raises:
        DataError: the spine lacks a column, a column has another type than the view's key or a value that does not
            fit, or two columns of the result would share a name.
    """
    join = Join(spine.schema, histories, threads=threads)
    return pa.Table.from_batches(join.batches(spine.to_batches()), join.schema)


class Join:
    """The point-in-time join of a spine that comes, and goes, in batches.

    Both sides stream. In memory are `rows` rows of the spine with the distinct rows that answer them, and a block of
    each history that is being read: of `threads` views at once. Of a history's values only those are read that stand in
    a row group with an answer.

    Args:
        spine: the columns of the spine.
        histories: the views to join.
        features: of each view, the names of its features that are wanted, in order; by default all of every view.
        status: whether to say what each view answered. Without, rows older than any question can use are not read.
        threads: CPU threads, and views that are asked at once.
        rows: rows of the spine for which each history is read once.
        reading: entered with the name of a view's table while its history is read, to say what is wrong with it; for
            several views at once.

    Attributes:
        schema: the columns of the result.

    Raises:
        DataError: the spine lacks a column, a column has another type than the view's key, or two columns of the result
            would share a name.
    """

    def __init__(
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
        self._parts = [_Part(history, features[history.view.name] if features else None, status=status, threads=threads)
                       for history in histories]  # fmt: skip
        check(spine, [(part.view, [field.name for field in part.added]) for part in self._parts])
        self.schema = reduce(
            lambda schema, field: schema.append(field), [f for p in self._parts for f in p.added], spine
        )

    def batches(self, spine: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Joins batches of any sizes, none included. The sizes of the result's do not depend on them.

        Raises:
            DataError: a row has no time, or a value that does not fit its type; the row is named.
        """
        first = 0
        for rows in in_lots(spine, self._rows):
            yield from self._joined(rows, first)
            first += len(rows)

    def questions(self, spine: pa.Table, first: int) -> pa.Table:
        """The join keys and `event_timestamp` of some rows, in the types of the histories, to be joined elsewhere.

        Args:
            spine: the rows.
            first: the number of the first one, for messages.

        Raises:
            DataError: as `batches`.
        """
        columns: dict[str, pa.ChunkedArray | pa.Array] = {
            "event_timestamp": pa.array(moments(spine, first)).cast(pa.timestamp("us", tz="UTC"))
        }
        for part in self._parts:
            for column, keys in zip(part.view.keys, part.keys(spine, first), strict=True):
                columns.setdefault(column.name, keys)
        return pa.table(columns)

    def answered(self, spine: pa.RecordBatch, found: pa.Table) -> pa.RecordBatch:
        """A batch of the result: rows of the spine, and beside them the columns that were added, however found."""
        columns = list(spine.columns)
        for field in list(self.schema)[len(columns) :]:
            column = found[field.name]
            if field.type == _LABEL:
                column = _labels(_whole(pc.index_in(column, _LABELS)).cast(pa.int8()))
            columns.append(_whole(column.cast(field.type)))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _joined(self, spine: pa.Table, first: int) -> Iterator[pa.RecordBatch]:
        at = moments(spine, first)

        def ask(part: _Part) -> _Answers:
            keys = part.keys(spine, first)
            with self._reading(part.view.table):
                return part.answers(keys, at)

        with ThreadPoolExecutor(self._threads) as pool:
            answers = list(pool.map(ask, self._parts))
        for start in range(0, len(spine), BATCH):
            columns = [_whole(column) for column in spine.slice(start, BATCH).columns]
            for answer in answers:
                columns += answer.columns(slice(start, start + BATCH))
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


class _Part:
    """One view of a join."""

    def __init__(self, history: ViewHistory, features: Sequence[str] | None, *, status: bool, threads: int) -> None:
        self.view = view = history.view
        self._history, self._status, self._threads = history, status, threads
        named = {column.name: column for column in view.fields}
        self._fields = [named[name] for name in (named if features is None else features)]
        self.added = [pa.field(view.full_name(column.name), ARROW[column.dtype.name]) for column in self._fields]
        if status:
            self.added.append(pa.field(status_column(view), _LABEL))

    def keys(self, spine: pa.Table, first: int) -> list[pa.ChunkedArray]:
        return [cast(spine, column.name, ARROW[column.dtype.name], first) for column in self.view.keys]

    def answers(self, keys: Sequence[pa.ChunkedArray], at: Integers) -> "_Answers":
        view = self.view
        scan = self._scan(at)
        places, events = self._places(scan, keys, at)
        # Ages are counted without a sign: from the first moment to the last there are more than int64 has.
        old = np.zeros(len(at), bool) if view.ttl is None else (at.view(np.uint64) - events.view(np.uint64)) > view.ttl
        valid = (places >= 0) & ~old
        needed, own = np.unique(places[valid], return_inverse=True)
        read = view.fields if self._status else self._fields
        rows = scan.rows(needed, [column.name for column in read])
        taken = np.full(len(at), -1)
        taken[valid] = own
        codes = None
        if self._status:
            empty = reduce(pc.and_, [rows[column.name].is_null() for column in read]).to_numpy()
            codes = np.where(places < 0, np.int8(Status.NOT_FOUND), np.int8(Status.EXPIRED))
            codes[valid] = np.where(empty, np.int8(Status.NULL), np.int8(Status.PRESENT))[own]
        values = [rows[column.name].cast(ARROW[column.dtype.name]) for column in self._fields]
        return _Answers([_whole(column) for column in values], taken, codes)

    def _places(self, scan: Scan, keys: Sequence[pa.ChunkedArray], at: Integers) -> tuple[Integers, Integers]:
        questions = Questions(keys, at, lambda places: scan.rows(places, ["content_hash"])["content_hash"].to_numpy())
        names = [column.name for column in self.view.keys]
        for first, rows in scan.blocks([*names, "event_timestamp", "known_at"]):
            event, known = micros(rows["event_timestamp"]), micros(rows["known_at"])
            questions.offer([rows[name] for name in names], event, known, first)
        return questions.answers()

    def _scan(self, at: Integers) -> Scan:
        """The rows that can answer at these moments."""
        last = _time(int(at.max(initial=_EARLIEST)))
        condition = (ds.field("event_timestamp") <= last) & (ds.field("known_at") <= last)
        if not self._status and self.view.ttl is not None:
            # Statistics of a table may be cut to milliseconds.
            oldest = int(at.min(initial=_LATEST)) - self.view.ttl - 1000
            condition &= ds.field("event_timestamp") >= _time(max(oldest, _EARLIEST))
        texts = [column.name for column in self.view.keys if column.dtype.name in ("String", "Bytes")]
        return Scan(self._history.data, texts, condition, self._threads)


@dataclass(frozen=True)
class _Answers:
    """What a view answered to some rows of a spine: distinct rows of it, and which of them is whose."""

    values: Sequence[pa.Array]
    rows: Integers
    codes: "np.ndarray[Any, np.dtype[np.int8]] | None"

    def columns(self, part: slice) -> list[pa.Array]:
        rows = self.rows[part]
        taken = pa.array(rows, mask=rows < 0)
        columns = [_whole(column.take(taken)) for column in self.values]
        if self.codes is not None:
            columns.append(_labels(self.codes[part]))
        return columns


def latest(history: ViewHistory, at: int) -> pa.Table:
    """The row that each key of a view answers with at time `at`, expired ones included, ordered by key.

    Returns:
        The columns of the table: keys, `event_timestamp`, `known_at`, features, `content_hash`.
    """
    view = history.view
    keys = ", ".join(f'"{column.name}"' for column in view.keys)
    query = f"""
        SELECT _place FROM history
        WHERE _event <= {at} AND _known <= {at}
        QUALIFY row_number() OVER (PARTITION BY {keys} ORDER BY _event DESC, _known DESC, _content DESC) = 1
        ORDER BY {keys}"""  # noqa: S608 - names are checked by the contract, `at` is an integer
    rows = history.table().select(table_schema(view).names)
    with connection() as db:
        db.register("history", _places(view, rows))
        places = db.sql(query).to_arrow_table()["_place"]
    return rows.take(places).cast(table_schema(view))


def horizon(history: ViewHistory, at: int) -> int:
    """The latest known time of all that a view holds at time `at`, in microseconds; the least there is if nothing."""
    rows = history.data if isinstance(history.data, pa.Table) else history.data.to_table(columns=["known_at"])
    known = micros(rows["known_at"])
    return int(known[known <= at].max(initial=-(1 << 63)))


def _places(view: ViewContract, rows: pa.Table) -> pa.Table:
    """What decides which row wins, by key, and where the row is.

    No declared name begins with an underscore: what is added cannot clash with a key.
    """
    columns = {column.name: _plain(rows[column.name]) for column in view.keys}
    columns["_event"] = _plain(rows["event_timestamp"])
    columns["_known"] = _plain(rows["known_at"])
    columns["_content"] = rows["content_hash"]
    columns["_empty"] = reduce(pc.and_, [rows[column.name].is_null() for column in view.fields])
    columns["_place"] = pa.array(np.arange(len(rows)))
    return pa.table(columns)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Times as whole numbers, bytes as text in the same order, everything else as it is.

    To DuckDB, the greatest and the least times are infinite, and its ASOF joins (2.0) lose rows by a key of bytes that
    has another key before it.
    """
    if pa.types.is_binary(column.type):
        return pa.chunked_array([[None if value is None else value.hex() for value in column.to_pylist()]], pa.string())
    return column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column


def _time(at: int) -> pa.Scalar:
    return pa.scalar(at, pa.int64()).cast(pa.timestamp("us", tz="UTC"))


def _whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column in one piece; if it is too large for that, still in several."""
    return column if isinstance(column, pa.Array) else column.combine_chunks()


def _labels(codes: "np.ndarray[Any, np.dtype[np.int8]]") -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(codes), _LABELS)


def join_naively(spine: pa.Table, history: ViewHistory) -> pa.Table:
    """One view joined to a spine row by row, as the time rule reads: the oracle of `point_in_time`."""
    view = history.view
    table = history.table()
    rows: dict[tuple[object, ...], list[clock.Row]] = {}
    place: dict[int, int] = {}
    times = [table[name].cast(pa.int64()).to_pylist() for name in ("event_timestamp", "known_at")]
    features = [table[column.name].to_pylist() for column in view.fields]
    keys = [table[column.name].to_pylist() for column in view.keys]
    for n, content in enumerate(table["content_hash"].to_pylist()):
        values = tuple(column[n] for column in features)
        row = clock.Row(times[0][n], times[1][n], content, values)
        rows.setdefault(tuple(key[n] for key in keys), []).append(row)
        place[id(row)] = n
    winners, statuses = [], []
    asked = zip(*(spine[column.name].to_pylist() for column in view.keys), strict=True)
    for key, at in zip(asked, moments(spine, 0).tolist(), strict=True):
        winner, status = clock.as_of(rows.get(key, ()), at, view.ttl)
        winners.append(place[id(winner)] if winner else None)
        statuses.append(int(status))
    for column in view.fields:
        # Values are copied, never rebuilt: a signaling NaN does not survive Python's float.
        values = table[column.name].take(pa.array(winners, pa.int64()))
        spine = spine.append_column(view.full_name(column.name), values)
    return spine.append_column(status_column(view), _labels(np.array(statuses, np.int8)))
