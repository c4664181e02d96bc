"""Rows of a view from its events: computed by its function, or from tiles if the view has aggregations."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.clock import MICROSECOND
from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import LAST
from isthmus.features.definition.spec import FeatureView, Source
from isthmus.features.offline.canonical import canonical
from isthmus.features.offline.history import table_schema
from isthmus.features.streams.tiles import TileState
from isthmus.features.streams.window import EventWindow, distinct_keys, has_key
from isthmus.features.values.arrow import micros
from isthmus.transforms.views.compute import Frames, stream_view, tile_events, with_known_at

EventFrames: TypeAlias = Callable[[pa.Table, pa.Table], AbstractContextManager[Frames]]
"""Makes a view's source DataFrames from events, minus duplicates and the events of a second table."""
Load: TypeAlias = Callable[[int, int | None], pa.Table]
"""Returns the source's events since an event time, plus those that became known since a second time."""


class Recomputation:
    """Computes rows by the view's function, from the events that they may depend on, which are in memory.

    Call `restart` first. All times are in microseconds since 1970 UTC.
    """

    def __init__(
        self, view: FeatureView, contract: ViewContract, source: Source, frames: EventFrames, load: Load
    ) -> None:
        self._view, self._contract, self._frames, self._load = view, contract, frames, load
        self._timestamp = source.timestamp or ""
        self._reach = contract.lookback or 0
        self._keys = [key.name for key in contract.keys]

    def restart(self, lowest: int) -> None:
        """Read the events needed for rows since an event time, with a margin for late events."""
        first = self._first(lowest)
        self.window = EventWindow(self._load(first, None), self._timestamp, first)

    def add(self, events: pa.Table) -> pa.Table:
        """Add events, and return the keys whose rows they change, each once; without null keys."""
        self.window.add(events)
        return distinct_keys(events, self._keys)

    def forget(self, lowest: int) -> None:
        """Drop events that were only needed for rows before an event time."""
        self.window.forget(self._first(lowest))

    def _first(self, lowest: int) -> int:
        # A quarter more, for late events.
        return lowest - self._reach - self._reach // 4

    def rows(self, keys: pa.Table | None, lowest: int) -> pa.Table:
        """Return the rows of these keys, or of all (None), from an event time on, in the form of the table."""
        first = lowest - self._reach
        if keys is None:
            events = self.window.events
        elif first < self.window.first:
            events = self._load(first, None)
            events = events.filter(has_key(events, keys))
        else:
            events = self.window.with_keys(keys, first)
        with self._frames(events, events.slice(0, 0)) as frames:
            rows = [table for table in stream_view(self._view, self._contract, frames, (lowest, LAST)) if len(table)]
        return canonical(self._contract, pa.concat_tables(rows)) if rows else table_schema(self._contract).empty_table()


class TileComputation(Recomputation):
    """Computes rows from tiles, the partial results of each key and tick. Each event is added to its tile once.

    The events stay in memory, too, to recognize an event that arrives again.
    """

    def restart(self, lowest: int) -> None:
        super().restart(lowest)
        assert self._view.tiling is not None  # noqa: S101 - only such views
        self._longest = max(self._view.tiling.windows) // MICROSECOND
        self._tiles = TileState(self._contract, self._view.tiling)
        self._tiles.add(self._to_aggregate(self.window.events))

    def add(self, events: pa.Table) -> pa.Table:
        # If an event is older than the events in memory, `rows` reads them again.
        recent = pa.array(micros(events[self._timestamp]) >= self.window.first)
        earlier, again = self.window.possible_copies(events)
        new = self._to_aggregate(events.filter(pc.and_not(recent, again)))
        self._tiles.add(new)
        other = events.filter(pc.or_(pc.invert(recent), again))
        if len(other):
            new = pa.concat_tables([new, self._to_aggregate(other)])
            self._tiles.add(self._to_aggregate(events.filter(pc.and_(recent, again)), earlier))
        self.window.add(events)
        return distinct_keys(new, self._keys)

    def _to_aggregate(self, events: pa.Table, earlier: pa.Table | None = None) -> pa.Table:
        with self._frames(events, events.slice(0, 0) if earlier is None else earlier) as frames:
            return tile_events(self._view, self._contract, frames)

    def forget(self, lowest: int) -> None:
        before = self.window.first
        super().forget(lowest)
        if self.window.first > before:
            # Keep only complete tiles: those whose events are all in memory.
            self._tiles.forget(self.window.first + self._reach - self._longest)

    def rows(self, keys: pa.Table | None, lowest: int) -> pa.Table:
        if lowest - self._reach < self.window.first:
            self.restart(lowest)
        return canonical(self._contract, with_known_at(self._contract, self._tiles.rows(keys, lowest)))
