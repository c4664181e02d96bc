"""The time rules, as pure functions on microseconds since 1970 UTC.

The value of a view for a key at time t is the row with the greatest (event, known, content) among the key's rows with
event <= t and known <= t. If t - event > ttl, the value is expired; exactly ttl old is still valid.

`as_of` is the plain form of the rule: the oracle of every fast path in this package.
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
    """A view's answer for a key at a time."""

    PRESENT = 0
    NULL = 1
    """There is a valid row, but all its features are null."""
    EXPIRED = 2
    NOT_FOUND = 3
    DAMAGED = 4
    """There is a row, which cannot be read. Only lookups meet it: training refuses such rows."""

    @property
    def label(self) -> str:
        """The name in tables and reports."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Row:
    """A feature row of a key: times in microseconds, the content hash, the values (None is null)."""

    event: int
    known: int
    content: int
    values: tuple[Any, ...]


def as_of(rows: Iterable[Row], at: int, ttl: int | None) -> tuple[Row | None, Status]:
    """The value of a key at time `at`, and its status; no row if EXPIRED or NOT_FOUND.

    Args:
        rows: the history of the key, in any order.
        at: in microseconds.
        ttl: in microseconds, or None.
    """
    visible = [row for row in rows if row.event <= at and row.known <= at]
    if not visible:
        return None, Status.NOT_FOUND
    winner = max(visible, key=lambda row: (row.event, row.known, row.content))
    if expired(winner.event, at, ttl):
        return None, Status.EXPIRED
    return winner, Status.NULL if all(value is None for value in winner.values) else Status.PRESENT


def expired(event: int, at: int, ttl: int | None) -> bool:
    """Whether a value that became true at `event` is too old at `at`."""
    return ttl is not None and at - event > ttl


def micros(moment: datetime) -> int:
    """Microseconds since 1970 UTC of a datetime with a time zone."""
    if moment.utcoffset() is None:
        raise ValueError(f"{moment.isoformat()} has no time zone; add it, for example a Z at the end")
    return (moment - _EPOCH) // MICROSECOND


def moment(at: int) -> datetime:
    """The UTC datetime of microseconds since 1970."""
    return _EPOCH + timedelta(microseconds=at)


def now() -> int:
    """The present time in microseconds since 1970 UTC."""
    return time.time_ns() // 1000
