"""Labels of each kind: what they are read as, what is refused, and what is declared of them."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from isthmus.distill.declaration import Distillation, Tabular
from isthmus.distill.distillation import distill
from isthmus.distill.gates import Gate
from isthmus.distill.labels import SEVERAL, Binary, Classes, Isotonic, Label, Number, Rank, Temperature
from isthmus.distill.restore import create_task, provenance
from isthmus.distill.tabular.kinds.classes import ClassLabels
from isthmus.distill.tabular.kinds.number import NumberLabels
from isthmus.distill.tabular.kinds.rank import RankLabels
from isthmus.distill.tasks.split import split_table
from isthmus.distill.tasks.task import Material
from isthmus.features.definition.spec import FeatureService, Field, Snapshot
from isthmus.features.errors import ConfigurationError, DataError
from isthmus.features.types import Array, Float64, Int64, String
from tests.distill.labelled import KINDS, labelled, material_of
from tests.distill.support import declaration

ROWS = 300
HOURLY = timedelta(hours=1)


def parts_of(table: pa.Table, within: str | None = None) -> Any:
    return split_table(table, (0.7, 0.1, 0.2), None, within)


def read(kind: str, values: Any, label: Label | None = None) -> Any:
    """The labels of a table whose column of them is replaced."""
    table = labelled(kind, ROWS)
    if values is not None:
        table = table.set_column(table.column_names.index("late"), "late", pa.array(values))
    declared = Tabular(label=label or KINDS[kind][0])
    reader: Any = {"classes": ClassLabels, "number": NumberLabels, "rank": RankLabels}[kind]
    return reader(table, "late", parts_of(table, declared.label.grouped_by), declared)


def test_classes_are_those_of_the_training_part_in_a_fixed_order() -> None:
    assert read("classes", None).classes == ("early", "late", "on time")
    numbers = read("classes", np.tile([10, -2, 9], ROWS // 3))
    assert numbers.classes == ("-2", "9", "10")
    assert numbers.values[:3].tolist() == [2, 0, 1]
    coded = read("classes", pa.array(["b", "a", "é"] * (ROWS // 3)).dictionary_encode())
    assert coded.classes == ("a", "b", "é")
    assert coded.chance(np.arange(ROWS)) == pytest.approx(np.log(3), abs=0.01)


def with_last(values: list[Any], last: Any) -> list[Any]:
    return [*values[:-2], last, last]


@pytest.mark.parametrize(("values", "message"), [
    (["a"] * ROWS, "label late: only a in the train part; expected 2 to 256 classes"),
    (with_last(["a", "b"] * (ROWS // 2), "c"), "2 labels of the test part name a class that no row of the train"),
    (with_last(["a", "b"] * (ROWS // 2), None), "column late: 2 nulls"),
    ([0.5, 1.0] * (ROWS // 2), "column late: .*0.5.*; expected values of type int64"),
    ([f"row {n}" for n in range(ROWS)], r"label late: 2\d\d classes|labels of the validation part name a class"),
    (["a", "b\n"] * (ROWS // 2), r"a class is 'b\\n'; expected at most 255 printable characters"),
])  # fmt: skip
def test_what_names_no_class_is_refused(values: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read("classes", values)


def test_numbers_are_learned_in_standard_form_and_answered_within_those_seen() -> None:
    labels = read("number", None)
    known = labels.values[parts_of(labelled("number", ROWS)).train]
    standard = labels.targets.numpy()
    np.testing.assert_allclose(standard * known.std() + known.mean(), labels.values, atol=1e-3)
    answer = labels.answer()
    high = answer.from_scores(answer.calibrate(answer.high + 1).numpy())
    assert high == pytest.approx(known.max())
    assert labels.tolerance["fp32"] == pytest.approx(1e-5 * known.std(), rel=0.2)
    assert labels.rounding == labels.tolerance["fp32"]
    zeros = {"value": np.zeros(ROWS, np.float32)}
    every = np.arange(ROWS)
    assert labels.quality(zeros, every)["rmse"] == pytest.approx(labels.chance(every), rel=1e-6)
    median = read("number", None, Number(loss="absolute"))
    assert median.metric == "mae"
    assert median.chance(every) == pytest.approx(np.abs(labels.values - np.median(known)).mean())


@pytest.mark.parametrize(("values", "message"), [
    (with_last([1.5, 2.0] * (ROWS // 2), float("nan")), "2 of 300 rows are not finite, such as row 298: nan"),
    (with_last([1.5, 2.0] * (ROWS // 2), float("inf")), "2 of 300 rows are not finite, such as row 298: inf"),
    (with_last([1.5, 2.0] * (ROWS // 2), None), "column late: 2 nulls"),
    ([3] * ROWS, "label late: only 3 in the train part; expected numbers that differ"),
    (["a", "b"] * (ROWS // 2), "column late: .*; expected numbers"),
    ([1e9, 1e9 + 1] * (ROWS // 2), "expected numbers whose differences float32, .*, can represent: its spacing is 64"),
    ([1e300, 1e299] * (ROWS // 2), "300 of 300 rows are too large, such as row 0: 1e.300; expected numbers up to"),
    (with_last([1.5, 2.0] * (ROWS // 2), -1e39), "2 of 300 rows are too large, such as row 298: -1e.39; expected"),
])  # fmt: skip
def test_what_is_no_number_is_refused(values: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read("number", values)


@pytest.mark.parametrize(("values", "message"), [
    ([0, -1] * (ROWS // 2), "label late: 150 values such as -1; expected whole numbers from 0 to 30"),
    ([0, 31] * (ROWS // 2), "label late: 150 values such as 31; expected whole numbers from 0 to 30"),
    ([0.5] * ROWS, "column late"),
    ([2] * ROWS, "all rows of a group are equally relevant, in each of the .* groups of the train part"),
    (with_last([0, 1] * (ROWS // 2), None), "column late: 2 nulls"),
])  # fmt: skip
def test_what_is_no_relevance_is_refused(values: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read("rank", values)


def test_the_split_cuts_no_group() -> None:
    table = labelled("rank", ROWS)
    # The rows of a group at different times, each later than the last.
    event = table["event_timestamp"].cast(pa.int64()).to_numpy() + np.arange(ROWS) % 8 * 40_000_000_000
    moments = pa.array(event, pa.timestamp("us", tz="UTC"))
    for name in ("event_timestamp", "known_at"):
        table = table.set_column(table.column_names.index(name), name, moments)
    parts, query = parts_of(table, "query"), table["query"].to_numpy()
    found = [set(query[rows]) for rows in (parts.train, parts.validation, parts.test)]
    assert all(found)
    assert sum(map(len, found)) == len(set.union(*found))
    cut = parts_of(table)
    assert set(query[cut.train]) & set(query[cut.validation]) | set(query[cut.validation]) & set(query[cut.test])
    first, second = parts.boundaries
    assert event[parts.train].max() < first
    assert event[parts.validation].max() < second
    with pytest.raises(DataError, match="no column session; expected the groups of rows"):
        parts_of(table, "session")


@pytest.mark.parametrize("kind", ["classes", "number", "rank"])
def test_an_input_that_says_the_label_is_named(kind: str) -> None:
    table = labelled(kind, 3000)
    numbers = (
        np.unique(table["late"].to_numpy(), return_inverse=True)[1] if kind == "classes" else table["late"].to_numpy()
    )
    leaking = table.set_column(table.column_names.index("distance"), "distance", pa.array(-3.0 * numbers, pa.float32()))
    assert not create_task(material_of(kind, table)).leaks()
    (leak,) = create_task(material_of(kind, leaking)).leaks()
    words = {
        "classes": "predicts the classes",
        "number": "has a rank correlation of 1.0",
        "rank": "separates the relevant rows",
    }
    assert leak.startswith(f"distance {words[kind]}")


def problems(task: Tabular, dtype: Any = Int64, **changes: Any) -> list[str]:
    declared = declaration(task=task)
    spine = replace(declared.spine, label=Field("late", dtype))
    return [str(problem) for problem in replace(declared, spine=spine, **changes).problems()]


@pytest.mark.parametrize(("task", "dtype", "message"), [
    (Tabular(label=Number(loss="cubed")), Float64, "label: loss: 'cubed'; expected 'squared' or 'absolute'"),  # type: ignore[arg-type]
    (Tabular(label=Rank(within="event_timestamp", at=0)), Int64, "label: at: 0; expected a whole number of at least 1"),
    (Tabular(label=Rank(within="event_timestamp", at="10")), Int64, "label: at: '10'; expected a whole number"),  # type: ignore[arg-type]
    (Tabular(label=Rank(within="event_timestamp", at=2.5)), Int64, "label: at: 2.5; expected a whole number"),  # type: ignore[arg-type]
    (Tabular(label=Rank(within=None)), Int64, "label: within: None; expected the name of a column"),  # type: ignore[arg-type]
    (Tabular(label=Rank(within="query")), Int64, "label, within: 'query'; expected event_timestamp"),
    (Tabular(label=Number()), String, "label late: is of type String; expected one of Bool, Float32"),
    (Tabular(label=Classes()), Float64, "label late: is of type Float64; expected one of Bool, Int32, Int64, String"),
    (Tabular(label="classes"), Int64, "label: 'classes'; expected Binary, Classes, Number or Rank"),  # type: ignore[arg-type]
    (Tabular(label=Classes(), calibration=Isotonic()), Int64,
     "calibration: Isotonic(); expected None, or a calibration for Classes(several=False), which predicts the"),
    (Tabular(label=SEVERAL, calibration=Isotonic()), Array(String), "a calibration for Classes(several=True)"),
    (Tabular(label=SEVERAL), String, "is of type String; expected Array(String) for Classes(several=True)"),
    (Tabular(label=Classes()), Array(String), "is of type Array(String); expected one of Bool, Int32, Int64, String"),
    (Tabular(label=Classes(several="yes")), Array(String), "label: several: 'yes'; expected"),  # type: ignore[arg-type]
    (Tabular(label=Number(), calibration=Temperature()), Int64, "calibration: Temperature(); expected None"),
    (Tabular(calibration=Isotonic), Int64, "calibration: <class 'isthmus.distill.labels.Isotonic'>; expected None"),  # type: ignore[arg-type]
    (Tabular(calibration="temperature"), Int64, "calibration: 'temperature'; expected None"),  # type: ignore[arg-type]
])  # fmt: skip
def test_what_cannot_be_learned_is_said_of_the_declaration(task: Tabular, dtype: Any, message: str) -> None:
    (problem,) = problems(task, dtype)
    assert message in problem


def test_several_classes_have_no_bounds_in_production() -> None:
    bounds = [Gate("production.log_loss", at_most=1.0)]
    assert problems(Tabular(label=Classes()), String, bounds=bounds) == []
    (problem,) = problems(Tabular(label=SEVERAL), Array(String), bounds=bounds)
    assert "bound: 'production.log_loss'; expected device" in problem


@pytest.mark.parametrize(("label", "answer", "expected"), [
    (Binary(), 1.5, "a probability, or a distillation"), (Binary(), 0.5, ""),
    (Number(), -40.0, ""), (Number(), float("nan"), "a number, or a distillation"),
    (Classes(), 0.5, "a distillation"), (Rank(within="event_timestamp"), 3.0, ""),
    (Binary(), True, "a probability, or a distillation"), (Binary(), [0.2], "a probability, or a distillation"),
    (Classes(), ["no"], "a distillation"), (Number(), np.float64(2.5), "a number, or a distillation"),
])  # fmt: skip
def test_a_default_is_an_answer_of_that_kind(label: Label, answer: Any, expected: str) -> None:
    device = FeatureService("features", [], device=Snapshot(age=HOURLY, every=HOURLY))
    found = problems(Tabular(label=label), Int64, stale=answer, student=device)
    assert [problem.partition("; expected ")[2] for problem in found] == ([expected] if expected else [])


def test_a_label_of_0_and_1_keeps_the_identity_of_its_student() -> None:
    def kind(material: Material) -> str:
        return provenance(create_task(material))["kind"]

    table = labelled("binary", ROWS)
    usual = material_of("binary", table)
    # As in 0.1, before there were other labels.
    assert kind(usual) == "f1f371a740ae0e8ee92d865ad43a04885f4606150f9ec5e50000eb951d398914"
    # As before a row could have several classes.
    classes = kind(material_of("classes", labelled("classes", ROWS)))
    assert classes == "6bcec636984e912fa32d06e11b7bbb2c5aedaee614b6f2711494f825a9952c01"
    others = [material_of("binary", table, calibration=how) for how in (Temperature(), Isotonic())]
    others += [material_of(name, labelled(name, ROWS)) for name in ("classes", "several", "number", "rank")]
    others.append(material_of("number", labelled("number", ROWS), Number(loss="absolute")))
    assert len({kind(each) for each in (usual, *others)}) == 8
    teachers = {create_task(each).teacher().fingerprint() for each in (usual, *others[2:])}
    assert len(teachers) == 6
    assert create_task(others[0]).teacher().fingerprint() == create_task(usual).teacher().fingerprint()


@pytest.mark.parametrize("kind", KINDS)
def test_some_rows_are_measured_alike_by_themselves(kind: str) -> None:
    task: Any = create_task(material_of(kind, labelled(kind, ROWS)))
    rows, width = np.arange(40, 200, 3), len(task.classes or ())
    shape = (len(rows), width) if width else (len(rows),)
    answers = {task.keys[0]: np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    some, every = task._kind.take(rows), np.arange(len(rows))
    assert some.quality(answers, every) == task._kind.quality(answers, rows)
    assert some.score(answers, every) == task._kind.score(answers, rows) == some.quality(answers, every)[task.metric]
    assert some.chance(every) == task._kind.chance(rows)


def test_a_batch_that_cuts_a_group_is_said_before_the_teacher_is_asked(tmp_path: Path) -> None:
    rows = material_of("rank", labelled("rank", ROWS), batch=5)
    with pytest.raises(ConfigurationError, match="distillation late: batch: 5; expected at least 8, the rows of the"):
        distill(rows, folder=tmp_path / "models", cache=tmp_path / "cache", runs=tmp_path / "runs")
    assert not [*tmp_path.glob("cache/*/*.npy")]


def test_a_search_says_the_label_too() -> None:
    line = create_task(material_of("rank", labelled("rank", ROWS))).line()
    assert line == "task=Tabular(label=Rank(within='query', at=10), hidden=(16, 8))"
    assert isinstance(declaration(), Distillation)
