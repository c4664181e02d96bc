"""Stored and request features beside a text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus import Bag, Embedding, Pretrained, PrunedEncoder, Text
from isthmus.distill.declaration import Plan
from isthmus.distill.distillation import distill
from isthmus.distill.export.export import export
from isthmus.distill.onnx.runtime import ask, session
from isthmus.distill.restore import provenance, restore
from isthmus.distill.tasks.graph import student_graph
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.task import Material
from isthmus.distill.text.embedding import EmbeddingTask
from isthmus.distill.text.task import TextTask
from isthmus.features.contract.schema import TransformContract, request_column
from isthmus.features.errors import ConfigurationError, DataError
from isthmus.features.profiles import ServingProfile
from isthmus.features.types import Array, Bool, Float32, Float64, String
from isthmus.package.golden import read_golden
from isthmus.package.inputs import ModelInput
from isthmus.package.manifest import open_package
from isthmus.transforms.preparation.fit import Preparation
from isthmus.transforms.rowwise.compiler import compile_columns
from isthmus.transforms.rowwise.core.expressions import traced
from isthmus.transforms.rowwise.core.types import DOUBLE, STRING
from tests.distill.support import check_package, learn
from tests.distill.text.support import HERE, INPUT, bert, material, notes

TEXT = Text(teacher=f"{HERE}:informed", column="body", student=Bag(vocabulary=200, width=8))
FURTHER = [
    ModelInput("user__plan", String), ModelInput("user__taste", Array(Float32), size=2),
    ModelInput("input_ids", Float64), ModelInput("urgent", Bool), ModelInput("split__share", Float64),
]  # fmt: skip
"""Stored features, request fields, one of them named as a tensor, and the result of a request transform."""


@pytest.fixture(scope="module")
def table() -> pa.Table:
    """Notes of which those of a plan, or of a small amount, are alarms, whatever the text says."""
    found, draw = notes(), np.random.default_rng(1)
    plan, amount = draw.choice(["free", "paid", "team"], len(found)), draw.uniform(1, 9, len(found))
    intents = np.where((plan == "team") | (amount < 3), "alarm", found["intent"].to_numpy(zero_copy_only=False))
    missing = draw.random(len(found)) < 0.1
    taste = [None if gone else [1.0, float(value)] for gone, value in zip(missing, amount, strict=True)]
    return found.set_column(4, "intent", pa.array(intents)).append_column("user__plan", pa.array(
        plan.tolist(), mask=missing)).append_column("user__taste", pa.array(taste, pa.list_(pa.float32()))
    ).append_column("input_ids", pa.array(amount)).append_column("urgent", pa.array(amount > 5)).append_column(
        "split__share", pa.array(9 / amount))  # fmt: skip


@pytest.fixture(scope="module")
def request_inputs() -> RequestInputs:
    with traced():
        share = compile_columns({"share": F.lit(9.0) / F.col("input_ids")}, {"input_ids": DOUBLE}).model
    field, computed = request_column("input_ids", Float64), request_column("share", Float64)
    transform = TransformContract("split", (), (field,), (computed,), share.SerializeToString())
    return RequestInputs((transform,), (field,), ((transform, computed),))


@pytest.fixture(scope="module")
def of(table: pa.Table, request_inputs: RequestInputs, tmp_path_factory: pytest.TempPathFactory) -> Material:
    inputs, learned = [*FURTHER, INPUT], dict[str, Preparation]()

    def once(plan: Plan, before: int) -> Preparation:
        if (key := repr(plan)) not in learned:
            learned[key] = learn(table)(plan, before)
        return learned[key]

    declared = material(table, tmp_path_factory.mktemp("root"), TEXT, split_by=None)
    return replace(declared, teacher_inputs=inputs, student_inputs=inputs, request_inputs=request_inputs, learn=once)


def declaring(of: Material, **changes: Any) -> Material:
    declared = of.declaration
    return replace(of, declaration=replace(declared, task=replace(declared.task, **changes)))  # type: ignore[type-var]


@pytest.mark.accept
def test_a_student_of_text_and_features_is_trained_and_packaged(of: Material, tmp_path: Path) -> None:
    made = distill(of, folder=tmp_path / "models", cache=tmp_path / "cache", runs=tmp_path / "runs")
    quality = {name: model["quality"]["accuracy"] for name, model in made.data["models"].items()}
    alone = replace(of, student_inputs=[INPUT])
    told = TextTask(alone).references()["reference"].ask(of.parts.test)["logits"].argmax(1).numpy()
    without = (told == TextTask(of)._kind.values[of.parts.test]).mean()
    assert quality["student"] > without + 0.1
    assert quality["reference"] > without + 0.1
    sliced = TextTask(of).sliced(of.parts.test).column_names
    assert sliced == ["tokens of body", "user__plan", "input_ids", "urgent", "split__share"]
    patient, contract = ServingProfile(latency_objective_ms=1000), {"hash": "contract", "views": {}}
    exported = export(
        of, made.path, tmp_path / "packages", contract=contract, profile=patient, cache=tmp_path / "cache"
    )
    package = open_package(exported.path)
    verdicts = check_package(of, package, made.path, ["id"], 40)
    assert verdicts.keys() >= {"model.fp32.onnx", "model.int8.ort"}
    assert not any(verdict.differing for verdict in verdicts.values())
    golden = read_golden(package)
    assert {case.feeds["categories"][0, 0] for case in golden.cases} >= {"", "\x7fnever in training"}
    places = {(item.name, item.tensor): item.position for item in package.manifest.inputs}
    assert places == {
        ("body", "input_ids"): 0,
        ("user__taste", "numeric"): 0, ("input_ids", "numeric"): 2, ("urgent", "numeric"): 3,
        ("user__plan", "categories"): 0, ("input_ids", "given_double"): 0,
    }  # fmt: skip
    (made.path / "preparation.json").write_text("{}")
    with pytest.raises(DataError, match=r"preparation\.json: cannot be read"):
        restore(of, made.path)


@pytest.mark.accept
@pytest.mark.parametrize("student", [PrunedEncoder(layers=(0,)), f"{HERE}:longest"], ids=["pruned", "function"])
def test_the_graph_of_any_student_reads_the_features(
    of: Material, table: pa.Table, tmp_path: Path, student: Any
) -> None:
    if isinstance(student, PrunedEncoder):
        bert(tmp_path / "bert", table, steps=0)
        of = replace(declaring(of, teacher=Pretrained("bert", column="body"), tokens=16), root=tmp_path)
    task = TextTask(declaring(of, student=student))
    network = task.student().eval().requires_grad_(requires_grad=False)
    run = session(student_graph(task, network).SerializeToString(), 1)
    case, *edges = task.cases(network)
    for each in (case, *edges):
        np.testing.assert_allclose(ask(run, each.feeds)[task.output], each.expected[task.output], atol=1e-5)
    other = {**case.feeds, "numeric": case.feeds["numeric"] + 1}
    assert np.abs(ask(run, other)[task.output] - case.expected[task.output]).max() > 1e-3
    assert task.network(network) is None
    zero = {**case.feeds, "given_double": np.zeros((1, len(case.feeds["numeric"])))}
    assert np.isnan(ask(run, zero)[task.output]).all()


def test_a_request_transform_may_read_the_text(of: Material) -> None:
    with traced():
        empty = compile_columns({"empty": F.col("body") == ""}, {"body": STRING}).model
    field, computed = request_column("body", String), request_column("empty", Bool)
    transform = TransformContract("notes", (), (field,), (computed,), empty.SerializeToString())
    table = of.table.append_column("notes__empty", pc.equal(of.table["body"], ""))
    task = TextTask(
        replace(
            of,
            table=table,
            learn=learn(table),
            student_inputs=[INPUT, ModelInput("notes__empty", Bool)],
            request_inputs=RequestInputs((transform,), (field,), ((transform, computed),)),
        )
    )
    network = task.student().eval().requires_grad_(requires_grad=False)
    run = session(student_graph(task, network).SerializeToString(), 1)
    for each in task.cases(network):
        np.testing.assert_allclose(ask(run, each.feeds)[task.output], each.expected[task.output], atol=1e-5)


def test_other_features_make_another_student(of: Material, table: pa.Table) -> None:
    task, fewer = TextTask(of), TextTask(replace(of, student_inputs=[INPUT, *FURTHER[:1]]))
    assert provenance(task)["training"] != provenance(fewer)["training"]
    assert task.content() != fewer.content()
    place = table.column_names.index("user__plan")
    changed = table.set_column(place, "user__plan", pa.array(["free", *table["user__plan"].to_pylist()[1:]]))
    assert TextTask(replace(of, table=changed)).content() != task.content()


def test_further_inputs_that_cannot_be_read_are_refused(of: Material, table: pa.Table) -> None:
    def refused(of: Material, task: type[TextTask | EmbeddingTask] = TextTask) -> str:
        with pytest.raises((ConfigurationError, DataError)) as caught:
            task(of)
        return str(caught.value)

    tastes = [[1.0], *table["user__taste"].to_pylist()[1:]]
    place = table.column_names.index("user__taste")
    short = table.set_column(place, "user__taste", pa.array(tastes, pa.list_(pa.float32())))
    assert "an array of 1 elements in row 0; expected 2 elements" in refused(replace(of, table=short))
    assert 'has 2 Strings; expected column="...", one of body, user__plan' in refused(declaring(of, column=None))
    vectors = declaring(of, predicts=Embedding(), teacher=Pretrained("bert", column=None))
    assert "body alone: an Embedding has no other inputs" in refused(vectors, EmbeddingTask)
    by_id = replace(of, declaration=replace(of.declaration, split_by="id"))
    assert "split_by: set, and the student reads user__plan," in refused(by_id)


def test_a_feature_that_reveals_the_label_is_named(of: Material, table: pa.Table) -> None:
    place = table.column_names.index("user__plan")
    told = replace(of, table=table.set_column(place, "user__plan", table["intent"]))
    assert [leak.split()[0] for leak in TextTask(told).leaks()] == ["user__plan"]
