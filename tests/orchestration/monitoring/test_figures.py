"""Figures of every kind of label, by weeks and slices."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from isthmus.distill.evaluation import metrics
from isthmus.distill.labels import Binary, Classes, Label, Number, Rank
from isthmus.features.errors import DataError, RequestError
from isthmus.orchestration.monitoring import figures
from tests.orchestration.monitoring.recordings import DAY

ROWS = 400
EVERY = np.ones(ROWS, bool)


def declared(label: Label | None) -> Any:
    spine = SimpleNamespace(label=SimpleNamespace(name="late"))
    return SimpleNamespace(label=label, name="late", kind="tabular", spine=spine)


def test_a_number_has_its_residuals() -> None:
    chance = np.random.default_rng(0)
    labels = chance.normal(0, 2, ROWS)
    outputs = labels + chance.normal(0.5, 1, ROWS)
    found = figures.quality(figures.measuring(declared(Number())), labels, outputs[:, None], EVERY)
    assert found.measures["rmse"].value == pytest.approx(metrics.rmse(labels, outputs))
    assert found.measures["mae"].value == pytest.approx(metrics.mae(labels, outputs))
    # RMSE is 1.118, MAE 0.896 of such normal numbers.
    for name, truth in (("rmse", 1.118), ("mae", 0.896)):
        low, high = found.measures[name].low, found.measures[name].high
        assert low is not None
        assert high is not None
        assert low < truth < high < low + 0.25
    assert figures.main_measure(declared(Number())) == ("rmse", False)
    assert figures.main_measure(declared(Number(loss="absolute"))) == ("mae", False)


def test_classes_have_theirs_and_one_that_the_package_has_not_is_wrong() -> None:
    chance = np.random.default_rng(0)
    logits = chance.normal(0, 1, (ROWS, 3))
    labels = (logits + chance.gumbel(0, 1, (ROWS, 3))).argmax(1).astype(np.float64)
    outputs = np.exp(metrics.log_softmax(logits))
    found = figures.quality(figures.measuring(declared(Classes())), labels, outputs, EVERY).measures
    expected = metrics.multiclass_metrics(labels.astype(np.int64), logits)
    assert {name: found[name].value for name in found} == pytest.approx({name: expected[name] for name in found})
    unknown = figures.quality(figures.measuring(declared(Classes())), labels * 0 - 1, outputs, EVERY).measures
    assert unknown["accuracy"].value == 0
    assert unknown["log_loss"].value == pytest.approx(-np.log(1e-7))
    assert figures.main_measure(declared(Classes())) == ("log_loss", False)


@pytest.mark.parametrize(
    ("labels", "classes"), [([True, False, None], ["0", "1"]), ([2, 1, 7], ["1", "2"]), (["b", "a", ""], ["a", "b"])]
)
def test_labels_are_places_of_classes(labels: list[Any], classes: list[str]) -> None:
    assert figures.class_indices(pa.chunked_array([labels]), classes).to_pylist() == [1, 0, -1]


def test_labels_that_no_training_set_may_have_are_refused() -> None:
    assert figures.numeric_labels(declared(Binary()), pa.chunked_array([[True, None]]))[0] == 1
    for label, wrong in ((Binary(), [0, 2, None]), (Number(), [0.5, float("nan"), None])):
        with pytest.raises(DataError, match=r"label late: 1 values such as (2|nan); expected"):
            figures.numeric_labels(declared(label), pa.chunked_array([wrong]))


@pytest.mark.parametrize("label", [Rank(within="query"), Classes(several=True), None])
def test_what_has_no_measure_is_refused(label: Label | None) -> None:
    with pytest.raises(RequestError, match="have no measure"):
        figures.main_measure(declared(label))


def test_weeks_are_those_of_iso_and_slices_begin_with_the_worst() -> None:
    chance = np.random.default_rng(0)
    labels = chance.integers(0, 2, ROWS).astype(np.float64)
    outputs = np.where(np.arange(ROWS) < 200, 1 - labels, labels)[:, None] * 0.8 + 0.1
    measured = figures.measuring(declared(Binary()))
    chosen = np.arange(ROWS) % 2 == 0
    # 2021-01-03 was a Sunday, of the last week of 2020.
    at = np.where(np.arange(ROWS) < 150, 18630 * DAY, 18631 * DAY)
    first, second = figures.weeks(measured, labels, outputs, chosen, at)
    assert (first.week, first.answers, first.rows) == ("2020-W53", 150, 75)
    assert (second.week, second.answers, second.rows) == ("2021-W01", 250, 125)
    columns = pa.table({"half": ["a"] * 200 + ["b"] * 200, "few": ["x"] * 99 + ["y"] * 301})
    found = figures.slices(measured, labels, outputs, chosen, columns, ("auc", True))
    assert [(part.column, part.value) for part in found] == [("half", "a"), ("few", "y"), ("half", "b")]
    assert (found[0].answers, found[0].rows, found[0].measures["auc"].value) == (200, 100, 0)
    # So many answers are none without their labels.
    assert figures.slices(measured, labels, outputs, chosen & (np.arange(ROWS) % 8 == 0), columns, ("auc", True)) == ()
    # Of one class there is no AUC, and none of no row.
    none = figures.quality(measured, labels * 0, outputs, chosen)
    assert "auc" not in none.measures
    assert figures.quality(measured, labels, outputs, chosen & False).measures == {}


def test_a_loss_is_never_below_zero() -> None:
    labels, outputs = np.array([1.0, 1.0, 0.0]), np.array([[0.9], [0.01], [0.1]])
    found = figures.quality(figures.measuring(declared(Binary())), labels, outputs, np.ones(3, bool)).measures
    assert (found["log_loss"].low, found["brier"].low) == (0, 0)
    assert found["brier"].value == pytest.approx((0.01 + 0.9801 + 0.01) / 3)
