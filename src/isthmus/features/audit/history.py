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
"""The most rows of a key with one time that are compared with the online row."""

Cells = Mapping[str, pa.Array]
"""Feature to encoded values: serialized protos, b"" for a null. Online, null if the row does not have the feature."""


@dataclass(frozen=True, eq=False)
class History:
    """Rows of a source, sorted by key, event time and created time. Times are in microseconds.

    Attributes:
        keys: the distinct keys; `code` is the index in it of each row's key.
        row: index of each row in `cells`, which have the order of the source.
        resolution: precision of times online.
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
        """Sort the rows with an event time until `now`, and leave out later ones."""
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
        """The place of the latest row of each key."""
        return np.searchsorted(self.code, np.arange(len(self)), "right") - 1

    @cached_property
    def repeated(self) -> tuple[Ints, Ints]:
        """Return the places of rows with the key and times of the row before: with equal values, and others (ties)."""
        parts = (self.code, self.event, self.created)
        places = np.flatnonzero(np.logical_and.reduce([np.diff(part) == 0 for part in parts])) + 1
        equal = self.equal(places, self.at(places - 1))
        return places[equal], places[~equal]

    def at(self, places: Ints) -> Cells:
        return {name: cells.take(self.row[places]) for name, cells in self.cells.items()}

    def equal(self, places: Ints, values: Cells) -> Mask:
        """Compare the rows at `places` with other rows. Features that a row does not have are skipped."""
        equal = np.ones(len(places), bool)
        for name, theirs in values.items():
            mine = self.cells[name].take(self.row[places])
            equal &= same(mine, theirs) | theirs.is_null().to_numpy(zero_copy_only=False)
        return equal

    @cached_property
    def _times(self) -> tuple[Ints, Ints]:
        """Return the distinct times, and for each row its key and time as one number that is sorted."""
        times, ranks = np.unique(self.event // self.resolution, return_inverse=True)
        return times, self.code * len(times) + ranks

    def find(self, code: Ints, event: Ints, values: Cells) -> tuple[Ints, Ints]:
        """Find each online row in the history of its own key.

        Return the places of the last rows with this key, time and values, and with this key and time; -1 for none.
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
        """Mark online rows, with all their values and their time, that any key has."""
        if not len(event):
            return np.zeros(0, bool)
        mine = whole_rows(self.at(np.arange(len(self.row))), self.event // self.resolution)
        found: Mask = pc.is_in(whole_rows(cells, event // self.resolution), value_set=mine).to_numpy(
            zero_copy_only=False
        )
        return found


def same(source: pa.Array, online: pa.Array) -> Mask:
    """Compare encoded values by their bits. Feast writes a NaN of the source as a null, so these two are equal."""
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
