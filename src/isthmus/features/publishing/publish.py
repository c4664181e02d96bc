"""Publish a view from the offline table to Redis, one run at a time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
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
from isthmus.features.offline.history import LatestRows, ViewHistory
from isthmus.features.offline.log import Materialization, MaterializationLog
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online import record as published
from isthmus.features.online.loss import SAMPLE
from isthmus.features.online.record import Published
from isthmus.features.online.store import EVERYTHING, LEASE_SECONDS, OnlineStore
from isthmus.features.publishing.changes import (
    Facts,
    Find,
    KeyChanges,
    ViewChanges,
    WriteSelection,
    WriteTotals,
    key_values,
    remove,
)
from isthmus.features.redis.address import without_credentials
from isthmus.features.redis.connection import translate_errors

# A run compares the latest rows now with the rows that the last run published, and sends the difference. If Redis may
# lack published rows, because it was emptied, has evicted keys or the run was killed, every row is compared with Redis.

WAIT_SECONDS = 600.0
"""Maximum wait for another run of the same view."""


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
    find: Find | None = None,
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
        find: opens the rows to publish, for example on executors; by default in this process.
        waiting: called once if another run writes the view; this run then waits up to `WAIT_SECONDS`.
    """
    started, find = time.perf_counter(), find or _here(store, offline)
    with translate_errors(url):
        servers = store.servers()
        with _leased(store, history.view, url, waiting) as lease:
            try:
                counts = _Run(store, offline, history, now, lease, servers, find).write(full=full)
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
    find: Find

    def __post_init__(self) -> None:
        self.view = self.history.view
        self.at = self.now()
        self.record = self.store.record_text(self.view)
        self.before = published.decode(self.record)

    def write(self, *, full: bool) -> Publication:
        view, before = self.view, self.before
        built, fingerprint = self.history.commit.written, self.history.fingerprint
        overtaken = before is not None and before.built > built and not full
        with ExitStack() as stack:
            base = None if full or overtaken else self._base()
            parts, facts, base = self._open(stack, base)
            if overtaken:
                # Redis has rows of a table that was built later, so these rows overrule nothing.
                return self._counts(facts, parts.write(WriteSelection(self.record, None), self.lease.require))
            horizon = max(facts.horizon, before.horizon) if before is not None else facts.horizon
            complete = published.NEVER if before is None or before.contract != view.hash else before.complete_until
            record = Published(
                contract=view.hash, version=self.history.version, fingerprint=fingerprint, built=built, at=self.at,
                horizon=horizon, servers=self.servers, stamp=published.stamp_of(view, before), pending=True,
                complete=complete,
            )  # fmt: skip
            # While the record is pending, the rows are a mixture of the last run's and this run's.
            self._publish(record)
            suspects = self.store.take_suspects(view, horizon)
            started = self.now()
            stamp = facts.stamp(before.horizon) if before is not None else None
            whole = base is None or facts.missing or self.store.lacks_sample(view) or (facts.clash and stamp is None)
            if whole or suspects is None:
                written, stamp = self._write_all(parts, record, EVERYTHING if full else horizon), None
            else:
                written = self._write_changes(parts, horizon, suspects, moved=stamp is None)
                stamp = stamp or record.stamp
        self.lease.require()
        places = np.unique(np.linspace(0, len(facts.sample), SAMPLE, endpoint=False, dtype=np.int64))
        self.store.keep_sample(view, [facts.sample[place] for place in places[: len(facts.sample)]])
        require_same(self.lease.url, self.servers, self.store.servers())
        if self.store.record_text(view) != self.record:
            self.lease.refuse()
        if whole or suspects is None or written.written or written.removed or stamp != record.stamp:
            # Without a change, the rows were readable before.
            MaterializationLog(self.offline.root, self.offline.storage_options).append(
                Materialization(
                    view=view.name, contract=view.hash, version=record.version, fingerprint=fingerprint, at=self.at,
                    started=started, readable=self.now(), written=written.written,
                )
            )  # fmt: skip
        self._publish(msgspec.structs.replace(record, stamp=stamp, pending=False, complete=published.NEVER))
        return self._counts(facts, written)

    def _open(
        self, stack: ExitStack, base: tuple[ViewHistory, int] | None
    ) -> tuple[ViewChanges, Facts, tuple[ViewHistory, int] | None]:
        """Open the rows of the table and of `base` until `stack` closes. Return None as base if it cannot be read."""
        try:
            parts = stack.enter_context(self.find(self.history, self.at, base))
            return parts, parts.facts(self.before), base
        except IsthmusError:
            if base is None:
                raise
        return self._open(stack, None)  # The version of the base may be gone.

    def _write_changes(self, parts: ViewChanges, horizon: int, suspects: pa.Table, *, moved: bool) -> WriteTotals:
        written = parts.write(WriteSelection(self.record, horizon, suspects, moved), self.lease.require)
        left = suspects.filter(pa.array(~np.isin(np.arange(len(suspects)), written.found)))
        return written + WriteTotals(removed=remove(self.store, self.view, left, horizon))

    def _write_all(self, parts: ViewChanges, record: Published, horizon: int) -> WriteTotals:
        if record.stamp is None:
            written = parts.write(WriteSelection(self.record, horizon), self.lease.require)
        else:
            # Rows whose times the stamp would change come last, once the stamp is gone.
            written = parts.write(WriteSelection(self.record, horizon, stamp=record.stamp), self.lease.require)
            self._publish(msgspec.structs.replace(record, stamp=None))
            written += parts.write(
                WriteSelection(self.record, horizon, stamp=record.stamp, late=True), self.lease.require
            )
        self.lease.require()
        return written + WriteTotals(removed=parts.remove_others(self.record, horizon))

    def _publish(self, record: Published) -> None:
        text = msgspec.json.encode(record)
        if not self.store.replace(self.view, self.record, text):
            self.lease.refuse()
        self.record = text

    def _base(self) -> tuple[ViewHistory, int] | None:
        """Return the table whose rows Redis has according to its record; None if all must be compared with Redis."""
        before = self.before
        if before is None or before.pending or before.contract != self.view.hash:
            return None
        if not self.store.still_holds(before.servers):
            return None
        history = self.history
        if before.version != history.version:
            try:
                history = self.offline.history(self.view, before.version)
            except IsthmusError:
                return None  # That version is gone.
        return (history, before.at) if history.fingerprint == before.fingerprint else None

    def _counts(self, facts: Facts, counts: WriteTotals) -> Publication:
        return Publication(facts.keys, counts.changed, counts.written, facts.expired, counts.removed, 0.0)


