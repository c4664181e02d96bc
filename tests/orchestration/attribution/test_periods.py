"""What changed between two periods, against sums over segments, row by row."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.evaluation.metrics import auc, log_loss, mae, mean, rmse
from isthmus.features.values.columns import Ints
from isthmus.orchestration.attribution.periods.coalitions import PARTS, Weighted, coalition_values, weights
from isthmus.orchestration.attribution.shapley import Numbers, shapley
from tests.orchestration.attribution.test_shapley import shapley_naively

Row = tuple[int, tuple[float, ...]]
"""A segment, and the scores by contract and model."""


def mean_naively(periods: tuple[Sequence[Row], Sequence[Row]], population: int, features: int, place: int) -> float:
    """The oracle: the mean of each segment, by its share of the rows of the population's period."""
    groups: list[dict[int, list[float]]] = []
    for rows in periods:
        own = defaultdict(list)
        for segment, scores in rows:
            own[segment].append(scores[place])
        groups.append(own)
    total = 0.0
    for segment, members in groups[population].items():
        those = groups[features].get(segment, members)
        total += len(members) / len(periods[population]) * sum(those) / len(those)
    return total


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.tuples(*[st.integers(-8, 8).map(lambda n: n / 4)] * 4)), min_size=1, max_size=8
)


@given(ROWS, ROWS)
def test_the_mean_of_each_coalition_is_that_of_segments(before: list[Row], after: list[Row]) -> None:
    segments = [np.array([segment for segment, _ in rows]) for rows in (before, after)]
    scores = np.array([row for _, row in [*before, *after]]).T
    weight = weights(*segments)
    np.testing.assert_allclose(weight.sum(-1), 1, atol=1e-12)
    values = coalition_values(mean, weight, [[*scores[:2]], [*scores[2:]]])
    slow = np.empty(16)
    for swapped in product((0, 1), repeat=4):
        population, features, contract, model = swapped
        coalition = sum(bit << place for place, bit in enumerate(swapped))
        slow[coalition] = mean_naively((before, after), population, features, 2 * contract + model)
    np.testing.assert_allclose(values, slow, atol=1e-12)
    shares = shapley(values)
    for ours, theirs in zip(shares, shapley_naively(slow, {}), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)
    difference = np.mean([row[3] for _, row in after]) - np.mean([row[0] for _, row in before])
    assert abs(shares.value.sum() - difference) <= 1e-12


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 9).map(lambda n: n / 10), st.integers(0, 3)), min_size=1, max_size=9
    )
)
def test_a_weight_is_that_many_rows(rows: list[tuple[int, float, int]]) -> None:
    labels, scores, counts = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    if not counts.any():
        counts[:] = 1
    weight, many = counts / counts.sum(), np.repeat(np.arange(len(counts)), counts.astype(int))
    usual: list[Callable[..., float]] = [log_loss, rmse, mae]
    if len(np.unique(labels[many])) == 2:
        usual.append(auc)
    else:
        assert np.isnan(auc(labels, scores, weight))
    for measure in usual:
        assert measure(labels, scores, weight) == pytest.approx(measure(labels[many], scores[many]), abs=1e-12)
    assert mean(scores, weight) == pytest.approx(scores[many].mean(), abs=1e-12)


CHANCE = np.random.default_rng(0)
SEGMENTS = CHANCE.integers(0, 20, 4000)
NOISE = CHANCE.normal(0, 0.2, 4000)
COMPOSED = np.where(CHANCE.random(4000) < 0.7, SEGMENTS // 2 + 10, SEGMENTS)
"""Mostly segments of high numbers."""


def _score(segments: Numbers, feature: Numbers, model: float = 1.0) -> Numbers:
    return 1 / (1 + np.exp(-model * (segments / 10 - 1 + feature)))


def _parts(after: Ints, feature: Numbers, scores: Callable[[Numbers, Numbers], list[list[Numbers]]]) -> Numbers:
    segments, features = np.concatenate([SEGMENTS, after]), np.concatenate([NOISE, feature])
    labels = (np.random.default_rng(1).random(len(features)) < _score(segments, features)).astype(float)
    answers = scores(segments, features)
    weight = weights(SEGMENTS, after)
    measures: list[Weighted] = [mean, partial(log_loss, labels), partial(auc, labels)]
    shares = [shapley(coalition_values(measure, weight, answers)) for measure in measures]
    for measure, share in zip(measures, shares, strict=True):
        ends = measure(answers[1][1], weight[1, 1]) - measure(answers[0][0], weight[0, 0])
        assert abs(share.value.sum() - ends) <= 1e-12
    parts: Numbers = shares[0].value
    return parts


def _same(segments: Numbers, features: Numbers) -> list[list[Numbers]]:
    answers = _score(segments, features)
    return [[answers] * 2] * 2


@pytest.mark.parametrize(
    ("part", "after", "feature", "scores"),
    [
        ("population", COMPOSED, NOISE, _same),
        ("features", SEGMENTS, NOISE + 0.5, _same),
        ("contract", SEGMENTS, NOISE, lambda s, f: [[_score(s, f)] * 2, [_score(s, f + 0.5)] * 2]),
        ("model", SEGMENTS, NOISE, lambda s, f: [[_score(s, f), _score(s - 3, f, 1.5)]] * 2),
    ],
)
def test_what_alone_changed_has_the_whole_change(
    part: str, after: Ints, feature: Numbers, scores: Callable[[Numbers, Numbers], list[list[Numbers]]]
) -> None:
    moved = dict(zip(PARTS, np.abs(_parts(after, feature, scores)), strict=True))
    assert moved[part] >= 0.95 * sum(moved.values()) > 0.01
    assert not any(moved[name] for name in ("contract", "model") if name != part)


def test_where_nothing_changed_nothing_has_a_part() -> None:
    assert np.abs(_parts(SEGMENTS, NOISE, _same)).max() <= 1e-12


def test_segments_of_one_period_alone_are_a_matter_of_the_population() -> None:
    before, after = np.zeros(4, np.int64), np.ones(6, np.int64)
    scores = np.array([0.0] * 4 + [1.0] * 6)
    values = coalition_values(mean, weights(before, after), [[scores] * 2] * 2)
    np.testing.assert_allclose(shapley(values).value, [1, 0, 0, 0], atol=1e-12)
