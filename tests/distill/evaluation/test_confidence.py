"""Intervals in closed form: those of a naive oracle, and as often right as they say."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.evaluation import confidence, metrics

ROWS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 8)), min_size=2, max_size=40)
LEVEL = 0.95


def placements(labels: list[int], scores: list[float]) -> tuple[float, float]:
    """AUC and variance, pair by pair (DeLong, DeLong and Clarke-Pearson, 1988)."""
    ones = [score for label, score in zip(labels, scores, strict=True) if label]
    zeros = [score for label, score in zip(labels, scores, strict=True) if not label]

    def wins(one: float, zero: float) -> float:
        return 1.0 if one > zero else 0.5 if one == zero else 0.0

    of_ones = [sum(wins(one, zero) for zero in zeros) / len(zeros) for one in ones]
    of_zeros = [sum(wins(one, zero) for one in ones) / len(ones) for zero in zeros]
    variance = sum(float(np.var(part, ddof=1)) / len(part) for part in (of_ones, of_zeros))
    return sum(of_ones) / len(ones), variance


@given(ROWS)
def test_an_auc_is_that_of_all_pairs(rows: list[tuple[int, int]]) -> None:
    labels, scores = (np.array(part) for part in zip(*rows, strict=True))
    found = confidence.auc(labels, scores)
    if labels.min() == labels.max():
        assert found is None
        return
    assert found is not None
    assert found.value == pytest.approx(metrics.auc(labels, scores))
    if min(labels.sum(), (1 - labels).sum()) < 2 or not 0 < found.value < 1:
        assert found.low is found.high is None
        return
    value, variance = placements(labels.tolist(), scores.tolist())
    half = 1.959964 * math.sqrt(variance) / (value * (1 - value))
    middle = math.log(value / (1 - value))
    expected = [1 / (1 + math.exp(-end)) for end in (middle - half, middle + half)]
    assert found.value == pytest.approx(value)
    assert found.bounds == pytest.approx(expected, abs=1e-6)


@given(ROWS)
def test_a_calibration_error_is_that_of_the_report(rows: list[tuple[int, int]]) -> None:
    labels, tenths = (np.array(part) for part in zip(*rows, strict=True))
    found = confidence.calibration_error(labels, tenths / 8)
    assert found.value == pytest.approx(metrics.calibration_error(labels, tenths / 8))
    assert found.low is None or 0 <= found.low <= found.value <= (found.high or 0) <= 1


def test_few_rows_have_no_interval_and_certain_ones_have_no_error() -> None:
    assert confidence.mean(np.array([2.0])) == (2.0, None, None)
    assert confidence.root_mean(np.array([4.0])) == (2.0, None, None)
    assert confidence.root_mean(np.array([4.0, 4.0])) == (2.0, 2.0, 2.0)
    assert confidence.share(0, 10).low == 0
    assert confidence.share(10, 10).high == pytest.approx(1)
    assert confidence.share(5, 10).bounds == pytest.approx([0.2366, 0.7634], abs=1e-4)  # Wilson's own
    assert confidence.auc(np.array([0, 0, 1, 1]), np.array([1, 2, 3, 4])) == (1.0, None, None)


def covered(rows: int, slope: float, rounds: int = 400) -> dict[str, float]:
    """How often an interval holds the truth, of scores whose logit is `slope` times what it should be."""
    chance = np.random.default_rng(0)
    logits = chance.normal(-0.5, 1.2, 200_000)
    truth, said = (1 / (1 + np.exp(-part)) for part in (logits, slope * logits))
    parts = np.array_split(np.argsort(said), metrics.BINS)
    every = (chance.random(len(truth)) < truth).astype(np.int64)
    known = {
        "auc": metrics.auc(every, said),
        "log_loss": float(-(truth * np.log(said) + (1 - truth) * np.log1p(-said)).mean()),
        "ece": float(sum(abs((said - truth)[part].sum()) for part in parts) / len(truth)),
    }
    hits = dict.fromkeys(known, 0)
    for _ in range(rounds):
        places = chance.integers(0, len(truth), rows)
        labels, scores = (chance.random(rows) < truth[places]).astype(np.int64), said[places]
        losses = -np.where(labels == 1, np.log(scores), np.log1p(-scores))
        found = {
            "auc": confidence.auc(labels, scores),
            "log_loss": confidence.mean(losses),
            "ece": confidence.calibration_error(labels, scores),
        }
        for name, interval in found.items():
            low, high = (interval and interval.bounds) or (2.0, -2.0)
            hits[name] += low <= known[name] <= high
    return {name: count / rounds for name, count in hits.items()}


@pytest.mark.parametrize("slope", [1.0, 1.5])
@pytest.mark.parametrize("rows", [100, 2000])
def test_intervals_are_as_often_right_as_they_say(rows: int, slope: float) -> None:
    found = covered(rows, slope)
    # Of 400 rounds at 95 %, chance leaves fewer than 92 % once in 300 times.
    assert min(found.values()) >= 0.92, found
    assert max(found["auc"], found["log_loss"]) <= 0.98, found
