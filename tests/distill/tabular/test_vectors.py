"""Arrays of a declared size as inputs of a table's models: each element is a number, in training and in packages."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from isthmus.distill.declaration import Tabular
from isthmus.distill.distillation import distill
from isthmus.distill.export.export import export
from isthmus.distill.language.teachers import Onnx
from isthmus.distill.restore import restore
from isthmus.distill.tabular.graph import head
from isthmus.distill.tabular.student import Student
from isthmus.distill.tabular.task import TabularTask
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.samples import edges
from isthmus.distill.tasks.task import Material
from isthmus.features.errors import DataError, GateFailed, PackageError
from isthmus.features.types import Array, Float32, Float64, Int64, String
from isthmus.features.values.columns import from_python
from isthmus.package.golden import read_golden
from isthmus.package.inputs import ModelInput, feeds
from isthmus.package.manifest import open_package, tensor_positions
from isthmus.transforms.preparation.steps import Impute, OneHot, Standardize
from tests.distill.conftest import SERVING
from tests.distill.packages import rewritten
from tests.distill.support import CONTRACT, learn, material, training_set

WIDTH = 3
VECTOR = ModelInput("taste", Array(Float32), size=WIDTH)
INPUTS = [ModelInput("hour", Int64), VECTOR, ModelInput("carrier", String), ModelInput("distance", Float32)]


def with_taste(rows: int = 2000) -> pa.Table:
    """The training set with an array of each row, a tenth of them null, whose last element tells the secret."""
    table, draw = training_set(rows), np.random.default_rng(5)
    taste = draw.normal(size=(rows, WIDTH)).astype(np.float32)
    taste[:, 2] = table["secret"].to_numpy() * 2
    missing = draw.random(rows) < 0.1
    values = [None if gone else row.tolist() for row, gone in zip(taste, missing, strict=True)]
    return table.append_column("taste", pa.array(values, pa.list_(pa.float32())))


def of_vectors(table: pa.Table, **changes: Any) -> Material:
    return replace(material(table, **changes), teacher_inputs=INPUTS, student_inputs=INPUTS, learn=learn(table))


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return with_taste()


# --- tensors


@given(
    arrays=st.lists(st.none() | st.lists(st.floats(width=32), min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=8)
)
def test_an_array_fills_columns_of_its_own(arrays: list[list[float] | None]) -> None:
    count = len(arrays)
    columns = {
        "hour": from_python([*range(count)], Int64), "taste": from_python(arrays, VECTOR.dtype),
        "carrier": from_python(["AA"] * count, String), "distance": from_python([0.5] * count, Float32),
    }  # fmt: skip
    fed = feeds(INPUTS, columns)
    naive = [[n, *(array or [np.nan] * WIDTH), 0.5] for n, array in enumerate(arrays)]
    np.testing.assert_array_equal(fed["numeric"], np.array(naive, np.float32))
    assert fed["numeric"].dtype == np.float32
    places = {item.name: (item.tensor, item.position, item.size) for item in tensor_positions(INPUTS)}
    assert places == {
        "hour": ("numeric", 0, None), "taste": ("numeric", 1, WIDTH), "distance": ("numeric", 1 + WIDTH, None),
        "carrier": ("categories", 0, None),
    }  # fmt: skip


@pytest.mark.parametrize(("item", "array", "problem"), [
    (VECTOR, [1.0, 2.0], "model input taste: an array of 2 elements in row 1; expected 3 elements"),
    (ModelInput("taste", Array(Float32)), [1.0], "model input taste: its type is Array(Float32)"),
    (ModelInput("taste", Array(Float64), size=1), [1.0], "its type is Array(Float64)"),
])  # fmt: skip
def test_other_arrays_are_refused(item: ModelInput, array: list[float], problem: str) -> None:
    columns = {"taste": from_python([None, array], item.dtype)}
    with pytest.raises(DataError) as raised:
        feeds([item], columns)
    assert problem in str(raised.value)


# --- training and packages


def test_a_student_learns_from_an_array_and_its_package_reads_it(table: pa.Table, tmp_path: Path) -> None:
    def trained(of: Material, folder: Path) -> Any:
        return distill(of, folder=folder / "models", cache=folder / "cache", runs=folder / "runs")

    of = of_vectors(table, seeds=1)
    found = trained(of, tmp_path)
    auc = found.data["models"]["student"]["quality"]["auc"]
    scalars = [item for item in INPUTS if item.size is None]
    without = trained(replace(of, teacher_inputs=scalars, student_inputs=scalars), tmp_path / "without")
    assert auc > without.data["models"]["student"]["quality"]["auc"] + 0.05
    assert {part["column"] for part in found.data["slices"]} <= {"hour", "carrier", "distance"}

    student = restore(of, found.path).student
    assert isinstance(student, Student)
    numbers = student.prepare.preparation.numbers
    assert [number.name for number in numbers] == ["hour", "taste[0]", "taste[1]", "taste[2]", "distance"]
    # The elements of a null array are missing together, which one column says.
    assert [number.indicator for number in numbers] == [False, True, False, False, True]
    with pytest.raises(GateFailed, match=r"head\.json: the student reads taste, an array"):
        head(student, RequestInputs(), INPUTS)

    exported = export(
        of, found.path, tmp_path / "packages", contract={"hash": CONTRACT, "views": {}},
        profile=SERVING, cache=tmp_path / "cache",
    )  # fmt: skip
    package = open_package(exported.path)
    assert package.manifest.model_inputs == tuple(INPUTS)
    golden = read_golden(package)
    for case in golden.cases:
        columns = golden.columns(case, package.manifest.model_inputs)
        np.testing.assert_array_equal(feeds(INPUTS, columns)["numeric"], case.feeds["numeric"])
    place = golden.inputs.index("taste")
    (edge,) = [case for case in golden.cases if case.rows[0][place] is None and len(case.rows) == 5]
    assert edge.rows[1][place] == (0.0,) * WIDTH
    assert "| taste | Array(Float32) | numeric | 1 to 3 |" in (exported.path / "README.md").read_text()

    changes: list[tuple[Callable[[Any], object], str]] = [
        (lambda m: m["inputs"][1].update(size=0), "input taste has type Array(Float32) and size 0"),
        (lambda m: m["inputs"][1].pop("size"), "input taste has type Array(Float32)"),
        (lambda m: m["inputs"][1].update(size=4), "input distance is numeric[4]"),
        (lambda m: m["inputs"][1].update(tensor="given_"), "input taste has type Array(Float32) and size 3, in given_"),
        (lambda m: m["inputs"][0].update(size=1), "input hour has type Int64 and size 1"),
    ]
    for change, problem in changes:
        copy = Path(shutil.copytree(exported.path, tmp_path / "copy", dirs_exist_ok=True))
        rewritten("manifest.json", change)(copy)
        with pytest.raises(PackageError) as raised:
            open_package(copy)
        assert problem in str(raised.value)
    for value in (1.5, [1.0, 2.0], [1.0, 2.0, "x"], [[1.0], 2.0, 3.0], "NaN"):
        copy = Path(shutil.copytree(exported.path, tmp_path / "copy", dirs_exist_ok=True))
        rewritten("golden.json", partial(_put, place, value))(copy)
        with pytest.raises(PackageError):
            read_golden(open_package(copy))


def _put(place: int, value: Any, golden: Any) -> None:
    golden["cases"][0]["rows"][3][place] = value


def test_an_element_that_tells_the_label_is_a_leak(table: pa.Table) -> None:
    arrays = [[0.0, float(late), 1.0] for late in table["late"].to_pylist()]
    told = table.set_column(table.column_names.index("taste"), "taste", pa.array(arrays, pa.list_(pa.float32())))
    assert [leak.split(" ", 1)[0] for leak in TabularTask(of_vectors(told)).leaks()] == ["taste[1]"]


def names_of(features: Any, _labels: Any) -> Any:
    """A model that notes the columns that it is fitted to."""
    NAMES[:] = [*features]
    return lambda rows: rows["taste[2]"].fillna(0.0).to_numpy() > 0


NAMES: list[str] = []


def test_teachers_get_the_elements_as_columns(table: pa.Table) -> None:
    task = TabularTask(of_vectors(table, teacher="tests.distill.tabular.test_vectors:names_of"))
    answered = task.teacher().ask(np.arange(50))["logits"].numpy()
    assert NAMES == ["hour", "taste[0]", "taste[1]", "taste[2]", "carrier", "distance"]
    wanted = [array is not None and array[2] > 0 for array in table["taste"].to_pylist()[:50]]
    assert (answered > 0).tolist() == wanted
    boosting = TabularTask(of_vectors(table)).teacher().ask(np.arange(50))["logits"]
    assert boosting.shape == (50,)


def test_an_onnx_teacher_gets_an_array_by_name_or_among_all_numbers(table: pa.Table, tmp_path: Path) -> None:
    for names, width in ((("taste",), WIDTH), (("numbers",), WIDTH + 2)):
        inputs = [helper.make_tensor_value_info(names[0], TensorProto.FLOAT, ["N", width])]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N"])]
        axis = helper.make_tensor("axis", TensorProto.INT64, [1], [1])
        nodes = [helper.make_node("ReduceSum", [names[0], "axis"], ["logits"], keepdims=0)]
        graph = helper.make_graph(nodes, "sum", inputs, outputs, [axis])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.save(model, tmp_path / "m.onnx")
        scalars = [item for item in INPUTS if item.dtype != String]
        of = replace(of_vectors(table, teacher=Onnx("m.onnx", missing="labels")), teacher_inputs=scalars, root=tmp_path)
        rows = np.flatnonzero([each is not None for each in table["taste"].to_pylist()])[:40]
        rows = rows[[table["distance"][int(row)].as_py() is not None for row in rows]]
        found = TabularTask(of).teacher().ask(rows)["logits"].numpy()
        taste = np.stack(table["taste"].take(rows).to_pylist()).astype(np.float32)
        others = table["hour"].to_numpy()[rows] + np.array(table["distance"].take(rows).to_pylist())
        expected = taste.sum(1) + (0 if width == WIDTH else others)
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_extremes_of_an_array_are_those_of_its_elements() -> None:
    row = {"taste": from_python([[1.0, 2.0, 3.0]], VECTOR.dtype)}
    found = edges(row, [VECTOR])["taste"].tolist(VECTOR.dtype)
    assert found[:2] == [None, [0.0] * WIDTH]
    assert found[2] == [float(np.finfo(np.float32).max)] * WIDTH
    assert found[4] == [1.0, 2.0, 3.0]


# --- declarations


@pytest.mark.parametrize(
    ("preparation", "problem"),
    [
        ({"taste": [Standardize()]}, ""),
        ({"taste": OneHot()}, "taste is of type Array(Float32), which takes steps; expected a list of steps"),
        ({"taste[0]": [Standardize()]}, "no input of the student has this name"),
    ],
)
def test_the_steps_of_an_array_are_those_of_each_element(preparation: Any, problem: str) -> None:
    task = Tabular(preparation=preparation)
    assert problem in "; ".join(map(str, task.preparation_problems("task", INPUTS)))
    if not problem:
        plan = Tabular(preparation={"taste": [Impute("mean")]}).plan(INPUTS)
        assert [*plan.numbers] == ["hour", "taste[0]", "taste[1]", "taste[2]", "distance"]
        assert plan.numbers["taste[1]"] == (Impute("mean"),)
