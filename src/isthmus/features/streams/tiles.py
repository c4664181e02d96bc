"""Partial aggregates per key and tick (tiles), from which the rows of sliding windows are computed."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.clock import MICROSECOND
from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import FIRST, LAST
from isthmus.features.definition.tiles import LARGEST_SUM, Aggregation, Count, Max, Mean, Min, Sum, Tiling
from isthmus.features.errors import DataError
from isthmus.features.values.arrow import ARROW, micros
from isthmus.features.values.columns import Ints

Part: TypeAlias = tuple[str, str]
"""A column and the function of Arrow that aggregates it in a tile."""

_EVENTS: Part = ("", "count_all")
_NEUTRAL = {"min": (1 << 63) - 1, "max": -(1 << 63), "sum": 0, "count": 0, "count_all": 0}
_COMBINE: dict[str, Callable[[Ints, Ints], Ints]] = {"min": np.minimum, "max": np.maximum}


class TileState:
    """The tiles of a view's events, in memory. Call `add` for new events, then `rows` for the rows that they change."""

    def __init__(self, view: ViewContract, tiling: Tiling) -> None:
        self._view, self._keys = view.name, {key.name: ARROW[key.dtype.name] for key in view.keys}
        self._features = list(tiling.features())
        self._tick = tiling.tick // MICROSECOND
        self._reach = max(window // MICROSECOND for _, _, window in self._features) // self._tick
        # A place packs a tile's key number (high bits) and tick (low bits). So sorted places keep the ticks of a key
        # together and in order, and a window is a range of places.
        self._origin = FIRST // self._tick - self._reach
        self._bits = (LAST // self._tick + 1 - self._origin).bit_length()
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._places: Ints = np.empty(0, np.int64)
        self._parts: dict[Part, Ints] = {
            part: np.empty(0, np.float64 if part[1] == "size" else np.int64) for part in self._needed()
        }

    def _needed(self) -> set[Part]:
        parts = {(each.column, "count") if each.column else _EVENTS for _, each, _ in self._features}
        sums = {each.column for _, each, _ in self._features if isinstance(each, Sum | Mean)}
        parts |= {(column, part) for column in sums for part in ("sum", "size")}
        parts |= {(each.column, each.suffix) for _, each, _ in self._features if isinstance(each, Min | Max)}
        return parts

    def add(self, events: pa.Table) -> None:
        """Add events that were not added before: join keys, aggregated columns, and `known_at`."""
        if not len(events):
            return
        groups = [f"k{n}" for n in range(len(self._keys))]
        columns = dict(zip(groups, (events[name] for name in self._keys), strict=True))
        columns["tick"] = pa.array(-(-micros(events["known_at"]) // self._tick))
        results: dict[Part, tuple[Any, str]] = {_EVENTS: ([], "count_all")} if _EVENTS in self._parts else {}
        for n, (column, part) in enumerate(self._parts.keys() - results.keys()):
            values = events[column].cast(pa.int64())
            columns[f"p{n}"] = pc.abs(values.cast(pa.float64(), safe=False)) if part == "size" else values
            results[column, part] = f"p{n}", "sum" if part == "size" else part
        tiles = pa.table(columns).group_by([*groups, "tick"], use_threads=False).aggregate(list(results.values()))
        numbers = self._numbers
        keys = zip(*(tiles[name].to_pylist() for name in groups), strict=True)
        coded = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
        if len(numbers) >> (63 - self._bits):
            raise DataError(f"view {self._view}", f"has {len(numbers):,} keys at once, too many for its tick",
                            remedy="declare a longer tick=, or shorter windows")  # fmt: skip
        places = self._place(coded, tiles["tick"].to_numpy())
        order = np.argsort(places)
        found = {
            part: tiles[f"{name}_{function}" if name else function].fill_null(_NEUTRAL[function]).to_numpy()[order]
            for part, (name, function) in results.items()
        }
        self._merge(places[order], found)

    def _merge(self, places: Ints, parts: dict[Part, Ints]) -> None:
        at = np.searchsorted(self._places, places)
        known = at < len(self._places)
        known[known] = self._places[at[known]] == places[known]
        for part, values in parts.items():
            own, combine = self._parts[part], _COMBINE.get(part[1], np.add)
            own[at[known]] = combine(own[at[known]], values[known])
            self._parts[part] = np.insert(own, at[~known], values[~known])
        self._places = np.insert(self._places, at[~known], places[~known])

    def rows(self, keys: pa.Table | None, first: int) -> pa.Table:
        """Return the rows of `keys` (None: all keys) since event time `first`, in microseconds since 1970 UTC.

        Each tile gives a row. The columns are the join keys, the features, and `event_timestamp`. First add the events
        of the longest window before `first`.
        """
        chosen = self._numbers if keys is None else zip(*(keys[name].to_pylist() for name in self._keys), strict=True)
        found = sorted((number, key) for key in chosen if (number := self._numbers.get(key)) is not None)
        coded = np.array([number for number, _ in found], np.int64)
        tick = -(-first // self._tick)
        lows = np.searchsorted(self._places, self._place(coded, tick - self._reach + 1))
        highs = np.searchsorted(self._places, self._place(coded + 1, self._origin))
        counts = highs - lows
        index = np.repeat(lows - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        places = self._places[index]
        ticks = self._ticks(places)
        wanted = np.flatnonzero(ticks >= tick)
        windows = _Windows({part: values[index] for part, values in self._parts.items()}, places, wanted)
        columns = {name: windows.of(each, window // MICROSECOND // self._tick)
                   for name, each, window in self._features}  # fmt: skip
        place_of_key = np.repeat(np.arange(len(found)), counts)[wanted]
        taken = {name: pa.array([key[n] for _, key in found], dtype).take(pa.array(place_of_key))
                 for n, (name, dtype) in enumerate(self._keys.items())}  # fmt: skip
        times = pa.array(ticks[wanted] * self._tick).cast(pa.timestamp("us", "UTC"))
        return pa.table({**taken, **columns, "event_timestamp": times})

    def forget(self, first: int) -> None:
        """Drop the tiles before a time, and keys without tiles."""
        coded, ticks = self._places >> self._bits, self._ticks(self._places)
        kept = ticks * self._tick >= first
        used, renumbered = np.unique(coded[kept], return_inverse=True)
        names = list(self._numbers)
        self._numbers = {names[old]: new for new, old in enumerate(used.tolist())}
        self._places = self._place(renumbered, ticks[kept])
        self._parts = {part: values[kept] for part, values in self._parts.items()}

    def _place(self, numbers: Ints, ticks: Ints | int) -> Ints:
        return (numbers << self._bits) + (ticks - self._origin)

    def _ticks(self, places: Ints) -> Ints:
        return (places & ((1 << self._bits) - 1)) + self._origin


class _Windows:
    """The windows that end at the wanted rows."""

    def __init__(self, parts: dict[Part, Ints], places: Ints, wanted: Ints) -> None:
        self._parts, self._places, self._wanted = parts, places, wanted
        self._tables: dict[Part, list[Ints]] = {}

    def of(self, each: Aggregation, ticks: int) -> pa.Array:
        first, end = np.searchsorted(self._places, self._places[self._wanted] - ticks + 1), self._wanted + 1
        count = self._sum((each.column, "count") if each.column else _EVENTS, first, end)
        if isinstance(each, Count):
            return pa.array(count)
        empty = count == 0
        if isinstance(each, Sum):
            return pa.array(self._total(each.column, first, end), mask=empty)
        if isinstance(each, Mean):
            # Doubles of both first, as the engine divides.
            total = self._total(each.column, first, end).astype(np.float64)
            return pa.array(np.divide(total, count, out=np.zeros(len(count)), where=~empty), mask=empty)
        return pa.array(self._extreme((each.column, each.suffix), first, end), mask=empty)

    def _sum(self, part: Part, first: Ints, end: Ints) -> Ints:
        sums = np.append(0, np.cumsum(self._parts[part]))
        return np.asarray(sums[end] - sums[first])

    def _total(self, column: str, first: Ints, end: Ints) -> Ints:
        if np.any(self._sum((column, "size"), first, end) >= LARGEST_SUM):
            raise DataError(f"aggregation of {column}", "a sum exceeds 64 bits",
                            remedy="sum numbers of a larger unit, or over a shorter window")  # fmt: skip
        return self._sum((column, "sum"), first, end)

    def _extreme(self, part: Part, first: Ints, end: Ints) -> Ints:
        """Return the minimum or maximum of each range, from those of two overlapping ranges of 2**n values."""
        combine = _COMBINE[part[1]]
        sizes = np.frexp((end - first).astype(np.float64))[1] - 1
        levels = self._tables.setdefault(part, [self._parts[part]])
        while len(levels) <= sizes.max(initial=0):
            step = 1 << (len(levels) - 1)
            levels.append(combine(levels[-1][:-step], levels[-1][step:]))
        result = np.empty(len(first), np.int64)
        for size in np.unique(sizes).tolist():
            own = sizes == size
            result[own] = combine(
                self._tables[part][size][first[own]], self._tables[part][size][end[own] - (1 << size)]
            )
        return result
