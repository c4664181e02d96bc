"""Calibration: what it learns, what its graph says, and what it is worth where a student is off."""

import math

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from isthmus.distill.evaluation.metrics import (
    auc,
    calibration_error,
    confidence_error,
    log_loss,
    multiclass_log_loss,
    sigmoid,
)
from isthmus.distill.labels import Calibration, Isotonic, Temperature
from isthmus.distill.onnx.builder import Building
from isthmus.distill.onnx.runtime import predict, session
from isthmus.distill.tabular.answers import (
    NumberOutput,
    Probabilities,
    Probability,
    SeveralProbabilities,
    StudentOutput,
)
from isthmus.distill.tabular.calibration import STEEPEST, IsotonicCalibrator, create_calibrator, points
from isthmus.distill.types import Array, Index

ROWS = 20_000


def off(seed: int = 0, rows: int = ROWS) -> tuple[Array, Index]:
    """Logits of a student that is far too sure, and off in one direction, with labels."""
    draw = np.random.default_rng(seed)
    right = draw.normal(-1, 1, rows)
    labels = (draw.random(rows) < sigmoid(right)).astype(np.int64)
    return (3 * right + 1).astype(np.float32), labels


def classes(seed: int = 0) -> tuple[Array, Index]:
    draw = np.random.default_rng(seed)
    right = draw.normal(0, 1, (ROWS, 4))
    labels = (right + draw.gumbel(size=right.shape)).argmax(1)
    return (4 * right).astype(np.float32), labels


def graph(answer: StudentOutput) -> onnx.ModelProto:
    build = Building()
    answer.write(build, "last", answer.name)
    tensors = [helper.make_tensor_value_info("last", TensorProto.FLOAT, ["N", answer.width])]
    return build.model("end", tensors, [helper.make_tensor_value_info(answer.name, TensorProto.FLOAT, [*answer.shape])])


@pytest.mark.parametrize("declared", [Temperature(), Isotonic()])
def test_a_student_that_is_off_is_brought_right_on_rows_it_was_not_learned_from(declared: Calibration) -> None:
    made = create_calibrator(declared)
    assert made is not None
    raw, labels = off()
    made.learn(raw, labels)
    raw, labels = off(seed=1)
    after = made(torch.from_numpy(raw)).numpy()
    before, ece = (calibration_error(labels, sigmoid(logits)) for logits in (raw, after))
    assert before > 0.12
    # A temperature cannot mend what is off in one direction. With so many rows chance alone makes 0.008.
    assert ece < (0.015 if isinstance(declared, Isotonic) else 0.06)
    assert log_loss(labels, sigmoid(after)) < log_loss(labels, sigmoid(raw)) - 0.05
    assert auc(labels, after) == pytest.approx(auc(labels, raw), abs=1e-6)


@pytest.mark.parametrize("rows", [100, 150, 250, 1000])
def test_a_map_of_few_rows_does_no_harm_to_a_student_that_is_right(rows: int) -> None:
    draw = np.random.default_rng(0)
    raw = draw.normal(-4, 3, 20_000 + rows)
    labels = (draw.random(len(raw)) < sigmoid(raw)).astype(np.int64)
    made = IsotonicCalibrator()
    made.learn(raw[:rows], labels[:rows])
    after = made(torch.tensor(raw[rows:], dtype=torch.float32)).numpy()
    assert log_loss(labels[rows:], sigmoid(after)) < log_loss(labels[rows:], sigmoid(raw[rows:])) + 0.05


def test_a_temperature_of_classes_is_that_of_the_least_loss() -> None:
    made = create_calibrator(Temperature())
    assert made is not None
    raw, labels = classes()
    made.learn(raw, labels)
    after = made(torch.from_numpy(raw)).numpy()
    losses = [multiclass_log_loss(labels, raw / hot) for hot in np.exp(np.linspace(math.log(0.05), math.log(20), 400))]
    assert multiclass_log_loss(labels, after) <= min(losses) + 1e-9
    assert after[0] == pytest.approx(raw[0] / 4, rel=0.05)
    assert confidence_error(labels, after) < 0.01 < 0.1 < confidence_error(labels, raw)


def test_several_classes_share_a_temperature() -> None:
    learned = [create_calibrator(Temperature()) for _ in range(2)]
    raw, labels = off(rows=3_000)
    for made, shape in zip(learned, [(3_000,), (1_000, 3)], strict=True):
        assert made is not None
        made.learn(raw.reshape(shape), labels.reshape(shape))
    one, other = (made(torch.ones(())) for made in learned if made is not None)
    assert one == other < 0.5


@pytest.mark.parametrize(("size", "spread"), [(40, 0), (5, 1)])
def test_a_temperature_is_that_of_the_least_loss_of_a_student_that_is_sure_of_what_is_wrong(
    size: int, spread: int
) -> None:
    made = create_calibrator(Temperature())
    assert made is not None
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 2_000)
    side = np.where(draw.random(len(labels)) < 0.1, 1 - 2 * labels, 2 * labels - 1)
    raw = size * np.exp(spread * draw.normal(size=len(labels))) * side

    def loss(logits: Array) -> float:
        return float(np.logaddexp(0, np.where(labels == 1, -logits, logits)).mean())

    made.learn(raw, labels)
    losses = [loss(raw / hot) for hot in np.exp(np.linspace(math.log(0.05), math.log(20), 400))]
    assert loss(made(torch.from_numpy(raw)).numpy()) <= min(losses) + 1e-6


