"""Match rows with equal values at nearly the same time."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.values.columns import Ints, Mask

_NEVER = np.iinfo(np.int64).max


def nearest(left: pa.Table, left_times: Ints, right: pa.Table, right_times: Ints, tolerance: int) -> Ints:
    """Match rows of two tables that have equal values and nearly the same time.

    Returns for each row of `left` the index of its match in `right`, or -1: int64, shape (n,). Both times differ by at
    most `tolerance`, in the unit of the times. A null equals nothing. Among equally near candidates, the earlier one
    wins. A row of `right` matches only the nearest row of `left`, or the first of equally near ones.
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
    """Find, for each query, the candidate with the same number that is nearest in time.

    Returns two int64 arrays, one value per query: the index of the candidate (-1 without a candidate), and the distance
    in time. Candidates are given by their numbers (`number`) and times (`event`), sorted by number, then time. Queries
    are given by their numbers (`query`) and times (`at`). In a tie, the earlier candidate wins.
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
    """Return a mask that keeps one row per index in `match`: the row with the least `distance`.

    A row with index -1 is never kept. In a tie, the row with the earliest time `at` wins. All arrays have shape (n,).
    """
    rows = np.flatnonzero(match >= 0)
    order = rows[np.lexsort((rows, at[rows], distance[rows], match[rows]))]
    chosen = np.zeros(len(match), bool)
    chosen[order[np.unique(match[order], return_index=True)[1]]] = True
    return chosen


def number_rows(*tables: pa.Table) -> Ints:
    """Number rows so that rows with equal values in all columns share a number, even across tables.

    Returns an int64 array with a value per row, table after table. Nulls are equal. All tables have the same columns.
    """
    count = sum(map(len, tables))
    numbers = np.zeros(count, np.int64)
    for name in tables[0].column_names:
        chunks = [chunk for table in tables for chunk in table[name].chunks]
        column = pa.concat_arrays([pa.array([], tables[0].schema.field(name).type), *chunks])
        places = pc.dictionary_encode(column, null_encoding="encode").indices
        index = places.to_numpy(zero_copy_only=False).astype(np.int64)
        numbers = np.unique(numbers * (int(index.max(initial=0)) + 1) + index, return_inverse=True)[1]
    return numbers
