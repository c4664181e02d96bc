"""Rows that a run writes to Redis or removes there, found and sent for all keys of a view or for a part of them."""

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
    """The state of some keys, on which a run decides what to write. Add the facts of all parts.

    Attributes:
        keys: number of keys.
        expired: number of keys whose row is older than the ttl.
        horizon: latest known time of a row up to the time of the run, in microseconds since 1970 UTC; NEVER if none.
        sample: names in Redis of some of the keys.
        missing: number of keys that Redis lacks, of a sample of the keys that the last run published.
        moved: True if a row has new times and the same content.
        clash: True if Redis' present stamp would change the times of a changed or moved row.
        unchanged: pairs of event and known time of the rows with unchanged content, two of them if there are more.
        changed: such pairs of the rows with changed content that were known by the horizon of the last run.
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
class Selection:
    """Selects the rows to write.

    Attributes:
        record: the run's record in Redis. No row is written once another run has replaced it.
        horizon: the horizon of `OnlineStore.write`.
        suspects: keys with pushed rows. Only their rows and changed rows are written, and keys that are gone since the
            last run are removed. None writes all rows.
        moved: write rows with new times and the same content, too.
        stamp: without `suspects`, write only the rows whose times this stamp would change, or only the other rows.
        late: selects the former.
    """

    record: bytes | None
    horizon: int | None
    suspects: pa.Table | None = None
    moved: bool = False
    stamp: Stamp | None = None
    late: bool = False


class Written(msgspec.Struct, frozen=True):
    """The counts of rows written and removed, and the indices of the suspects that are keys of the part."""

    compared: int = 0
    changed: int = 0
    written: int = 0
    removed: int = 0
    found: Sequence[int] = ()

    def __add__(self, other: "Written") -> "Written":
        return Written(
            self.compared + other.compared, self.changed + other.changed, self.written + other.written,
            self.removed + other.removed, [*self.found, *other.found],
        )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """The latest rows of some keys of a view: `now`, and those that the last run published (`before`), if known."""

    now: LatestRows
    before: LatestRows | None

    @cached_property
    def _matched(self) -> Ints:
        assert self.before is not None  # noqa: S101 - the callers compare
        return index_of_keys(self.before.keys, self.now.keys)

    @cached_property
    def _changes(self) -> tuple[Mask, Mask]:
        """Masks of the rows that have other content, and of the rows that only have new times."""
        assert self.before is not None  # noqa: S101 - the callers compare
        same = self.before.equal_rows(self._matched, self.now, times=False)
        return ~same, same & ~self.before.equal_rows(self._matched, self.now)

    def facts(self, store: OnlineStore, record: Published | None) -> Facts:
        """Find what the part says about the run. `record` is that of the last run, if `before` is known."""
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

    def write(self, store: OnlineStore, selection: Selection, require: Callable[[], None] = lambda: None) -> Written:
        """Write the selected rows. Before each piece of them, call `require`, which may raise an error.

        Raises DependencyError if another run has begun, because this one is taken for dead. Some rows may be written
        then, so the next run compares every row with Redis.
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
        done = Written(found=found.tolist())
        # Write in pieces: Python values take several times the memory of Arrow.
        for piece in rebatch((batch for rows in now.rows(np.flatnonzero(sent)) for batch in rows.to_batches()), PART):
            require()
            require_record(store, view, selection.record)
            counts = write_rows(store, view, piece, selection.horizon)
            done += Written(counts.compared, counts.changed, counts.written)
        if suspects is not None and self.before is not None and selection.horizon is not None:
            gone = ~np.isin(np.arange(len(self.before.content)), self._matched)
            done += Written(removed=remove(store, view, self.before.keys.filter(pa.array(gone)), selection.horizon))
        require_record(store, view, selection.record)
        return done


class Parts(Protocol):
    """The latest rows of a view, in this process or on executors, with the methods of `Part` for all keys."""

    def facts(self, record: Published | None) -> Facts: ...

    def write(self, selection: Selection, require: Callable[[], None]) -> Written: ...

    def remove_others(self, record: bytes | None, horizon: int) -> int:
        """Remove the rows of all other keys from Redis, as `OnlineStore.remove_except` does. Return their number."""


Find = Callable[[ViewHistory, int, tuple[ViewHistory, int] | None], AbstractContextManager[Parts]]
"""Finds the latest rows of a history at a time, and those of an earlier one at its time, if the last is not None."""


def require_record(store: OnlineStore, view: ViewContract, record: bytes | None) -> None:
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
    return entity_keys(store.contract.project, view.keys, key_values(view, keys))


def key_values(view: ViewContract, rows: pa.Table) -> dict[str, list[KeyValue]]:
    return {column.name: arrow.from_arrow(rows[column.name], column.dtype).tolist(column.dtype) for column in view.keys}
