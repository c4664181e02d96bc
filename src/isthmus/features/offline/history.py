"""The history of a view: all rows of its offline table, their schema, and the latest row of each key at one time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from isthmus.features.clock import moment
from isthmus.features.contract.schema import SEPARATOR, STATUS, ViewContract
from isthmus.features.days import FIRST
from isthmus.features.errors import DataError
from isthmus.features.offline.commits import Commit
from isthmus.features.values.arrow import ARROW, micros
from isthmus.features.values.columns import Ints, Mask

if TYPE_CHECKING:
    import duckdb
    import pyarrow.dataset as ds

_NO_COMMIT = Commit("", None)
Places = Ints


@dataclass(frozen=True)
class ViewHistory:
    """The rows of a view at a version of its table.

    `since` is the time from which a replay of served values is complete, in microseconds since 1970 UTC.
    """

    view: ViewContract
    data: "ds.Dataset | pa.Table"
    version: int
    commit: Commit = _NO_COMMIT
    since: int = FIRST

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rows, to notice that a table changed; empty if unknown.

        Use it instead of `version`, which restarts at 0 when a table is built anew.
        """
        return self.commit.fingerprint

    def require_since(self, times: Ints) -> None:
        """Raise DataError if one of these times, in microseconds since 1970 UTC, is before `since`."""
        if early := int(np.count_nonzero(times < self.since)):
            raise DataError(
                f"offline table of {self.view.table}",
                f"what was served before {moment(self.since):%Y-%m-%d %H:%M} UTC is not known any more, and {early:,} "
                f"of {len(times):,} times are earlier: their versions were removed",
                remedy="leave these times out, and raise `keep_days` in [stores] to keep versions longer",
            )  # fmt: skip

    @property
    def files(self) -> list[str]:
        """Paths of the Parquet files in the folder of the view's table."""
        data: Any = self.data
        return list(data.files)

    def table(self, columns: list[str] | None = None) -> pa.Table:
        if isinstance(self.data, pa.Table):
            return self.data if columns is None else self.data.select(columns)
        return self.data.to_table(columns=columns)

    def rows(self) -> int:
        return len(self.data) if isinstance(self.data, pa.Table) else int(self.data.count_rows())


def status_column(view: ViewContract) -> str:
    return f"{view.name}{SEPARATOR}{STATUS}"


def table_schema(view: ViewContract) -> pa.Schema:
    time = pa.timestamp("us", tz="UTC")
    return pa.schema(
        [pa.field(column.name, ARROW[column.dtype.name], nullable=False) for column in view.keys]
        + [pa.field("event_timestamp", time, nullable=False), pa.field("known_at", time, nullable=False)]
        + [pa.field(column.name, ARROW[column.dtype.name]) for column in view.fields]
        + [pa.field("content_hash", pa.int64(), nullable=False)]
    )


def connection(threads: int = 2) -> "duckdb.DuckDBPyConnection":
    import duckdb

    return duckdb.connect(
        config={"threads": threads, "autoinstall_known_extensions": False, "autoload_known_extensions": False}
    )


@dataclass(frozen=True)
class LatestRows:
    """The latest row of each key at the time `at`, including expired rows. Times are in microseconds since 1970 UTC.

    `place` has row numbers in the history, ascending. `horizon` is the latest known time up to `at`, or -2**63.
    """

    history: ViewHistory
    at: int
    keys: pa.Table
    event: Ints
    known: Ints
    content: Ints
    place: Places
    horizon: int

    @classmethod
    def of(cls, history: ViewHistory, at: int) -> "LatestRows":
        keys = [column.name for column in history.view.keys]
        rows = history.table([*keys, "event_timestamp", "known_at", "content_hash"])
        event, known = micros(rows["event_timestamp"]), micros(rows["known_at"])
        place = np.flatnonzero((known <= at) & (event <= at))
        visible = rows.select(keys).take(place)
        # No declared name begins with an underscore, so these cannot clash with a key.
        parts = {"_event": event[place], "_known": known[place], "_content": rows["content_hash"].to_numpy()[place]}
        with connection() as db:
            columns = [*visible.columns, *map(pa.array, parts.values()), pa.array(np.arange(len(place)))]
            db.register("history", pa.table(columns, [*keys, *parts, "_row"]))
            listed = ", ".join(f'"{name}"' for name in keys)
            winners = db.sql(
                f"SELECT arg_max(_row, (_event, _known, _content)) AS _row FROM history GROUP BY {listed}"  # noqa: S608 - names are checked by the contract
            ).to_arrow_table()["_row"]
        row = np.sort(winners.to_numpy())
        event, known_then, content = (part[row] for part in parts.values())
        return cls(history, at, visible.take(row), event, known_then, content, place[row], _until(known, at))

    def equal_rows(self, places: Places, later: "LatestRows", *, times: bool = True) -> Mask:
        """Find unchanged rows: True for each row of `later` that equals the row with the same key in `self`.

        `places` comes from `index_of_keys`. For each row of `later`, it has the index in `self` of the row with the
        same key, or -1 for a missing key, which gives False. With `times=False`, only the content hashes are compared,
        and not the times.
        """
        same: Mask = places >= 0
        old = np.maximum(places, 0)
        if len(self.content):
            same &= self.content[old] == later.content
            if times:
                same &= (self.event[old] == later.event) & (self.known[old] == later.known)
        return same

    def rows(self, selection: Places) -> Iterator[pa.Table]:
        """Read the latest rows of some keys from the history, and yield them as tables, one part after the other.

        `selection` has the indexes of these keys in `self.keys`, ascending.
        """
        schema, places, data = table_schema(self.history.view), self.place[selection], self.history.data
        if isinstance(data, pa.Table):
            yield data.select(schema.names).take(places).cast(schema)
            return
        start = 0
        for fragment in data.get_fragments():
            end = start + fragment.count_rows()
            if len(_within(places, start, end)):
                for batch in fragment.to_batches(schema=data.schema, columns=schema.names):
                    inside = _within(places, start, start + len(batch))
                    if len(inside):
                        yield pa.Table.from_batches([batch]).take(inside - start).cast(schema)
                    start += len(batch)
            start = end


def latest_known_time(history: ViewHistory, at: int) -> int:
    """Return the latest known time in a history that is not after `at`, or -2**63 if the history has none.

    Both times are in microseconds since 1970 UTC.
    """
    return _until(micros(history.table(["known_at"])["known_at"]), at)


def _until(known: Ints, at: int) -> int:
    return int(known[known <= at].max(initial=-(1 << 63)))


def index_of_keys(left: pa.Table, right: pa.Table) -> Places:
    """Return the index in `left` of each key of `right`, or -1 if `left` lacks the key.

    Keys in `left` must be distinct. Both tables have a column per join key, with the same names.
    """
    if left.equals(right):
        return np.arange(len(right))
    rows = np.full(len(right), -1)
    if not len(left) or not len(right):
        return rows
    keys = right.column_names
    on = " AND ".join(f'r."{name}" = l."{name}"' for name in keys)
    with connection() as db:
        db.register("l", left.append_column("_l", pa.array(np.arange(len(left)))))
        db.register("r", right.append_column("_r", pa.array(np.arange(len(right)))))
        pairs = db.sql(f"SELECT _r, _l FROM r JOIN l ON {on}").to_arrow_table()  # noqa: S608 - names are checked by the contract
    rows[pairs["_r"].to_numpy()] = pairs["_l"].to_numpy()
    return rows


def _within(places: Places, start: int, end: int) -> Places:
    first, last = np.searchsorted(places, (start, end))
    return places[first:last]
