"""Aggregations over sliding windows, which a stream keeps up to date from partial results: the tiles."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

from isthmus.features.clock import MICROSECOND
from isthmus.features.definition.failure import type_problems
from isthmus.features.errors import Problem
from isthmus.features.types import DataType, Float64, Int64

LARGEST_SUM = 9.2e18
"""Greatest sum of the absolute values of a window. Sums of integers beyond 64 bits would be wrong, without an error."""

_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


@dataclass(frozen=True)
class Count:
    """The number of events, or of events whose `column` is not null.

    Attributes:
        name: prefix of the features' names, by default `count` or `COLUMN_count`.
    """

    column: str = ""
    name: str = ""

    suffix: ClassVar[str] = "count"
    dtype: ClassVar[DataType] = Int64


@dataclass(frozen=True)
class Sum:
    """The sum of an integer or boolean column, without nulls; null if the window has no value."""

    column: str
    name: str = ""

    suffix: ClassVar[str] = "sum"
    dtype: ClassVar[DataType] = Int64


@dataclass(frozen=True)
class Mean:
    """The mean of an integer or boolean column, without nulls, as a Float64; null if the window has no value."""

    column: str
    name: str = ""

    suffix: ClassVar[str] = "mean"
    dtype: ClassVar[DataType] = Float64


@dataclass(frozen=True)
class Min:
    """The smallest value of an integer column; null if the window has no value."""

    column: str
    name: str = ""

    suffix: ClassVar[str] = "min"
    dtype: ClassVar[DataType] = Int64


@dataclass(frozen=True)
class Max:
    """The largest value of an integer column; null if the window has no value."""

    column: str
    name: str = ""

    suffix: ClassVar[str] = "max"
    dtype: ClassVar[DataType] = Int64


Aggregation = Count | Sum | Mean | Min | Max


@dataclass(frozen=True)
class Tiling:
    """The aggregations of a view. See `isthmus.aggregate`.

    Attributes:
        tick: time between rows of a key; rows are at multiples of it since 1970 UTC.
    """

    tiles: Sequence[Aggregation]
    windows: Sequence[timedelta]
    tick: timedelta

    @property
    def columns(self) -> list[str]:
        """Columns of events that are aggregated."""
        return list(dict.fromkeys(each.column for each in self.tiles if each.column))

    @property
    def summed(self) -> set[str]:
        """Columns whose values are aggregated. `Count` only tests its column for null."""
        return {each.column for each in self.tiles if not isinstance(each, Count)}

    def features(self) -> Iterator[tuple[str, Aggregation, timedelta]]:
        """Yield the name of each feature, with its aggregation and window."""
        for window in self.windows:
            for each in self.tiles:
                name = each.name or "_".join(filter(None, (each.column, each.suffix)))
                yield f"{name}_{window_name(window)}", each, window

    def identity(self) -> list[Any]:
        """Return what determines the values of the rows, as plain data to hash."""
        named = [[name, each.suffix, each.column, window / MICROSECOND] for name, each, window in self.features()]
        return [self.tick / MICROSECOND, named]

    def problems(self, where: str) -> list[Problem]:
        """Return what is wrong with the declaration. `where` is the prefix of the places."""
        problems = type_problems(self, where)
        problems = problems or [wrong for each in self.tiles for wrong in type_problems(each, f"{where}{each}, ")]
        if problems:
            return problems
        if not self.tiles:
            problems.append(Problem(f"{where}tiles", "is empty", "at least one of Count, Sum, Mean, Min and Max"))
        if not self.windows:
            problems.append(Problem(f"{where}windows", "is empty", "at least one, such as timedelta(days=7)"))
        if len(set(self.windows)) < len(self.windows):
            problems.append(Problem(f"{where}windows", "has a window twice", "each window once"))
        second = timedelta(seconds=1)
        if self.tick < second or self.tick % second:
            problems.append(Problem(f"{where}tick", str(self.tick), "a whole number of seconds"))
        elif wrong := [window for window in self.windows if window < self.tick or window % self.tick]:
            problems.append(Problem(f"{where}windows", str(wrong[0]), f"a multiple of the tick, {self.tick}"))
        return problems


def window_name(window: timedelta) -> str:
    """Return a window's length in its largest unit, such as 28d, 3h or 90m."""
    seconds = int(window.total_seconds())
    return next(f"{seconds // size}{unit}" for unit, size in _UNITS if seconds % size == 0)