LOGIT = st.sampled_from([-20.0, -3.0, -3.0 + 1e-7, 0.0, 2.0, 40.0]) | st.floats(-30, 30, width=32)
LOGITS = st.lists(st.tuples(LOGIT, st.integers(0, 1)), min_size=1, max_size=40)


@given(LOGITS, st.integers(1, 60))
def test_a_map_rises_and_is_never_too_steep(rows: list[tuple[float, int]], times: int) -> None:
    logits, labels = (np.repeat(np.array(column), times) for column in zip(*rows, strict=True))
    starts, values = points(logits, labels)
    steps, rises = np.diff(starts), np.diff(values)
    assert (steps > 0).all()
    assert (rises > 0).all()
    assert (rises <= STEEPEST * steps * (1 + 1e-9)).all()
    made = IsotonicCalibrator()
    made.learn(logits.astype(np.float32), labels)
    after = made(torch.linspace(-50, 50, 2001)).numpy()
    assert np.isfinite(after).all()
    assert (np.diff(after) >= 0).all()


def test_the_graph_of_a_map_never_falls_and_is_what_numpy_says_to_the_bit() -> None:
    made = IsotonicCalibrator()
    made.learn(*off())
    build = Building()
    output = made.write(build, "logits")
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in ("logits", output)]
    model = build.model("map", tensors[:1], tensors[1:])
    assert {node.op_type for node in model.graph.node} <= {
        "Unsqueeze", "GreaterOrEqual", "Cast", "ReduceSum", "Gather", "Sub", "Mul", "Add", "Min",
    }, "of which IEEE 754 says the bits; the sum is of whole numbers"  # fmt: skip
    logits = np.sort(np.random.default_rng(2).normal(0, 5, 50_000)).astype(np.float32)
    found = predict(session(model.SerializeToString(), 1), {"logits": logits})
    starts, values, slopes = (part.numpy() for part in (made.starts, made.values, made.slopes))
    line = (logits[:, None] >= starts).sum(1)
    start, value = (np.insert(part, 0, part[0])[line] for part in (starts, values))
    slope, end = np.insert(slopes, 0, np.float32(1))[line], np.append(values, np.float32(np.inf))[line]
    expected = np.minimum(value + (logits - start) * slope, end)
    np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32))
    assert (np.diff(found) >= 0).all()
    np.testing.assert_allclose(found, made(torch.from_numpy(logits)).numpy(), rtol=1e-6, atol=1e-5)
    # Between its points it is what NumPy interpolates.
    known = starts < 1e30
    inside = (logits > starts[0]) & (logits < starts[known][-1])
    np.testing.assert_allclose(found[inside], np.interp(logits[inside], starts[known], values[known]), atol=1e-5)


@pytest.mark.parametrize("answer", [
    Probability(), Probability(create_calibrator(Temperature())), Probability(create_calibrator(Isotonic())),
    Probabilities(3), Probabilities(3, create_calibrator(Temperature())),
    SeveralProbabilities(3), SeveralProbabilities(3, create_calibrator(Temperature())),
    NumberOutput("value", -1.5, 2.0, 250.0, 1e4), NumberOutput("score", -16.0, 16.0),
], ids=lambda answer: f"{answer.name} {type(answer.calibration).__name__}")  # fmt: skip
def test_an_answer_is_the_same_in_torch_in_numpy_and_as_a_graph(answer: StudentOutput) -> None:
    last = np.random.default_rng(0).normal(0, 9, (200, answer.width)).astype(np.float32)
    found = predict(session(graph(answer).SerializeToString(), 1), {"last": last})
    with torch.inference_mode():
        scores = answer.scores(torch.from_numpy(last))
        in_torch, final = answer(scores).numpy(), answer.calibrate(scores).numpy()
    scale = max(1.0, float(np.abs(found).max()))
    for other in (in_torch, answer.from_scores(final)):
        np.testing.assert_allclose(found, other, atol=1e-6 * scale)
    np.testing.assert_allclose(answer.from_scores(answer.to_scores(found)), found, atol=1e-6 * scale)
    if isinstance(answer, NumberOutput):
        low, high = answer.from_scores(np.array([answer.low, answer.high]))
        assert (found.min(), found.max()) == pytest.approx((low, high))


def test_before_it_has_learned_a_calibration_changes_nothing() -> None:
    raw = torch.linspace(-12, 12, 101)
    for declared in (Temperature(), Isotonic()):
        made = create_calibrator(declared)
        assert made is not None
        torch.testing.assert_close(made(raw), raw, rtol=0, atol=0)
    assert create_calibrator(None) is None
