"""Ranking metrics per group. Rows with equal scores are treated alike, so their order never matters."""

import math

import numpy as np

from isthmus.distill.types import Array, Index


def ndcg(relevance: Index, scores: Array, groups: Index, at: int) -> float:
    """Return the normalized discounted cumulative gain (Järvelin and Kekäläinen, 2002), the mean over the groups.

    The gain of a group is the sum of (2**relevance - 1) / log2(place + 1) over its first `at` rows, highest score
    first, divided by the gain of the best order. Rows with equal scores share the mean of their gains (McSherry and
    Najork, ECIR 2008). Groups without a relevant row are skipped; NaN if no group is left. Arrays are (n,).
    """
    gains = np.exp2(relevance.astype(np.float64)) - 1
    best, reached = (_cumulated(gains, order, groups, at) for order in (gains, scores))
    counts = best > 0
    return float((reached[counts] / best[counts]).mean()) if counts.any() else math.nan


def chance_ndcg(relevance: Index, groups: Index, at: int) -> float:
    """Return the expected ndcg of a random order: each row has the mean gain of its group."""
    return ndcg(relevance, np.zeros(len(relevance)), groups, at)


def reciprocal_rank(relevance: Index, scores: Array, groups: Index) -> float:
    """Return the mean over the groups of 1 / (place of the first relevant row), placed last among equal scores.

    Groups without a relevant row are skipped; NaN if no group is left. Arrays are (n,).
    """
    numbers = _numbers(groups)
    best = np.full(numbers.max(initial=-1) + 1, -np.inf)
    relevant = relevance > 0
    np.maximum.at(best, numbers[relevant], scores[relevant])
    above = np.bincount(numbers[~relevant & (scores >= best[numbers])], minlength=len(best))
    counts = best > -np.inf
    return float((1 / (1 + above[counts])).mean()) if counts.any() else math.nan


def _cumulated(gains: Array, scores: Array, groups: Index, at: int) -> Array:
    """Return the discounted gain of the first `at` rows of each group."""
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
    """Renumber the groups from 0 without gaps."""
    _, numbers = np.unique(groups, return_inverse=True)
    return numbers.astype(np.int64)
