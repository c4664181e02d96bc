"""Measures of the order of rows within their groups. Of rows with the same score, no measure depends on their order."""

import math

import numpy as np

from isthmus.distill.types import Array, Index


def ndcg(relevance: Index, scores: Array, groups: Index, at: int) -> float:
    """Normalized discounted cumulative gain (Järvelin and Kekäläinen, 2002), the mean over the groups.

    Of the first `at` rows of a group, the highest score first, the sum of (2**relevance - 1) / log2(place + 1), divided
    by that of the best order. Rows with the same score have the mean of their gains (McSherry and Najork, ECIR 2008).
    Groups without a relevant row do not count; NaN if there is no other. Arrays are (n,).
    """
    gains = np.exp2(relevance.astype(np.float64)) - 1
    best, reached = (_cumulated(gains, order, groups, at) for order in (gains, scores))
    counts = best > 0
    return float((reached[counts] / best[counts]).mean()) if counts.any() else math.nan


def chance_ndcg(relevance: Index, groups: Index, at: int) -> float:
    """The ndcg of an order by chance, on average: each row has the mean gain of its group."""
    return ndcg(relevance, np.zeros(len(relevance)), groups, at)


def reciprocal_rank(relevance: Index, scores: Array, groups: Index) -> float:
    """Mean over the groups of 1 / the place of the first relevant row, after all others with its score.

    Groups without a relevant row do not count; NaN if there is no other. Arrays are (n,).
    """
    numbers = _numbers(groups)
    best = np.full(numbers.max(initial=-1) + 1, -np.inf)
    relevant = relevance > 0
    np.maximum.at(best, numbers[relevant], scores[relevant])
    above = np.bincount(numbers[~relevant & (scores >= best[numbers])], minlength=len(best))
    counts = best > -np.inf
    return float((1 / (1 + above[counts])).mean()) if counts.any() else math.nan


def _cumulated(gains: Array, scores: Array, groups: Index, at: int) -> Array:
    """The discounted gains of the first rows of each group, by the number of the group."""
    if not len(gains):
        return np.empty(0)
    numbers = _numbers(groups)
    order = np.lexsort((-scores, numbers))
    gains, scores, numbers = gains[order], scores[order], numbers[order]
    new = np.diff(numbers, prepend=-1) != 0
    place = np.arange(len(numbers)) - np.flatnonzero(new)[np.cumsum(new) - 1]
    tied = np.cumsum(new | (np.diff(scores, prepend=np.nan) != 0)) - 1
    mean = np.bincount(tied, gains) / np.bincount(tied)
    discounts = np.where(place < at, 1 / np.log2(place + 2.0), 0.0)
    return np.bincount(numbers, mean[tied] * discounts)


def _numbers(groups: Index) -> Index:
    """The groups, numbered from 0 without a gap."""
    _, numbers = np.unique(groups, return_inverse=True)
    return numbers.astype(np.int64)
