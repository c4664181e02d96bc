"""The search behind the point-in-time join: finds the valid rows for many keys and times in one pass over a history."""

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.values.columns import Ints

# A row of the history is visible from the later of its event and known times. The distinct times at which a key is
# queried are its slots, in order. Each row lands on the first slot at which it is visible; the greatest row by (event,
# known, content) wins the slot. The running maximum along the slots of a key is the answer at each time.
#
# Memory holds the sorted times of the spine and a block of the history, however long the history is.

_LEAST = np.iinfo(np.int64).min
_NONE = -1

_PART = 1 << 16
"""Rows processed together: few enough that their columns stay in a core's cache."""


class AsOfQueries:
    """A search of a view's history for the row that is valid at each of n pairs of key and time. No ttl is applied.

    Pass every block of the history to `offer`, in any order, and then call `answers`. `keys` has a column of n values
    per join key; a null matches no row. `at` holds n times in microseconds since 1970 UTC. `content` returns the
    content hashes of rows, given their ascending numbers in the history. It is called only for rows with equal keys and
    times.
    """

    def __init__(self, keys: Sequence[pa.ChunkedArray], at: Ints, content: Callable[[Ints], Ints]) -> None:
        self._keys, self._content = _Numbering(keys), content
        number = self._keys.number
        valid = number >= 0
        moments = at[valid]
        self._axis = _Axis(moments, self._keys.count)
        slots, slot = np.unique(self._axis.pack(number[valid], moments), return_inverse=True)
        self._slots = slots
        self._slot_of = np.full(len(at), _NONE)
        self._slot_of[valid] = slot
        # For each slot the number of its key, and the greatest row that landed on it. A sentinel slot at the end
        # receives the rows after all moments.
        self._number = np.append(self._axis.number(slots), _NONE)
        self._event = np.full(len(slots) + 1, _LEAST)
        self._known = np.full(len(slots) + 1, _LEAST)
        self._place = np.full(len(slots) + 1, _NONE)
        self._begin = np.append(self._number[:-1] * self._axis.span, np.iinfo(np.int64).max)
        # The top sixteen bits of a packed key and moment distinguish most of them.
        self._shift = max(int(slots[-1]).bit_length() - 16, 0) if len(slots) else 0

    def offer(self, keys: Sequence[pa.ChunkedArray], event: Ints, known: Ints, first: int) -> None:
        number = self._keys.of(keys)
        for start in range(0, len(number), _PART):
            part = slice(start, start + _PART)
            self._land(number[part], event[part], known[part], first + start)

    def _land(self, number: Ints, event: Ints, known: Ints, first: int) -> None:
        since = np.maximum(event, known)
        rows = np.flatnonzero((number >= 0) & (since <= self._axis.high))
        packed = self._axis.pack(number, np.clip(since, self._axis.low, self._axis.high))
        # Binary search is several times as fast when its needles are roughly sorted.
        rows = rows.take(np.argsort((packed >> self._shift).astype(np.uint16).take(rows), kind="stable"))
        packed = packed.take(rows)
        slot = np.searchsorted(self._slots, packed)
        # A row after the last moment of its key falls on the next key's slot, or on the sentinel.
        keep = np.flatnonzero(self._begin.take(slot) <= packed)
        rows, slot = rows.take(keep), slot.take(keep)
        for column, best in ((event, self._event), (known, self._known)):
            keep = self._greatest(slot, column.take(rows), best)
            rows, slot = rows.take(keep), slot.take(keep)
        self._settle(slot, rows + first)

    def answers(self) -> tuple[Ints, Ints]:
        """Return the number and the event time of the newest visible history row for each pair of key and time.

        Numbers count the rows of the history from 0. Event times are in microseconds since 1970 UTC. A row is visible
        from the later of its event time and its known time. Without a visible row, the number is -1 and the event time
        is meaningless.
        """
        best = self._best()
        slot = best[self._slot_of]
        slot[(self._slot_of < 0) | (self._number[slot] != self._number[self._slot_of])] = _NONE
        return self._place[slot], self._event[slot]

    def _best(self) -> Ints:
        filled = self._place >= 0
        rank = np.full(len(filled), _NONE)
        axis = _Axis(self._event[filled], self._keys.count)
        rank[filled] = axis.pack(self._number[filled], self._event[filled])
        # Rows of the same event become visible in the order of their known times, so the last of equals is greatest.
        top = filled & (rank == np.maximum.accumulate(rank))
        return np.maximum.accumulate(np.where(top, np.arange(len(filled)), 0))

    def _greatest(self, slot: Ints, values: Ints, best: Ints) -> Ints:
        before = best.take(slot)
        keep = np.flatnonzero(values >= before)
        slot, values, before = slot.take(keep), values.take(keep), before.take(keep)
        np.maximum.at(best, slot, values)
        risen = slot[values > before]
        self._place[risen] = _NONE
        if best is self._event:
            self._known[risen] = _LEAST
        greatest: Ints = keep[values == best.take(slot)]
        return greatest

    def _settle(self, slot: Ints, place: Ints) -> None:
        before = self._place.take(slot)
        self._place[slot] = place
        self._place[slot[(before >= 0) | (self._place.take(slot) != place)]] = _NONE
        tied = np.flatnonzero(self._place.take(slot) < 0)
        if len(tied):
            slots, places = np.tile(slot[tied], 2), np.concatenate([before[tied], place[tied]])
            slots, places = slots[places >= 0], places[places >= 0]
            distinct, inverse = np.unique(places, return_inverse=True)
            order = np.argsort(self._content(distinct)[inverse], kind="stable")
            # NumPy stores the last of several values for an index.
            self._place[slots[order]] = places[order]


