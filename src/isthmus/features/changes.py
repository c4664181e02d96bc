"""What has changed between two states of a view: by key, time and content hash, without reading a value.

A state is what each key answers with at one moment, by one version of the offline table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from isthmus.features.columns import micros
from isthmus.features.contract import ViewContract
from isthmus.features.history import History, connection, table_schema
from isthmus.features.stamp import Stamp, Times

Places = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class State:
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

    history: History
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
    def of(cls, history: History, at: int) -> "State":
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

    def same(self, places: Places, later: "State") -> np.ndarray[Any, np.dtype[np.bool_]]:
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


@dataclass(frozen=True)
class Changes:
    """How a state follows from an earlier one that Redis holds.

    Attributes:
        sent: which rows of the later state have to be written.
        changed: how many of its keys are new or have another content.
        removed: join keys that the later state lacks.
        stamp: what tells the times of the unchanged rows, if they need one.
    """

    sent: Places
    changed: int
    removed: pa.Table
    stamp: Stamp | None

    @classmethod
    def between(
        cls, before: State, after: State, *, stamp: Stamp | None, horizon: int, suspect: pa.Table
    ) -> "Changes | None":
        """The changes, or None if the stamp in force would give a written row other times than its own.

        Where every unchanged row has been given the same new times, a new stamp tells them, and only rows whose content
        changed are sent. Any other new times have to be written.

        Args:
            before: what Redis holds.
            after: what it is to hold.
            stamp: the stamp in force.
            horizon: the latest known time of all that Redis was told from the table.
            suspect: join keys which others have written: they are sent, whatever `before` says, and Redis decides.
        """
        matched = matches(before.keys, after.keys)
        old = np.maximum(matched, 0)
        same = (matched >= 0) & (before.content[old] == after.content) if len(before.content) else matched >= 0
        moved = np.zeros(len(same), bool)
        if same.any():
            moved = same & ((before.event[old] != after.event) | (before.known[old] != after.known))
        sent = ~same
        sent[_found(suspect, after.keys)] = True
        if moved.any():
            first = int(np.flatnonzero(moved)[0])
            fresh = Stamp(horizon, int(after.event[first]), int(after.known[first]))
            alike = (after.event[same] == fresh.event).all() and (after.known[same] == fresh.known).all()
            if alike and not fresh.alters(after.event[sent], after.known[sent]).any():
                stamp = fresh
            else:
                sent |= moved
        chosen = np.flatnonzero(sent)
        if stamp is not None and stamp.alters(after.event[chosen], after.known[chosen]).any():
            return None
        gone = np.ones(len(before.content), bool)
        gone[matched[matched >= 0]] = False
        lost = suspect.filter(pa.array(matches(after.keys, suspect) < 0))
        removed = pa.concat_tables([before.keys.filter(pa.array(gone)), lost])
        return cls(chosen, int(np.count_nonzero(~same)), removed, stamp)


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


def _found(keys: pa.Table, among: pa.Table) -> Places:
    """Where some keys are among others, those of them that are."""
    places = matches(among, keys)
    return places[places >= 0]


def _within(places: Places, start: int, end: int) -> Places:
    """Those of some ascending places that lie in a range."""
    first, last = np.searchsorted(places, (start, end))
    return places[first:last]


def _columns(history: History, names: list[str]) -> pa.Table:
    data = history.data
    return data.select(names) if isinstance(data, pa.Table) else data.to_table(columns=names)


def _listed(names: list[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)
