"""From the offline table to Redis: one view, by one run at a time.

A run that follows another one compares two states of the table and sends what has changed. Where Redis cannot have all
of the last one's rows, because it was emptied, has evicted keys or the last run was killed, every row is compared with
what Redis holds.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import msgspec
import numpy as np
import pyarrow as pa
import redis
from redis.exceptions import LockError
from redis.lock import Lock

from isthmus.features.contract.contract import ViewContract
from isthmus.features.errors import DependencyError, IsthmusError
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.log import Materialization, MaterializationLog
from isthmus.features.offline.snapshot import Places, Snapshot
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online import record as published
from isthmus.features.online.record import Published
from isthmus.features.online.store import EVERYTHING, LEASE_SECONDS, OnlineStore, WriteCounts
from isthmus.features.publishing.diff import SnapshotDiff
from isthmus.features.redis.address import without_credentials
from isthmus.features.redis.connection import answering
from isthmus.features.values import columns as columnar
from isthmus.features.values.entitykey import KeyValue

PART = 1 << 16
"""Rows that are turned from Arrow into values at a time."""

Send = Callable[[Snapshot, Places, int | None], WriteCounts]
"""Writes some rows of a state by the rule of a horizon, see `OnlineStore.write`."""

WAIT_SECONDS = 600.0
"""How long a run waits for another one of the same view."""

_PROBES = 1000
"""Keys of which it is looked whether Redis still has them, before all others are taken to be there."""


class Materialized(msgspec.Struct, frozen=True):
    """What one view's write to Redis did.

    Attributes:
        compared: keys of the view.
        changed: keys whose content is not what Redis had.
        written: keys whose row was replaced, be it only by newer times.
        expired: keys whose row is older than the ttl; they answer so.
        removed: keys that Redis had and the view does not have any more.
        seconds: how long it took.
    """

    compared: int
    changed: int
    written: int
    expired: int
    removed: int
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable form."""
        return msgspec.structs.asdict(self)


def publish(
    store: OnlineStore,
    url: str,
    offline: OfflineStore,
    history: ViewHistory,
    now: Callable[[], int],
    *,
    full: bool = False,
    send: "Send | None" = None,
    waiting: Callable[[], None] = lambda: None,
) -> Materialized:
    """Makes Redis answer what a history answers now. Another run for the same view is waited for.

    Args:
        store: the rows in Redis.
        url: of that Redis.
        offline: where the history is from.
        history: of the view.
        now: the present in microseconds since 1970 UTC.
        full: compare every row with Redis, replace whatever differs and remove what the view lacks, also what claims to
            be newer.
        send: what writes rows, instead of this process.
        waiting: told once that there is another run.

    Raises:
        DependencyError: Redis does not answer, refuses, or has lost what it had confirmed.
        DataError: the table is damaged.
    """
    started = time.perf_counter()
    with answering(url):
        servers = store.servers()
        with _alone(store, history.view, url, waiting) as lease:
            try:
                done = _Run(store, offline, history, now, lease, servers, send).write(full=full)
            except DependencyError:
                if lease.over:
                    # What this run has sent last may have come after the rows of the other one.
                    store.distrust(history.view)
                raise
    return msgspec.structs.replace(done, seconds=round(time.perf_counter() - started, 3))


class _Lease:
    """The right to be the only materialization of a view, renewed as long as this process lives.

    Args:
        lock: held.
        url: of Redis, for the error.

    Attributes:
        over: whether it was found that another run may have begun.
    """

    def __init__(self, lock: Lock, url: str) -> None:
        self._lock, self.url = lock, url
        self._renewed = time.monotonic()
        self._lost = self.over = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Refuses to go on where another run may have begun, because this process stood still for too long.

        Raises:
            DependencyError: it may have.
        """
        if self._lost or time.monotonic() - self._renewed > LEASE_SECONDS:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Refuses to go on.

        Raises:
            DependencyError: always.
        """
        self.over = True
        raise DependencyError(
            f"Redis at {without_credentials(self.url)}", "may have been taken over by another materialization",
            expected=f"a sign of life every {LEASE_SECONDS:g} seconds", remedy="run `isthmus materialize` again",
        )  # fmt: skip

    def end(self) -> None:
        """Lets others begin."""
        self._over.set()
        self._thread.join()
        with suppress(redis.RedisError):
            self._lock.release()

    def _renew(self) -> None:
        while not self._over.wait(LEASE_SECONDS / 5):
            now = time.monotonic()
            try:
                self._lock.reacquire()
                self._renewed = now
            except LockError:
                self._lost = True
                return
            except redis.RedisError:
                continue  # What Redis has, the main thread will hear.


