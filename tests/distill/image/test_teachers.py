"""Teachers of images that are models of the transformers library, and students that learn vectors of images."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image as Pillow
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    ResNetConfig,
    ResNetModel,
)

from isthmus import Embedding, Image, Number, Pretrained, Settings, TeacherOutputs
from isthmus.distill.export.export import export
from isthmus.distill.tasks.task import Material
from isthmus.features.contract.schema import Column, Contract, ServiceContract
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from isthmus.features.profiles import ServingProfile
from isthmus.features.types import String
from isthmus.package.inspect import inspect
from tests.distill.image.support import HERE, IMAGE, material, report, task_of, vit

DIGITS = "5036981724"
"""Names of classes in another order than the student's."""
COLORS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
CROPPED = {
    "image_processor_type": "MobileViTImageProcessor",
    "size": {"shortest_edge": 20},
    "crop_size": 16,
    "resample": 2,
}
CAMERA = ServiceContract("camera", (), (Column("file", String),), "replaced on loading")
CONTRACT = Contract.loads(Contract("photos", {}, {"camera": CAMERA}, {}, {}).dumps())
VECTORS = replace(IMAGE, predicts=Embedding())
ROWS = np.arange(3)


def taught(name: str, image: Image = IMAGE) -> Image:
    return replace(image, teacher=Pretrained(name))


def packaged(of: Material, folder: Path) -> Any:
    """Export the student in `folder`, check the package, and return its manifest."""
    student = next((folder / "models").glob("*/report.json")).parent
    made = export(
        of, student, folder / "packages", contract=json.loads(CONTRACT.dumps()), cache=folder / "cache",
        profile=ServingProfile(latency_objective_ms=1000),
    )  # fmt: skip
    inspect(made.path).require()
    return json.loads((made.path / "manifest.json").read_bytes())


@pytest.mark.accept
def test_a_classifier_teaches_a_student_that_is_packaged(table: pa.Table, root: Path, tmp_path: Path) -> None:
    vit(root / "classes", DIGITS)
    of = replace(material(table, root, replace(taught("classes"), soft_weight=1.0)), contract=CONTRACT.hash)
    found = report(of, tmp_path)
    assert found["agreement"]["student"]["kl"] < found["agreement"]["control"]["kl"] / 2
    assert [output["name"] for output in packaged(of, tmp_path)["outputs"]] == ["probabilities"]


@pytest.mark.accept
@pytest.mark.slowest
def test_vectors_are_learned_and_packaged(table: pa.Table, root: Path, tmp_path: Path) -> None:
    vit(root / "vectors")
    settings = Settings(steps=60, batch=32, learning_rate=1e-2)
    of = material(table, root, taught("vectors", VECTORS), settings=settings)
    of = replace(of, contract=CONTRACT.hash)
    found = report(of, tmp_path)
    quality = {name: found["models"][name]["quality"] for name in ("teacher", "student", "control")}
    assert quality["teacher"]["recall_at_10"] == 1
    figure = "recall_at_10_of_its_index"
    assert quality["student"][figure] > quality["control"][figure] + 0.03
    assert found["agreement"]["student"]["cosine"] > found["agreement"]["control"]["cosine"] + 0.5
    assert "untrained" in found["models"]["control"]["about"]
    assert [output["name"] for output in packaged(of, tmp_path)["outputs"]] == ["vector"]


@pytest.mark.parametrize("processor", [{}, COLORS, CROPPED], ids=["usual", "colors", "cropped and flipped"])
def test_images_are_read_as_the_image_processor_says(table: pa.Table, root: Path, processor: dict[str, Any]) -> None:
    model = vit(root / "read", DIGITS, processor)
    task = task_of(table, root, taught("read"))
    pixels = task.feeds(ROWS)["image"]
    if processor == CROPPED:
        images = [Pillow.fromarray(np.rint(255 * image.transpose(1, 2, 0)).astype(np.uint8)) for image in pixels]
        larger = np.stack([np.array(image.resize((20, 20), Pillow.Resampling.BILINEAR)) for image in images])
        given = larger[:, 2:18, 2:18, ::-1].transpose(0, 3, 1, 2) / 255
    else:
        mean, std = (np.array(processor.get(name, [0.5] * 3))[:, None, None] for name in COLORS)
        given = (pixels - mean) / std
    with torch.no_grad():
        expected = model(pixel_values=torch.from_numpy(given.astype(np.float32))).logits.numpy()
    answers = task.teacher().ask(task.asked(ROWS))["logits"].numpy()
    np.testing.assert_allclose(answers, expected[:, np.argsort([*DIGITS])], atol=1e-4)


def test_another_image_processor_is_another_teacher(table: pa.Table, root: Path) -> None:
    identities = set()
    for processor in ({}, COLORS):
        vit(root / "other", DIGITS, processor)
        identities.add(task_of(table, root, taught("other")).teacher().fingerprint())
    assert len(identities) == 2


def test_a_regression_head_teaches_a_number(table: pa.Table, root: Path) -> None:
    vit(root / "number", ["ink"], problem_type="regression")
    task = task_of(table, root, taught("number", replace(IMAGE, predicts=Number())), "ink")
    assert task.teacher().ask(task.asked(ROWS))["value"].shape == (3,)


