"""Rows that are about the same: with the same values, at nearly the same time."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.values.columns import Ints, Mask

_NEVER = np.iinfo(np.int64).max


def nearest(left: pa.Table, left_times: Ints, right: pa.Table, right_times: Ints, tolerance: int) -> Ints:
    """Of each row of `left` the row of `right` of the same keys that is nearest in time, or -1; shape (n,).

    It is at most `tolerance` away; of two as near it is the earlier. Of rows with the same nearest row only that has it
    which is nearest to it, the first of those. A null key is like no other.
    """
    number, count = identities(left, right), len(left)
    for name in left.column_names:
        number[np.concatenate([column.is_null().to_numpy() for column in (left[name], right[name])])] = -1
    order = np.lexsort((right_times, number[count:]))
    place, apart = closest(number[count:][order], right_times[order], number[:count], left_times)
    there = (place >= 0) & (apart <= tolerance) & (number[:count] >= 0)
    found = np.full(count, -1)
    found[there] = order[place[there]]
    result: Ints = np.where(once(found, apart, np.zeros(count, np.int64)), found, -1)
    return result


def closest(own: Ints, event: Ints, wanted: Ints, at: Ints) -> tuple[Ints, Ints]:
    """The place of the nearest moment with the same number, and how far it is; -1 if there is none.

    `own` are the numbers of the moments `event`, sorted by both; `wanted` and `at` are what is looked for. Of two as
    near it is the earlier.
    """
    times = np.unique(event)
    width = len(times) + 1
    moments = own * width + np.searchsorted(times, event)
    after = np.searchsorted(moments, wanted * width + np.searchsorted(times, at))
    best, apart = np.full(len(at), -1), np.full(len(at), _NEVER)
    for place in (after - 1, after):
        there = (place >= 0) & (place < len(own))
        there[there] = own[place[there]] == wanted[there]
        distance = np.full(len(at), _NEVER)
        distance[there] = np.abs(event[place[there]] - at[there])
        nearer = distance < apart
        best, apart = np.where(nearer, place, best), np.where(nearer, distance, apart)
    return best, apart


def once(found: Ints, apart: Ints, at: Ints) -> Mask:
    """Of rows that have found the same, the one that is nearest to it, and of several the first in time and place."""
    rows = np.flatnonzero(found >= 0)
    order = rows[np.lexsort((rows, at[rows], apart[rows], found[rows]))]
    chosen = np.zeros(len(found), bool)
    chosen[order[np.unique(found[order], return_index=True)[1]]] = True
    return chosen


def identities(*tables: pa.Table) -> Ints:
    """A number for each row of all tables: the same for rows with the same values, nulls included."""
    count = sum(map(len, tables))
    numbers = np.zeros(count, np.int64)
    for name in tables[0].column_names:
        chunks = [chunk for table in tables for chunk in table[name].chunks]
        column = pa.concat_arrays([pa.array([], tables[0].schema.field(name).type), *chunks])
        places = pc.dictionary_encode(column, null_encoding="encode").indices
        index = places.to_numpy(zero_copy_only=False).astype(np.int64)
        numbers = np.unique(numbers * (int(index.max(initial=0)) + 1) + index, return_inverse=True)[1]
    return numbers
