"""Match rows with equal values at nearly the same time."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.values.columns import Ints, Mask

_NEVER = np.iinfo(np.int64).max


def nearest(left: pa.Table, left_times: Ints, right: pa.Table, right_times: Ints, tolerance: int) -> Ints:
    """Return for each row of `left` the index of its match in `right`, or -1; shape (n,).

    A match has equal values in all columns (a null equals nothing) and is nearest in time, at most `tolerance` away. In
    a tie, the earlier time wins. If several rows of `left` have the same match, only the nearest one keeps it. In a
    tie, the first row of `left` keeps it.
    """
    number, count = number_rows(left, right), len(left)
    for name in left.column_names:
        number[np.concatenate([column.is_null().to_numpy() for column in (left[name], right[name])])] = -1
    order = np.lexsort((right_times, number[count:]))
    place, distance = closest(number[count:][order], right_times[order], number[:count], left_times)
    valid = (place >= 0) & (distance <= tolerance) & (number[:count] >= 0)
    match = np.full(count, -1)
    match[valid] = order[place[valid]]
    result: Ints = np.where(nearest_per_match(match, distance, np.zeros(count, np.int64)), match, -1)
    return result


def closest(number: Ints, event: Ints, query: Ints, at: Ints) -> tuple[Ints, Ints]:
    """Return for each query the index of the nearest candidate in time with the same number, and the distance in time.

    Candidates have the numbers `number` and times `event`. They must be sorted by number, then time. Queries have the
    numbers `query` and times `at`. In a tie, the earlier candidate wins. Without a candidate, the index is -1.
    """
    times = np.unique(event)
    width = len(times) + 1
    moments = number * width + np.searchsorted(times, event)
    after = np.searchsorted(moments, query * width + np.searchsorted(times, at))
    best, distance = np.full(len(at), -1), np.full(len(at), _NEVER)
    for place in (after - 1, after):
        valid = (place >= 0) & (place < len(number))
        valid[valid] = number[place[valid]] == query[valid]
        gap = np.full(len(at), _NEVER)
        gap[valid] = np.abs(event[place[valid]] - at[valid])
        nearer = gap < distance
        best, distance = np.where(nearer, place, best), np.where(nearer, gap, distance)
    return best, distance


def nearest_per_match(match: Ints, distance: Ints, at: Ints) -> Mask:
    """Mark, for each index in `match` except -1, the row with the least `distance`; in a tie, the earliest by `at`."""
    rows = np.flatnonzero(match >= 0)
    order = rows[np.lexsort((rows, at[rows], distance[rows], match[rows]))]
    chosen = np.zeros(len(match), bool)
    chosen[order[np.unique(match[order], return_index=True)[1]]] = True
    return chosen


def number_rows(*tables: pa.Table) -> Ints:
    """Number the rows, table after table. Rows with equal values in all columns share a number; nulls are equal."""
    count = sum(map(len, tables))
    numbers = np.zeros(count, np.int64)
    for name in tables[0].column_names:
        chunks = [chunk for table in tables for chunk in table[name].chunks]
        column = pa.concat_arrays([pa.array([], tables[0].schema.field(name).type), *chunks])
        places = pc.dictionary_encode(column, null_encoding="encode").indices
        index = places.to_numpy(zero_copy_only=False).astype(np.int64)
        numbers = np.unique(numbers * (int(index.max(initial=0)) + 1) + index, return_inverse=True)[1]
    return numbers
