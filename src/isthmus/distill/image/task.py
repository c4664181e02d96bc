"""The task class that trains and measures students of images."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from onnx import ModelProto
from torch import Tensor, nn

from isthmus.distill.image.files import SEED, ImageFiles, augmented, with_copies
from isthmus.distill.image.students import ImageNetwork, image_network
from isthmus.distill.language.image import Image
from isthmus.distill.language.teachers import teachers
from isthmus.distill.onnx.exporter import export_network
from isthmus.distill.outputs.cache import OutputCache
from isthmus.distill.outputs.form import OutputFormat
from isthmus.distill.tabular.answers import LabelStudent
from isthmus.distill.tabular.kinds.kind import Kind
from isthmus.distill.tabular.labelled import LabelTask
from isthmus.distill.tabular.users.teacher import UserTeacher
from isthmus.distill.tasks.task import Batch, Case, Material
from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.contract.schema import sha256
from isthmus.features.errors import ConfigurationError, DataError, Problem
from isthmus.features.types import String
from isthmus.features.values.columns import Values
from isthmus.package.inputs import Feeds

IMAGES = "images.sha256"
_NUMBERS = 768 * 768
"""Numbers of a channel that a model outside of training gets at once, and that golden rows have at most."""
_PIPELINES: Mapping[str | None, str | None] = {
    "tabular-classification": "image-classification",
    "tabular-regression": None,
}


class Unlabeled(Kind):
    """Base of the kinds that an `Image` learns from its teacher's outputs, not from a label of the spine."""

    values = teacher_labels = np.empty(0)
    targets = torch.empty(0)

    def quality(self, answers: Answers, rows: Index) -> dict[str, float]:  # noqa: ARG002 - the task knows the teacher
        return {}

    def score(self, answers: Answers, rows: Index) -> float:  # noqa: ARG002 - likewise
        return math.nan

    def chance(self, rows: Index) -> float:  # noqa: ARG002 - no output is a usual one
        return math.nan

    def leak(self, column: Values, rows: Index) -> str:  # noqa: ARG002 - a path tells nothing
        return ""