@dataclass(frozen=True)
class _Here:
    """The rows of a view in this process."""

    store: OnlineStore
    offline: OfflineStore
    part: KeyChanges

    def facts(self, record: Published | None) -> Facts:
        return self.part.facts(self.store, record)

    def write(self, selection: WriteSelection, require: Callable[[], None]) -> WriteTotals:
        with self.offline.reading(self.part.now.history.view.table):
            return self.part.write(self.store, selection, require)

    def remove_others(self, record: bytes | None, horizon: int) -> int:  # noqa: ARG002 - as in `ViewChanges`
        now = self.part.now
        return self.store.remove_except(now.history.view, key_values(now.history.view, now.keys), horizon)


def _here(store: OnlineStore, offline: OfflineStore) -> Find:
    @contextmanager
    def find(history: ViewHistory, at: int, base: tuple[ViewHistory, int] | None) -> Iterator[ViewChanges]:
        with offline.reading(history.view.table):
            now = LatestRows.of(history, at)
            before = base and (now if base[0] is history and base[1] == at else LatestRows.of(*base))
        yield _Here(store, offline, KeyChanges(now, before))

    return find


def require_same(url: str, before: dict[str, int], after: dict[str, int]) -> None:
    if not before.keys() <= after.keys():
        raise DependencyError(
            f"Redis at {without_credentials(url)}", "was restarted, or has changed its primaries, during the run",
            remedy="run `isthmus materialize` again, which writes only what is missing",
        )  # fmt: skip
