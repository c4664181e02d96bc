"""Publish a view from the offline table to Redis, one run at a time. `RowsDiff` has the rows to write and remove."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import numpy as np
import pyarrow as pa
import redis
from redis.exceptions import LockError
from redis.lock import Lock

from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DependencyError, IsthmusError
from isthmus.features.offline.history import LatestRows, Places, ViewHistory, index_of_keys
from isthmus.features.offline.log import Materialization, MaterializationLog
from isthmus.features.offline.scan import rebatch
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online import record as published
from isthmus.features.online.loss import SAMPLE
from isthmus.features.online.record import Published, Stamp
from isthmus.features.online.store import EVERYTHING, LEASE_SECONDS, OnlineStore, WriteCounts
from isthmus.features.redis.address import without_credentials
from isthmus.features.redis.connection import translate_errors
from isthmus.features.values import arrow
from isthmus.features.values.entitykey import KeyValue

# A run compares the latest rows now with the rows that the last run published, and sends the difference. If Redis may
# lack published rows, because it was emptied, has evicted keys or the run was killed, every row is compared with Redis.

PART = 1 << 16
"""Rows that are converted from Arrow at a time."""

Send = Callable[[LatestRows, Places, int | None], WriteCounts]
"""Writes the rows at these indices of the latest rows. The last argument is the `horizon` of `OnlineStore.write`."""

WAIT_SECONDS = 600.0
"""Maximum wait for another run of the same view."""

_PROBES = 1000
"""Number of sampled keys that must be in Redis before a run assumes that Redis has all keys."""


class Publication(msgspec.Struct, frozen=True):
    """The counts of a run that wrote a view to Redis.

    Attributes:
        changed: number of keys whose content differed from Redis.
        written: number of keys whose row was replaced, if only by newer times.
        expired: number of keys whose row is older than the ttl.
        removed: number of keys in Redis that the view lacked.
    """

    compared: int
    changed: int
    written: int
    expired: int
    removed: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


def publish(  # noqa: PLR0913 - each argument is a choice of the caller
    store: OnlineStore,
    url: str,
    offline: OfflineStore,
    history: ViewHistory,
    now: Callable[[], int],
    *,
    full: bool = False,
    send: "Send | None" = None,
    waiting: Callable[[], None] = lambda: None,
) -> Publication:
    """Update a view's rows in Redis to the latest rows of its offline table, and return the counts.

    `isthmus materialize` runs this for each view. It writes rows that differ, and removes rows of keys that the table
    lacks. If Redis already has rows of a table that was built later, and `full` is False, it only adds newer rows.
    Otherwise it appends the run to the log of materializations; a run that did not have to compare every row with Redis
    is logged only if it changed something. Raises DependencyError if Redis fails or is restarted, if another run keeps
    the view's lock, or if it may have taken the lock from this run. Raises DataError if the table is damaged.

    Args:
        store: Redis, opened with the view's contract.
        url: URL of Redis, for error messages.
        offline: offline store that has the view's table.
        history: opened table of the view.
        now: returns the time in microseconds since 1970 UTC; rows after it are not written.
        full: compare every row with Redis, and replace or remove even newer rows there.
        send: writes the rows instead of this process, for example on executors.
        waiting: called once if another run writes the view; this run then waits up to `WAIT_SECONDS`.
    """
    started = time.perf_counter()
    with translate_errors(url):
        servers = store.servers()
        with _leased(store, history.view, url, waiting) as lease:
            try:
                counts = _Run(store, offline, history, now, lease, servers, send).write(full=full)
            except DependencyError:
                if lease.over:
                    # The last rows of this run may have arrived after the rows of the other run.
                    store.distrust(history.view)
                raise
    return msgspec.structs.replace(counts, seconds=round(time.perf_counter() - started, 3))


class _Lease:
    """The lock of the only run for a view, renewed until `end`. `over` is True if another run may have taken over."""

    def __init__(self, lock: Lock, url: str) -> None:
        self._lock, self.url = lock, url
        self._renewed = time.monotonic()
        self._lost = self.over = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def require(self) -> None:
        if self._lost or time.monotonic() - self._renewed > LEASE_SECONDS:
            self.refuse()

    def refuse(self) -> NoReturn:
        self.over = True
        raise DependencyError(
            f"Redis at {without_credentials(self.url)}", "another materialization may have taken over",
            expected=f"a renewed lock every {LEASE_SECONDS:g} seconds", remedy="run `isthmus materialize` again",
        )  # fmt: skip

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        with suppress(redis.RedisError):
            self._lock.release()

    def _renew(self) -> None:
        while not self._ended.wait(LEASE_SECONDS / 5):
            now = time.monotonic()
            try:
                self._lock.reacquire()
                self._renewed = now
            except LockError:
                self._lost = True
                return
            except redis.RedisError:
                continue  # The main thread gets the same error.


@contextmanager
def _leased(store: OnlineStore, view: ViewContract, url: str, waiting: Callable[[], None]) -> Iterator[_Lease]:
    lock = store.lock(view)
    if not lock.acquire(blocking=False):
        waiting()
        if not lock.acquire(blocking_timeout=WAIT_SECONDS):
            raise DependencyError(
                f"Redis at {without_credentials(url)}",
                f"another run has been writing {view.name} for {WAIT_SECONDS:g} seconds",
                remedy="wait for it to end, or stop it",
            )  # fmt: skip
    lease = _Lease(lock, url)
    try:
        yield lease
    finally:
        lease.end()


@dataclass
class _Run:
    """A run for a view. `servers` are the Redis processes that had the rows when it started."""

    store: OnlineStore
    offline: OfflineStore
    history: ViewHistory
    now: Callable[[], int]
    lease: _Lease
    servers: dict[str, int]
    send: "Send | None"

    def __post_init__(self) -> None:
        self.view = self.history.view
        self.at = self.now()
        self.record = self.store.record_text(self.view)
        self.before = published.decode(self.record)

    def write(self, *, full: bool) -> Publication:
        view, before = self.view, self.before
        with self.offline.reading(view.table):
            state = LatestRows.of(self.history, self.at)
        built = self.history.commit.written
        if before is not None and before.built > built and not full:
            # Redis has rows of a table that was built later, so these rows overrule nothing.
            return self._counts(state, self._send(state, np.arange(len(state.content)), None), 0)
        horizon = max(state.horizon, before.horizon) if before is not None else state.horizon
        fingerprint = self.history.fingerprint
        complete = published.NEVER if before is None or before.contract != view.hash else before.complete_until
        record = Published(
            contract=view.hash, version=self.history.version, fingerprint=fingerprint, built=built, at=self.at,
            horizon=horizon, servers=self.servers, stamp=published.stamp_of(view, before), pending=True,
            complete=complete,
        )  # fmt: skip
        # While the record is pending, the rows are a mixture of the last run's and this run's.
        self._publish(record)
        suspect = self.store.take_suspects(view, horizon)
        started = self.now()
        changes = None
        if before is not None and suspect is not None and not full and (base := self._base(before, state)):
            changes = RowsDiff.between(
                base, state, stamp=record.stamp, horizon=before.horizon, suspect=suspect.cast(state.keys.schema)
            )
        if changes is None:
            counts, removed = self._all(state, record, EVERYTHING if full else horizon)
            stamp = None
        else:
            counts = self._send(state, changes.sent, horizon)
            keys = changes.removed
            removed = self.store.remove(view, key_values(view, keys), horizon) if len(keys) else 0
            stamp = changes.stamp
        self.lease.require()
        places = np.unique(np.linspace(0, len(state.content), SAMPLE, endpoint=False, dtype=np.int64))
        self.store.keep_sample(view, key_values(view, state.keys.take(places[: len(state.content)])))
        require_same(self.lease.url, self.servers, self.store.servers())
        if self.store.record_text(view) != self.record:
            self.lease.refuse()
        if changes is None or counts.written or removed or stamp != record.stamp:
            # Without a change, the rows were readable before.
            MaterializationLog(self.offline.root, self.offline.storage_options).append(
                Materialization(
                    view=view.name, contract=view.hash, version=record.version, fingerprint=fingerprint, at=self.at,
                    started=started, readable=self.now(), written=counts.written,
                )
            )  # fmt: skip
        self._publish(msgspec.structs.replace(record, stamp=stamp, pending=False, complete=published.NEVER))
        return self._counts(state, counts, removed)

    def _all(self, state: LatestRows, record: Published, until: int) -> tuple[WriteCounts, int]:
        places = np.arange(len(state.content))
        if record.stamp is None:
            counts = self._send(state, places, until)
        else:
            # Rows whose times the stamp would change come last, once the stamp is gone.
            late = record.stamp.changes_times(state.event, state.known)
            first = self._send(state, places[~late], until)
            self._publish(msgspec.structs.replace(record, stamp=None))
            second = self._send(state, places[late], until)
            counts = WriteCounts(len(places), first.changed + second.changed, first.written + second.written)
        self.lease.require()
        return counts, self.store.remove_except(self.view, key_values(self.view, state.keys), until)

    def _publish(self, record: Published) -> None:
        text = msgspec.json.encode(record)
        if not self.store.replace(self.view, self.record, text):
            self.lease.refuse()
        self.record = text

    def _base(self, before: Published, state: LatestRows) -> LatestRows | None:
        """Return the rows that Redis has according to its record, or None if every row must be compared with Redis."""
        view = self.view
        if before.pending or before.contract != view.hash or not self.store.still_holds(before.servers):
            return None
        base = state
        if before.version != self.history.version or before.at != self.at:
            try:
                history = self.offline.history(view, before.version)
                if history.fingerprint != before.fingerprint:
                    return None
                with self.offline.reading(view.table):
                    base = LatestRows.of(history, before.at)
            except IsthmusError:
                return None  # That version is gone.
        probes = np.unique(np.linspace(0, len(base.content), _PROBES, endpoint=False, dtype=np.int64))
        missing = self.store.missing(view, key_values(view, base.keys.take(probes[: len(base.content)])))
        return None if missing or self.store.lacks_sample(view) else base

    def _send(self, state: LatestRows, places: Places, until: int | None) -> WriteCounts:
        """Write rows in parts, since their Python values take several times the memory of Arrow."""
        if self.send is not None:
            return self.send(state, places, until) if len(places) else WriteCounts(0, 0, 0)
        changed = written = 0
        with self.offline.reading(self.view.table):
            for part in rebatch((batch for table in state.rows(places) for batch in table.to_batches()), PART):
                self.lease.require()
                counts = write_rows(self.store, self.view, part, until)
                changed, written = changed + counts.changed, written + counts.written
        return WriteCounts(len(places), changed, written)

    def _counts(self, state: LatestRows, counts: WriteCounts, removed: int) -> Publication:
        ttl = self.view.ttl
        expired = 0 if ttl is None else int(np.count_nonzero(self.at - state.event > ttl))
        return Publication(len(state.content), counts.changed, counts.written, expired, removed, 0.0)


@dataclass(frozen=True)
class RowsDiff:
    """The writes that bring Redis from one state of a view to a later one, found without reading values.

    Attributes:
        sent: indices, in the later state, of the rows to write.
        changed: number of keys that are new or have different content.
        removed: join keys whose rows the later state lacks.
        stamp: new times of all unchanged rows, written once and not into every row; None if rows keep their own.
    """

    sent: Places
    changed: int
    removed: pa.Table
    stamp: Stamp | None

    @classmethod
    def between(
        cls, before: LatestRows, after: LatestRows, *, stamp: Stamp | None, horizon: int, suspect: pa.Table
    ) -> "RowsDiff | None":
        """Compare two states of a view, and return the rows to write and remove in Redis. Values are not read.

        A row whose content is unchanged can have new times. If all these rows have the same times now, and storing
        them once changes the times of no row to write, they become the new stamp. Otherwise, rows with new times are
        written, too. Return None if Redis keeps its stamp (`stamp`), and that would change the times of a row to write:
        the caller must then compare every row with Redis.

        Args:
            before: rows that Redis has.
            after: rows that Redis should have.
            stamp: common times that Redis stores once for these rows now, or None.
            horizon: latest known time of the table's rows in Redis, in microseconds since 1970 UTC.
            suspect: keys with pushed rows. Their rows are always written or removed, and Redis keeps the newer row.
        """
        matched = index_of_keys(before.keys, after.keys)
        same = before.equal_rows(matched, after, times=False)
        moved = same & ~before.equal_rows(matched, after)
        sent = ~same
        suspect_places = index_of_keys(after.keys, suspect)
        sent[suspect_places[suspect_places >= 0]] = True
        if moved.any():
            first = int(np.flatnonzero(moved)[0])
            fresh = Stamp(horizon, int(after.event[first]), int(after.known[first]))
            alike = (after.event[same] == fresh.event).all() and (after.known[same] == fresh.known).all()
            if alike and not fresh.changes_times(after.event[sent], after.known[sent]).any():
                stamp = fresh
            else:
                sent |= moved
        places = np.flatnonzero(sent)
        if stamp is not None and stamp.changes_times(after.event[places], after.known[places]).any():
            return None
        gone = before.keys.filter(pa.array(~np.isin(np.arange(len(before.content)), matched)))
        removed = pa.concat_tables([gone, suspect.filter(pa.array(suspect_places < 0))])
        return cls(places, int(np.count_nonzero(~same)), removed, stamp)


def require_same(url: str, before: dict[str, int], after: dict[str, int]) -> None:
    if not before.keys() <= after.keys():
        raise DependencyError(
            f"Redis at {without_credentials(url)}", "was restarted, or has changed its primaries, during the run",
            remedy="run `isthmus materialize` again, which writes only what is missing",
        )  # fmt: skip


def write_rows(store: OnlineStore, view: ViewContract, rows: pa.Table, until: int | None) -> WriteCounts:
    values = {column.name: arrow.from_arrow(rows[column.name], column.dtype) for column in view.fields}
    event, known = arrow.micros(rows["event_timestamp"]), arrow.micros(rows["known_at"])
    return store.write(view, key_values(view, rows), event, known, values, horizon=until)


def key_values(view: ViewContract, rows: pa.Table) -> dict[str, list[KeyValue]]:
    return {column.name: arrow.from_arrow(rows[column.name], column.dtype).tolist(column.dtype) for column in view.keys}
