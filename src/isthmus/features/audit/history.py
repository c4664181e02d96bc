"""The rows of a source by key and time, with features as encoded values: ties, duplicates, and the latest rows."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.values.columns import Ints, Mask

BYTES = pa.large_binary()
EMPTY = pa.scalar(b"", BYTES)
"""The encoded null."""
_NANS = pa.array([b"\x35" + struct.pack("<f", np.nan), b"\x29" + struct.pack("<d", np.nan)], BYTES)
_VERSIONS = 32
"""Number of rows with one key and time, from the last one back, that are compared with the online row."""

Cells = Mapping[str, pa.Array]
"""Encoded values by feature: serialized protos, b"" for a null. An Arrow null is a feature that an online row lacks."""


@dataclass(frozen=True, eq=False)
class History:
    """Rows of a source, sorted by key, event time and created time. A place is an index in this order.

    Attributes:
        keys: the distinct keys.
        code: index in `keys` of each row's key.
        event: event time of each row, in microseconds.
        created: created time of each row, in microseconds.
        row: index of each row in the source, and in `cells`.
        cells: encoded values, in the order of the source.
        resolution: precision of online times, in microseconds.
    """

    keys: pa.Array
    code: Ints
    event: Ints
    created: Ints
    row: Ints
    cells: Cells
    resolution: int = 1

    @classmethod
    def of(cls, keys: pa.Array, event: Ints, created: Ints, cells: Cells, now: int, resolution: int = 1) -> "History":
        """Sort the rows of a source. Leave out rows with an event time after `now`."""
        known = np.flatnonzero(event <= now)
        encoded = keys.take(known).dictionary_encode()
        code = encoded.indices.to_numpy().astype(np.int64)
        order = np.lexsort((created[known], event[known], code))
        row = known[order]
        return cls(encoded.dictionary, code[order], event[row], created[row], row, cells, resolution)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def latest(self) -> Ints:
        """Place of the latest row of each key."""
        return np.searchsorted(self.code, np.arange(len(self)), "right") - 1

    @cached_property
    def repeated(self) -> tuple[Ints, Ints]:
        """Places of rows with the same key and times as the row before: first duplicates, then ties (other values)."""
        parts = (self.code, self.event, self.created)
        places = np.flatnonzero(np.logical_and.reduce([np.diff(part) == 0 for part in parts])) + 1
        equal = self.equal(places, self.at(places - 1))
        return places[equal], places[~equal]

    def at(self, places: Ints) -> Cells:
        return {name: cells.take(self.row[places]) for name, cells in self.cells.items()}

    def equal(self, places: Ints, values: Cells) -> Mask:
        """Mark rows at `places` that equal the online rows in `values`. Skip features that an online row lacks."""
        equal = np.ones(len(places), bool)
        for name, theirs in values.items():
            mine = self.cells[name].take(self.row[places])
            equal &= same(mine, theirs) | theirs.is_null().to_numpy(zero_copy_only=False)
        return equal

    @cached_property
    def _times(self) -> tuple[Ints, Ints]:
        """Distinct event times, and one number per row that combines key and time, in ascending order."""
        times, ranks = np.unique(self.event // self.resolution, return_inverse=True)
        return times, self.code * len(times) + ranks

    def find(self, code: Ints, event: Ints, values: Cells) -> tuple[Ints, Ints]:
        """Find online rows, given by key index, event time and values.

        Return two places for each, or -1: the last row with the same key, time and values, and the last row with the
        same key and time.
        """
        times, ranked = self._times
        rank = np.minimum(np.searchsorted(times, event // self.resolution), len(times) - 1)
        wanted = code * len(times) + rank
        low, high = np.searchsorted(ranked, wanted), np.searchsorted(ranked, wanted, "right")
        high = np.where(times[rank] == event // self.resolution, high, low)
        exact, timed = np.full(len(code), -1), np.where(high > low, high - 1, -1)
        for back in range(1, min(int((high - low).max(initial=0)), _VERSIONS) + 1):
            left = np.flatnonzero((exact < 0) & (high - back >= low))
            places = high[left] - back
            found = self.equal(places, {name: cells.take(left) for name, cells in values.items()})
            exact[left[found]] = places[found]
        return exact, timed

    def has_rows(self, cells: Cells, event: Ints) -> Mask:
        """Mark online rows whose time and values equal those of a source row of any key."""
        if not len(event):
            return np.zeros(0, bool)
        mine = whole_rows(self.at(np.arange(len(self.row))), self.event // self.resolution)
        found: Mask = pc.is_in(whole_rows(cells, event // self.resolution), value_set=mine).to_numpy(
            zero_copy_only=False
        )
        return found


def same(source: pa.Array, online: pa.Array) -> Mask:
    """Mark equal encoded values. A NaN in the source equals a null online, because Feast writes it as one."""
    nan = pc.and_(pc.is_in(source, value_set=_NANS), pc.equal(online, EMPTY))
    equal: Mask = pc.fill_null(pc.or_(pc.equal(source, online), nan), False).to_numpy(zero_copy_only=False)
    return equal


def whole_rows(cells: Cells, event: Ints) -> pa.Array:
    """Return the time and all values of each row as one binary value."""
    parts = [pa.array(event.astype(np.int64)).view(pa.binary(8)).cast(BYTES)]
    for name in sorted(cells):
        values = pc.fill_null(cells[name], EMPTY)
        # Lengths keep ("a", "bc") and ("ab", "c") apart.
        parts += [pc.binary_length(values).cast(pa.int64()).view(pa.binary(8)).cast(BYTES), values]
    return pc.binary_join_element_wise(*parts, EMPTY)
