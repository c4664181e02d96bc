"""Rows of one table that are about the same as rows of another: the same keys, at nearly the same time."""

import numpy as np
import pyarrow as pa

from isthmus.features.offline.latest import matches
from isthmus.features.values.columns import Ints


def nearest(left: pa.Table, left_times: Ints, right: pa.Table, right_times: Ints, tolerance: int) -> Ints:
    """Of each row of `left` the row of `right` of the same keys that is nearest in time, or -1; shape (n,).

    It is at most `tolerance` away; of two as near it is the earlier. Of rows with the same nearest row only that has it
    which is nearest to it, the first of those. A null key is like no other.
    """
    both = pa.concat_tables([left, right])
    distinct = both.group_by(both.column_names).aggregate([])
    groups = matches(distinct, both)
    times = np.concatenate([left_times, right_times])
    count, own = len(left_times), np.flatnonzero(groups >= 0)
    # By keys, then time, with rows of `right` before those of `left` at the same time.
    order = own[np.lexsort((own < count, times[own], groups[own]))]
    is_right, every = order >= count, np.arange(len(order))
    before = np.maximum.accumulate(np.where(is_right, every, -1))
    after = np.minimum.accumulate(np.where(is_right, every, len(order))[::-1])[::-1]
    best = np.full(len(order), -1)
    far = np.full(len(order), tolerance + 1)
    for candidates in (before, after):
        there = (candidates >= 0) & (candidates < len(order)) & ~is_right
        rows = every[there]
        at = candidates[there]
        away = np.abs(times[order[at]] - times[order[rows]])
        nearer = (groups[order[at]] == groups[order[rows]]) & (away < far[rows])
        best[rows[nearer]], far[rows[nearer]] = order[at[nearer]], away[nearer]
    found, away = np.full(count, -1), np.full(count, tolerance + 1)
    asked = ~is_right
    found[order[asked]], away[order[asked]] = best[asked] - count, far[asked]
    found[away > tolerance] = -1
    matched = np.flatnonzero(found >= 0)
    # Stable: of rows as near, the first.
    closest = matched[np.argsort(away[matched], kind="stable")]
    _, first = np.unique(found[closest], return_index=True)
    result = np.full(count, -1)
    result[closest[first]] = found[closest[first]]
    return result