@contextmanager
def _alone(store: OnlineStore, view: ViewContract, url: str, waiting: Callable[[], None]) -> Iterator[_Lease]:
    """The only materialization of a view for as long as the block lasts; waits for another one to end."""
    lock = store.lock(view)
    if not lock.acquire(blocking=False):
        waiting()
        if not lock.acquire(blocking_timeout=WAIT_SECONDS):
            raise DependencyError(
                f"Redis at {without_credentials(url)}", f"another run has been writing {view.name} for a long time",
                remedy="let it end, or end it",
            )  # fmt: skip
    lease = _Lease(lock, url)
    try:
        yield lease
    finally:
        lease.end()


class _Run:
    """One view's way from the offline table to Redis.

    Args:
        store: the rows in Redis.
        offline: where the history is from.
        history: what is to be written.
        now: the present in microseconds.
        lease: held for the view.
        servers: the processes that held the rows when all this began.
        send: what writes rows, instead of this process.
    """

    def __init__(
        self,
        store: OnlineStore,
        offline: OfflineStore,
        history: ViewHistory,
        now: Callable[[], int],
        lease: _Lease,
        servers: dict[str, int],
        send: "Send | None",
    ) -> None:
        self._elsewhere = send
        self._store, self._offline, self._now, self._lease = store, offline, now, lease
        self._view = history.view
        self._history = history
        self._at = now()
        self._told = store.record_text(self._view)
        self._before = published.decode(self._told)
        self._servers = servers

    def write(self, *, full: bool) -> Materialized:
        """Writes what has to be written."""
        view, before = self._view, self._before
        with self._offline.reading(view.table):
            state = Snapshot.of(self._history, self._at)
        built = self._history.commit.written
        if before is not None and before.built > built and not full:
            # Redis has rows of a table that was built later, where this one decides nothing.
            return self._counted(state, self._send(state, np.arange(len(state.content)), None), 0)
        horizon = max(state.horizon, before.horizon) if before is not None else state.horizon
        fingerprint = self._history.fingerprint
        record = Published(
            contract=view.hash, version=self._history.version, fingerprint=fingerprint, built=built, at=self._at,
            horizon=horizon, servers=self._servers, stamp=published.stamp_of(view, before), pending=True,
        )  # fmt: skip
        # Whoever finds this record later knows that the rows are neither those of the last run nor all of this one's.
        self._publish(record)
        suspect = self._store.take_suspects(view, horizon)
        started = self._now()
        changes = None
        if before is not None and suspect is not None and not full and (base := self._base(before, state)):
            changes = SnapshotDiff.between(
                base, state, stamp=record.stamp, horizon=before.horizon, suspect=suspect.cast(state.keys.schema)
            )
        if changes is None:
            counts, removed = self._everything(state, record, EVERYTHING if full else horizon)
            stamp = None
        else:
            counts, removed = self._send(state, changes.sent, horizon), self._remove(changes.removed, horizon)
            stamp = changes.stamp
        self._lease.require()
        require_same(self._lease.url, self._servers, self._store.servers())
        if self._store.record_text(view) != self._told:
            self._lease.refuse()
        if changes is None or counts.written or removed or stamp != record.stamp:
            # What answers as before became readable before.
            MaterializationLog(self._offline.root).append(
                Materialization(
                    view=view.name, contract=view.hash, version=record.version, fingerprint=fingerprint, at=self._at,
                    started=started, readable=self._now(), written=counts.written,
                )
            )  # fmt: skip
        self._publish(msgspec.structs.replace(record, stamp=stamp, pending=False))
        return self._counted(state, counts, removed)

    def _everything(self, state: Snapshot, record: Published, until: int) -> tuple[WriteCounts, int]:
        """Compares every row with Redis; returns what was written and how many other rows were removed."""
        everyone = np.arange(len(state.content))
        if record.stamp is None:
            counts = self._send(state, everyone, until)
        else:
            # Rows that would not keep their own times under the stamp wait until all others do without it.
            late = record.stamp.alters(state.event, state.known)
            first = self._send(state, everyone[~late], until)
            self._publish(msgspec.structs.replace(record, stamp=None))
            second = self._send(state, everyone[late], until)
            counts = WriteCounts(len(everyone), first.changed + second.changed, first.written + second.written)
        self._lease.require()
        return counts, self._store.remove_others(self._view, key_values(self._view, state.keys), until)

    def _publish(self, record: Published) -> None:
        """Tells Redis of the table, if nobody else has since this run did."""
        text = msgspec.json.encode(record)
        if not self._store.replace(self._view, self._told, text):
            self._lease.refuse()
        self._told = text

    def _base(self, before: Published, state: Snapshot) -> Snapshot | None:
        """What Redis holds, if that is certain enough to compare with it instead of with Redis."""
        view = self._view
        if before.pending or before.contract != view.hash or not self._store.still_holds(before.servers):
            return None
        base = state
        if before.version != self._history.version or before.at != self._at:
            try:
                history = self._offline.history(view, before.version)
                if history.fingerprint != before.fingerprint:
                    return None
                with self._offline.reading(view.table):
                    base = Snapshot.of(history, before.at)
            except IsthmusError:
                return None  # That version is gone.
        probes = np.unique(np.linspace(0, len(base.content), _PROBES, endpoint=False, dtype=np.int64))
        missing = self._store.missing(view, key_values(view, base.keys.take(probes[: len(base.content)])))
        return None if missing else base

    def _remove(self, keys: pa.Table, until: int) -> int:
        return self._store.remove(self._view, key_values(self._view, keys), until) if len(keys) else 0

    def _send(self, state: Snapshot, chosen: Places, until: int | None) -> WriteCounts:
        """Writes some rows a part at a time: their form outside of Arrow takes several times the memory."""
        if self._elsewhere is not None:
            return self._elsewhere(state, chosen, until) if len(chosen) else WriteCounts(0, 0, 0)
        view, changed, written = self._view, 0, 0
        with self._offline.reading(view.table):
            for part in _parts(state.rows(chosen)):
                self._lease.require()
                counts = write_rows(self._store, view, part, until)
                changed, written = changed + counts.changed, written + counts.written
        return WriteCounts(len(chosen), changed, written)

    def _counted(self, state: Snapshot, counts: WriteCounts, removed: int) -> Materialized:
        ttl = self._view.ttl
        expired = 0 if ttl is None else int(np.count_nonzero(self._at - state.event > ttl))
        return Materialized(len(state.content), counts.changed, counts.written, expired, removed, 0.0)


