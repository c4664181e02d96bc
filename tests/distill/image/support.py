"""Handwritten digits as PNG files, and teachers and students that read them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image as Pillow
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import dropout, interpolate

from isthmus import Distillation, Entity, FeatureService, Field, Float32, Image, RequestSource, Settings, Spine, String
from isthmus.distill.distillation import distill
from isthmus.distill.image.task import ImageTask
from isthmus.distill.restore import create_task
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.task import Material
from isthmus.distill.types import Array
from isthmus.features import types
from isthmus.features.profiles import TrainingProfile
from isthmus.package.inputs import ModelInput
from isthmus.transforms.preparation.fit import Preparation

HERE = "tests.distill.image.support"
INPUT = ModelInput("file", String)
LABELS = {"digit": String, "ink": Float32, "drawing": String, "traits": types.Array(String)}
IMAGE = Image(teacher=f"{HERE}:fitted", student=f"{HERE}:small", side=16, mirror=False)
CALLS: list[int] = []
"""The number of images of each call of a teacher."""


def digits(root: Path, count: int = 400) -> pa.Table:
    """Write the first digits of scikit-learn as files of 32 x 40 pixels, and return their table."""
    data = load_digits()
    (root / "digits").mkdir()
    for number in range(count):
        pixels = np.kron((data.images[number] * 15).astype(np.uint8), np.ones((4, 4), np.uint8))
        Pillow.fromarray(np.pad(pixels, ((4, 4), (0, 0)))).save(root / "digits" / f"{number}.png")
    times = pa.array(np.arange(count) * 3_600_000_000, pa.timestamp("us", tz="UTC"))
    files = [f"digits/{number}.png" for number in range(count)]
    return pa.table({
        "id": [str(number) for number in range(count)], "event_timestamp": times, "known_at": times, "file": files,
        "digit": data.target[:count].astype(str), "ink": data.images[:count].mean((1, 2)).astype(np.float32),
        "drawing": pa.array(files, mask=np.arange(count) % 3 == 0),
        "traits": [["even"] * (digit % 2 == 0) + ["large"] * (digit > 4) for digit in data.target[:count].tolist()],
    })  # fmt: skip


def _no_preparation(*_: Any) -> Preparation:
    raise AssertionError("an Image has no preparation")


def material(table: pa.Table, root: Path, image: Image = IMAGE, label: str = "digit", **changes: Any) -> Material:
    camera = FeatureService("camera", features=[RequestSource("seen", schema=[Field("file", String)])])
    declared: dict[str, Any] = {
        "settings": Settings(steps=200, batch=32, learning_rate=1e-2, evaluate_every=50), "seeds": 1, "gates": [],
        "split": (0.6, 0.2, 0.2), **changes,
    }  # fmt: skip
    spine = Spine("photos", [Entity("photo", join_keys={"id": String})], Field(label, LABELS[label]), [])
    return Material(
        Distillation("look", spine, camera, camera, task=image, **declared), table, [INPUT], [INPUT], label,
        f"set-{len(table)}", "contract", TrainingProfile(threads=1), RequestInputs(), _no_preparation, root=root,
    )  # fmt: skip


def report(of: Material, folder: Path) -> Mapping[str, Any]:
    return distill(of, folder=folder / "models", cache=folder / "cache", runs=folder / "runs").data


def task_of(table: pa.Table, root: Path, image: Image = IMAGE, label: str = "digit", **changes: Any) -> ImageTask:
    task = create_task(material(table, root, image, label, **changes))
    assert isinstance(task, ImageTask)
    return task


class Flat(LogisticRegression):  # type: ignore[misc]
    """A classifier of the pixels of images, which counts its calls."""

    def fit(self, images: Array, labels: Array) -> "Flat":
        super().fit(_gray(images), labels)
        return self

    def predict_proba(self, images: Array) -> Any:
        CALLS.append(len(images))
        return super().predict_proba(_gray(images))


def _gray(images: Array) -> Array:
    return images[:, 0].reshape(len(images), -1)


def fitted(images: Array, labels: Array) -> Any:
    return Flat(max_iter=1000).fit(images, labels)


def traits() -> Any:
    return lambda images: [["even", "large"] if image.mean() > 0.25 else [] for image in images]


def brightness() -> Any:
    return lambda images: images.mean((1, 2, 3))


def inverting() -> Any:
    return lambda images: 1 - images


def enlarging() -> Any:
    return lambda images: interpolate(torch.from_numpy(images), scale_factor=2.0).numpy()


def eight_bits() -> Any:
    return lambda images: 255 * images


def nothing() -> Any:
    return lambda images: np.zeros((len(images), 4))


def unknown() -> Any:
    return lambda images: np.full((len(images), 4), np.nan)


def widening() -> Any:
    return lambda images: np.ones((len(images), 1 + len(images)))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(768, 4))


def random() -> nn.Module:
    return Dropping(32).eval()


def vit(folder: Path, names: Sequence[str] = (), processor: Mapping[str, Any] = {}, **config: Any) -> Any:
    """Save a small ViT with drawn weights: with names a classifier, else a model of vectors; return it."""
    from transformers import ViTConfig, ViTForImageClassification, ViTModel

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    sizes |= {"image_size": 16, "patch_size": 4, "initializer_range": 0.3, "attention_probs_dropout_prob": 0.5}
    if names:
        config["id2label"] = dict(enumerate(names))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = (ViTForImageClassification if names else ViTModel)(ViTConfig(**{**sizes, **config})).eval()
    model.save_pretrained(folder)
    described = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}, **processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(described))
    return model


def edges() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval().requires_grad_(requires_grad=False)


def small(outputs: int) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.Flatten())
    return layers.append(nn.Linear(8 * 16, outputs))


def same(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding="same"), nn.Flatten(), nn.Linear(8 * 256, outputs))


def wide(outputs: int) -> nn.Module:
    return small(outputs + 1)


class Frozen(nn.Module):
    """A network for a single image."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.last = nn.Linear(768, outputs)

    def forward(self, image: Tensor) -> Tensor:
        return self.last(image.reshape(1, 768))  # type: ignore[no-any-return]


class Dropping(nn.Module):
    """A network whose dropout is also active in eval mode."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.network = small(outputs)

    def forward(self, image: Tensor) -> Tensor:
        return dropout(self.network(image), 0.5)
