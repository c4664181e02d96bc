import math
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from isthmus import DataError
from isthmus.distill.evaluation.metrics import (
    agreement,
    auc,
    brier,
    calibration_error,
    cosine,
    interleaved,
    log_loss,
    sigmoid,
)

Array = np.ndarray[Any, Any]

ROWS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0])), min_size=2)


@given(ROWS.filter(lambda rows: len({label for label, _ in rows}) == 2))
def test_auc_log_loss_and_brier_score_are_those_of_scikit_learn(rows: list[tuple[int, float]]) -> None:
    labels, scores = np.array(rows).T
    labels = labels.astype(np.int64)
    assert auc(labels, scores) == pytest.approx(sklearn.metrics.roc_auc_score(labels, scores))
    assert log_loss(labels, scores) == pytest.approx(
        sklearn.metrics.log_loss(labels, np.clip(scores, 1e-7, 1 - 1e-7)), rel=1e-6
    )
    assert brier(labels, scores) == pytest.approx(sklearn.metrics.brier_score_loss(labels, scores))


def test_calibration_error() -> None:
    labels = np.array([0, 1] * 150)
    assert calibration_error(labels, np.full(300, 0.5)) == 0
    assert calibration_error(labels, np.full(300, 0.75)) == pytest.approx(0.25)


def test_sigmoid_of_extremes() -> None:
    assert sigmoid(np.array([-1e4, 0, 1e4])).tolist() == [0, 0.5, 1]


def test_a_time_is_that_of_the_quietest_round() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        if len(calls) <= 55:  # what else the machine does, until the first round has ended
            time.sleep(0.002)

    (timing,) = interleaved({"": call}, calls=50).values()
    assert len(calls) == 5 + 5 * 50
    assert 0 < timing["p50_us"] <= timing["p99_us"] < 2000


def test_models_that_are_timed_together_take_turns() -> None:
    calls: list[str] = []

    def call(name: str, seconds: float) -> Callable[[], None]:
        def one() -> None:
            calls.append(name)
            if seconds:
                time.sleep(seconds)

        return one

    timing = interleaved({"quick": call("quick", 0), "slow": call("slow", 0.002)}, calls=50, rounds=3)
    assert calls == ["quick"] * 5 + ["slow"] * 5 + (["quick"] * 50 + ["slow"] * 50) * 3
    assert timing["quick"]["p99_us"] < 2000 <= timing["slow"]["p50_us"] <= timing["slow"]["p99_us"]


def test_a_slow_model_is_called_less_often() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        time.sleep(0.002)

    timing = interleaved({"slow": call}, calls=5000, rounds=2, seconds=0.01)
    assert len(calls) == 3 * 20
    assert timing["slow"]["p50_us"] >= 2000


def naive_agreement(student: Array, teacher: Array) -> dict[str, float]:
    """Row by row and class by class, by the definition."""
    same, kl = 0, []
    for ours, theirs in zip(student.tolist(), teacher.tolist(), strict=True):
        ours, theirs = ([0.0, row] if isinstance(row, float) else row for row in (ours, theirs))
        same += ours.index(max(ours)) == theirs.index(max(theirs))
        logs = []
        for row in (ours, theirs):
            total = max(row) + math.log(math.fsum(math.exp(x - max(row)) for x in row))
            logs.append([x - total for x in row])
        kl.append(math.fsum(math.exp(t) * (t - s) for s, t in zip(*logs, strict=True)))
    return {"agreement": same / len(student), "kl": math.fsum(kl) / len(kl)}


@st.composite
def pairs_of_logits(draw: st.DrawFn) -> tuple[Array, Array]:
    shape = draw(st.one_of(st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 9), st.integers(1, 5))))
    width = draw(st.sampled_from([16, 32, 64]))
    values = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-6e4, 6e4, width=16))
    dtype = np.dtype(f"f{width // 8}")
    return draw(hnp.arrays(dtype, shape, elements=values)), draw(hnp.arrays(dtype, shape, elements=values))


@given(pairs_of_logits())
def test_agreement_is_that_of_the_definition(pair: tuple[Array, Array]) -> None:
    found, expected = agreement(*pair), naive_agreement(*pair)
    assert found["agreement"] == expected["agreement"]
    assert found["kl"] == pytest.approx(expected["kl"], rel=1e-9, abs=1e-10)
    assert found["kl"] >= 0


def test_agreement_compares_part_by_part_in_little_memory() -> None:
    generator = np.random.default_rng(0)
    teacher = generator.normal(size=(3000, 1000)).astype(np.float16)
    student = teacher + generator.normal(scale=0.1, size=teacher.shape).astype(np.float16)
    agreement(student[:1], teacher[:1])
    tracemalloc.start()
    found = agreement(student, teacher)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24e6  # all of it as float64 is 24 MB, four times
    thirds = [agreement(student[n : n + 1000], teacher[n : n + 1000]) for n in (0, 1000, 2000)]
    for name, value in found.items():
        assert value == pytest.approx(sum(third[name] for third in thirds) / 3)
    assert 0 < found["agreement"] < 1


def test_two_logits_are_one_logit_and_zero() -> None:
    student, teacher = np.random.default_rng(1).normal(size=(2, 100))
    both = agreement(np.stack([0 * student, student], 1), np.stack([0 * teacher, teacher], 1))
    assert agreement(student, teacher) == both


@given(st.floats(-300, 300), st.floats(-300, 300))
def test_cosine_of_any_length_is_that_of_the_direction(ours: float, theirs: float) -> None:
    directions = np.random.default_rng(2).normal(size=(2, 5, 3))
    naive = np.mean([a @ b / math.sqrt((a @ a) * (b @ b)) for a, b in zip(*directions, strict=True)])
    assert cosine(directions[0] * 10**ours, directions[1] * 10**theirs) == pytest.approx(naive)


@pytest.mark.parametrize(
    ("student", "teacher", "found"),
    [
        (np.zeros(3), np.zeros(4), r"logits: \(3,\) of the student and \(4,\) of the teacher; expected the same shape"),
        (np.zeros(0), np.zeros(0), "at least one row"),
        (np.zeros((2, 3, 4)), np.zeros((2, 3, 4)), r"expected the same shape \(n,\) or \(n, c\)"),
        (np.array([0, 1, np.nan]), np.zeros(3), "logits of the student, row 2: not finite"),
        (np.zeros((600_000, 1)), np.r_[np.zeros(599_999), np.inf][:, None], "logits of the teacher, row 599999: not f"),
    ],
)
def test_logits_that_cannot_be_compared(student: Array, teacher: Array, found: str) -> None:
    with pytest.raises(DataError, match=found):
        agreement(student, teacher)


def test_an_embedding_without_a_direction() -> None:
    with pytest.raises(DataError, match="an embedding is zero"):
        cosine(np.eye(3), np.array([[1, 0, 0], [0, 0, 0], [0, 0, 1]]))
    with pytest.raises(DataError, match=r"expected the same shape \(n, c\)"):
        cosine(np.ones(3), np.ones(3))
