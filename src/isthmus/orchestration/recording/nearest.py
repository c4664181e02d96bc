"""Match rows with equal values at nearly the same time."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.values.columns import Ints, Mask

_NEVER = np.iinfo(np.int64).max


def nearest(left: pa.Table, left_times: Ints, right: pa.Table, right_times: Ints, tolerance: int) -> Ints:
    """Find for each row of `left` the row of `right` with equal values and the nearest time, such as its training row.

    Returns the index of the match in `right`, or -1, for each row of `left`: int64, shape (n,). Both tables have the
    same columns. `left_times` and `right_times` have the time of each row, in the unit of `tolerance`. The times of a
    match differ by at most `tolerance`. A row with a null has no match. Of two equally near rows of `right`, the
    earlier one wins. If several rows of `left` are nearest to the same row of `right`, only the closest one, or the
    first of several, gets it.
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


def closest(
    candidate_numbers: Ints, candidate_times: Ints, query_numbers: Ints, query_times: Ints
) -> tuple[Ints, Ints]:
    """Find for each query the candidate with the same key and the nearest time, for example the label of an answer.

    Keys are given as numbers from `number_rows`. Candidates are sorted by number, then by time; queries may be in any
    order. All times have the same unit. Returns two int64 arrays with a value per query: the index of the candidate, or
    -1 without one, and the distance in time. If two candidates are equally near, the earlier one wins.
    """
    times = np.unique(candidate_times)
    width = len(times) + 1
    moments = candidate_numbers * width + np.searchsorted(times, candidate_times)
    after = np.searchsorted(moments, query_numbers * width + np.searchsorted(times, query_times))
    best, distance = np.full(len(query_times), -1), np.full(len(query_times), _NEVER)
    for place in (after - 1, after):
        valid = (place >= 0) & (place < len(candidate_numbers))
        valid[valid] = candidate_numbers[place[valid]] == query_numbers[valid]
        gap = np.full(len(query_times), _NEVER)
        gap[valid] = np.abs(candidate_times[place[valid]] - query_times[valid])
        nearer = gap < distance
        best, distance = np.where(nearer, place, best), np.where(nearer, gap, distance)
    return best, distance


def nearest_per_match(match: Ints, distance: Ints, at: Ints) -> Mask:
    rows = np.flatnonzero(match >= 0)
    order = rows[np.lexsort((rows, at[rows], distance[rows], match[rows]))]
    chosen = np.zeros(len(match), bool)
    chosen[order[np.unique(match[order], return_index=True)[1]]] = True
    return chosen


def number_rows(*tables: pa.Table) -> Ints:
    """Number the rows of tables with the same columns; rows with equal values in all columns get the same number.

    Callers compare one number per row instead of several columns. Two nulls are equal. Returns an int64 array: the
    numbers of all rows of the first table, then of the next table.
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
