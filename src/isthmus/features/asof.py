"""Which row of a history answers which question, where the history is read once, in blocks of any order.

A row can be used from `since` on. The questions of a key are put in order of time, and every row of the history lands
on the first question that can use it; of the rows that land on one question, the greatest by (event, known, content)
stays. The greatest so far, along the questions of a key, then answers each: `clock.as_of` for all of them at once.

Only the questions are sorted and kept. A history costs the block at hand, in memory, however long it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_LEAST = np.iinfo(np.int64).min
_NONE = -1


def since(event: Integers, known: Integers) -> Integers:
    """The moment from which each row answers: when it was both true and known, in microseconds. Shape (n,)."""
    return np.maximum(event, known)


@dataclass(frozen=True)
class Block:
    """Some rows of a history, without their values.

    Attributes:
        keys: a column per join key.
        event: microseconds, shape (n,).
        known: microseconds, shape (n,).
        since: the moment from which each row answers, not before its event; microseconds, shape (n,).
        place: what the caller knows each row by, shape (n,), not negative.
        content: content hashes, shape (n,); None if they are not needed to tell rows apart.
    """

    keys: Sequence[pa.ChunkedArray]
    event: Integers
    known: Integers
    since: Integers
    place: Integers
    content: Integers | None = None


class Tie(Exception):
    """Two rows of a key have the same times, and only their content hashes, which were not given, can decide."""


class Questions:
    """Keys and moments to which a history has the answers.

    Args:
        keys: a column per join key, n values each; a null is no key of any row.
        at: microseconds, shape (n,).
    """

    def __init__(self, keys: Sequence[pa.ChunkedArray], at: Integers) -> None:
        self._keys = _Numbering(keys)
        number = self._keys.number
        asked = number >= 0
        moments = at[asked]
        self._axis = _Axis(moments, self._keys.count)
        slots, slot = np.unique(self._axis.pack(number[asked], moments), return_inverse=True)
        self._slots = slots
        self._slot_of = np.full(len(at), _NONE)
        self._slot_of[asked] = slot
        # Of each slot, the number of its key, and the greatest row that landed on it.
        self._number = self._axis.number(slots)
        self._event = np.full(len(slots), _LEAST)
        self._known = np.full(len(slots), _LEAST)
        self._content = np.full(len(slots), _LEAST)
        self._place = np.full(len(slots), _NONE)
        self._exact = True

    def offer(self, block: Block) -> None:
        """Takes up what rows of the history say.

        Raises:
            Tie: rows of one key and the same times came without their content.
        """
        if not len(self._place):
            return
        number = self._keys.of(block.keys)
        slot = np.searchsorted(self._slots, self._axis.pack_rows(number, block.since))
        # Past the last question of its key, a row falls on another key's, or on none.
        late = slot == len(self._place)
        slot[late] = 0
        kept = np.flatnonzero((self._number[slot] == number) & ~late & (block.since <= self._axis.high))
        for column, best in ((block.event, self._event), (block.known, self._known)):
            kept = self._greatest(kept, slot, column, best)
        self._exact = block.content is not None
        if block.content is not None:
            kept = self._greatest(kept, slot, block.content, self._content)
        elif _tied(slot[kept]) or (self._place[slot[kept]] >= 0).any():
            raise Tie
        self._place[slot[kept]] = block.place[kept]

    def answers(self) -> tuple[Integers, Integers]:
        """The place of the row that answers each question, -1 without one, and its event time. Shape (n,) each.

        Raises:
            Tie: as `offer`.
        """
        there = self._place >= 0
        best = self._best(there)
        found = there[best] & (self._number[best] == self._number)
        place = np.append(np.where(found, self._place[best], _NONE), _NONE)
        event = np.append(np.where(found, self._event[best], _LEAST), _LEAST)
        return place[self._slot_of], event[self._slot_of]

    def _best(self, there: np.ndarray[Any, np.dtype[np.bool_]]) -> Integers:
        """Of each slot, the slot at or before it that holds the greatest row so far."""
        order, rank = np.arange(len(there)), np.full(len(there), _NONE)
        axis = _Axis(self._event[there], self._keys.count)
        rank[there] = axis.pack(self._number[there], self._event[there])
        top = np.flatnonzero(there & (rank == np.maximum.accumulate(rank)))
        equal, known = rank[top][1:] == rank[top][:-1], self._known[top]
        if (equal & (known[1:] <= known[:-1])).any():
            # What is known later does not answer later: event times alone do not tell which row is the greatest.
            if not self._exact and (equal & (known[1:] == known[:-1])).any():
                raise Tie
            places = np.lexsort((self._content, self._known, self._event, self._number))
            rank[places] = np.where(there[places], order, _NONE)
            top = np.flatnonzero(there & (rank == np.maximum.accumulate(rank)))
        best = np.zeros(len(there), np.int64)
        best[top] = top
        # The last of equals stays.
        return np.maximum.accumulate(best)

    def _greatest(self, rows: Integers, slot: Integers, column: Integers, best: Integers) -> Integers:
        """Those of the rows that are the greatest so far in a column; what they surpass is forgotten."""
        slots, values = slot[rows], column[rows]
        before = best[slots]
        np.maximum.at(best, slots, values)
        after = best[slots]
        risen = slots[after > before]
        self._place[risen] = _NONE
        if best is self._event:
            self._known[risen] = _LEAST
        if best is not self._content:
            self._content[risen] = _LEAST
        kept: Integers = rows[values == after]
        return kept


class _Axis:
    """Numbers of keys and moments as one integer each that orders by both."""

    def __init__(self, moments: Integers, count: int) -> None:
        self.low, self.high = (int(moments.min()), int(moments.max())) if len(moments) else (0, -1)
        self._span = self.high - self.low + 1
        # Far apart, moments are counted instead: that fits for any number of keys and moments that fit into memory.
        self._moments = np.unique(moments) if self._span * max(count, 1) >= 1 << 62 else None
        if self._moments is not None:
            self._span = len(self._moments)

    def pack(self, number: Integers, moment: Integers) -> Integers:
        """Of moments from the least to the greatest one of this axis."""
        place = moment - self.low if self._moments is None else np.searchsorted(self._moments, moment)
        packed: Integers = number * self._span + place
        return packed

    def pack_rows(self, number: Integers, moment: Integers) -> Integers:
        """Of any moments: one before the least stands with it, one past the greatest with that one."""
        return self.pack(number, np.clip(moment, self.low, self.high))

    def number(self, packed: Integers) -> Integers:
        """The numbers of the keys."""
        return packed // max(self._span, 1)


class _Numbering:
    """The keys of the questions, numbered in their own order from 0: rows stored by key are looked up in order."""

    def __init__(self, keys: Sequence[pa.ChunkedArray]) -> None:
        self._values: list[pa.Array] = []
        self._seen: list[Integers | None] = []
        self.number = np.zeros(len(keys[0]), np.int64)
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
        number = np.zeros(len(keys[0]), np.int64)
        for column, values, seen in zip(keys, self._values, self._seen, strict=True):
            number = _joined(number, _positions(column, values), len(values))
            if seen is not None:
                number = _index(seen, number)
        return number


def _joined(number: Integers, position: Integers, count: int) -> Integers:
    return np.where((number >= 0) & (position >= 0), number * count + position, _NONE)


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
    parts = []
    for chunk in column.chunks:
        # Each value of the dictionary is looked up once; a null has an index past its end.
        known = np.append(_filled(pc.index_in(chunk.dictionary, value_set=values)), _NONE)
        parts.append(known[_filled(chunk.indices)])
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _filled(indices: pa.ChunkedArray | pa.Array) -> Integers:
    found: Integers = pc.fill_null(indices, _NONE).to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _tied(slots: Integers) -> bool:
    return len(np.unique(slots)) < len(slots)
