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
    """Return the row of a key that was valid at time `at`, and the status. If EXPIRED or NOT_FOUND, the row is None.

    All `rows` have the same key. Only rows with event <= at and known <= at count, and the greatest (event, known,
    content) wins. It has expired if at - event > ttl. Times and `ttl` are in microseconds. If `ttl` is None, rows never
    expire.
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
    """Convert microseconds since 1970 UTC to a datetime. Raise OverflowError outside the years 1 to 9999."""
    return _EPOCH + timedelta(microseconds=at)


def now() -> int:
    """Return the current time in microseconds since 1970 UTC."""
    return time.time_ns() // 1000