class _Axis:
    """Packs a key number and a time into an integer that orders by both."""

    def __init__(self, moments: Ints, count: int) -> None:
        self.low, self.high = (int(moments.min()), int(moments.max())) if len(moments) else (0, -1)
        self.span = self.high - self.low + 1
        # If the span would overflow, the ranks of the moments replace them; ranks always fit.
        self._moments = np.unique(moments) if self.span * max(count, 1) >= 1 << 62 else None
        if self._moments is not None:
            self.span = len(self._moments)

    def pack(self, number: Ints, moment: Ints) -> Ints:
        place = moment - self.low if self._moments is None else np.searchsorted(self._moments, moment)
        packed: Ints = number * self.span + place
        return packed

    def number(self, packed: Ints) -> Ints:
        return packed // max(self.span, 1)


class _Numbering:
    """Numbers the distinct keys from 0 in key order, so that rows stored by key are looked up in order."""

    def __init__(self, keys: Sequence[pa.ChunkedArray]) -> None:
        self._values: list[pa.Array] = []
        self._seen: list[Ints | None] = []
        self.number = np.zeros(1, np.int64)
        self.count = 1
        for column in keys:
            values = pc.drop_null(pc.unique(column))
            self._values.append(values.take(pc.sort_indices(values)))
            number = _joined(self.number, _positions(column, self._values[-1]), len(values))
            self.count *= len(values)
            seen = None
            if self.count > 1 << 24:
                # Few of so many combinations occur, so renumbering them bounds the numbers.
                seen = np.unique(number[number >= 0])
                number, self.count = _index(seen, number), len(seen)
            self._seen.append(seen)
            self.number = number

    def of(self, keys: Sequence[pa.ChunkedArray]) -> Ints:
        number = np.zeros(1, np.int64)
        for column, values, seen in zip(keys, self._values, self._seen, strict=True):
            number = _joined(number, _positions(column, values), len(values))
            if seen is not None:
                number = _index(seen, number)
        return number


def _joined(number: Ints, position: Ints, count: int) -> Ints:
    # A negative number stays negative.
    return np.where(position < 0, _NONE, number * count + position)


def _index(distinct: Ints, values: Ints) -> Ints:
    if not len(distinct):
        return np.full(len(values), _NONE)
    place = np.minimum(np.searchsorted(distinct, values), len(distinct) - 1)
    return np.where(distinct[place] == values, place, _NONE)


def _positions(column: pa.ChunkedArray, values: pa.Array) -> Ints:
    if not pa.types.is_dictionary(column.type):
        return _filled(pc.index_in(column, value_set=values))
    if not column.num_chunks:
        return np.empty(0, np.int64)
    # A single call for the distinct values: each call hashes all of `values`.
    column = column.unify_dictionaries()
    positions = np.append(_filled(pc.index_in(column.chunk(0).dictionary, value_set=values)), _NONE)
    # The index -1 of a null is the appended last entry.
    return positions.take(np.concatenate([_filled(chunk.indices) for chunk in column.chunks]))


def _filled(indices: pa.ChunkedArray | pa.Array) -> Ints:
    filled: Ints = pc.fill_null(indices, _NONE).to_numpy(zero_copy_only=False).astype(np.int64)
    return filled
