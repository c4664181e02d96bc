"""Measures of numbers and of classes, against scikit-learn and SciPy."""

import math
import warnings

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.evaluation.metrics import correlation, log_softmax, mae, multiclass_metrics, r2, rmse

NUMBERS = st.floats(-1e6, 1e6, width=32)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=40))
def test_numbers_are_measured_as_by_scikit_learn(rows: list[tuple[float, float]]) -> None:
    labels, values = np.array(rows).T
    assert rmse(labels, values) == pytest.approx(sklearn.metrics.root_mean_squared_error(labels, values))
    assert mae(labels, values) == pytest.approx(sklearn.metrics.mean_absolute_error(labels, values))
    if labels.std() > 1e-3:
        assert r2(labels, values) == pytest.approx(sklearn.metrics.r2_score(labels, values), rel=1e-6, abs=1e-9)
        if values.std() > 1e-3:
            assert correlation(labels, values) == pytest.approx(
                scipy.stats.pearsonr(labels, values).statistic, abs=1e-6
            )


def test_what_has_no_measure_is_no_number() -> None:
    same, nothing = np.ones(3), np.empty(0)
    assert math.isnan(r2(same, np.arange(3.0)))
    assert math.isnan(correlation(same, np.arange(3.0)))
    assert all(math.isnan(measure(nothing, nothing)) for measure in (rmse, mae, r2))
    assert correlation(np.array([0.0, 1e300]), np.array([0.0, 1e-300])) == pytest.approx(1)
    assert all(map(math.isnan, multiclass_metrics(nothing.astype(int), np.empty((0, 3))).values()))


@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(2, 5))
def test_classes_are_measured_as_by_scikit_learn(seed: int, rows: int, classes: int) -> None:
    draw = np.random.default_rng(seed)
    labels, logits = draw.integers(0, classes, rows), draw.normal(size=(rows, classes)).astype(np.float32)
    found, chances = multiclass_metrics(labels, logits), np.exp(log_softmax(logits))
    every = range(classes)
    assert found["log_loss"] == pytest.approx(sklearn.metrics.log_loss(labels, chances, labels=[*every]))
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(labels, logits.argmax(1)))
    with warnings.catch_warnings(action="ignore"):
        f1 = sklearn.metrics.f1_score(labels, logits.argmax(1), labels=np.unique(labels), average="macro")
    assert found["macro_f1"] == pytest.approx(f1)
    # The naive way: the rows in the order of their confidence, fifteen bins, one after the other.
    order = sorted(range(rows), key=lambda row: chances[row].max())
    bins = np.array_split(np.array(order), 15)
    gaps = [abs(sum(chances[row].max() - (chances[row].argmax() == labels[row]) for row in part)) for part in bins]
    assert found["ece"] == pytest.approx(sum(gaps) / rows)
