"""The point-in-time join: what each view answered at each row's own moment.

A row can be used from `max(event, known)` on. Of the rows of a key, ordered by that moment, keep those that are then
the greatest by (event, known, content): a row that loses when it becomes usable has lost for good. Among the rest, the
answer at time t is the latest one usable at t, which is one ASOF join. `join_naively` says the same without the
shortcut.

DuckDB sees keys, times and content hashes only, and answers with the places of rows: its windows and ASOF joins make
0.0 of -0.0 and one NaN of all NaNs. The values are taken from those places by Arrow, to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from isthmus.features import clock
from isthmus.features.clock import Status
from isthmus.features.columns import ARROW, micros
from isthmus.features.contract import SEPARATOR, STATUS, ViewContract
from isthmus.features.errors import DataError

_LABELS = pa.array([status.label for status in Status])


@dataclass(frozen=True)
class History:
    """The full history of one view, and the version of the table it was read from."""

    view: ViewContract
    data: ds.Dataset | pa.Table
    version: int

    def table(self) -> pa.Table:
        """All rows, in memory."""
        return self.data if isinstance(self.data, pa.Table) else self.data.to_table()

    def rows(self) -> int:
        """Number of rows."""
        return len(self.data) if isinstance(self.data, pa.Table) else int(self.data.count_rows())


def status_column(view: ViewContract) -> str:
    """The column of a training set that says what the view answered."""
    return f"{view.name}{SEPARATOR}{STATUS}"


def point_in_time(spine: pa.Table, histories: Sequence[History], threads: int = 2) -> pa.Table:
    """Joins views to a spine by the time rules.

    Args:
        spine: one row per question, with `event_timestamp` (timestamp with time zone, no nulls) and the join keys.
        histories: the views to join.
        threads: CPU threads.

    Returns:
        The spine's rows, all of them, in order, followed by `<view>__<feature>` columns and a `<view>__status` column
        (present, null, expired, not_found) for each view.

    Raises:
        DataError: the spine lacks a column, a column has another type than the view's key or a value that does not
            fit, or two columns of the result would share a name.
    """
    _check_spine(spine, histories)
    asked = pa.table({"_row": np.arange(len(spine)), "_at": _micros(spine)})
    result = spine
    with connection(threads) as db:
        for history in histories:
            view = history.view
            keys = [_cast(spine, column.name, ARROW[column.dtype.name]) for column in view.keys]
            names = [*asked.column_names, *(column.name for column in view.keys)]
            db.register("asked", pa.table([*asked.columns, *map(_plain, keys)], names))
            rows = history.table()
            db.register("history", _places(view, rows))
            answers = db.sql(_join(view)).to_arrow_table()
            for column in view.fields:
                values = rows[column.name].take(answers["_place"]).cast(ARROW[column.dtype.name])
                result = result.append_column(view.full_name(column.name), values)
            result = result.append_column(status_column(view), _labels(answers["_status"]))
    return result


def latest(history: History, at: int) -> pa.Table:
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


def horizon(history: History, at: int) -> int:
    """The latest known time of all that a view holds at time `at`, in microseconds; the least there is if nothing."""
    rows = history.data if isinstance(history.data, pa.Table) else history.data.to_table(columns=["known_at"])
    known = micros(rows["known_at"])
    return int(known[known <= at].max(initial=-(1 << 63)))


def table_schema(view: ViewContract) -> pa.Schema:
    """The columns of a view's offline table."""
    time = pa.timestamp("us", tz="UTC")
    return pa.schema(
        [pa.field(column.name, ARROW[column.dtype.name], nullable=False) for column in view.keys]
        + [pa.field("event_timestamp", time, nullable=False), pa.field("known_at", time, nullable=False)]
        + [pa.field(column.name, ARROW[column.dtype.name]) for column in view.fields]
        + [pa.field("content_hash", pa.int64(), nullable=False)]
    )


def connection(threads: int = 2) -> duckdb.DuckDBPyConnection:
    """A DuckDB of its own that neither downloads extensions nor takes more than its share."""
    return duckdb.connect(
        config={"threads": threads, "autoinstall_known_extensions": False, "autoload_known_extensions": False}
    )


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


