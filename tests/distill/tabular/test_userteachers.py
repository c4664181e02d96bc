from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from isthmus.distill.distillation import distill
from isthmus.distill.language.teachers import Onnx, TeacherFunction, TeacherOutputs
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.preflight import rehearse
from isthmus.distill.reports.modelcard import model_card
from isthmus.distill.restore import restore
from isthmus.distill.tabular.task import TabularTask
from isthmus.distill.tabular.users.prediction import Prediction, binary_scores, class_scores
from isthmus.distill.tasks.answers import student_answers
from isthmus.distill.tasks.task import Material
from isthmus.distill.training.teacheroutputs import TeacherCost, complete_outputs, open_outputs
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from tests.distill import userteachers
from tests.distill.labelled import labelled, material_of
from tests.distill.support import training_set

HERE = "tests.distill.userteachers"


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return training_set()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    userteachers.CALLS.clear()
    userteachers.FAILS.clear()
    yield
    userteachers.FAILS.clear()


def made(table: pa.Table, root: Path, kind: str = "binary", **changes: Any) -> Material:
    return replace(material_of(kind, table, **changes), root=root)


def report(of: Material, folder: Path, notes: list[str] | None = None) -> Mapping[str, Any]:
    said: list[str] = [] if notes is None else notes
    return distill(
        of, folder=folder / "models", cache=folder / "cache", runs=folder / "runs",
        progress=lambda text, _done: said.append(text),
    ).data  # fmt: skip


def scores(of: Material, rows: Array) -> Array:
    task = TabularTask(of)
    values: Array = task.teacher().ask(rows)[task.keys[0]].numpy()
    return values


def probabilities(table: pa.Table, rows: int | None = None) -> Array:
    """The ideal probability of each row, as float64."""
    frame = table.slice(0, rows or len(table)).to_pandas()
    answers: Array = userteachers.ideal(frame)
    return answers


def stored(root: Path, table: pa.Table, *, name: str = "teacher.parquet", **columns: Any) -> TeacherOutputs:
    rows = next(iter(columns.values()))
    pq.write_table(pa.table({"event_timestamp": table["event_timestamp"].slice(0, len(rows)), **columns}), root / name)
    return TeacherOutputs(name)


@pytest.fixture(scope="module")
def unique() -> pa.Table:
    """The training set with a time of its own for each row, since it has no join keys."""
    table = training_set()
    moments = pa.timestamp("us", tz="UTC")
    event = np.arange(len(table)) * 3_600_000_000
    for name, times in (("event_timestamp", event), ("known_at", event + 3_600_000_000)):
        table = table.set_column(table.column_names.index(name), name, pa.array(times, moments))
    return table


# --- what teaches


