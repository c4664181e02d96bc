"""Find the rows that a materialization writes to Redis or removes there, and send them, for some keys at a time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import msgspec
import numpy as np
import pyarrow as pa

from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DependencyError
from isthmus.features.offline.history import LatestRows, ViewHistory, index_of_keys
from isthmus.features.offline.scan import rebatch
from isthmus.features.online.loss import SAMPLE
from isthmus.features.online.record import NEVER, Published, Stamp
from isthmus.features.online.store import OnlineStore, WriteCounts
from isthmus.features.values import arrow
from isthmus.features.values.columns import Ints, Mask
from isthmus.features.values.entitykey import KeyValue, entity_keys

PART = 1 << 16
"""Rows that are converted from Arrow at a time."""

_PROBES = 1000
"""Number of sampled keys that must be in Redis before a run assumes that Redis has all keys."""


class Facts(msgspec.Struct, frozen=True):
    """The state of some keys. A run adds the facts of all keys, then decides which rows to write.

    Attributes:
        keys: number of keys.
        expired: number of keys whose row is older than the ttl.
        horizon: latest known time of a row up to the time of the run, in microseconds since 1970 UTC; NEVER if none.
        sample: names in Redis of a sample of the keys.
        missing: number of sampled keys of the last run that Redis no longer has.
        moved: True if a row has the same content as in the last run and new times.
        clash: True if Redis' present stamp would change the times of a changed or moved row.
        unchanged: pairs (event time, known time) of rows with unchanged content: the least and the greatest times.
        changed: such pairs of rows with changed content that were known by the horizon of the last run.
    """

    keys: int = 0
    expired: int = 0
    horizon: int = NEVER
    sample: Sequence[bytes] = ()
    missing: int = 0
    moved: bool = False
    clash: bool = False
    unchanged: frozenset[tuple[int, int]] = frozenset()
    changed: frozenset[tuple[int, int]] = frozenset()

    def __add__(self, other: "Facts") -> "Facts":
        return Facts(
            self.keys + other.keys, self.expired + other.expired, max(self.horizon, other.horizon),
            [*self.sample, *other.sample], self.missing + other.missing, self.moved or other.moved,
            self.clash or other.clash, self.unchanged | other.unchanged, self.changed | other.changed,
        )  # fmt: skip

    def stamp(self, horizon: int) -> Stamp | None:
        """Return the new times of all unchanged rows, which Redis stores once; None if the rows keep their own times.

        An unchanged row can have new times. They become the stamp if all unchanged rows have the same times now, and
        the stamp changes the times of no other row. `horizon` is the horizon of the last run.
        """
        if not self.moved or len(self.unchanged) != 1 or not self.changed <= self.unchanged:
            return None
        return Stamp(horizon, *next(iter(self.unchanged)))


@dataclass(frozen=True)
class WriteSelection:
    """Tells `KeyChanges.write` which rows to write.

    Attributes:
        record: the view's record in Redis. Writing stops once another run has replaced it.
        horizon: the horizon of `OnlineStore.write`.
        suspects: keys with pushed rows. Write their rows and changed rows only, and remove keys that are gone since the
            last run. With None, write all rows.
        moved: with `suspects`, also write rows with the same content and new times.
        stamp: without `suspects`, write only part of the rows, by whether this stamp would change their times.
        late: True for the rows whose times `stamp` would change, False for the other rows.
    """

    record: bytes | None
    horizon: int | None
    suspects: pa.Table | None = None
    moved: bool = False
    stamp: Stamp | None = None
    late: bool = False


class WriteTotals(msgspec.Struct, frozen=True):
    """The result of a write. Add the results of all parts.

    Attributes:
        compared: number of rows that were compared with Redis.
        changed: number of rows that differed from Redis.
        written: number of rows written.
        removed: number of rows removed.
        found: indices of the suspects that are keys of the part.
    """

    compared: int = 0
    changed: int = 0
    written: int = 0
    removed: int = 0
    found: Sequence[int] = ()

    def __add__(self, other: "WriteTotals") -> "WriteTotals":
        return WriteTotals(
            self.compared + other.compared, self.changed + other.changed, self.written + other.written,
            self.removed + other.removed, [*self.found, *other.found],
        )  # fmt: skip


@dataclass(frozen=True)
class KeyChanges:
    """The latest rows of some keys of a view, and in `before` the rows that the last run published, if known."""

    now: LatestRows
    before: LatestRows | None

    @cached_property
    def _matched(self) -> Ints:
        assert self.before is not None  # noqa: S101 - the callers compare
        return index_of_keys(self.before.keys, self.now.keys)

    @cached_property
    def _changes(self) -> tuple[Mask, Mask]:
        """Masks of the rows with new content, and of the rows with the same content and new times."""
        assert self.before is not None  # noqa: S101 - the callers compare
        same = self.before.equal_rows(self._matched, self.now, times=False)
        return ~same, same & ~self.before.equal_rows(self._matched, self.now)

    def facts(self, store: OnlineStore, record: Published | None) -> Facts:
        """Return the facts of these keys. `record` is the last run's, used if `before` is known."""
        now, view = self.now, self.now.history.view

        def sampled(rows: LatestRows, count: int) -> list[bytes]:
            places = np.unique(np.linspace(0, len(rows.content), count, endpoint=False, dtype=np.int64))
            return names(store, view, rows.keys.take(places[: len(rows.content)]))

        expired = 0 if view.ttl is None else int(np.count_nonzero(now.at - now.event > view.ttl))
        facts = Facts(len(now.content), expired, now.horizon, sampled(now, SAMPLE))
        if self.before is None or record is None:
            return facts
        (changed, moved), stamp = self._changes, record.stamp
        resent = changed | moved
        return msgspec.structs.replace(
            facts, missing=store.missing(view, sampled(self.before, _PROBES)), moved=bool(moved.any()),
            clash=stamp is not None and bool(stamp.changes_times(now.event[resent], now.known[resent]).any()),
            unchanged=self._times(~changed), changed=self._times(changed & (now.known <= record.horizon)),
        )  # fmt: skip

    def _times(self, rows: Mask) -> frozenset[tuple[int, int]]:
        event, known = self.now.event[rows], self.now.known[rows]
        return frozenset((int(pick(event)), int(pick(known))) for pick in (np.min, np.max) if len(event))

    def write(
        self, store: OnlineStore, selection: WriteSelection, require: Callable[[], None] = lambda: None
    ) -> WriteTotals:
        """Write the selected rows in pieces. Call `require` before each piece; it may raise an error to stop.

        Raises DependencyError if another run has replaced this one, which seemed dead. Some rows may be written then,
        so the next run compares every row with Redis.
        """
        now, suspects = self.now, selection.suspects
        view, sent, found = now.history.view, np.ones(len(now.content), bool), np.array([], np.int64)
        if suspects is not None:
            changed, moved = self._changes
            sent = changed | (moved & selection.moved)
            places = index_of_keys(now.keys, suspects)
            found = np.flatnonzero(places >= 0)
            sent[places[found]] = True
        elif selection.stamp is not None:
            sent = selection.stamp.changes_times(now.event, now.known) == selection.late
        done = WriteTotals(found=found.tolist())
        # Write in pieces: Python values take several times the memory of Arrow.
        for piece in rebatch((batch for rows in now.rows(np.flatnonzero(sent)) for batch in rows.to_batches()), PART):
            require()
            require_record(store, view, selection.record)
            counts = write_rows(store, view, piece, selection.horizon)
            done += WriteTotals(counts.compared, counts.changed, counts.written)
        if suspects is not None and self.before is not None and selection.horizon is not None:
            gone = ~np.isin(np.arange(len(self.before.content)), self._matched)
            done += WriteTotals(removed=remove(store, view, self.before.keys.filter(pa.array(gone)), selection.horizon))
        require_record(store, view, selection.record)
        return done


