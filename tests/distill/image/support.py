"""Handwritten digits as PNG files, and teachers that know them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image as Pillow
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

from isthmus import Distillation, Entity, FeatureService, Field, Float32, Image, MobileNet, RequestSource, Settings, Spine, String
from isthmus.distill.tasks.requestinputs import RequestInputs
from isthmus.distill.tasks.task import Material
from isthmus.distill.types import Array
from isthmus.features.profiles import TrainingProfile
from isthmus.package.inputs import ModelInput
from isthmus.transforms.preparation.fit import Preparation

HERE = "tests.distill.image.support"
INPUT = ModelInput("file", String)
LABELS = {"digit": String, "ink": Float32, "drawing": String}
SIDE = 16


def digits(root: Path, count: int = 400) -> pa.Table:
    """Write the first digits of scikit-learn, 32 x 40 pixels, and return their table."""
    data = load_digits()
    (root / "digits").mkdir(exist_ok=True)
    for number in range(count):
        pixels = np.kron((data.images[number] * 15).astype(np.uint8), np.ones((4, 4), np.uint8))
        Pillow.fromarray(np.pad(pixels, ((4, 4), (0, 0)))).save(root / "digits" / f"{number}.png")
    times = pa.array(np.arange(count) * 3_600_000_000, pa.timestamp("us", tz="UTC"))
    files = [f"digits/{number}.png" for number in range(count)]
    return pa.table({
        "id": [str(number) for number in range(count)], "event_timestamp": times, "known_at": times, "file": files,
        "digit": data.target[:count].astype(str), "ink": data.images[:count].mean((1, 2)).astype(np.float32),
        "drawing": pa.array(files, mask=np.arange(count) % 3 == 0),
    })  # fmt: skip


def _no_preparation(*_: Any) -> Preparation:
    raise AssertionError("an Image has no preparation")


def material(table: pa.Table, root: Path, image: Image | None = None, label: str = "digit", **changes: Any) -> Material:
    camera = FeatureService("camera", features=[RequestSource("seen", schema=[Field("file", String)])])
    declared: dict[str, Any] = {
        "task": image or Image(teacher=f"{HERE}:fitted", student=MobileNet(width=0.5, depth=0.5), side=SIDE),
        "settings": Settings(epochs=10, batch=32, learning_rate=3e-3), "seeds": 1, "gates": [], "split_by": "id",
        "split": (0.6, 0.2, 0.2), **changes,
    }  # fmt: skip
    spine = Spine("photos", [Entity("photo", join_keys={"id": String})], Field(label, LABELS[label]), [])
    return Material(
        Distillation("look", spine, camera, camera, **declared), table, [INPUT], [INPUT], label, f"set-{len(table)}",
        "contract", TrainingProfile(threads=2), RequestInputs(), _no_preparation, root=root,
    )  # fmt: skip


class Flat(LogisticRegression):
    """A classifier of pixels."""

    def fit(self, images: Array, labels: Array) -> "Flat":
        return super().fit(images.reshape(len(images), -1), labels)

    def predict_proba(self, images: Array) -> Array:
        return super().predict_proba(images.reshape(len(images), -1))


def fitted(images: Array, labels: Array) -> Flat:
    return Flat(max_iter=200).fit(images, labels)


class Invert(nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return 1 - image


def inverting() -> nn.Module:
    return Invert().eval()


def inky() -> Any:
    return lambda images: images.mean((1, 2, 3)) * 16


def edges() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval().requires_grad_(requires_grad=False)