def test_code_of_the_users_teaches_like_its_own_predictions(table: pa.Table, tmp_path: Path) -> None:
    found = report(made(table, tmp_path, teacher=f"{HERE}:service", seeds=1), tmp_path)
    quality = found["models"]["teacher"]["quality"]
    assert quality["auc"] > 0.75
    assert found["models"]["student"]["quality"]["auc"] > 0.6
    rows = np.arange(len(table))
    wanted = probabilities(table)
    np.testing.assert_allclose(
        scores(made(table, tmp_path, teacher=f"{HERE}:service"), rows),
        np.log(wanted / (1 - wanted)),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("name", ["fitted", "pipeline"])
def test_a_function_fits_a_model_to_the_training_part_alone(table: pa.Table, tmp_path: Path, name: str) -> None:
    of = made(table, tmp_path, teacher=f"{HERE}:{name}")
    rows, test = np.arange(len(table)), of.parts.test
    labels = table["late"].to_numpy().copy()
    labels[test] = 1 - labels[test]
    other = table.set_column(table.column_names.index("late"), "late", pa.array(labels))
    np.testing.assert_array_equal(scores(of, rows), scores(made(other, tmp_path, teacher=f"{HERE}:{name}"), rows))


@pytest.mark.accept
@pytest.mark.parametrize(
    ("kind", "name"), [("classes", "fitted"), ("number", "fitted_numbers"), ("rank", "fitted_numbers")]
)
def test_it_teaches_every_kind_of_label(tmp_path: Path, kind: str, name: str) -> None:
    of = made(labelled(kind), tmp_path, kind, teacher=f"{HERE}:{name}", seeds=1)
    found = report(of, tmp_path)
    metric, better = TabularTask(of).metric, TabularTask(of).more
    teacher, control = (found["models"][model]["quality"][metric] for model in ("teacher", "control"))
    assert (teacher > control) == better


def test_a_language_model_names_classes_and_may_refuse(tmp_path: Path) -> None:
    table = labelled("classes")
    with pytest.raises(DataError, match=r"rows have no answer.*expected an answer for every row.*missing=\"labels\""):
        report(made(table, tmp_path, "classes", teacher=f"{HERE}:names"), tmp_path)
    teacher = TeacherFunction(f"{HERE}:names", missing="labels")
    found = report(made(table, tmp_path, "classes", teacher=teacher, seeds=1), tmp_path)
    test = made(table, tmp_path, "classes").parts.test
    share = float((table["secret"].to_numpy()[test] <= 2).mean())
    assert found["models"]["teacher"]["quality"]["answered"] == pytest.approx(share)


def test_a_torch_network_gets_numbers_only(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="features: carrier, silent are texts"):
        scores(made(table, tmp_path, teacher=f"{HERE}:network"), np.arange(5))


def test_a_remote_teacher_gets_the_calls_that_are_announced(table: pa.Table, tmp_path: Path) -> None:
    notes: list[str] = []
    of = made(table, tmp_path, teacher=TeacherFunction(f"{HERE}:service", version="1"), seeds=1)
    report(of, tmp_path, notes)
    announced = next(note for note in notes if "runs in" in note)
    assert f"runs in {len(userteachers.CALLS)} calls" in announced
    userteachers.CALLS.clear()
    report(replace(of, training_set="set-1"), tmp_path)
    assert not userteachers.CALLS


def test_a_service_that_fails_is_named_and_nothing_is_lost(table: pa.Table, tmp_path: Path) -> None:
    of = made(table, tmp_path, teacher=f"{HERE}:service", seeds=1)
    userteachers.FAILS.append(True)
    with pytest.raises(DependencyError, match=r"a call with \d+ rows raised ConnectionError: the service is down"):
        report(of, tmp_path)
    userteachers.FAILS.clear()
    assert report(of, tmp_path)["models"]["teacher"]["quality"]["auc"] > 0.75


def test_a_model_that_cannot_be_fitted_is_named(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(DependencyError, match=r"unfittable: fitting a model to 1,4\d\d rows raised ValueError"):
        report(made(table, tmp_path, teacher=f"{HERE}:unfittable"), tmp_path)


# --- models in ONNX format


def model(path: Path, inputs: Mapping[str, Any], output: str, nodes: list[onnx.NodeProto], width: int = 1) -> None:
    graph = helper.make_graph(
        nodes, "teacher",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["n", width])],
    )  # fmt: skip
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )


def test_an_onnx_model_gets_the_features_by_name(table: pa.Table, tmp_path: Path) -> None:
    nodes = [helper.make_node("Sigmoid", ["secret"], ["probabilities"])]
    model(tmp_path / "large.onnx", {"secret": (TensorProto.FLOAT, ["n", 1])}, "probabilities", nodes)
    found = scores(made(table, tmp_path, teacher=Onnx("large.onnx")), np.arange(50))
    np.testing.assert_allclose(found, table["secret"].to_numpy()[:50], atol=1e-4)


@pytest.mark.parametrize(
    ("inputs", "output", "problem"),
    [
        ({"secret": (TensorProto.FLOAT, [1, 1])}, "probabilities", "fixed number of rows"),
        ({"secret": (TensorProto.FLOAT, ["n", 1]), "age": (TensorProto.FLOAT, ["n", 1])}, "probabilities",
         "input age: is not a feature"),
        ({"secret": (TensorProto.FLOAT, ["n", 1])}, "y", "output y: unknown meaning"),
        ({"x": (TensorProto.FLOAT, ["n", 9])}, "probabilities", "features carrier, silent are texts"),
    ],
)  # fmt: skip
def test_an_onnx_model_that_does_not_fit_is_refused(
    table: pa.Table, tmp_path: Path, inputs: Mapping[str, Any], output: str, problem: str
) -> None:
    nodes = [helper.make_node("Sigmoid", [next(iter(inputs))], [output])]
    model(tmp_path / "large.onnx", inputs, output, nodes, width=9 if "x" in inputs else 1)
    with pytest.raises(ConfigurationError, match=problem):
        scores(made(table, tmp_path, teacher=Onnx("large.onnx")), np.arange(5))


