"""The latest row of each key of a view, at one moment, by one version of the offline table."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from isthmus.features.contract.contract import ViewContract
from isthmus.features.offline.history import ViewHistory, connection, table_schema
from isthmus.features.values.columns import micros
from isthmus.features.values.stamp import Times

Places = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Snapshot:
    """The latest row of each key at one moment.

    Attributes:
        history: where the rows are.
        at: the moment, microseconds since 1970 UTC.
        keys: n join keys.
        event: shape (n,) int64 microseconds.
        known: likewise.
        content: shape (n,) int64, the content hashes.
        place: shape (n,), where in the history each row is.
        horizon: the latest known time of all that was known at that moment; the least there is if nothing was.
    """

    history: ViewHistory
    at: int
    keys: pa.Table
    event: Times
    known: Times
    content: Times
    place: Places
    horizon: int

    @property
    def view(self) -> ViewContract:
        """The view."""
        return self.history.view

    @classmethod
    def of(cls, history: ViewHistory, at: int) -> "Snapshot":
        """The state at time `at`, in microseconds."""
        keys = [column.name for column in history.view.keys]
        rows = _columns(history, [*keys, "event_timestamp", "known_at", "content_hash"])
        event, known = micros(rows["event_timestamp"]), micros(rows["known_at"])
        there = known <= at
        horizon = int(known[there].max(initial=-(1 << 63)))
        place = np.flatnonzero(there & (event <= at))
        asked = rows.select(keys).take(place)
        parts = {"_event": event[place], "_known": known[place], "_content": rows["content_hash"].to_numpy()[place]}
        with connection() as db:
            columns = [*asked.columns, *map(pa.array, parts.values()), pa.array(np.arange(len(place)))]
            db.register("history", pa.table(columns, [*keys, *parts, "_row"]))
            picked = db.sql(
                f"SELECT arg_max(_row, (_event, _known, _content)) AS _row FROM history GROUP BY {_listed(keys)}"  # noqa: S608 - names are checked by the contract
            ).to_arrow_table()["_row"]
        chosen = np.sort(picked.to_numpy())
        event, known, content = (part[chosen] for part in parts.values())
        return cls(history, at, asked.take(chosen), event, known, content, place[chosen], horizon)

    def same(self, places: Places, later: "Snapshot") -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which rows of a later state, shape (m,), have the times and the content of those at `places`, -1 for none."""
        if not len(self.content):
            return places >= 0
        old = np.maximum(places, 0)
        equal = (self.content[old] == later.content) & (self.event[old] == later.event)
        same: np.ndarray[Any, np.dtype[np.bool_]] = (places >= 0) & equal & (self.known[old] == later.known)
        return same

    def rows(self, chosen: Places) -> Iterator[pa.Table]:
        """Some rows with all their columns, in the form of the offline table, a part at a time.

        Args:
            chosen: which of the n, in ascending order.
        """
        schema, places, data = table_schema(self.view), self.place[chosen], self.history.data
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


def matches(left: pa.Table, right: pa.Table) -> Places:
    """For each key of `right` the row of `left` with the same key, or -1; no key of `left` is there twice."""
    if left.equals(right):
        return np.arange(len(right))
    found = np.full(len(right), -1)
    if not len(left) or not len(right):
        return found
    keys = right.column_names
    on = " AND ".join(f'r."{name}" = l."{name}"' for name in keys)
    with connection() as db:
        db.register("l", left.append_column("_l", pa.array(np.arange(len(left)))))
        db.register("r", right.append_column("_r", pa.array(np.arange(len(right)))))
        pairs = db.sql(f"SELECT _r, _l FROM r JOIN l ON {on}").to_arrow_table()  # noqa: S608 - names are checked by the contract
    found[pairs["_r"].to_numpy()] = pairs["_l"].to_numpy()
    return found


def _within(places: Places, start: int, end: int) -> Places:
    """Those of some ascending places that lie in a range."""
    first, last = np.searchsorted(places, (start, end))
    return places[first:last]


def _columns(history: ViewHistory, names: list[str]) -> pa.Table:
    data = history.data
    return data.select(names) if isinstance(data, pa.Table) else data.to_table(columns=names)


def _listed(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
