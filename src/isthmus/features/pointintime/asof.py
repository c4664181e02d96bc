"""Which row of a history answers which question, where the history is read once, in blocks of any order.

A row can be used from when it is both true and known. The questions of a key are put in order of time, and every row of
the history lands on the first question that can use it; of the rows that land on one question, the greatest by (event,
known, content) stays. The greatest so far, along the questions of a key, then answers each: `clock.as_of` for all of
them at once.

Only the questions are sorted and kept. A history costs the block at hand, in memory, however long it is.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_LEAST = np.iinfo(np.int64).min
_NONE = -1

_PART = 1 << 16
"""Rows that land together: their columns stay in a core's cache."""


class Questions:
    """Keys and moments to which a history has the answers.

    Args:
        keys: a column per join key, n values each; a null is no key of any row.
        at: microseconds, shape (n,).
        content: the content hashes of the rows at some places, which are distinct and in order. Asked for where rows of
            one key have the same times.
    """

    def __init__(self, keys: Sequence[pa.ChunkedArray], at: Integers, content: Callable[[Integers], Integers]) -> None:
        self._keys, self._content = _Numbering(keys), content
        number = self._keys.number
        asked = number >= 0
        moments = at[asked]
        self._axis = _Axis(moments, self._keys.count)
        slots, slot = np.unique(self._axis.pack(number[asked], moments), return_inverse=True)
        self._slots = slots
        self._slot_of = np.full(len(at), _NONE)
        self._slot_of[asked] = slot
        # Of each slot, the number of its key, and the greatest row that landed on it. The last one is nobody's: there
        # land the rows past all questions.
        self._number = np.append(self._axis.number(slots), _NONE)
        self._event = np.full(len(slots) + 1, _LEAST)
        self._known = np.full(len(slots) + 1, _LEAST)
        self._place = np.full(len(slots) + 1, _NONE)
        self._begin = np.append(self._number[:-1] * self._axis.span, np.iinfo(np.int64).max)
        # Sixteen bits of a packed key and moment that tell most of them apart.
        self._shift = max(int(slots[-1]).bit_length() - 16, 0) if len(slots) else 0

    def offer(self, keys: Sequence[pa.ChunkedArray], event: Integers, known: Integers, first: int) -> None:
        """Takes up what rows of the history say.

        Args:
            keys: a column per join key, m values each.
            event: microseconds, shape (m,).
            known: microseconds, shape (m,).
            first: the place of the first row. The others follow.
        """
        number = self._keys.of(keys)
        for start in range(0, len(number), _PART):
            part = slice(start, start + _PART)
            self._land(number[part], event[part], known[part], first + start)

    def _land(self, number: Integers, event: Integers, known: Integers, first: int) -> None:
        since = np.maximum(event, known)
        rows = np.flatnonzero((number >= 0) & (since <= self._axis.high))
        packed = self._axis.pack(number, np.clip(since, self._axis.low, self._axis.high))
        # What stands in about the order of the questions is found in them several times as fast.
        rows = rows.take(np.argsort((packed >> self._shift).astype(np.uint16).take(rows), kind="stable"))
        packed = packed.take(rows)
        slot = np.searchsorted(self._slots, packed)
        # Past the last question of its key, a row falls on another key's, or on nobody's.
        kept = np.flatnonzero(self._begin.take(slot) <= packed)
        rows, slot = rows.take(kept), slot.take(kept)
        for column, best in ((event, self._event), (known, self._known)):
            kept = self._greatest(slot, column.take(rows), best)
            rows, slot = rows.take(kept), slot.take(kept)
        self._settle(slot, rows + first)

    def answers(self) -> tuple[Integers, Integers]:
        """The place of the row that answers each question, -1 without one, and its event time. Shape (n,) each."""
        best = self._best()
        found = best[self._slot_of]
        found[(self._slot_of < 0) | (self._number[found] != self._number[self._slot_of])] = _NONE
        return self._place[found], self._event[found]

    def _best(self) -> Integers:
        """Of each slot, the slot at or before it that holds the greatest row so far."""
        there = self._place >= 0
        rank = np.full(len(there), _NONE)
        axis = _Axis(self._event[there], self._keys.count)
        rank[there] = axis.pack(self._number[there], self._event[there])
        # Of one event, what is known later answers later: the last of equals is the greatest.
        top = there & (rank == np.maximum.accumulate(rank))
        return np.maximum.accumulate(np.where(top, np.arange(len(there)), 0))

    def _greatest(self, slot: Integers, values: Integers, best: Integers) -> Integers:
        """Which rows are the greatest so far of their slots in a column; what they surpass is forgotten."""
        before = best.take(slot)
        kept = np.flatnonzero(values >= before)
        slot, values, before = slot.take(kept), values.take(kept), before.take(kept)
        np.maximum.at(best, slot, values)
        risen = slot[values > before]
        self._place[risen] = _NONE
        if best is self._event:
            self._known[risen] = _LEAST
        greatest: Integers = kept[values == best.take(slot)]
        return greatest

    def _settle(self, slot: Integers, place: Integers) -> None:
        """Keeps the rows at these places, which nothing surpasses; of equal ones the greatest by content."""
        before = self._place.take(slot)
        self._place[slot] = place
        self._place[slot[(before >= 0) | (self._place.take(slot) != place)]] = _NONE
        tied = np.flatnonzero(self._place.take(slot) < 0)
        if len(tied):
            slots, places = np.tile(slot[tied], 2), np.concatenate([before[tied], place[tied]])
            slots, places = slots[places >= 0], places[places >= 0]
            distinct, own = np.unique(places, return_inverse=True)
            order = np.argsort(self._content(distinct)[own], kind="stable")
            # Where several are written, the last one stays.
            self._place[slots[order]] = places[order]