def require_same(url: str, before: dict[str, int], after: dict[str, int]) -> None:
    """Refuses a Redis that was started again meanwhile: it may have lost rows that it had confirmed.

    Raises:
        DependencyError: it was.
    """
    if not before.keys() <= after.keys():
        raise DependencyError(
            f"Redis at {without_credentials(url)}", "was started again, or has changed its primaries, in the middle",
            remedy="run `isthmus materialize` again, which writes only what is missing",
        )  # fmt: skip


def _parts(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows, neither in very many nor in very large tables."""
    held: list[pa.Table] = []
    for table in tables:
        for start in range(0, len(table), PART):
            held.append(table.slice(start, PART))
            if sum(map(len, held)) >= PART:
                yield pa.concat_tables(held)
                held = []
    if held:
        yield pa.concat_tables(held)


def write_rows(store: OnlineStore, view: ViewContract, rows: pa.Table, until: int | None) -> WriteCounts:
    """Writes rows in the form of the offline table by the rule of a horizon, see `OnlineStore.write`."""
    values = {column.name: columnar.from_arrow(rows[column.name], column.dtype) for column in view.fields}
    event, known = columnar.micros(rows["event_timestamp"]), columnar.micros(rows["known_at"])
    return store.write(view, key_values(view, rows), event, known, values, horizon=until)


def key_values(view: ViewContract, rows: pa.Table) -> dict[str, list[KeyValue]]:
    """The join keys of rows as Python values."""
    return {
        column.name: columnar.from_arrow(rows[column.name], column.dtype).tolist(column.dtype) for column in view.keys
    }
