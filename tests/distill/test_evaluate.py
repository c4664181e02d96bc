import time

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st

from isthmus.distill.evaluate import auc, calibration_error, latency, log_loss, sigmoid

ROWS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])), min_size=2)


@given(ROWS.filter(lambda rows: len({label for label, _ in rows}) == 2))
def test_auc_and_log_loss_are_those_of_scikit_learn(rows: list[tuple[int, float]]) -> None:
    labels, scores = np.array(rows).T
    labels = labels.astype(np.int64)
    assert auc(labels, scores) == pytest.approx(sklearn.metrics.roc_auc_score(labels, scores))
    assert log_loss(labels, scores) == pytest.approx(
        sklearn.metrics.log_loss(labels, np.clip(scores, 1e-7, 1 - 1e-7)), rel=1e-6
    )


def test_calibration_error() -> None:
    labels = np.array([0, 1] * 150)
    assert calibration_error(labels, np.full(300, 0.5)) == 0
    assert calibration_error(labels, np.full(300, 0.75)) == pytest.approx(0.25)


def test_sigmoid_of_extremes() -> None:
    assert sigmoid(np.array([-1e4, 0, 1e4])).tolist() == [0, 0.5, 1]


def test_latency_is_that_of_the_quietest_round() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        if len(calls) <= 55:  # what else the machine does, until the first round has ended
            time.sleep(0.002)

    timing = latency(call, calls=50)
    assert len(calls) == 5 + 5 * 50
    assert 0 < timing["p50_us"] <= timing["p99_us"] < 2000
