"""The time rules, as pure functions on microseconds since 1970 UTC.

The value of a view for a key at time t is the row with the greatest (event, known, content) among the key's rows with
event <= t and known <= t. If t - event > ttl, the value is expired; a value exactly ttl old is still valid.

`as_of` is the plain implementation of the rule. Tests compare every fast path in this package with it.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import Any

MICROSECOND = timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Status(IntEnum):
    """The status of a view's value for a key at a time."""

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
    """A feature row of a key.

    It has the event time and the known time in microseconds since 1970 UTC, the content hash, and the feature values
    (None is null).
    """

    event: int
    known: int
    content: int
    values: tuple[Any, ...]


def as_of(rows: Iterable[Row], at: int, ttl: int | None) -> tuple[Row | None, Status]:
    """Return the row of a key that is valid at time `at`, and its status. The row is None if EXPIRED or NOT_FOUND.

    All `rows` must belong to the same key. `at` and `ttl` are in microseconds. With a `ttl` of None, rows never expire.
    """
    visible = [row for row in rows if row.event <= at and row.known <= at]
    if not visible:
        return None, Status.NOT_FOUND
    winner = max(visible, key=lambda row: (row.event, row.known, row.content))
    if expired(winner.event, at, ttl):
        return None, Status.EXPIRED
    return winner, Status.NULL if all(value is None for value in winner.values) else Status.PRESENT


def expired(event: int, at: int, ttl: int | None) -> bool:
    """Return True if a value with event time `event` is older than `ttl` at time `at`; all in microseconds.

    With a `ttl` of None, values never expire.
    """
    return ttl is not None and at - event > ttl


def micros(moment: datetime) -> int:
    """Return microseconds since 1970 UTC of a datetime; raise ValueError without a time zone."""
    if moment.utcoffset() is None:
        raise ValueError(f"{moment.isoformat()} has no time zone; add it, for example a Z at the end")
    return (moment - _EPOCH) // MICROSECOND


def moment(at: int) -> datetime:
    """Return the UTC datetime of microseconds since 1970; raise OverflowError outside the years 1 to 9999."""
    return _EPOCH + timedelta(microseconds=at)


def now() -> int:
    """Return the current time in microseconds since 1970 UTC."""
    return time.time_ns() // 1000
