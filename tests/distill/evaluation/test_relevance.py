"""Orders of rows within groups, against a group at a time and all orders of rows with the same score."""

import math
from collections import defaultdict
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.evaluation.metrics import chance_ndcg, ndcg, reciprocal_rank

ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from([-1.5, 0.0, 0.25, 2.0])), min_size=1, max_size=12
)
"""Group, relevance and score of each row."""
Rows = list[tuple[int, int, float]]


def grouped(rows: Rows) -> list[list[tuple[int, float]]]:
    groups = defaultdict(list)
    for group, relevance, score in rows:
        groups[group].append((relevance, score))
    return [group for group in groups.values() if any(relevance for relevance, _ in group)]


def dcg(relevance: list[int], at: int) -> float:
    return math.fsum((2**grade - 1) / math.log2(place + 2) for place, grade in enumerate(relevance[:at]))


def naively(rows: Rows, at: int) -> float:
    """The mean over the groups; of each group, over every order that its scores allow."""
    found = []
    for group in grouped(rows):
        best = dcg(sorted((relevance for relevance, _ in group), reverse=True), at)
        orders = [
            [relevance for relevance, _ in order]
            for order in permutations(group[:5])
            if all(before[1] >= after[1] for before, after in pairwise(order))
        ]
        found.append(sum(dcg(order, at) for order in orders) / len(orders) / best)
    return sum(found) / len(found) if found else math.nan


def arrays(rows: Rows) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
    return tuple(map(np.array, zip(*rows, strict=True)))


def few(rows: Rows) -> Rows:
    """At most five rows of a group: 120 orders."""
    counts: dict[int, int] = defaultdict(int)
    kept = []
    for row in rows:
        counts[row[0]] += 1
        kept += [row] if counts[row[0]] <= 5 else []
    return kept


@given(ROWS, st.integers(1, 6))
def test_ndcg_is_the_mean_over_all_orders_that_the_scores_allow(rows: Rows, at: int) -> None:
    rows = few(rows)
    groups, relevance, scores = arrays(rows)
    found = ndcg(relevance, scores, 7 * groups - 3, at)
    assert found == pytest.approx(naively(rows, at), nan_ok=True)
    assert math.isnan(found) or 0 <= found <= 1 + 1e-12
    level = [(group, grade, 0.0) for group, grade, _ in rows]
    assert chance_ndcg(relevance, groups, at) == pytest.approx(naively(level, at), nan_ok=True)
    if grouped(rows):
        assert ndcg(relevance, relevance, groups, at) == pytest.approx(1)


@given(ROWS)
def test_the_first_relevant_row_counts_after_all_others_with_its_score(rows: Rows) -> None:
    groups, relevance, scores = arrays(rows)
    found = []
    for group in grouped(rows):
        # The worst order that the scores allow.
        order = sorted(group, key=lambda row: (-row[1], row[0] > 0))
        found.append(1 / next(place for place, (grade, _) in enumerate(order, 1) if grade))
    expected = sum(found) / len(found) if found else math.nan
    assert reciprocal_rank(relevance, scores, groups) == pytest.approx(expected, nan_ok=True)


def test_an_order_of_many_rows_does_not_depend_on_theirs() -> None:
    draw = np.random.default_rng(0)
    groups, relevance, scores = draw.integers(0, 50, 2000), draw.integers(0, 4, 2000), draw.integers(0, 9, 2000) / 3
    order = draw.permutation(2000)
    for measure in (ndcg(relevance, scores, groups, 10) - ndcg(relevance[order], scores[order], groups[order], 10),
                    reciprocal_rank(relevance, scores, groups)
                    - reciprocal_rank(relevance[order], scores[order], groups[order])):  # fmt: skip
        assert measure == pytest.approx(0, abs=1e-12)
    nothing = np.empty(0, np.int64)
    assert math.isnan(ndcg(nothing, nothing, nothing, 3))
    assert math.isnan(reciprocal_rank(nothing, nothing, nothing))
