"""Keep a view up to date from a stream: compute the rows that events change, and write them to Redis and the table."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import DAY, FIRST, LAST
from isthmus.features.definition.spec import FeatureView, Source
from isthmus.features.errors import ContractMismatch
from isthmus.features.offline.canonical import identity, rows_not_in
from isthmus.features.offline.commits import StreamPosition
from isthmus.features.offline.history import table_schema
from isthmus.features.offline.pushes import ACCEPTED, PushLog
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.changes import write_rows
from isthmus.features.streams.window import distinct_keys, has_key
from isthmus.features.values.arrow import micros
from isthmus.orchestration.streams.computation import EventFrames, Load, Recomputation, TileComputation
from isthmus.transforms.views.compute import returns_known

# The rules, with K the known time of a new event, and L the view's look-back:
#
# * A row depends only on events that were known by its known_at (`check` tests this). So the event changes only rows of
#   its key with known_at >= K, and a row with known_at < watermark is final, apart from late events (K < watermark).
# * Rows with known_at >= watermark are pending. They are computed again when another event of their key arrives, and
#   written when the watermark has passed them.
# * A late event may change rows that were written. These rows are computed and compared with the written ones.
#
# So, whatever the order of the events, the table ends with the rows that a build computes from the same events.


class ViewUpdater:
    """The state of a view between micro-batches.

    Call `open` first. Then, for each micro-batch, call `add` with the new events, and `emit`. Call `save` from time to
    time: after a crash, the events since the last `save` are processed again.

    Attributes:
        incomplete: True if a late event has removed the latest row of a key, so that `materialize` must run.
        watermark: rows known before it were written online, in microseconds since 1970 UTC.
        newest: known time of the newest row that was written online; None before the first.
    """

    def __init__(
        self, view: FeatureView, contract: ViewContract, source: Source, offline: OfflineStore, online: OnlineStore,
        now: Callable[[], int],
    ) -> None:  # fmt: skip
        self.view, self.contract, self.source = view, contract, source
        self._offline, self._online, self._now = offline, online, now
        self._known = source.known_column
        self._keys = [key.name for key in contract.keys]
        self._names = identity(contract)
        self._reach = contract.lookback or 0
        self._columns = [*self._names, "content_hash"]
        self._empty = empty = table_schema(contract).empty_table()
        self._pending, self._unsaved_rows, self._unsaved_removals = empty, empty, empty.select(self._names)
        self._future = empty
        self._served: list[pa.Table] = []
        self._flushed: pa.Table | None = None
        self.incomplete = False
        self.newest: int | None = None

    def open(self, frames: EventFrames, load: Load, watermark: int) -> None:
        """Start from the rows of the table, and the events that the next rows may depend on."""
        import pyarrow.dataset as ds

        self.watermark = watermark
        self._history = history = self._offline.history(self.contract)
        none = load(LAST, None)
        with frames(none, none) as empty:
            self._returns_known = returns_known(self.view, self.contract, empty)
        lowest = self._lowest(watermark, None)
        if self._returns_known:
            # Events may become known long after their own time. Their rows are pending, too.
            known = load(lowest - self._reach, watermark)
            times = micros(known.filter(pc.greater_equal(known[self._known], _time(watermark)))[self.source.timestamp])
            lowest = min(lowest, int(times.min(initial=lowest + self._reach)) - self._reach)
        kind = Recomputation if self.view.tiling is None else TileComputation
        self._computation = kind(self.view, self.contract, self.source, frames, load)
        self._computation.restart(lowest)
        self._pending = self._known_from(self._computation.rows(None, lowest), watermark)
        with self._offline.reading(self.contract.table):
            assert not isinstance(history.data, pa.Table)  # noqa: S101 - a history of the store
            later = history.data.to_table(["known_at"], ds.field("known_at") >= _time(watermark))
            now = _time(self._now())
            ahead = (ds.field("known_at") > now) | (ds.field("event_timestamp") > now)
            future = history.data.to_table(self._empty.column_names, ahead)
        self._future = future.cast(self._empty.schema)
        # Rows of a build or a flush may be newer than the watermark.
        self._written_before = max(watermark, int(micros(later["known_at"]).max(initial=watermark - 1)) + 1)

    @property
    def unsaved(self) -> int:
        """Number of rows that are in Redis and not in the table yet, or the other way around."""
        return len(self._unsaved_rows) + len(self._unsaved_removals)

    def add(self, events: pa.Table) -> None:
        """Compute the rows that new events change, and correct written rows that late events change.

        Corrections are in Redis at once, and in the table after `save`. Other rows wait for `emit`. The events must be
        in the table of events already. Ignores events with a null key.
        """
        keys = self._computation.add(events)
        if not len(keys):
            return
        known = int(micros(events[self._known]).min())
        lowest = self._lowest(known, int(micros(events[self.source.timestamp]).min()))
        rows = self._computation.rows(keys, lowest)
        changed = self._known_from(rows, known)
        # Rows with an earlier event time were not computed again: the new events do not change them.
        stale = pc.and_(
            pc.greater_equal(self._pending["known_at"], _time(known)),
            pc.greater_equal(self._pending["event_timestamp"], _time(lowest)),
        )
        stale = pc.and_(has_key(self._pending, keys), stale)
        self._pending = pa.concat_tables(
            [self._pending.filter(pc.invert(stale)), self._known_from(changed, self.watermark)]
        )
        if known < self._written_before:
            self._correct(keys, rows, changed, known, lowest)

    def _correct(self, keys: pa.Table, rows: pa.Table, changed: pa.Table, known: int, lowest: int) -> None:
        """Replace written rows that late events change, online and, with the next `save`, in the table."""
        written = self._stored(keys, known, lowest)
        bound = _time(self._written_before)
        final = changed.filter(pc.less(changed["known_at"], bound))
        different = rows_not_in(final, written)
        gone = self._without_pushed(rows_not_in(written.select(self._names), changed.select(self._names)))
        if not len(different) and not len(gone):
            return
        self._keep(different, gone)
        corrected = distinct_keys(pa.concat_tables([different.select(self._keys), gone.select(self._keys)]), self._keys)
        latest = self._latest_due(rows.filter(pc.and_(has_key(rows, corrected), pc.less(rows["known_at"], bound))))
        self.incomplete |= len(latest) < len(corrected)
        self._publish(self._not_overtaken(latest), self._now())

    def _without_pushed(self, identities: pa.Table) -> pa.Table:
        """Keep the keys and times that no client has pushed. Pushed rows stay, whatever the events are."""
        if not len(identities):
            return identities
        log = PushLog(self._offline.root, self.contract.table, self._offline.storage_options)
        days = sorted({int(day) for day in micros(identities["event_timestamp"]) // DAY})
        pushed = log.rows(self.contract, days).select(self._names)
        return rows_not_in(identities, pushed.cast(identities.schema))

    def emit(self, watermark: int) -> int:
        """Write the rows known before the new watermark to Redis, and keep them for `save`. Return their number."""
        self.watermark = max(self.watermark, watermark)
        ready = pc.less(self._pending["known_at"], _time(self.watermark))
        rows, self._pending = self._pending.filter(ready), self._pending.filter(pc.invert(ready))
        self._computation.forget(self._lowest(self.watermark, None))
        if len(rows):
            # Rows of a flush or of a build may have been written already, and be different now.
            again = int(micros(rows["known_at"]).min()) < self._written_before
            self._keep(rows, rows.select(self._names).slice(0, 0))
            latest = self._latest_due(rows)
            # A row that became known later than others may have an earlier event time.
            latest = self._not_overtaken(latest) if again or self._returns_known else latest
            self._publish(latest, self._now() if again else None)
        self._written_before = max(self._written_before, self.watermark)
        return len(rows)

    def flush(self, save: Callable[[], bool]) -> int:
        """Write the pending rows to the table and to Redis before the watermark passes them. Return their number.

        Use it when no event is left to wait for. The rows stay pending, since later events may change them. `save`
        calls the method `save`, and returns False if the table is busy; then nothing is written to Redis. The table
        comes first: if the process is killed in between, the next start knows which rows Redis may have.
        """
        rows = self._pending
        if rows is self._flushed:
            return 0
        self._keep(rows, rows.select(self._names).slice(0, 0))
        self._written_before = max(self._written_before, int(micros(rows["known_at"]).max(initial=FIRST)) + 1)
        if not save():
            return 0
        self._flushed = rows
        self._publish(self._not_overtaken(self._latest_due(rows)), self._now())
        return len(rows)

    def publish_due(self) -> None:
        """Write the rows to Redis whose times were in the future when they were computed, and are not any more."""
        due = self._is_due(self._future)
        if pc.any(due).as_py():
            rows, self._future = self._future.filter(due), self._future.filter(pc.invert(due))
            self._publish(self._not_overtaken(self._latest(rows)), self._now())

    def _not_overtaken(self, latest: pa.Table) -> pa.Table:
        """Keep the rows without a later written row of their key."""
        if not len(latest):
            return latest
        written = self._stored(latest.select(self._keys), FIRST, int(micros(latest["event_timestamp"]).min()))
        newest = self._latest(written.filter(self._is_due(written))).select(self._names)
        return rows_not_in(latest, rows_not_in(latest, newest).select(self._names))

    def refresh_table(self) -> None:
        """Read the state of the table. Raise ContractMismatch if a build replaced it; collected pushes are fine."""
        history = self._offline.history(self.contract)
        if history.commit.base != self._history.commit.base:
            raise ContractMismatch(f"offline table of {self.contract.table}", "was built again")
        self._history = history

    def save(self, offsets: Mapping[str, int], *, last: bool = False) -> None:
        """Commit the rows that are only in Redis to the table, with the offsets of the events that they include.

        First appends them to the log of pushes, with the times at which they became readable. If no row has changed,
        the offsets are committed only with `last`. The caller must hold `Project.adding_to`. Raises ContractMismatch if
        the table has another definition, and DataError or DependencyError if it cannot be written.
        """
        if self._served:
            log = PushLog(self._offline.root, self.contract.table, self._offline.storage_options)
            log.append_streamed(self.contract, pa.concat_tables(self._served))
            self._served = []
        position = StreamPosition(self.watermark, {self.source.name: dict(offsets)})
        if self.unsaved or (last and position != self._history.commit.origin.position):
            self._offline.replace_rows(self.contract, self._unsaved_rows, self._unsaved_removals, position)
            self._history = self._offline.history(self.contract)
            self._unsaved_rows, self._unsaved_removals = self._empty, self._empty.select(self._names)

    def _lowest(self, known: int, event: int | None) -> int:
        """Return the earliest event time of a row that an event can change, from its known time and its own time.

        Without a time of its own (None), assume that events become known within the look-back.
        """
        if not self._returns_known:
            return known - self.contract.delay
        return (known - self._reach if event is None else event) - self._reach

    @staticmethod
    def _known_from(rows: pa.Table, known: int) -> pa.Table:
        return rows.filter(pc.greater_equal(rows["known_at"], _time(known)))

    def _stored(self, keys: pa.Table, known: int, lowest: int) -> pa.Table:
        """Return keys, times and hashes of the written rows of these keys, from a known and an event time on."""
        import pyarrow.dataset as ds

        data: Any = self._history.data
        with self._offline.reading(self.contract.table):
            stored = data.to_table(
                self._columns,
                (ds.field("event_timestamp") >= _time(lowest)) & (ds.field("known_at") >= _time(known)),
            )
        stored = stored.filter(has_key(stored, keys))
        overruled = pa.concat_tables([self._unsaved_rows.select(self._names), self._unsaved_removals])
        stored = rows_not_in(stored, overruled.cast(stored.select(self._names).schema))
        mine = self._known_from(self._unsaved_rows.filter(has_key(self._unsaved_rows, keys)), known)
        mine = mine.filter(pc.greater_equal(mine["event_timestamp"], _time(lowest)))
        return pa.concat_tables([stored, mine.select(self._columns).cast(stored.schema)])

    def _keep(self, rows: pa.Table, gone: pa.Table) -> None:
        """Keep rows, and the keys and times of removed rows, for `save`."""
        own = rows.select(self._names)
        replaced = pa.concat_tables([own, gone])
        # Rows that became known at `_written_before` or later were not kept yet.
        if int(micros(replaced["known_at"]).min(initial=LAST)) < self._written_before:
            self._future = rows_not_in(self._future, replaced)
            self._unsaved_rows = rows_not_in(self._unsaved_rows, replaced)
            self._unsaved_removals = rows_not_in(self._unsaved_removals, own)
        self._unsaved_rows = pa.concat_tables([self._unsaved_rows, rows])
        self._unsaved_removals = pa.concat_tables([self._unsaved_removals, gone])

    def _is_due(self, rows: pa.Table) -> pa.ChunkedArray:
        now = _time(self._now())
        return pc.and_(pc.less_equal(rows["known_at"], now), pc.less_equal(rows["event_timestamp"], now))

    def _latest_due(self, rows: pa.Table) -> pa.Table:
        """Return the latest row of each key. Rows whose times are in the future are kept for `publish_due`."""
        due = self._is_due(rows)
        self._future = pa.concat_tables([self._future, rows.filter(pc.invert(due))])
        return self._latest(rows.filter(due))

    def _latest(self, rows: pa.Table) -> pa.Table:
        order = [(name, "descending") for name in ("event_timestamp", "known_at", "content_hash")]
        places = rows.select(self._columns).append_column("_row", pa.array(np.arange(len(rows)))).sort_by(order)
        first = places.group_by(self._keys, use_threads=False).aggregate([("_row", "first")])["_row_first"]
        return rows.take(first)

    def _publish(self, rows: pa.Table, horizon: int | None) -> None:
        """Write rows to Redis: over rows known by the horizon, or only over older rows (None)."""
        if len(rows):
            self.newest = max(self.newest or FIRST, int(micros(rows["known_at"]).max()))
            write_rows(self._online, self.contract, rows, horizon)
            accepted = pa.array(np.full(len(rows), self._now()), ACCEPTED.type)
            self._served.append(rows.append_column(ACCEPTED, accepted))


def _time(micros: int) -> pa.Scalar:
    return pa.scalar(micros, pa.timestamp("us", "UTC"))