class ImageTask(LabelTask):
    """Predicts a label from an image."""

    about: Mapping[str, str] = {"teacher": "the declared teacher"}
    form = OutputFormat("float32")
    shape: Mapping[str, Any] = MappingProxyType(dict.fromkeys(("width", "depth", "expand")))
    """None means the value that the declared student has."""

    declared: Image

    def __init__(self, material: Material) -> None:
        declared = material.declaration.task
        assert isinstance(declared, Image)  # noqa: S101 - only an Image selects this task
        column = _column(material, declared)
        material = with_copies(material, declared.augment)
        self._images = self._read(material, column, declared.side)
        self._seeds = material.table[SEED].to_numpy()
        self.images = self._shown
        super().__init__(material, declared)
        fit = _NUMBERS // declared.side**2
        self.at_once, self.golden = max(8, min(256, fit)), min(16, fit // 8)
        self.rows_per_thread = max(1, fit // 8)
        self.pipeline = _PIPELINES.get(self.pipeline, self.pipeline)

    def _read(self, material: Material, column: str, side: int) -> ImageFiles:
        threads, where = material.profile.threads, f"column {column}"
        return ImageFiles(material.table[column], material.root, side, threads, where, material.progress)

    def _shown(self, rows: Index) -> Array:
        """Return the images of rows, copies augmented, float32 (rows, 3, side, side) in [0, 1]."""
        images, files = self._images[rows], self._images
        for place in np.flatnonzero(self._seeds[rows]):
            digest, seed = files.digests[files.places[rows[place]]], int(self._seeds[rows[place]])
            images[place] = augmented(images[place], seed, digest, mirror=self.declared.mirror)
        return images

    def teacher(self) -> UserTeacher:
        return self._user_teacher(teachers(self.declared.teacher))

    def _recipe(self) -> dict[str, Any]:
        copies = [self.declared.augment, self.declared.mirror, fingerprint(augmented)] if self.declared.augment else []
        return {**super()._recipe(), "images": [self._images.digest(), *copies]}

    def student(self) -> nn.Module:
        answer, where = self._kind.answer(), f"{self.material.declaration.where}: student"
        declared = replace(self.declared, student=self._shaped())
        network = image_network(declared, self._outputs, where)
        student: nn.Module = LabelStudent(network, answer)
        # Trains a third faster on a CPU.
        return student.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    @property
    def _outputs(self) -> int:
        """Numbers that the network gives for an image; 0 for a picture."""
        return self._answer.width

    def _shaped(self) -> Any:
        student, given = self.declared.student, {name: value for name, value in self.shape.items() if value is not None}
        return replace(student, **given) if given else student  # type: ignore[type-var]

    def line(self) -> str:
        return f"student={self._shaped()!r}"

    def batch(self, rows: Tensor) -> Batch:
        return Batch((torch.from_numpy(self._shown(rows.numpy())),), self._kind.targets[rows])

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:  # noqa: ARG002 - no reference
        return {}

    def sliced(self, rows: Index) -> pa.Table:
        """Return the columns for slices: the brightness of each image and, if declared, the column `split_by`."""
        split_by = self.material.declaration.split_by
        light = self._images.pixels.reshape(len(self._images.pixels), -1).mean(1)[self._images.places[rows]]
        table = pa.table({"brightness": light / 255})
        return table if split_by is None else table.append_column(split_by, self.material.table[split_by].take(rows))

    def model(self, student: nn.Module) -> ModelProto:
        sizes = (3, self.declared.side, self.declared.side)
        example = {"image": np.zeros((2, *sizes), np.float32)}
        return export_network(self.network(student), example, {"image": ("N", *sizes)}, [self._answer.name])

    def network(self, student: nn.Module) -> nn.Module:
        assert isinstance(student, LabelStudent)  # noqa: S101 - created by `student`
        return ImageNetwork(student).eval()

    def feeds(self, rows: Index) -> Feeds:
        return {"image": self._shown(rows)}

    def expected(self, student: nn.Module, feeds: Feeds) -> Answers:
        return {self._answer.name: self.network(student)(torch.from_numpy(feeds["image"])).numpy()}

    def edges(self, student: nn.Module) -> Sequence[Case]:
        """Return an image of the test part whose last quarter is noise."""
        fed, side = self.feeds(self.material.parts.test[:1]), self.declared.side
        noise = np.random.default_rng(0).random((1, 3, side // 4, side), np.float32)
        fed["image"][:, :, -(side // 4) :] = noise
        return [Case(fed, self.expected(student, fed))]

    def shipped(self, _teacher: OutputCache) -> Mapping[str, tuple[bytes, str]]:
        image = self._images.pixels[self._images.places[self.material.parts.test[0]]].transpose(1, 2, 0)
        side = self.declared.side
        about = f"an image of the test part, {side} x {side}, one byte each for red, green and blue"
        return {"image.rgb": (image.tobytes(), about)}

    def content(self) -> str:
        targets = self._kind.targets.numpy()
        return sha256({"images": self._recipe()["images"], "labels": hashlib.sha256(targets.tobytes()).hexdigest()})

    def files(self, identity: str) -> dict[str, bytes]:  # noqa: ARG002 - the same for all students
        return {IMAGES: self.content().encode()}


def _column(material: Material, declared: Image) -> str:
    inputs = {item.name: item.dtype for item in material.student_inputs}
    column = declared.column or next(iter(inputs), "column")
    if inputs != {column: String}:
        found = f"the student's service has {', '.join(inputs)}"
        expected = f"{column} alone, a String: an Image reads nothing else"
        raise ConfigurationError(f"{material.declaration.where}: column", [Problem("inputs", found, expected)])
    if nulls := material.table[column].null_count:
        raise DataError(f"column {column}", f"null in {nulls:,} rows", expected="the path of an image in every row")
    return column
