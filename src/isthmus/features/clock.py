"""The point-in-time rules, as pure functions on microseconds since 1970 UTC. `as_of` is the reference for tests."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import Any

MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Status(IntEnum):
    """The result of looking up a view's row for a key at a time."""

    PRESENT = 0
    NULL = 1
    """A valid row exists, but all its features are null."""
    EXPIRED = 2
    NOT_FOUND = 3
    DAMAGED = 4
    """A row exists but cannot be read. Only lookups return this status; training rejects such rows."""

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Row:
    """A feature row of a key: event and known time in microseconds since 1970 UTC, content hash, and feature values."""

    event: int
    known: int
    content: int
    values: tuple[Any, ...]


def as_of(rows: Iterable[Row], at: int, ttl: int | None) -> tuple[Row | None, Status]:
    """Return the row of one key that was valid at the time `at`, and its status. Tests compare all joins with this.

    Only rows with event <= at and known <= at count, and the greatest (event, known, content) wins. If the winner has
    expired (at - event > ttl), the row is None and the status EXPIRED. If no row counts, the row is None and the status
    NOT_FOUND.

    Args:
        rows: rows of the same key, in any order.
        at: time in microseconds since 1970 UTC.
        ttl: microseconds for which a row is valid; None if rows never expire.
    """
    visible = [row for row in rows if row.event <= at and row.known <= at]
    if not visible:
        return None, Status.NOT_FOUND
    winner = max(visible, key=lambda row: (row.event, row.known, row.content))
    if expired(winner.event, at, ttl):
        return None, Status.EXPIRED
    return winner, Status.NULL if all(value is None for value in winner.values) else Status.PRESENT


def expired(event: int, at: int, ttl: int | None) -> bool:
    return ttl is not None and at - event > ttl


def micros(moment: datetime) -> int:
    """Convert a datetime to microseconds since 1970 UTC. Raise ValueError if it has no time zone."""
    if moment.utcoffset() is None:
        raise ValueError(f"{moment.isoformat()} has no time zone; add it, for example a Z at the end")
    return (moment - _EPOCH) // MICROSECOND


def moment(at: int) -> datetime:
    return _EPOCH + timedelta(microseconds=at)


def now() -> int:
    return time.time_ns() // 1000
