"""The events of a source that a view's look-back can still reach, in memory."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.days import FIRST, LAST
from isthmus.features.values.arrow import micros


class EventWindow:
    """Events at or after a start time that moves forward. `timestamp` is the column with the time of an event.

    Attributes:
        events: the events, in any order, possibly with duplicates.
        first: start time, in microseconds since 1970 UTC. All events since then are in the window.
    """

    def __init__(self, events: pa.Table, timestamp: str, first: int) -> None:
        self.events, self._timestamp, self.first = events, timestamp, first
        self._added = 0

    def add(self, events: pa.Table) -> None:
        self.events = pa.concat_tables([self.events, events.select(self.events.column_names).cast(self.events.schema)])
        self._added += 1
        if self._added % 64 == 0:  # each batch adds a chunk to every column
            self.events = self.events.combine_chunks()

    def forget(self, first: int) -> None:
        """Drop the events before `first` if they are more than half."""
        times = micros(self.events[self._timestamp])
        if np.count_nonzero(times < first) * 2 > len(times):
            self.events = self.events.filter(pa.array(times >= first)).combine_chunks()
            self.first = first

    def possible_copies(self, events: pa.Table) -> tuple[pa.Table, pa.BooleanArray]:
        """Return the events in the window that may equal one of `events`, and a mask of `events` that have such a copy.

        Copies have equal times and equal hashes of their numbers. Other columns may differ.
        """
        times, new = micros(self.events[self._timestamp]), micros(events[self._timestamp])
        near = self.events.filter(pa.array((times >= new.min(initial=LAST)) & (times <= new.max(initial=FIRST))))
        own, others = _numbers(near), _numbers(events.select(near.column_names))
        return near.filter(pc.is_in(own, others)), pc.is_in(others, own)

    def with_keys(self, keys: pa.Table, first: int) -> pa.Table:
        """Return the events from `first` on that have one of the keys; `keys` has a column per join key."""
        events = self.events.filter(pa.array(micros(self.events[self._timestamp]) >= first))
        return events.filter(has_key(events, keys))


def _numbers(events: pa.Table) -> pa.Array:
    """Return a hash of the numbers and times of each event. Equal events have equal hashes."""
    numbers = np.zeros(len(events), np.int64)
    for column in events.columns:
        if pa.types.is_integer(column.type) or pa.types.is_timestamp(column.type):
            numbers = numbers * 31 + column.cast(pa.int64()).fill_null(0).to_numpy()
    return pa.array(numbers)


def has_key(rows: pa.Table, keys: pa.Table) -> pa.BooleanArray:
    """Return a mask of the rows with one of the keys. Both tables have the join keys as columns."""
    names = keys.column_names
    if len(names) == 1:
        return pc.is_in(rows[names[0]], keys[names[0]].combine_chunks())
    numbered = rows.select(names).append_column("_row", pa.array(np.arange(len(rows))))
    mask = np.zeros(len(rows), bool)
    mask[numbered.join(keys, names, join_type="left semi")["_row"].to_numpy()] = True
    return pa.array(mask)


def distinct_keys(rows: pa.Table, names: list[str]) -> pa.Table:
    """Return each key of the rows once; without keys that are null."""
    keys = rows.select(names).group_by(names, use_threads=False).aggregate([])
    return keys.filter(pc.is_valid(keys[names[0]])) if len(names) == 1 else keys.drop_null()
