"""Students of images: trained from teachers of several kinds, restored, and refused if they do not fit."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from onnx import TensorProto, helper, save

from isthmus import (
    Binary,
    Classes,
    Embedding,
    Image,
    MobileNet,
    Number,
    Onnx,
    Picture,
    Pretrained,
    Rank,
    Search,
    Settings,
    TeacherFunction,
    TeacherOutputs,
    Temperature,
    UNet,
)
from isthmus.distill.image.files import SEED
from isthmus.distill.image.picture import PictureTask, label_distance, psnr, ssim
from isthmus.distill.onnx.runtime import predict, session
from isthmus.distill.restore import create_task, restore
from isthmus.distill.tasks.answers import require_steady
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError
from tests.distill.image.support import CALLS, HERE, IMAGE, digits, material, report, task_of

PICTURE = Image(
    teacher=f"{HERE}:inverting", predicts=Picture(), student=UNet(width=4, depth=1, expand=2), side=16, augment=1
)


@pytest.mark.accept
def test_a_student_learns_digits_and_is_restored_until_a_file_changes(tmp_path: Path) -> None:
    table = digits(tmp_path, 300)
    of = material(table, tmp_path, replace(IMAGE, augment=1, calibration=Temperature()))
    found = report(of, tmp_path)
    assert found["rows"] == {"train": 360, "validation": 60, "test": 60}
    assert found["models"]["student"]["quality"]["accuracy"] > 0.7
    (folder,) = (tmp_path / "models").iterdir()
    restored = restore(of, folder)
    answers = restored.task.expected(restored.student, restored.task.feeds(of.parts.test))["probabilities"]
    right = answers.argmax(1) == np.array(table["digit"].to_pylist(), int)[of.parts.test]
    assert right.mean() == pytest.approx(found["models"]["student"]["quality"]["accuracy"])
    CALLS.clear()
    assert report(replace(of, declaration=replace(of.declaration, settings=Settings(steps=2))), tmp_path)
    assert CALLS == []  # also the outputs for copies are cached
    (tmp_path / "digits" / "7.png").write_bytes((tmp_path / "digits" / "8.png").read_bytes())
    with pytest.raises(ContractMismatch, match="images or labels have changed since it was trained"):
        restore(of, folder)
    task = create_task(of)
    assert task.teacher().fingerprint() != restored.task.teacher().fingerprint()


@pytest.mark.accept
@pytest.mark.slowest
def test_a_mobilenet_learns_digits(table: pa.Table, root: Path, tmp_path: Path) -> None:
    image = replace(IMAGE, student=MobileNet(width=0.5, depth=0.5))
    found = report(material(table, root, image, settings=Settings(steps=250, batch=16, learning_rate=3e-3)), tmp_path)
    assert found["models"]["student"]["quality"]["accuracy"] > 0.6


@pytest.mark.accept
@pytest.mark.slowest
def test_a_picture_is_learned_from_the_teacher_and_from_labels(table: pa.Table, root: Path, tmp_path: Path) -> None:
    image = replace(PICTURE, predicts=Picture(features=f"{HERE}:edges", adversarial=0.01))
    of = material(table.slice(0, 60), root, image, "drawing", settings=Settings(steps=4, batch=8))
    found = report(of, tmp_path)
    assert found["rows"] == {"train": 72, "validation": 12, "test": 12, "unlabeled": 48}
    teacher, student, control = (found["models"][name]["quality"] for name in ("teacher", "student", "control"))
    assert teacher["ssim"] == 1
    assert 0 < student["psnr"] < 10
    assert found["measures"]["gain_on_labels"] == student["psnr_of_label"] - control["psnr_of_label"]
    ours, theirs = ({*run["history"][-1]} for run in found["runs"])
    assert {"pixels", "perceptual", "adversarial", "labels"} <= ours
    assert {"pixels", "perceptual", "adversarial", "labels"} & theirs == {"labels"}
    (folder,) = (tmp_path / "models").iterdir()
    restored = restore(of, folder)
    fed = restored.task.feeds(of.parts.test[:3])
    graph = session(restored.task.model(restored.student).SerializeToString(), 1)
    np.testing.assert_allclose(predict(graph, fed), restored.task.expected(restored.student, fed)["picture"], atol=1e-5)


def test_without_pictures_as_labels_the_teacher_alone_teaches(table: pa.Table, root: Path) -> None:
    task = task_of(table, root, PICTURE, "ink")
    assert (task.objective().without_teacher(), task.pipeline) == (None, "image-to-image")
    assert task.batch(torch.arange(2)).labels is None
    pictures = {"picture": task.feeds(np.arange(2))["image"]}
    assert {*task.quality(pictures, np.arange(2), pictures)} == {"ssim", "psnr"}


def test_labels_without_a_picture_to_learn_are_refused(table: pa.Table, root: Path) -> None:
    drawings, nothing = table["drawing"].to_pylist(), [None] * len(table)
    for part, labels in (("train", nothing), ("test", drawings[:320] + nothing[320:])):
        other = table.set_column(table.column_names.index("drawing"), "drawing", pa.array(labels, pa.string()))
        with pytest.raises(DataError, match=f"label drawing: null in all rows of the {part} part"):
            task_of(other, root, PICTURE, "drawing")


def test_only_the_training_part_has_copies_and_these_no_picture(table: pa.Table, root: Path) -> None:
    task = task_of(table, root, replace(PICTURE, augment=2), "drawing")
    assert isinstance(task, PictureTask)
    seeds = task.material.table[SEED].to_numpy()
    parts = task.material.parts
    assert [(seeds[parts.train] == seed).sum() for seed in (0, 1, 2)] == [240, 240, 240]
    assert not seeds[[*parts.validation, *parts.test]].any()
    labeled = task.labeled(parts.train)
    assert not seeds[labeled].any()
    assert [row % 3 != 0 for row in range(240)] == np.isin(np.arange(240), labeled).tolist()
    first = parts.train[seeds[parts.train] > 0][:4]
    images = task.feeds(first)["image"]
    np.testing.assert_array_equal(images[2:], task.feeds(first[2:])["image"])
    assert not np.array_equal(images, task.feeds(np.arange(4))["image"])


def test_a_distance_ignores_rows_without_a_picture() -> None:
    pictures, labels = torch.zeros(3, 3, 4, 4, requires_grad=True), torch.full((3, 3, 4, 4), 0.25)
    labels[1] = torch.nan
    loss = label_distance(pictures, labels)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(0.25)
    assert pictures.grad is not None
    assert pictures.grad.flatten(1).abs().sum(1).bool().tolist() == [True, False, True]
    assert label_distance(pictures, torch.full_like(labels, torch.nan)).item() == 0


def test_pictures_are_compared_as_defined() -> None:
    draw = np.random.default_rng(1)
    pictures, wanted = (draw.random((2, 3, 16, 16), np.float32) for _ in range(2))
    assert psnr(pictures, wanted) == pytest.approx(10 * np.log10(1 / np.mean((pictures - wanted) ** 2)))
    assert psnr(pictures, pictures) == np.inf
    assert ssim(pictures, pictures) == pytest.approx(1)
    assert ssim(pictures, wanted) < 0.5
    assert np.isnan([psnr(pictures[:0], wanted[:0]), ssim(pictures[:0], wanted[:0])]).all()


@pytest.mark.parametrize("label", ["ink", "digit", "traits"])
def test_numbers_and_classes_have_their_outputs(table: pa.Table, root: Path, label: str) -> None:
    image = replace(IMAGE, student=MobileNet(width=0.1, depth=0.1))
    numbers = replace(image, predicts=Number(), teacher=f"{HERE}:brightness")
    several = replace(image, predicts=Classes(several=True), teacher=f"{HERE}:traits")
    task = task_of(table, root, {"ink": numbers, "digit": image, "traits": several}[label], label)
    assert task.pipeline == (None if label == "ink" else "image-classification")
    student = task.student().eval().requires_grad_(requires_grad=False)
    rows = np.arange(3)
    answer = task.expected(student, task.feeds(rows))
    shapes = {"ink": {"value": (3,)}, "digit": {"probabilities": (3, 10)}, "traits": {"probabilities": (3, 2)}}
    assert {name: values.shape for name, values in answer.items()} == shapes[label]
    outputs = task.teacher().ask(task.asked(rows))
    if label == "traits":
        bright = task.feeds(rows)["image"].mean((1, 2, 3)) > 0.25
        np.testing.assert_array_equal(outputs["logits"] > 0, np.stack([bright, bright], 1))
    if label == "ink":
        found = task._kind._values({"value": outputs["value"].numpy()})  # type: ignore[attr-defined]
        np.testing.assert_allclose(found, task.feeds(rows)["image"].mean((1, 2, 3)), rtol=1e-5)


def test_models_and_files_teach_copies_too(table: pa.Table, root: Path) -> None:
    shape = ["N", 3, 16, 16]
    axes = helper.make_tensor("axes", TensorProto.INT64, [3], [1, 2, 3])
    node = helper.make_node("ReduceMean", ["pixels", "axes"], ["values"], keepdims=0)
    ends = [helper.make_tensor_value_info(*each) for each in (("pixels", 1, shape), ("values", 1, ["N"]))]
    graph = helper.make_graph([node], "mean", ends[:1], ends[1:], [axes])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), root / "mean.onnx")
    pq.write_table(table.select(["id", "event_timestamp"]).append_column("values", table["ink"]), root / "ink.parquet")
    image = replace(IMAGE, predicts=Number(), augment=1)
    model = task_of(table, root, replace(image, teacher=Onnx("mean.onnx")), "ink")
    file = task_of(table, root, replace(image, teacher=TeacherOutputs("ink.parquet")), "ink")
    rows = np.array([0, 5, 400, 405])  # two training rows, and their copies
    means, stored = (
        each._kind._values({"value": each.teacher().ask(each.asked(rows))["value"].numpy()})  # type: ignore[attr-defined]
        for each in (model, file)
    )
    np.testing.assert_allclose(means, model.feeds(rows)["image"].mean((1, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(stored, table["ink"].to_numpy()[[0, 5, 0, 5]], rtol=1e-5)


def test_a_search_varies_the_student(table: pa.Table, root: Path) -> None:
    task = task_of(table, root, replace(IMAGE, student=MobileNet(width=0.5, depth=0.1)))
    smaller = task.with_shape({"width": 0.1})
    assert smaller.line() == "student=MobileNet(width=0.1, depth=0.1)"
    small, large = (sum(part.numel() for part in each.student().parameters()) for each in (smaller, task))
    assert small < large


@pytest.mark.parametrize(
    ("student", "message"),
    [
        ("same", r'support:same: 0: padding="same"; expected padding=kernel_size // 2: runtimes on devices refuse'),
        ("wide", r"its network returns \(3, 11\) for three images; expected \(3, 10\)"),
        ("Frozen", r"its network raises RuntimeError.*for three images; expected \(3, 10\).*keep the first dimension"),
    ],
)
def test_a_module_that_does_not_fit_is_refused(table: pa.Table, root: Path, student: str, message: str) -> None:
    task = task_of(table, root, replace(IMAGE, student=f"{HERE}:{student}"))
    with pytest.raises(ConfigurationError, match=message):
        task.student()


def test_dropout_that_stays_on_is_refused(table: pa.Table, root: Path) -> None:
    task = task_of(table, root, replace(IMAGE, student=f"{HERE}:Dropping"))
    with pytest.raises(ConfigurationError, match="two answers to the same rows differ"):
        require_steady(task, task.student().eval(), np.arange(4))


@pytest.mark.parametrize(
    ("teacher", "error", "message"),
    [
        ("enlarging", ConfigurationError, r"shape \(2, 3, 32, 32\); expected \(2, 3, 16, 16\), the shape of"),
        ("eight_bits", DataError, "colors from 0 to 240; expected finite numbers from 0 to 1"),
        ("brightness", ConfigurationError, r"output: shape \(2,\)"),
        ("fitted", ConfigurationError, r"takes 2 arguments; expected no argument$"),
    ],
)
def test_pictures_of_another_size_or_range_are_refused(
    table: pa.Table, root: Path, teacher: str, error: type[Exception], message: str
) -> None:
    task = task_of(table, root, replace(PICTURE, teacher=f"{HERE}:{teacher}"), "drawing")
    with pytest.raises(error, match=message):
        task.teacher().ask(task.asked(np.array([1, 2])))


def test_a_class_of_the_test_part_alone_is_refused(table: pa.Table, root: Path) -> None:
    labels = [*table["digit"].to_pylist()[:-1], "ten"]
    other = table.set_column(table.column_names.index("digit"), "digit", pa.array(labels))
    with pytest.raises(
        DataError, match="1 labels of the test part name a class that no row of the train part has: ten"
    ):
        task_of(other, root)


def test_a_row_without_an_image_is_refused(table: pa.Table, root: Path) -> None:
    files = pa.array([None, *table["file"].to_pylist()[1:]])
    with pytest.raises(DataError, match="column file: null in 1 rows"):
        task_of(table.set_column(table.column_names.index("file"), "file", files), root)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": None}, "teacher: None"),
        ({"teacher": Pretrained("large", tokens=8)}, "no column and no tokens: it reads images"),
        ({"predicts": Picture(), "student": UNet(), "teacher": Pretrained("large")}, "for a Picture"),
        ({"predicts": Embedding(index=5)}, "index=0: an index needs pairs of texts"),
        ({"predicts": Embedding(pooling="last")}, "'last'"),  # type: ignore[arg-type]
        ({"predicts": Embedding(), "teacher": ["a:b", "c:d"]}, "one teacher that answers every image"),
        (
            {"predicts": Embedding(), "teacher": Onnx("a.onnx", missing="labels")},
            "one teacher that answers every image",
        ),
        ({"predicts": Embedding(), "soft_weight": 0.5}, "soft_weight: 0.5 not set: it is for labels"),
        ({"predicts": Embedding(), "student": UNet()}, 'a MobileNet or "module:function"'),
        ({"predicts": Rank(within="id")}, "predicts"),
        ({"predicts": Picture()}, 'a UNet or "module:function"'),
        ({"student": UNet()}, 'a MobileNet or "module:function"'),
        ({"student": MobileNet(width=0)}, "student: width: 0"),
        ({"side": 4}, "side: 4"),
        ({"augment": -1}, "augment: -1"),
        ({"predicts": Binary(), "soft_weight": 0.0}, "soft_weight"),
        ({"predicts": Picture(), "student": UNet(), "side": 20}, "a multiple of 8"),
        ({"predicts": Picture(), "student": UNet(), "teacher": TeacherOutputs("a.parquet")}, "for a Picture"),
        ({"predicts": Picture(), "student": UNet(), "teacher": Onnx("a.onnx", missing="labels")}, "for a Picture"),
        ({"predicts": Picture(features="no"), "student": UNet()}, "features: 'no'"),
        ({"predicts": Picture(adversarial=-1.0), "student": UNet()}, "adversarial: -1"),
        ({"predicts": Picture(), "student": UNet(), "weight": "id"}, "weight"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"teacher": TeacherFunction(f"{HERE}:fitted"), **changes}
    problems = [f"{each.where}: {each.found} {each.expected}" for each in Image(**given).problems("look")]
    assert re.search(message, "; ".join(problems))


def test_a_search_of_what_the_student_lacks_is_refused() -> None:
    search = Search(shape={"layers": [1, 2], "width": [0.5, -1.0]})
    found = [f"{each.where}: {each.found}" for each in search.problems("search", Image(teacher="a:b"))]
    assert found == [
        "search: shape 'layers': is not part of the shape of the student",
        "search: shape 'width': width: -1.0",
    ]