def _join(view: ViewContract) -> str:
    keys = [f'"{column.name}"' for column in view.keys]
    on = " AND ".join(f"asked.{key} = winners.{key}" for key in keys)
    late = "false" if view.ttl is None else f"_at - _event > {view.ttl}"
    return f"""
        WITH usable AS (SELECT *, greatest(_event, _known) AS _since FROM history),
        winners AS (
            SELECT * FROM usable
            QUALIFY (_event, _known, _content) =
                max((_event, _known, _content)) OVER (PARTITION BY {", ".join(keys)} ORDER BY _since))
        SELECT CASE WHEN {late} THEN NULL ELSE _place END AS _place,
               CASE WHEN _event IS NULL THEN {Status.NOT_FOUND:d} WHEN {late} THEN {Status.EXPIRED:d}
                    WHEN _empty THEN {Status.NULL:d} ELSE {Status.PRESENT:d} END AS _status
        FROM asked ASOF LEFT JOIN winners ON {on} AND asked._at >= winners._since
        ORDER BY asked._row"""  # noqa: S608 - names are checked by the contract, ttl is an integer


def _check_spine(spine: pa.Table, histories: Sequence[History]) -> None:
    if "event_timestamp" not in spine.column_names:
        raise DataError("spine", "has no column event_timestamp", remedy="name the moment of each question so")
    if spine.column_names.count("event_timestamp") > 1:
        raise DataError("spine", "has two columns event_timestamp", expected="one")
    time = spine.schema.field("event_timestamp").type
    if not pa.types.is_timestamp(time) or time.tz is None:
        raise DataError("spine, event_timestamp", f"has type {time}", expected="a timestamp with a time zone")
    if spine["event_timestamp"].null_count:
        raise DataError("spine, event_timestamp", f"{spine['event_timestamp'].null_count} nulls", expected="no null")
    taken = list(spine.column_names)
    for history in histories:
        for column in history.view.keys:
            if taken.count(column.name) > 1:
                raise DataError("spine", f"has two columns {column.name}", expected="one")
            if column.name not in spine.column_names:
                raise DataError("spine", f"has no column {column.name}", expected=f"every key of {history.view.name}")
            found, wanted = spine.schema.field(column.name).type, ARROW[column.dtype.name]
            integers = pa.types.is_integer(found) and pa.types.is_integer(wanted)
            texts = pa.types.is_large_string(found) and pa.types.is_string(wanted)
            blobs = pa.types.is_large_binary(found) and pa.types.is_binary(wanted)
            moments = pa.types.is_timestamp(found) and found.tz is not None and pa.types.is_timestamp(wanted)
            if found != wanted and not (integers or texts or blobs or moments):
                raise DataError(f"spine, {column.name}", f"has type {found}", expected=str(wanted))
        added = [*(history.view.full_name(column.name) for column in history.view.fields), status_column(history.view)]
        clash = sorted({*added} & {*taken})
        if clash:
            raise DataError("spine", f"has a column {clash[0]}",
                            expected="no column named like a feature, and each view once")  # fmt: skip
        taken += added


def _micros(spine: pa.Table) -> pa.ChunkedArray:
    return _cast(spine, "event_timestamp", pa.timestamp("us", tz="UTC")).cast(pa.int64())


def _cast(spine: pa.Table, name: str, wanted: pa.DataType) -> pa.ChunkedArray:
    """The column in the type in which the history has it: every value, or an error."""
    try:
        return spine[name].cast(wanted)
    except pa.ArrowInvalid as error:
        raise DataError(f"spine, {name}", f"has a value that does not fit ({error})", expected=str(wanted)) from None


def _labels(codes: pa.ChunkedArray) -> pa.Array:
    return pa.DictionaryArray.from_arrays(codes.cast(pa.int8()).combine_chunks(), _LABELS)


def join_naively(spine: pa.Table, history: History) -> pa.Table:
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
    for key, at in zip(asked, _micros(spine).to_pylist(), strict=True):
        winner, status = clock.as_of(rows.get(key, ()), at, view.ttl)
        winners.append(place[id(winner)] if winner else None)
        statuses.append(int(status))
    for column in view.fields:
        # Values are copied, never rebuilt: a signaling NaN does not survive Python's float.
        values = table[column.name].take(pa.array(winners, pa.int64()))
        spine = spine.append_column(view.full_name(column.name), values)
    return spine.append_column(status_column(view), _labels(pa.chunked_array([statuses], pa.int8())))