def test_weights_in_files_beside_a_model_are_read_and_identify_it(table: pa.Table, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "large.onnx"
    nodes = [helper.make_node("Mul", ["secret", "factor"], ["y"]), helper.make_node("Sigmoid", ["y"], ["logits"])]
    model(path, {"secret": (TensorProto.FLOAT, ["n", 1])}, "logits", nodes)
    loaded = onnx.load(path)
    loaded.graph.initializer.append(onnx.numpy_helper.from_array(np.full((1, 1), 2, np.float32), "factor"))
    onnx.save(loaded, path, save_as_external_data=True, location="weights.bin", size_threshold=0)

    task = TabularTask(made(table, tmp_path, teacher=Onnx("models/large.onnx")))
    first, wanted = task.teacher(), 1 / (1 + np.exp(-2 * table["secret"].to_numpy()[:50]))
    np.testing.assert_allclose(first.ask(np.arange(50))["logits"], wanted, atol=1e-4)
    assert first.size() == (1, path.stat().st_size + 4)
    before = first.fingerprint()
    (tmp_path / "models" / "weights.bin").write_bytes(np.full(1, 3, np.float32).tobytes())
    assert task.teacher().fingerprint() != before
    (tmp_path / "models" / "weights.bin").unlink()
    with pytest.raises(DataError, match=r"models/weights\.bin not found"):
        task.teacher().fingerprint()
    loaded = onnx.load(path, load_external_data=False)
    (location,) = (entry for entry in loaded.graph.initializer[0].external_data if entry.key == "location")
    location.value = "../weights.bin"
    path.write_bytes(loaded.SerializeToString())
    with pytest.raises(ConfigurationError, match=r"file of weights: '\.\./weights\.bin'; expected a file beside"):
        task.teacher().fingerprint()


def test_trees_in_a_model_count_as_weights(table: pa.Table, tmp_path: Path) -> None:
    node = helper.make_node("LinearRegressor", ["secret"], ["logits"], domain="ai.onnx.ml", coefficients=[1.0, 2.0])
    model(tmp_path / "large.onnx", {"secret": (TensorProto.FLOAT, ["n", 1])}, "logits", [node])
    size = TabularTask(made(table, tmp_path, teacher=Onnx("large.onnx"))).teacher().size()
    assert size is not None
    assert size[0] == 2


def test_a_file_that_is_not_a_model_is_named(table: pa.Table, tmp_path: Path) -> None:
    (tmp_path / "large.onnx").write_bytes(b"not a model")
    of = made(table, tmp_path, teacher=Onnx("large.onnx"))
    TabularTask(of).teacher().fingerprint()
    with pytest.raises(ConfigurationError, match=r"teacher large\.onnx: ONNX Runtime: cannot open a session"):
        scores(of, np.arange(5))


def test_a_model_that_fails_on_the_features_is_named(table: pa.Table, tmp_path: Path) -> None:
    """It wants three rows in a batch."""
    shape = helper.make_node("Constant", [], ["shape"], value_ints=[3, 1])
    nodes = [
        shape,
        helper.make_node("Reshape", ["secret", "shape"], ["y"]),
        helper.make_node("Sigmoid", ["y"], ["logits"]),
    ]
    model(tmp_path / "large.onnx", {"secret": (TensorProto.FLOAT, ["n", 1])}, "logits", nodes)
    with pytest.raises(
        ConfigurationError, match=r"teacher large\.onnx: ONNX Runtime: fails on secret float32 \[5, 1\]"
    ):
        scores(made(table, tmp_path, teacher=Onnx("large.onnx")), np.arange(5))


# --- outputs that were computed elsewhere


def test_outputs_of_a_file_are_joined_by_key_and_time(unique: pa.Table, tmp_path: Path) -> None:
    wanted, order = probabilities(unique), np.random.default_rng(0).permutation(len(unique))
    shuffled = unique.take(order)
    stored(tmp_path, shuffled, probabilities=wanted[order])
    of = made(unique, tmp_path, teacher=TeacherOutputs("teacher.parquet"), seeds=1)
    np.testing.assert_allclose(scores(of, np.arange(len(unique))), np.log(wanted / (1 - wanted)), rtol=1e-4, atol=1e-4)
    assert report(of, tmp_path)["models"]["teacher"]["quality"]["auc"] > 0.75


def test_outputs_for_half_the_rows_are_refused_or_learned_from_labels(unique: pa.Table, tmp_path: Path) -> None:
    teacher = stored(tmp_path, unique, probabilities=probabilities(unique)[: len(unique) * 9 // 10])
    with pytest.raises(DataError, match=r"rows have no answer, such as event_timestamp .*missing=\"labels\""):
        report(made(unique, tmp_path, teacher=teacher), tmp_path)
    found = report(made(unique, tmp_path, teacher=replace(teacher, missing="labels"), seeds=1), tmp_path)
    test = made(unique, tmp_path).parts.test
    share = float((test < len(unique) * 9 // 10).mean())
    assert found["models"]["teacher"]["quality"]["answered"] == pytest.approx(share)


def test_the_closed_gap_is_of_the_rows_that_the_teacher_answers(unique: pa.Table, tmp_path: Path) -> None:
    teacher = stored(tmp_path, unique, probabilities=probabilities(unique)[: len(unique) * 9 // 10])
    of = made(unique, tmp_path, teacher=replace(teacher, missing="labels"), seeds=1)
    found = report(of, tmp_path)
    task, test = TabularTask(of), of.parts.test
    rows = test[test < len(unique) * 9 // 10]
    assert 0 < len(rows) < len(test)
    auc = {"teacher": task.score(task.teacher().ask(rows), rows, {})}  # type: ignore[arg-type]
    for name in ("student", "control"):
        restored = restore(of, tmp_path / "models" / found["id"], name)
        answers = student_answers(restored.task, restored.student, rows, torch.device("cpu"))
        auc[name] = task.score(answers, rows, {})
    wanted = (auc["student"] - auc["control"]) / (auc["teacher"] - auc["control"])
    assert found["gap_closed"]["value"] == pytest.approx(wanted)
    quality = {name: found["models"][name]["quality"]["auc"] for name in auc}
    assert found["taught"]["value"] == pytest.approx(quality["student"] - quality["control"])
    assert quality["student"] != auc["student"], "quality is of all rows"


def test_rows_without_an_answer_do_not_teach(unique: pa.Table, tmp_path: Path) -> None:
    """Null and NaN are no answers, and the loss does not depend on what stands in their place."""
    wanted, gaps = probabilities(unique), np.arange(len(unique)) % 3 == 0
    for answers in (pa.array(wanted, mask=gaps), np.where(gaps, np.nan, wanted)):
        teacher = stored(tmp_path, unique, probabilities=answers)
        task = TabularTask(made(unique, tmp_path, teacher=replace(teacher, missing="labels")))
        found = task.teacher().ask(np.arange(9))
        assert found["answered"].tolist() == [0, 1, 1] * 3
    batch = task.batch(torch.arange(9))
    student = {"logits": torch.linspace(-1, 1, 9)}

    def loss(row: int) -> float:
        changed = found["logits"].clone()
        changed[row] += 5
        return float(task.objective()(student, {**found, "logits": changed}, batch.labels, 0.5)[0])

    assert loss(0) == loss(3) != loss(1) != loss(2)


def test_outputs_with_several_rows_for_an_example_are_refused(unique: pa.Table, tmp_path: Path) -> None:
    twice = pa.concat_tables([unique, unique.slice(7, 1)])
    stored(tmp_path, twice, probabilities=np.r_[probabilities(unique), 0.5])
    with pytest.raises(DataError, match=r"has several rows for event_timestamp 1970-01-01 07:00"):
        scores(made(unique, tmp_path, teacher=TeacherOutputs("teacher.parquet")), np.arange(5))


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"score": [0.5]}, "expected one of probabilities, logits, log_probabilities, values"),
        ({"values": [0.5]}, "output: values; expected probabilities or logits"),
        ({"probabilities": [1.5]}, "probabilities: 1.5; expected numbers from 0 to 1"),
        ({"probabilities": [[0.5, 0.3, 0.2]]}, r"shape \(5, 3\)"),
        ({"log_probabilities": [[-0.1]], "classes": [["late"]]}, "classes: 0, 1, late"),
        ({"log_probabilities": [[-0.1]], "classes": [["0", "1"]]}, "lists of other lengths"),
        ({"log_probabilities": [[-0.1]]}, "no column classes"),
        ({"log_probabilities": [-0.1], "classes": [["0"]]}, "expected lists in a Parquet file"),
        ({"values": [[0.5]]}, "expected a number for each row"),
        ({"probabilities": ["n/a"]}, "expected numbers, or lists of numbers"),
    ],
)
def test_a_file_of_outputs_that_does_not_fit_is_refused(
    unique: pa.Table, tmp_path: Path, columns: Mapping[str, Any], problem: str
) -> None:
    teacher = stored(tmp_path, unique, **{name: value * len(unique) for name, value in columns.items()})
    with pytest.raises((ConfigurationError, DataError), match=problem):
        scores(made(unique, tmp_path, teacher=teacher), np.arange(5))


def test_the_likeliest_classes_leave_the_rest_to_the_others(tmp_path: Path) -> None:
    table = labelled("classes")
    event = pa.array(np.arange(len(table)) * 3_600_000_000, pa.timestamp("us", tz="UTC"))
    table = table.set_column(0, "event_timestamp", event).set_column(1, "known_at", event)
    logs = [np.log([0.7, 0.2]).tolist()] * len(table)
    teacher = stored(tmp_path, table, log_probabilities=logs, classes=[["late", "early"]] * len(table))
    found = np.exp(scores(made(table, tmp_path, "classes", teacher=teacher), np.arange(4)))
    np.testing.assert_allclose(found, [[0.2, 0.7, 0.1]] * 4, rtol=1e-5)  # early, late, on time


# --- several teachers


def test_several_teachers_are_a_weighted_mean_of_probabilities(table: pa.Table, tmp_path: Path) -> None:
    nodes = [helper.make_node("Sigmoid", ["secret"], ["probabilities"])]
    model(tmp_path / "large.onnx", {"secret": (TensorProto.FLOAT, ["n", 1])}, "probabilities", nodes)
    teacher = [(f"{HERE}:service", 3), Onnx("large.onnx")]
    found = scores(made(table, tmp_path, teacher=teacher), np.arange(100))
    secret = 1 / (1 + np.exp(-table["secret"].to_numpy()[:100]))
    mean = (3 * probabilities(table, 100) + secret) / 4
    np.testing.assert_allclose(1 / (1 + np.exp(-found)), mean, rtol=1e-4)


def test_a_teacher_that_abstains_leaves_the_row_to_the_others(table: pa.Table, tmp_path: Path) -> None:
    teacher = [TeacherFunction(f"{HERE}:abstains", missing="labels"), f"{HERE}:service"]
    found = scores(made(table, tmp_path, teacher=teacher), np.arange(200))
    wanted = probabilities(table, 200)
    np.testing.assert_allclose(1 / (1 + np.exp(-found)), wanted, rtol=1e-4)


def test_each_teacher_of_a_list_answers_every_row_unless_it_may_abstain(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"teacher .*:abstains: \d+ of 200 rows have no answer"):
        scores(made(table, tmp_path, teacher=[f"{HERE}:service", f"{HERE}:abstains"]), np.arange(200))


def test_a_rank_needs_an_answer_for_each_row(tmp_path: Path) -> None:
    teacher = TeacherFunction(f"{HERE}:service", missing="labels")
    problems = made(labelled("rank"), tmp_path, "rank", teacher=teacher).declaration.problems()
    assert "a Rank is learned from whole groups of answers" in "; ".join(map(str, problems))


def test_a_teacher_that_answers_nothing_is_refused(unique: pa.Table, tmp_path: Path) -> None:
    teacher = stored(tmp_path, unique, probabilities=np.full(len(unique), np.nan))
    with pytest.raises(DataError, match=r"the teacher answers none of .* rows"):
        report(made(unique, tmp_path, teacher=replace(teacher, missing="labels")), tmp_path)


def test_columns_without_names_are_refused_for_classes(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"classes: unknown; expected an attribute classes_"):
        scores(made(labelled("classes"), tmp_path, "classes", teacher=f"{HERE}:unnamed"), np.arange(5))


@pytest.mark.parametrize(("rows", "answered"), [(1, [0]), (3, [0, 0, 1])])
def test_a_batch_may_have_no_answer_at_all(tmp_path: Path, rows: int, answered: list[int]) -> None:
    """NaN beside names, and lists with None, are rows without an answer, too."""
    for name in ("late_names", "late_lists"):
        teacher = TeacherFunction(f"{HERE}:{name}", missing="labels")
        task = TabularTask(made(labelled("classes"), tmp_path, "classes", teacher=teacher))
        assert task.teacher().ask(np.arange(rows))["answered"].tolist() == answered


def test_a_list_of_classes_is_as_good_as_an_array(table: pa.Table, tmp_path: Path) -> None:
    found = scores(made(table, tmp_path, teacher=f"{HERE}:reversed_classes"), np.arange(50))
    wanted = probabilities(table, 50)
    np.testing.assert_allclose(1 / (1 + np.exp(-found)), wanted, rtol=1e-4)


def test_a_fit_without_a_seed_can_be_repeated(table: pa.Table, tmp_path: Path) -> None:
    rows = np.arange(100)
    one, two = (scores(made(table, tmp_path, teacher=f"{HERE}:unseeded"), rows) for _ in range(2))
    np.testing.assert_array_equal(one, two)


# --- identity


def test_another_file_or_version_is_another_teacher(table: pa.Table, tmp_path: Path) -> None:
    (tmp_path / "weights.txt").write_text("1")

    def identity(**changes: Any) -> str:
        teacher = TeacherFunction(f"{HERE}:service", **{"files": ["weights.txt"], **changes})
        return TabularTask(made(table, tmp_path, teacher=teacher)).teacher().fingerprint()

    first = identity()
    assert identity() == first
    assert identity(version="2") != first
    (tmp_path / "weights.txt").write_text("2")
    assert identity() != first
    with pytest.raises(DataError, match=r"gone\.txt not found"):
        identity(files=["gone.txt"])


def test_nothing_is_built_before_an_answer_is_missing(table: pa.Table, tmp_path: Path) -> None:
    teacher = TabularTask(made(table, tmp_path, teacher=f"{HERE}:nothing")).teacher()
    teacher.fingerprint()
    with pytest.raises(ConfigurationError, match="model: a int; expected predict_proba"):
        teacher.ask(np.arange(3))


@pytest.mark.parametrize(
    ("teacher", "problem"),
    [
        (f"{HERE}:too_many", "takes 3 arguments; expected no argument, or features and labels"),
        (f"{HERE}:missing", "cannot be imported"),
        ("nowhere:at_all", "cannot be imported"),
        (f"{HERE}:FILE", "a function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(
    table: pa.Table, tmp_path: Path, teacher: str, problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        TabularTask(made(table, tmp_path, teacher=teacher)).teacher()


def test_numbers_that_are_not_probabilities_are_refused(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected numbers from 0 to 1"):
        scores(made(table, tmp_path, teacher=f"{HERE}:percent"), np.arange(100))


@pytest.mark.parametrize(
    ("teacher", "problem"),
    [
        (3, "teacher: 3; expected a TeacherFunction"),
        ([], "teacher: an empty list"),
        ([("a:b", -1)], "teacher 1: weight: -1; expected a finite number of at least 0"),
        ([("a:b", 0), (Onnx("x.onnx"), 0.0)], "teacher: weights: 0 for each teacher"),
        ("not a function", '"module:function"'),
        (Onnx("/etc/x.onnx"), "a relative path within the project"),
        (Onnx("../x.onnx"), "a relative path within the project"),
        (TeacherFunction("a:b", files="weights.txt"), "files"),
        (TeacherOutputs("x", missing="guess"), '"refuse" or "labels"'),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_declaration_is_explained(table: pa.Table, tmp_path: Path, teacher: Any, problem: str) -> None:
    problems = made(table, tmp_path, teacher=teacher).declaration.problems()
    assert problem in "; ".join(map(str, problems))


# --- conversions against a naive oracle


@given(
    numbers=st.lists(st.lists(st.floats(0.01, 10), min_size=3, max_size=3), min_size=1, max_size=5),
    order=st.permutations(["a", "b", "c"]),
)
def test_classes_in_any_order_mean_the_same(numbers: list[list[float]], order: list[str]) -> None:
    shares = np.array(numbers) / np.sum(numbers, 1, keepdims=True)
    found = class_scores(Prediction("probabilities", shares, order), "teacher", ("a", "b", "c"))
    for row, logs in zip(shares, found, strict=True):
        by_name = dict(zip(order, row, strict=True))
        assert np.exp(logs) == pytest.approx([by_name[name] for name in "abc"])


@given(numbers=st.lists(st.floats(0, 1), min_size=1, max_size=20), twice=st.booleans())
def test_one_or_two_columns_mean_the_same(numbers: list[float], twice: bool) -> None:
    second = np.array(numbers)
    shares = np.stack([1 - second, second], 1) if twice else second
    found = binary_scores(Prediction("probabilities", shares), "teacher")
    assert 1 / (1 + np.exp(-found)) == pytest.approx(second, abs=1e-6)


# --- rows without a label, and students that learn from the teacher alone


def unlabeled(table: pa.Table, share: float) -> pa.Table:
    """The table with a share of the labels null, in all parts."""
    gone = np.random.default_rng(5).random(len(table)) < share
    late = pa.array(table["late"].to_pylist(), table["late"].type, mask=gone)
    return table.set_column(table.column_names.index("late"), "late", late)


@pytest.mark.accept
@pytest.mark.parametrize(("kind", "name"), [("binary", "service"), ("classes", "fitted"), ("number", "fitted_numbers")])
def test_rows_without_a_label_are_learned_from_the_teacher(tmp_path: Path, kind: str, name: str) -> None:
    table, notes = unlabeled(labelled(kind), 0.8), list[str]()
    of = made(table, tmp_path, kind, teacher=f"{HERE}:{name}", seeds=1)
    found, known = report(of, tmp_path, notes), pc.is_valid(table["late"]).to_numpy()
    whole = made(labelled(kind), tmp_path, kind).parts
    rows = {part: int(known[getattr(whole, part)].sum()) for part in ("train", "validation", "test")}
    assert found["rows"] == {**rows, "train": len(whole.train), "unlabeled": len(whole.train) - rows["train"]}
    said = f"{len(whole.train) - rows['train']:,} of {len(whole.train):,} training rows have no label"
    assert any(note.startswith(said) for note in notes)
    assert said.replace("of ", "of the ") in model_card(found)
    student, control = (run["steps"] for run in found["runs"])
    assert student == control
    metric, more = TabularTask(of).metric, TabularTask(of).more
    taught, alone = (found["models"][model]["quality"][metric] for model in ("student", "control"))
    assert (taught > alone) == more


def test_the_control_and_the_fit_see_labeled_rows_only(table: pa.Table, tmp_path: Path) -> None:
    """The inputs of rows without a label change neither the control nor a fitted teacher."""
    some = unlabeled(table, 0.5)
    gone = pc.is_null(some["late"])
    other = some.set_column(
        some.column_names.index("secret"), "secret", pc.if_else(gone, pc.add(some["secret"], 9), some["secret"])
    )
    tasks = [TabularTask(made(each, tmp_path, teacher=f"{HERE}:fitted")) for each in (some, other)]
    rows = np.flatnonzero(~gone.to_numpy())[:100]
    one, two = (task.teacher().ask(rows)["logits"].numpy() for task in tasks)
    np.testing.assert_array_equal(one, two)
    task, batch = tasks[0], tasks[0].batch(torch.arange(40))
    alone, student = task.objective().without_teacher(), torch.linspace(-1, 1, 40)
    assert alone is not None
    assert batch.labels is not None
    known = batch.labels.isfinite()
    assert 0 < int(known.sum()) < 40
    moved = torch.where(known, student, student + 3)
    losses = [float(alone({"logits": each}, {}, batch.labels, 0.5)[0]) for each in (student, moved)]
    assert losses[0] == losses[1]


def test_rows_without_a_label_need_a_teacher_of_ones_own(table: pa.Table, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column late: \d+ nulls; expected a value in every row"):
        TabularTask(made(unlabeled(table, 0.1), tmp_path))
    with pytest.raises(DataError, match=r"column late: \d+ nulls"):
        TabularTask(made(unlabeled(labelled("rank"), 0.1), tmp_path, "rank", teacher=f"{HERE}:fitted_numbers"))


def test_a_part_without_any_label_is_refused(table: pa.Table, tmp_path: Path) -> None:
    for part, problem in (("test", "test part: no row with a label"), ("train", "null in all rows of the train part")):
        rows = getattr(made(table, tmp_path).parts, part)
        gone = np.isin(np.arange(len(table)), rows)
        late = pa.array(table["late"].to_pylist(), pa.int64(), mask=gone)
        some = table.set_column(table.column_names.index("late"), "late", late)
        with pytest.raises(DataError, match=problem):
            TabularTask(made(some, tmp_path, teacher=f"{HERE}:service"))


def test_a_student_learns_from_the_teacher_alone_and_its_control_from_labels(table: pa.Table, tmp_path: Path) -> None:
    found = report(made(table, tmp_path, soft_weight=1.0, seeds=1), tmp_path)
    terms = {run["model"]: {"soft", "labels"} & {*run["history"][-1]} for run in found["runs"]}
    assert terms == {"student": {"soft"}, "control": {"labels"}}
    assert found["gap_closed"] is not None
    for kind in ("classes", "number", "rank"):
        objective = TabularTask(made(labelled(kind), tmp_path, kind, soft_weight=1.0)).objective()
        alone = objective.without_teacher()
        assert [*objective.terms] == ["soft"]
        assert alone is not None
        assert [*alone.terms] == ["labels"]


def test_labels_alone_do_not_teach_a_student_of_the_teacher_alone(table: pa.Table, tmp_path: Path) -> None:
    teacher = TeacherFunction(f"{HERE}:abstains", missing="labels")
    problems = made(table, tmp_path, teacher=teacher, soft_weight=1.0).declaration.problems()
    assert "with 1, the student does not learn from labels" in "; ".join(map(str, problems))


# --- outputs that are cached for each teacher


def completed(of: Material, folder: Path, notes: list[str]) -> TeacherCost:
    """The teacher's part of a distillation: everything that calls a teacher, without a training."""
    task, rows = TabularTask(of), np.arange(of.table.num_rows)
    teacher, settings = task.teacher(), of.declaration.training_settings(of.profile, len(of.parts.train))
    with open_outputs(task, teacher, rows, folder, lambda _text, _done: None) as outputs:
        rehearse(task, teacher, outputs, settings, notes.append)
        return complete_outputs(task, teacher, rows, folder, lambda _text, _done: None, outputs)[1]


def test_a_teacher_in_another_declaration_is_not_called_again(table: pa.Table, tmp_path: Path) -> None:
    """Neither `missing`, nor a weight, nor a teacher beside it changes what a service has answered."""
    nodes = [helper.make_node("Sigmoid", ["secret"], ["probabilities"])]
    model(tmp_path / "large.onnx", {"secret": (TensorProto.FLOAT, ["n", 1])}, "probabilities", nodes)
    service, notes = TeacherFunction(f"{HERE}:service", version="1"), list[str]()
    completed(made(table, tmp_path, teacher=service), tmp_path, notes)
    assert any(f"teacher {HERE}:service runs in {len(userteachers.CALLS)} calls" in note for note in notes)
    first = replace(service, missing="labels")
    userteachers.CALLS.clear()
    for teacher in (first, [(service, 3), Onnx("large.onnx")], [(first, 1), (Onnx("large.onnx"), 2)]):
        notes.clear()
        assert completed(made(table, tmp_path, teacher=teacher), tmp_path, notes).p50_us > 0
        assert not userteachers.CALLS
        assert not any("runs in" in note for note in notes)
    completed(made(table, tmp_path, teacher=[service, f"{HERE}:counted"]), tmp_path, notes)
    (announced,) = (note for note in notes if "runs in" in note)
    assert announced.startswith(f"teacher {HERE}:counted runs in {len(userteachers.CALLS)} calls: ")


def test_the_mean_of_cached_teachers_is_that_of_their_answers(table: pa.Table, tmp_path: Path) -> None:
    teacher = [(TeacherFunction(f"{HERE}:abstains", missing="labels"), 2), (f"{HERE}:service", 1)]
    task = TabularTask(made(table, tmp_path, teacher=teacher))
    rows = np.arange(len(table))
    outputs = open_outputs(task, task.teacher(), rows, tmp_path, lambda _text, _done: None)
    outputs.fill()
    wanted = task.teacher().ask(rows)
    np.testing.assert_allclose(outputs[rows]["logits"], wanted["logits"], rtol=1e-5, atol=1e-6)
    (again,) = open_outputs(task, task.teacher(), rows, tmp_path, lambda _text, _done: None)[[3]]["answered"]
    assert again == 1


def test_what_one_service_answered_is_kept_when_the_next_one_fails(table: pa.Table, tmp_path: Path) -> None:
    teacher = [f"{HERE}:counted", f"{HERE}:service"]
    userteachers.FAILS.append(True)
    with pytest.raises(DependencyError, match="the service is down"):
        completed(made(table, tmp_path, teacher=teacher), tmp_path, [])
    userteachers.FAILS.clear()
    before, notes = userteachers.CALLS[:1], list[str]()
    userteachers.CALLS.clear()
    completed(made(table, tmp_path, teacher=teacher), tmp_path, notes)
    announced = [int(note.split(" runs in ")[1].split()[0]) for note in notes if " runs in " in note]
    assert sum(announced) == len(userteachers.CALLS)
    rows = len(table) + 2 * 2 + 1
    assert sum(userteachers.CALLS) == 2 * rows - before[0], "the first batch of the first service is not asked again"


def test_outputs_cached_by_an_earlier_release_are_still_read(table: pa.Table, tmp_path: Path) -> None:
    """A single teacher's outputs lie where they always lay, in a cache without parts."""
    of = made(table, tmp_path, teacher=f"{HERE}:service", seeds=1)
    task = TabularTask(of)
    rows = np.arange(len(table))
    OutputCache(
        tmp_path / "cache", task.teacher(), task.identities(), task.asked, contract=of.contract, form=task.form,
        options=task.options(), batch=task.at_once,
    ).fill()  # fmt: skip
    (folder,) = (tmp_path / "cache").iterdir()
    userteachers.CALLS.clear()
    opened = open_outputs(task, task.teacher(), rows, tmp_path / "cache", lambda _text, _done: None)
    assert (opened.path, opened.missing, opened.parts) == (folder, 0, [])
    assert [*(tmp_path / "cache").iterdir()] == [folder]
    assert not userteachers.CALLS
