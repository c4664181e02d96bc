"""Ranges of UTC days. Builds cover a range of days, and offline tables are partitioned by day."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from isthmus.features import clock
from isthmus.features.errors import RequestError

DAY = 86_400_000_000  # microseconds
FIRST, LAST = clock.micros(datetime.min.replace(tzinfo=UTC)), clock.micros(datetime.max.replace(tzinfo=UTC))
"""The first and last microsecond that `datetime` can represent."""
_EPOCH = date(1970, 1, 1)


def day_of(micros: int) -> int:
    return micros // DAY


@dataclass(frozen=True, order=True, slots=True)
class Days:
    """A range of UTC days. `first` and `end` are numbers of days since 1970-01-01; `end` is not part of the range."""

    first: int
    end: int

    @classmethod
    def parse(cls, first: str, end: str) -> "Days":
        """Parse the first day and the end of a range, such as 2024-01-31. The day `end` is not part of the range.

        Raise RequestError if a day is invalid, or if the range contains no day. A time at the start of a day in UTC is
        also accepted.
        """
        days = cls(_day("from", first), _day("to", end))
        if days.first >= days.end:
            raise RequestError(
                "range", f"{days} contains no day", expected="a later end: the end is not part of the range"
            )
        return days

    def __str__(self) -> str:
        return f"{day_name(self.first)} to {day_name(self.end)}"

    def __len__(self) -> int:
        return max(0, self.end - self.first)

    def __contains__(self, day: int) -> bool:
        return self.first <= day < self.end

    def steps(self, length: int) -> Iterator["Days"]:
        for first in range(self.first, self.end, length):
            yield Days(first, min(first + length, self.end))

    def without(self, done: Iterable["Days"]) -> list["Days"]:
        remaining, first = [], self.first
        for days in sorted(done):
            if days.end <= first or days.first >= self.end:
                continue
            if days.first > first:
                remaining.append(Days(first, days.first))
            first = days.end
        return [*remaining, Days(first, self.end)] if first < self.end else remaining


def union(ranges: Iterable[Days]) -> list[Days]:
    merged: list[Days] = []
    for days in sorted(ranges):
        if merged and days.first <= merged[-1].end:
            merged[-1] = Days(merged[-1].first, max(merged[-1].end, days.end))
        else:
            merged.append(days)
    return merged


def day_name(day: int) -> str:
    try:
        return (_EPOCH + timedelta(days=day)).isoformat()
    except OverflowError:
        return f"day {day}"


def _day(role: str, text: str) -> int:
    try:
        return (date.fromisoformat(text) - _EPOCH).days
    except ValueError:
        pass
    expected = "a day like 2024-01-31, or the start of a UTC day like 2024-01-31T00:00:00Z"
    try:
        at = clock.micros(datetime.fromisoformat(text))
    except ValueError as error:
        raise RequestError(f"--{role} {text}", f"is not a day ({error})", expected=expected) from None
    if at % DAY:
        raise RequestError(f"--{role} {text}", "is not the start of a UTC day", expected=expected)
    return at // DAY