class _Axis:
    """Numbers of keys and moments as one integer each that orders by both."""

    def __init__(self, moments: Integers, count: int) -> None:
        self.low, self.high = (int(moments.min()), int(moments.max())) if len(moments) else (0, -1)
        self.span = self.high - self.low + 1
        # Far apart, moments are counted instead: that fits for any number of keys and moments that fit into memory.
        self._moments = np.unique(moments) if self.span * max(count, 1) >= 1 << 62 else None
        if self._moments is not None:
            self.span = len(self._moments)

    def pack(self, number: Integers, moment: Integers) -> Integers:
        """Of moments from the least to the greatest one of this axis."""
        place = moment - self.low if self._moments is None else np.searchsorted(self._moments, moment)
        packed: Integers = number * self.span + place
        return packed

    def number(self, packed: Integers) -> Integers:
        """The numbers of the keys."""
        return packed // max(self.span, 1)


class _Numbering:
    """The keys of the questions, numbered in their own order from 0: rows stored by key are looked up in order."""

    def __init__(self, keys: Sequence[pa.ChunkedArray]) -> None:
        self._values: list[pa.Array] = []
        self._seen: list[Integers | None] = []
        self.number = np.zeros(1, np.int64)
        self.count = 1
        for column in keys:
            values = pc.drop_null(pc.unique(column))
            self._values.append(values.take(pc.sort_indices(values)))
            number = _joined(self.number, _positions(column, self._values[-1]), len(values))
            self.count *= len(values)
            seen = None
            if self.count > 1 << 24:
                # Few of so many combinations occur: they are counted anew, and stay small however many keys there are.
                seen = np.unique(number[number >= 0])
                number, self.count = _index(seen, number), len(seen)
            self._seen.append(seen)
            self.number = number

    def of(self, keys: Sequence[pa.ChunkedArray]) -> Integers:
        """The number of each key, -1 for one that nobody asks for."""
        number = np.zeros(1, np.int64)
        for column, values, seen in zip(keys, self._values, self._seen, strict=True):
            number = _joined(number, _positions(column, values), len(values))
            if seen is not None:
                number = _index(seen, number)
        return number


def _joined(number: Integers, position: Integers, count: int) -> Integers:
    # Below zero, a number stays there.
    return np.where(position < 0, _NONE, number * count + position)


def _index(distinct: Integers, wanted: Integers) -> Integers:
    """Where each wanted value stands among distinct ones in order, -1 if it does not."""
    if not len(distinct):
        return np.full(len(wanted), _NONE)
    place = np.minimum(np.searchsorted(distinct, wanted), len(distinct) - 1)
    return np.where(distinct[place] == wanted, place, _NONE)


def _positions(column: pa.ChunkedArray, values: pa.Array) -> Integers:
    """Where each value of a column stands in `values`, -1 if it does not or is null."""
    if not pa.types.is_dictionary(column.type):
        return _filled(pc.index_in(column, value_set=values))
    if not column.num_chunks:
        return np.empty(0, np.int64)
    # Each value is looked up once, and all in one call: each call hashes all of `values`.
    column = column.unify_dictionaries()
    known = np.append(_filled(pc.index_in(column.chunk(0).dictionary, value_set=values)), _NONE)
    # A null has an index past the end.
    return known.take(np.concatenate([_filled(chunk.indices) for chunk in column.chunks]))


def _filled(indices: pa.ChunkedArray | pa.Array) -> Integers:
    found: Integers = pc.fill_null(indices, _NONE).to_numpy(zero_copy_only=False).astype(np.int64)
    return found
