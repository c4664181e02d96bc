"""Labels with several classes per row: what is read, measured and refused, who teaches them, and their package."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from onnx import TensorProto, helper
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, log_loss
from sklearn.multiclass import OneVsRestClassifier
from sklearn.svm import LinearSVC

from isthmus.distill.declaration import Tabular
from isthmus.distill.distillation import distill
from isthmus.distill.evaluation.metrics import multilabel_metrics, sigmoid
from isthmus.distill.export.export import export
from isthmus.distill.labels import Classes, Temperature
from isthmus.distill.language.teachers import Onnx, TeacherFunction, TeacherOutputs
from isthmus.distill.tabular.kinds.several import SeveralLabels
from isthmus.distill.tabular.task import TabularTask
from isthmus.distill.tasks.split import split_table
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, DataError
from isthmus.package.manifest import open_package
from tests.distill.conftest import SERVING
from tests.distill.labelled import NAMES, labelled, material_of
from tests.distill.support import check_package
from tests.distill.tabular.test_userteachers import model, unlabeled

HERE = "tests.distill.tabular.kinds.test_several"
ROWS = 300
SHARES = np.array([0.9, 0.2, 0.4])


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """The training set with a time of its own for each row, since it has no join keys."""
    event = pa.array(np.arange(ROWS) * 3_600_000_000, pa.timestamp("us", tz="UTC"))
    return labelled("several", ROWS).set_column(0, "event_timestamp", event).set_column(1, "known_at", event)


def with_labels(table: pa.Table, labels: Any) -> pa.Table:
    return table.set_column(table.column_names.index("late"), "late", pa.array(labels))


def read(table: pa.Table, labels: Any) -> SeveralLabels:
    parts = split_table(table, (0.7, 0.1, 0.2))
    return SeveralLabels(with_labels(table, labels), "late", parts, Tabular(label=Classes(several=True)))


def test_classes_are_read_as_sets(table: pa.Table) -> None:
    found = read(table, [["b", "a", "b"], [], ["a"]] * (ROWS // 3))
    assert found.classes == ("a", "b")
    assert found.values[:3].tolist() == found.targets[:3].tolist() == [[1, 1], [0, 0], [1, 0]]


@pytest.mark.parametrize(("labels", "message"), [
    ([[]] * ROWS, "label late: no class in the train part; expected 2 to 256 classes"),
    ([["a"], []] * (ROWS // 2), "label late: only a in the train part"),
    ([["a"], ["a", "b"]] * (ROWS // 2), "all rows of the train part have the class a; expected classes that some rows"),
    ([["a"], ["b"]] * (ROWS // 2 - 1) + [["c", "a"], ["c", "d"]],
     "3 labels of the test part name a class that no row of the train part has: c, d"),
    ([["a"], ["b", None]] * (ROWS // 2), "column late: 150 nulls inside of arrays"),
    ([["a"], None] * (ROWS // 2), "column late: 150 nulls; expected a value in every row"),
    (["a", "b"] * (ROWS // 2), "column late: .*; expected arrays of class names"),
])  # fmt: skip
def test_arrays_that_cannot_be_learned_are_refused(table: pa.Table, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(table, labels)


def test_metrics_are_those_of_scikit_learn(table: pa.Table) -> None:
    labels = read(table, table["late"].to_pylist())
    logits = 2 * np.random.default_rng(0).normal(size=(ROWS, 3))
    found, chosen = multilabel_metrics(labels.values, logits), logits > 0
    for average in ("micro", "macro"):
        assert found[f"{average}_f1"] == pytest.approx(f1_score(labels.values, chosen, average=average))
    each = [log_loss(column, chances) for column, chances in zip(labels.values.T, sigmoid(logits).T, strict=True)]
    assert found["log_loss"] == pytest.approx(np.mean(each))
    nothing = multilabel_metrics(np.zeros((4, 2), np.int8), np.full((4, 2), -1.0))
    assert np.isnan([nothing["micro_f1"], nothing["macro_f1"]]).all()
    same = labels.agreement({"logits": logits}, {"logits": logits + 1e-9})
    assert same == {"agreement": 1.0, "kl": pytest.approx(0, abs=1e-9)}
    assert labels.agreement({"logits": -logits}, {"logits": logits})["agreement"] == 0


def test_an_input_that_tells_one_class_is_named(table: pa.Table) -> None:
    assert TabularTask(material_of("several", table)).leaks() == []
    rough = pa.array(["rough" in names for names in table["late"].to_pylist()])
    leaking = table.set_column(table.column_names.index("weekend"), "weekend", rough)
    (leak,) = TabularTask(material_of("several", leaking)).leaks()
    assert leak == "weekend orders the rows of the training part by the class rough with an AUC of 1.0000"


# --- teachers


def scores(table: pa.Table, root: Path, teacher: Any, rows: int = 20) -> Array:
    task = TabularTask(replace(material_of("several", table, teacher=teacher), root=root))
    found: Array = task.teacher().ask(np.arange(rows))["logits"].numpy()
    return found


def numbers(features: Any) -> Any:
    return features[["distance", "hour", "secret"]].fillna(800.0)


class Fitted:
    """A classifier of numbers, without those that a table may lack."""

    def __init__(self, classifier: Any, features: Any, labels: Any) -> None:
        self.inner = classifier.fit(numbers(features), labels)
        self.classes_ = self.inner.classes_
        for name in ("predict_proba", "decision_function"):
            if hasattr(self.inner, name):
                setattr(self, name, self._asking(name))

    def _asking(self, name: str) -> Any:
        return lambda features: getattr(self.inner, name)(numbers(features))


def one_vs_rest(features: Any, labels: Any) -> Any:
    return Fitted(OneVsRestClassifier(LogisticRegression(max_iter=500)), features, labels)


def forest(features: Any, labels: Any) -> Any:
    return Fitted(RandomForestClassifier(20, max_depth=4, random_state=0), features, labels)


def margins(features: Any, labels: Any) -> Any:
    return Fitted(OneVsRestClassifier(LinearSVC()), features, labels)


def named() -> Any:
    """Answers for the classes in another order."""
    return lambda features: (np.tile(SHARES[::-1], (len(features), 1)), list(NAMES[::-1]))


def lists() -> Any:
    return lambda features: [["rough", "late"] if hour > 12 else [] for hour in features["hour"]]


def silent() -> Any:
    return lambda features: [[]] * len(features)


def unnamed() -> Any:
    return lambda features: np.tile(SHARES, (len(features), 1))


def softmax() -> Any:
    return lambda features: (np.tile(SHARES / SHARES.sum(), (len(features), 1)), list(NAMES))


def gaps() -> Any:
    """Does not answer for one class in the morning."""

    def answer(features: Any) -> Any:
        shares = np.tile(SHARES, (len(features), 1))
        shares[features["hour"] < 6, 1] = np.nan
        return shares, list(NAMES)

    return answer


@pytest.mark.parametrize("name", ["one_vs_rest", "forest", "margins", None])
def test_a_fitted_model_teaches_the_classes_in_their_order(table: pa.Table, tmp_path: Path, name: str | None) -> None:
    found = scores(table, tmp_path, name and f"{HERE}:{name}", ROWS)
    wanted = np.array([[each in names for each in NAMES] for names in table["late"].to_pylist()])
    for logits, has in zip(found.T[:2], wanted.T, strict=False):  # no input tells the last one
        assert logits[has].mean() > logits[~has].mean() + 0.5


def test_names_give_the_order_of_outputs(table: pa.Table, tmp_path: Path) -> None:
    np.testing.assert_allclose(sigmoid(scores(table, tmp_path, f"{HERE}:named")), np.tile(SHARES, (20, 1)), rtol=1e-5)
    late = sigmoid(scores(table, tmp_path, f"{HERE}:lists")) > 0.5
    np.testing.assert_array_equal(late, (table["hour"].to_numpy()[:20] > 12)[:, None] & [False, True, True])
    assert (scores(table, tmp_path, f"{HERE}:silent") < -80).all()


def test_several_teachers_are_averaged_class_by_class(table: pa.Table, tmp_path: Path) -> None:
    found = sigmoid(scores(table, tmp_path, [f"{HERE}:named", f"{HERE}:silent"]))
    np.testing.assert_allclose(found, np.tile(SHARES / 2, (20, 1)), rtol=1e-5)


def stored(root: Path, table: pa.Table, names: list[str] | None, /, **columns: Any) -> TeacherOutputs:
    pq.write_table(pa.table({"event_timestamp": table["event_timestamp"], **columns}), root / "teacher.parquet")
    return TeacherOutputs("teacher.parquet", classes=names)


@pytest.mark.parametrize("form", ["probabilities", "logits"])
def test_outputs_of_a_file_and_of_a_model_teach(table: pa.Table, tmp_path: Path, form: str) -> None:
    logits = np.log(SHARES / (1 - SHARES))
    row = (SHARES if form == "probabilities" else logits)[::-1].tolist()
    teacher = stored(tmp_path, table, list(NAMES[::-1]), **{form: [row] * ROWS})
    np.testing.assert_allclose(scores(table, tmp_path, teacher), np.tile(logits, (20, 1)), rtol=1e-5)
    nodes = [
        helper.make_node("Concat", ["secret", "hour", "secret"], ["all"], axis=1),
        helper.make_node("Sigmoid" if form == "probabilities" else "Identity", ["all"], [form]),
    ]
    inputs = {name: (TensorProto.FLOAT, ["n", 1]) for name in ("secret", "hour")}
    model(tmp_path / "large.onnx", inputs, form, nodes, width=3)
    found = scores(table, tmp_path, Onnx("large.onnx", classes=NAMES))
    secret, hour = (table[name].to_numpy()[:20] for name in ("secret", "hour"))
    np.testing.assert_allclose(sigmoid(found), sigmoid(np.stack([secret, hour, secret], 1)), rtol=1e-4)


@pytest.mark.parametrize(("columns", "classes", "message"), [
    ({"probabilities": [[0.2, 0.3]]}, ["late", "rough"], "without 'delayed'"),
    ({"probabilities": [[0.2, 0.3, 0.9]]}, ["late", "rough", "early"], "without 'delayed' and with 'early'"),
    ({"probabilities": [[0.2, 0.3, 0.9]]}, None, "classes: unknown"),
    ({"probabilities": [[0.2, 0.3, 1.9]]}, NAMES, "probabilities: 1.9; expected numbers from 0 to 1"),
    ({"probabilities": [0.2]}, NAMES, r"shape \(20,\); expected probabilities or logits of 3 classes for each row"),
    ({"log_probabilities": [[-0.1]], "classes": [["late"]]}, None,
     "log_probabilities: names the likeliest of classes that exclude each other; expected probabilities or logits"),
])  # fmt: skip
def test_outputs_of_other_classes_are_refused(
    table: pa.Table, tmp_path: Path, columns: Any, classes: Any, message: str
) -> None:
    whole = {name: values * ROWS for name, values in columns.items()}
    with pytest.raises((ConfigurationError, DataError), match=message):
        scores(table, tmp_path, stored(tmp_path, table, classes, **whole))


def test_a_function_without_names_and_a_softmax_are_refused(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="classes: unknown; expected an attribute classes_"):
        scores(table, tmp_path, f"{HERE}:unnamed")
    with pytest.raises(DataError, match="the sum is 1 in each of 20 rows, as of a softmax; expected probabilities of"):
        scores(table, tmp_path, f"{HERE}:softmax")


def test_a_row_without_an_answer_for_one_class_has_none(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="of 20 rows have no answer"):
        scores(table, tmp_path, f"{HERE}:gaps")
    teacher = TeacherFunction(f"{HERE}:gaps", missing="labels")
    task = TabularTask(material_of("several", unlabeled(table, 0.3), teacher=teacher))
    rows = np.arange(60)
    taught, labels = task.teacher().ask(rows), task.batch(torch.from_numpy(rows)).labels
    assert labels is not None
    answered = table["hour"].to_numpy()[rows] >= 6
    np.testing.assert_array_equal(taught["answered"].numpy() > 0, answered)

    student = torch.zeros((60, 3), requires_grad=True)
    loss, terms = task.objective()({"logits": student}, taught, labels, 0.5)
    known = labels.isfinite()
    assert (known.any(1) == known.all(1)).all()
    assert 20 < int(known.all(1).sum()) < 60
    assert terms["labels"].item() == pytest.approx(np.log(2))
    (slope,) = torch.autograd.grad(loss, student)
    np.testing.assert_array_equal(slope.abs().sum(1).numpy() > 0, known.all(1).numpy() | answered)


# --- to the package


@pytest.mark.accept
def test_a_student_of_several_classes_is_packaged(tmp_path: Path) -> None:
    rows = material_of("several", labelled("several", 1000), calibration=Temperature(), seeds=1, gates=[], epochs=8)
    folders = {name: tmp_path / name for name in ("models", "cache", "runs")}
    trained = distill(rows, folder=folders["models"], cache=folders["cache"], runs=folders["runs"])
    quality = trained.data["models"]["student"]["quality"]
    assert [*quality] == ["log_loss", "micro_f1", "macro_f1", "ece", "ece_uncalibrated"]
    assert trained.data["measures"]["lift_kept"] > 0.3
    assert trained.data["models"]["teacher"]["quality"]["micro_f1"] > quality["micro_f1"] > 0.3
    assert trained.data["gap_closed"] is not None
    report = export(
        rows, trained.path, tmp_path / "packages", contract={"views": {}}, profile=SERVING, cache=folders["cache"]
    )
    package = open_package(report.path)
    assert (package.manifest.classes, package.manifest.several) == (NAMES, True)
    assert json.loads((report.path / "manifest.json").read_bytes())["several"] is True
    compared = check_package(rows, package, trained.path, rows=50)
    assert {verdict.differing for verdict in compared.values()} == {0}