class ViewChanges(Protocol):
    """The latest rows of all keys of a view, in this process or on executors. The methods are those of `KeyChanges`."""

    def facts(self, record: Published | None) -> Facts: ...

    def write(self, selection: WriteSelection, require: Callable[[], None]) -> WriteTotals: ...

    def remove_others(self, record: bytes | None, horizon: int) -> int:
        """Remove the rows of keys that the view lacks, like `OnlineStore.remove_except`. Return their number."""


Find = Callable[[ViewHistory, int, tuple[ViewHistory, int] | None], AbstractContextManager[ViewChanges]]
"""Opens the latest rows of a history at a time; the last argument is the history and time of the last run, or None."""


def require_record(store: OnlineStore, view: ViewContract, record: bytes | None) -> None:
    """Raise DependencyError if the view's record in Redis is no longer `record`."""
    if store.record_text(view) != record:
        # Rows of this run may have arrived after those of the other run.
        store.distrust(view)
        raise DependencyError(f"view {view.name}", "another materialization has taken over",
                              remedy="run `isthmus materialize` again")  # fmt: skip


def write_rows(store: OnlineStore, view: ViewContract, rows: pa.Table, until: int | None) -> WriteCounts:
    values = {column.name: arrow.from_arrow(rows[column.name], column.dtype) for column in view.fields}
    event, known = arrow.micros(rows["event_timestamp"]), arrow.micros(rows["known_at"])
    return store.write(view, key_values(view, rows), event, known, values, horizon=until)


def remove(store: OnlineStore, view: ViewContract, keys: pa.Table, horizon: int) -> int:
    return store.remove(view, key_values(view, keys), horizon) if len(keys) else 0


def names(store: OnlineStore, view: ViewContract, keys: pa.Table) -> list[bytes]:
    """Return the names of keys in Redis."""
    return entity_keys(store.contract.project, view.keys, key_values(view, keys))


def key_values(view: ViewContract, rows: pa.Table) -> dict[str, list[KeyValue]]:
    return {column.name: arrow.from_arrow(rows[column.name], column.dtype).tolist(column.dtype) for column in view.keys}
