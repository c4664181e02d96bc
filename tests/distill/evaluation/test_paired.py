"""What a model loses beside another: against each measure by itself, and a naive DeLong."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.evaluation.confidence import paired_loss, placements
from isthmus.distill.evaluation.metrics import auc, brier, log_loss, mae, rmse
from isthmus.distill.types import Array
from isthmus.features.errors import DataError

OF_ONE = {"auc": lambda labels, scores: -auc(labels, scores), "log_loss": log_loss, "brier": brier,
          "rmse": rmse, "mae": mae}  # fmt: skip


def naive(labels: Array, scores: Array) -> list[float]:
    """Each row beside every row of the other label, one by one."""
    found = []
    for label, score in zip(labels, scores, strict=True):
        others = [other for known, other in zip(labels, scores, strict=True) if known != label]
        right = [score > other if label == 1 else score < other for other in others]
        found.append((sum(right) + sum(score == other for other in others) / 2) / len(others))
    return found


@st.composite
def rows(draw: st.DrawFn) -> tuple[Array, Array, Array]:
    # Few values, so that there are ties.
    row = st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 5))
    drawn = [(True, 1, 2), (True, 3, 3), (False, 2, 2), (False, 0, 1), *draw(st.lists(row, max_size=30))]
    labels, scores, former = np.array(drawn, np.float64).T
    return labels, scores / 5, former / 5


@given(rows())
def test_placements_are_those_of_all_pairs(drawn: tuple[Array, Array, Array]) -> None:
    labels, scores, _ = drawn
    assert placements(labels, scores) == pytest.approx(naive(labels, scores))


@pytest.mark.parametrize("metric", OF_ONE)
@given(drawn=rows())
def test_what_is_lost_is_the_difference_of_both(metric: str, drawn: tuple[Array, Array, Array]) -> None:
    labels, scores, former = drawn
    found = paired_loss(metric, *drawn)
    assert found.value == pytest.approx(OF_ONE[metric](labels, scores) - OF_ONE[metric](labels, former), abs=1e-12)
    assert paired_loss(metric, labels, former, scores).value == pytest.approx(-found.value, abs=1e-12)
    assert paired_loss(metric, labels, scores, scores) == (0, 0)
    assert found.error >= 0


@pytest.mark.parametrize("metric", OF_ONE)
def test_its_error_is_how_far_it_is_off_over_other_rows(metric: str) -> None:
    generator = np.random.default_rng(0)

    def draw() -> tuple[Array, Array, Array]:
        labels = (generator.random(400) < 0.3).astype(np.float64)
        common = labels + generator.normal(0, 1, 400)
        scores, former = (1 / (1 + np.exp(-common - generator.normal(0, noise, 400))) for noise in (0.8, 0.3))
        return labels, scores, former

    found = [paired_loss(metric, *draw()) for _ in range(600)]
    spread = np.std([part.value for part in found])
    assert np.mean([part.error for part in found]) == pytest.approx(spread, rel=0.12)
    truth = np.mean([part.value for part in found])
    beyond = np.mean([part.least(0.05) > truth for part in found])
    assert 0.02 < beyond < 0.09, "the end of a one-sided interval of 95 %"


def test_the_least_is_what_chance_leaves() -> None:
    found = paired_loss("mae", np.array([0.0, 0, 0, 0]), np.array([3.0, 1, 3, 1]), np.zeros(4))
    assert found.value == 2
    assert found.error == pytest.approx(math.sqrt(4 / 3) / 2)
    assert found.least(1e-4) == pytest.approx(2 - 3.719 * found.error, abs=1e-3)


@pytest.mark.parametrize("labels", [[], [1.0], [1.0, 1, 1], [1.0, 0, 0]])
def test_too_few_rows_say_nothing(labels: list[float]) -> None:
    with pytest.raises(DataError, match="at least two rows"):
        paired_loss("auc", np.array(labels), np.zeros(len(labels)), np.zeros(len(labels)))
