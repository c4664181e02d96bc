"""The task of an effect: a generator teaches a small network to draw frames as it does."""

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import torch
from networks import Generator, Painter, exported, multiply_adds
from painting import effect, painted
from photographs import PAN, SIDE, cut, digest, photograph
from skimage.metrics import structural_similarity
from teaching import part, seen, taught
from torch import Tensor, nn
from torch.nn.functional import l1_loss

from isthmus.distill.losses import Adversarial, Objective, PatchDiscriminator, Perceptual, Term
from isthmus.distill.outputs.cache import TeacherOutputs
from isthmus.distill.settings import Settings
from isthmus.distill.tasks.task import Batch, Case, Material, Task
from isthmus.distill.teachers.fingerprint import fingerprint
from isthmus.distill.teachers.network import NetworkTeacher
from isthmus.distill.teachers.teacher import Teacher
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.contract.contract import sha256
from isthmus.features.errors import DataError
from isthmus.features.package.inputs import Feeds

FOLDER = Path(__file__).parent / "data"
MARGIN = 16
"""Pixels at the edge of a frame that say nothing of flicker: there, neighbors do not see the same around them."""


class Effects(Task):
    """Frames, drawn."""

    metric = "ssim"
    keys = ("image",)
    at_once = 8
    tolerance: Mapping[str, float] = {"fp32": 1e-4, "int8": 0.5}
    """Of a single color of a single pixel, from 0 to 1; the gates say how far INT8 may be on the whole."""
    golden, compared = 0, 16
    about: Mapping[str, str] = {
        "teacher": "a generator, taught by the effect",
        "student": "a small network, taught by the generator",
        "control": "the same network, taught by the effect alone",
    }
    generator_shape: Mapping[str, int] = {"width": 24, "blocks": 5}
    generator_settings = Settings(steps=300, batch=16, learning_rate=1.5e-3)
    crop = 64
    """Side of what the generator learns from: parts of frames, so that a batch shows more of them."""
    shape: Mapping[str, int] = {"width": 16, "wider": 3, "blocks": 4}
    """Of the student: see `networks.Painter`."""

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        columns = [material.table[name].to_pylist() for name in ("photograph", "x", "y")]
        self.places = list(zip(*columns, strict=True))
        self.pixels = material.table["frames__pixels"].to_pylist()
        for (name, x, y), pixels in zip(self.places, self.pixels, strict=True):
            if digest(cut(photograph(name), x, y)) != pixels:
                raise DataError(
                    f"frame of {name} at {x}, {y}",
                    "other pixels than when the table of frames was written",
                    expected=f"those with the digest {pixels[:12]}",
                    remedy="run python photographs.py, isthmus build and isthmus training-set again",
                )

    @cached_property
    def generator(self) -> Generator:
        """What teaches. It has seen no photograph but those that are learned from."""
        rows = self.material.parts.train.tolist()
        FOLDER.mkdir(exist_ok=True)
        return taught(
            [self.places[row] for row in rows], [self.pixels[row] for row in rows], dict(self.generator_shape),
            self.generator_settings, self.crop, self.material.profile, FOLDER,
            self.material.progress,
        )  # fmt: skip

    def _shown(self, rows: list[int]) -> Tensor:
        """Frames, (n, 3, side, side) float32, 0 to 1."""
        return torch.stack([part(seen(name), x, y) for name, x, y in (self.places[row] for row in rows)])

    def _drawn(self, rows: list[int]) -> Tensor:
        """What the effect makes of them."""
        return torch.stack([part(painted(name), x, y) for name, x, y in (self.places[row] for row in rows)])

    def teacher(self) -> Teacher:
        """The generator."""
        return NetworkTeacher(self.generator, self.keys, name="generator")

    def asked(self, rows: Index) -> Any:
        """Frames."""
        return self._shown(rows.tolist())

    def student(self) -> nn.Module:
        """A U-Net of MobileNet's blocks."""
        return Painter(**self.shape).to(memory_format=torch.channels_last)  # a third faster to train on a CPU

    def batch(self, rows: Tensor) -> Batch:
        """Frames, with what the effect makes of them for labels."""
        return Batch((self._shown(rows.tolist()),), self._drawn(rows.tolist()))

    def content(self) -> str:
        """The frames, and the effect on them."""
        return sha256({"training_set": self.material.training_set, "effect": fingerprint(effect)})

    def objective(self) -> Objective:
        """The teacher's pixels, what its first layers see in them, and what a discriminator does; and the effect's."""
        return Objective({
            "pixels": Term(l1_loss, input="student.image", target="teacher.image"),
            "perceptual": Term(
                Perceptual(self.generator.down[:2].eval(), ["0", "1"]), 0.1,
                student="student.image", teacher="teacher.image",
            ),
            "adversarial": Term(
                Adversarial(PatchDiscriminator(3, width=16)), 0.002, student="student.image", teacher="teacher.image"
            ),
            "drawn": Term(l1_loss, 0.1, input="student.image", target="labels"),
        })  # fmt: skip

    def quality(self, answers: Answers, rows: Index, taught: Answers) -> dict[str, float]:
        """How near images are to the teacher's, and how calm.

        * ssim, psnr: against what the teacher draws; psnr in dB, of all frames together;
        * psnr_of_effect: against what the effect draws;
        * change: the mean difference of a frame from its neighbor in the film, where both show the same, of 255;
        * flicker: what of that the teacher's have not.
        """
        drawn = self._drawn(rows.tolist()).numpy()
        pairs = self._neighbors(rows)
        change = changed(answers["image"], pairs)
        return {
            "ssim": self.score(answers, rows, taught),
            "psnr": psnr(answers["image"], taught["image"]),
            "psnr_of_effect": psnr(answers["image"], drawn),
            "change": change,
            "flicker": change - changed(taught["image"], pairs),
        }

    def score(self, answers: Answers, rows: Index, taught: Answers) -> float:  # noqa: ARG002 - the answers say
        """SSIM alone."""
        return ssim(answers["image"], taught["image"])

    def _neighbors(self, rows: Index) -> list[tuple[int, int]]:
        """Which of these rows, by their place among them, follow each other in a film."""
        known = {self.places[row]: place for place, row in enumerate(rows.tolist())}
        after = [(place, known.get((name, x + PAN[0], y + PAN[1]))) for (name, x, y), place in known.items()]
        return [(first, second) for first, second in after if second is not None]

    def sliced(self, rows: Index) -> pa.Table:
        """By photograph and contrast."""
        return self.material.table.select(["photograph", "contrast"]).take(rows)

    pipeline = "image-to-image"
    measured = ("teacher_multiply_adds", "student_multiply_adds", "fewer_multiply_adds")

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:  # noqa: ARG002 - they cost the same
        """Multiply-adds of a frame, and how many times fewer the student's are."""
        with torch.random.fork_rng(devices=[]):
            teacher, student = multiply_adds(self.generator), multiply_adds(self.student())
        return {
            "teacher_multiply_adds": teacher, "student_multiply_adds": student, "fewer_multiply_adds": teacher / student
        }  # fmt: skip

    def model(self, student: nn.Module) -> onnx.ModelProto:
        """A frame to a drawing."""
        return exported(student)

    def feeds(self, rows: Index) -> Feeds:
        """Frames."""
        return {"frame": self._shown(rows.tolist()).numpy()}

    def edges(self, student: nn.Module) -> list[Case]:
        """A photograph whose last quarter is noise, which no photograph is: answers are as large as frames."""
        fed = self.feeds(self.material.parts.test[:1])
        noise = np.random.default_rng(0).random((1, 3, SIDE // 4, SIDE), np.float32)
        fed["frame"][:, :, -SIDE // 4 :] = noise
        return [Case(fed, self.expected(student, fed))]

    def shipped(self, _taught: TeacherOutputs) -> dict[str, tuple[bytes, str]]:
        """A photograph for its page."""
        name, x, y = self.places[int(self.material.parts.test[0])]
        pixels = np.ascontiguousarray(cut(photograph(name), x, y)).tobytes()
        return {
            "photograph.rgb": (pixels, f"a photograph, {SIDE} x {SIDE}: of each pixel red, green and blue, a byte each")
        }


def ssim(images: Array, wanted: Array) -> float:
    """Mean structural similarity (Wang et al., 2004, doi:10.1109/TIP.2003.819861), a Gaussian of 1.5 pixels wide."""
    options = {"channel_axis": 0, "data_range": 1.0, "gaussian_weights": True, "use_sample_covariance": False}
    return float(np.mean([structural_similarity(*pair, **options) for pair in zip(images, wanted, strict=True)]))


def psnr(images: Array, wanted: Array) -> float:
    """Peak signal-to-noise ratio in dB; infinite if nothing differs."""
    error = float(np.square(images - wanted, dtype=np.float64).mean())
    return -10 * math.log10(error) if error else math.inf


def changed(images: Array, pairs: list[tuple[int, int]]) -> float:
    """Mean difference of images, of 255, from those that follow, where both show the same; NaN of none."""
    right, down = PAN
    inner = slice(MARGIN, SIDE - MARGIN - max(PAN))
    found = [
        np.abs(images[first][:, down:, right:][:, inner, inner] - images[second][:, inner, inner]).mean()
        for first, second in pairs
    ]
    return 255 * float(np.mean(found)) if found else math.nan