@pytest.mark.parametrize(
    ("names", "processor", "config", "message"),
    [
        ("01234567xy", {}, {}, "10 labels without '8', '9' and with 'x', 'y'"),
        ("01", {}, {}, "2 labels without"),
        (DIGITS, {"size": {"height": 32, "width": 32}}, {}, r"Input image size \(32\*32\) doesn't match model"),
        (DIGITS, {"image_mean": [0.5, 0.5]}, {}, "mean must have 3 elements"),
        (DIGITS, {"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}}, {},
         "has no image processor that can be read: .* contains custom code"),
        (DIGITS, {}, {"num_channels": 1}, "Expected 1 but got 3; expected a model of images in color"),
        ("", {}, {}, "output logits: it gives last_hidden_state"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_refused(
    table: pa.Table, root: Path, names: str, processor: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    vit(root / "unfit", names, processor, **config)
    task = task_of(table, root, taught("unfit"))
    with pytest.raises(ConfigurationError, match=message):
        task.teacher().ask(task.asked(ROWS))


def test_a_folder_without_image_processor_and_a_name_without_a_network_are_refused(table: pa.Table, root: Path) -> None:
    vit(root / "bare", DIGITS)
    (root / "bare" / "preprocessor_config.json").unlink()
    task = task_of(table, root, taught("bare"))
    with pytest.raises(ConfigurationError, match=r"has no image processor .* expected preprocessor_config\.json"):
        task.teacher().ask(task.asked(ROWS))
    with pytest.raises(DependencyError, match="is not a folder and cannot be downloaded from the hub"):
        task_of(table, root, taught("no/such-model")).teacher().fingerprint()


def test_each_model_gives_the_vectors_that_it_was_trained_with(table: pa.Table, root: Path) -> None:
    clip = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**clip, "image_size": 16, "patch_size": 8, "projection_dim": 8}
    words = {**clip, "vocab_size": 9, "bos_token_id": 1, "eos_token_id": 2}
    models = {
        "resnet": ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1])),
        "clip": CLIPModel(CLIPConfig(vision_config=vision, text_config=words, projection_dim=8)),
        "seen": CLIPVisionModelWithProjection(CLIPVisionConfig(**vision)),
    }
    for name, model in models.items():
        vit(root / name)  # for its image processor
        model.eval().save_pretrained(root / name)
    models["first"] = vit(root / "first")
    task = task_of(table, root, VECTORS)
    pixels = torch.from_numpy(2 * task.feeds(ROWS)["image"] - 1)
    with torch.no_grad():
        expected = {
            "resnet": models["resnet"](pixels).pooler_output.flatten(1),
            "clip": models["clip"].get_image_features(pixels).pooler_output,
            "seen": models["seen"](pixels).image_embeds,
            "first": models["first"](pixels).last_hidden_state[:, 0],
        }
    for name, vectors in expected.items():
        image = replace(VECTORS, predicts=Embedding(pooling="first" if name == "first" else "mean"))
        teacher = task_of(table, root, taught(name, image)).teacher()
        answers = teacher.ask(task.asked(ROWS))["vector"]
        torch.testing.assert_close(answers, torch.nn.functional.normalize(vectors), atol=1e-5, rtol=1e-4)
    maps = task_of(table, root, taught("resnet", replace(VECTORS, predicts=Embedding(pooling="first"))))
    with pytest.raises(ConfigurationError, match='pooling="first" needs a model with tokens'):
        maps.student()


def test_vectors_of_a_file_are_learned_by_a_module(table: pa.Table, root: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(len(table), 5))
    keys = table.select(["id", "event_timestamp"])
    pq.write_table(keys.append_column("values", pa.array(vectors.tolist())), root / "vectors.parquet")
    task = task_of(table, root, replace(VECTORS, teacher=TeacherOutputs("vectors.parquet")))
    answers = task.teacher().ask(task.asked(ROWS))["vector"].numpy()
    np.testing.assert_allclose(answers, vectors[:3] / np.linalg.norm(vectors[:3], axis=1, keepdims=True), rtol=1e-5)
    student = task.student().eval().requires_grad_(requires_grad=False)
    found = task.expected(student, task.feeds(ROWS))["vector"]
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    assert found.shape == (3, 5)


@pytest.mark.parametrize(
    ("teacher", "error", "message"),
    [
        ("unknown", DataError, "1 of 1 vectors are missing, not finite, or zero"),
        ("nothing", DataError, "1 of 1 vectors are missing, not finite, or zero"),
        ("brightness", ConfigurationError, r"output: values, shape \(1,\); expected \(1, width\), a vector per image"),
        ("inverting", ConfigurationError, r"output: values, shape \(1, 3, 16, 16\)"),
        ("fitted", ConfigurationError, r"takes 2 arguments; expected no argument$"),
        ("dropping", ConfigurationError, "network: is in training mode"),
        ("random", ConfigurationError, "two answers to the same batch differ"),
        ("widening", ConfigurationError, "cosine: teacher: width 33; expected 2, as in student"),
    ],
)
def test_a_teacher_without_a_vector_for_each_image_is_refused(
    table: pa.Table, root: Path, tmp_path: Path, teacher: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        report(material(table, root, replace(VECTORS, teacher=f"{HERE}:{teacher}")), tmp_path)


def test_ten_images_are_too_few_for_a_search(table: pa.Table, root: Path) -> None:
    with pytest.raises(DataError, match="the validation part has 11 rows; expected at least 12, to find 10 of"):
        task_of(table.slice(0, 55), root, VECTORS)
