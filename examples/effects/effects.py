"""The task of an effect: a generator teaches a small network to draw frames as it does."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
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

from isthmus import DataError, Settings
from isthmus.losses import Adversarial, Objective, PatchDiscriminator, Perceptual, Term
from isthmus.tasks import Answers, Array, Batch, Case, Feeds, Index, Material, Split, Task
from isthmus.teachers import NetworkTeacher, Teacher, TeacherOutputs, fingerprint, identities
from isthmus.training import sha256

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
        "teacher": "a generator, taught by the drawings of many photographs",
        "student": "a small network, taught by the generator and by the drawings of one photograph",
        "control": "the same network, taught by the drawings of that photograph alone",
    }
    paired: Sequence[str] = ("rocket",)
    """Photographs whose drawings student and control have. Of the others they have the frames alone."""
    repeats = 4
    """How often an epoch has each frame with a drawing, so that a batch has one or two."""
    seeds = 1
    """How many augmented copies an epoch has of each frame without a drawing."""
    generator_shape: Mapping[str, int] = {"width": 24, "blocks": 5}
    generator_settings = Settings(steps=300, batch=16, learning_rate=1.5e-3)
    crop = 64
    """Side of what the generator learns from: parts of frames, so that a batch shows more of them."""
    shape: Mapping[str, int] = {"width": 16, "wider": 3, "blocks": 4}
    """Of the student: see `networks.Painter`."""

    def __init__(self, material: Material) -> None:
        train = material.parts.train
        known = np.isin(material.table["photograph"].take(pa.array(train)).to_pylist(), self.paired)
        if not known.any():
            raise DataError(
                material.declaration.where,
                "no drawing to learn from",
                expected=f"frames of {' or '.join(self.paired)} in the training part",
                remedy="name photographs of the training part in Effects.paired",
            )
        self.archive, self.with_drawing = train, train[known]
        super().__init__(extended(material, train[known], train[~known], self.repeats, self.seeds))
        columns = [self.material.table[name].to_pylist() for name in ("photograph", "x", "y")]
        self.places = list(zip(*columns, strict=True))
        self.pixels, self.seed_of = (self.material.table[name].to_pylist() for name in ("frames__pixels", "seed"))
        for (name, x, y), pixels in zip(self.places, self.pixels, strict=True):
            if digest(cut(photograph(name), x, y)) != pixels:
                raise DataError(
                    f"frame of {name} at {x}, {y}",
                    "other pixels than when the table of frames was written",
                    expected=f"those with the digest {pixels[:12]}",
                    remedy="run python photographs.py, isthmus build and isthmus features training-set again",
                )

    @cached_property
    def generator(self) -> Generator:
        """What teaches. It has learned from the drawings of all photographs of the training part, and of no other."""
        rows = self.archive.tolist()
        FOLDER.mkdir(exist_ok=True)
        return taught(
            [self.places[row] for row in rows], [self.pixels[row] for row in rows], dict(self.generator_shape),
            self.generator_settings, self.crop, self.material.profile, FOLDER,
            self.material.progress,
        )  # fmt: skip

    def _shown(self, rows: list[int]) -> Tensor:
        """Frames, (n, 3, side, side) float32, 0 to 1, as their seeds augment them."""
        frames = []
        for row in rows:
            name, x, y = self.places[row]
            frames.append(augmented(part(seen(name), x, y), self.seed_of[row], self.pixels[row]))
        return torch.stack(frames)

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
        """Frames, and for labels what the effect makes of them: NaN where nobody who learns knows it."""
        labels = self._drawn(rows.tolist())
        labels[~torch.from_numpy(np.isin(rows.numpy(), self.with_drawing))] = torch.nan
        return Batch((self._shown(rows.tolist()),), labels)

    def identities(self) -> Array:
        """Of the pixels and the seed: what the teacher draws of an augmented frame is kept, too."""
        return identities(self.material.table.select(["frames__pixels", "seed"]))

    def options(self) -> dict[str, Any]:
        """How frames are augmented."""
        return {"augmented": fingerprint(augmented)}

    def content(self) -> str:
        """The frames, the effect on them, and for which of them it is known."""
        return sha256({
            "training_set": self.material.training_set, "effect": fingerprint(effect), "paired": [*self.paired],
            "repeats": self.repeats, "seeds": self.seeds, "augmented": fingerprint(augmented),
        })  # fmt: skip

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
            "drawn": Term(drawing_loss, 0.1, images="student.image", drawings="labels"),
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
    measured = ("teacher_multiply_adds", "student_multiply_adds", "fewer_multiply_adds", "worth")

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Multiply-adds of a frame, and how many times fewer the student's are; and what the teacher is worth.

        That is how much nearer the student is to the effect than its control, in dB.
        """
        with torch.random.fork_rng(devices=[]):
            teacher, student = multiply_adds(self.generator), multiply_adds(self.student())
        return {
            "teacher_multiply_adds": teacher,
            "student_multiply_adds": student,
            "fewer_multiply_adds": teacher / student,
            "worth": quality["student"]["psnr_of_effect"] - quality["control"]["psnr_of_effect"],
        }

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


def extended(material: Material, known: Index, unknown: Index, repeats: int, seeds: int) -> Material:
    """With more to learn from: `known` rows several times, and `unknown` ones with each seed of an augmentation.

    A column says the seed; the seed 0 leaves a frame as it is.
    """
    plain, copy = material.table, material.table.take(pa.array(unknown))
    tables = [plain, *[copy] * seeds]
    seed = np.repeat(np.arange(seeds + 1), [table.num_rows for table in tables])
    table = pa.concat_tables(tables).append_column("seed", pa.array(seed))
    parts, further = material.parts, np.arange(plain.num_rows, table.num_rows)
    train = np.concatenate([np.tile(known, repeats), unknown, further])
    division = Split(train, parts.validation, parts.test, parts.boundaries)
    return replace(material, table=table, division=division)


def augmented(frame: Tensor, seed: int, pixels: str) -> Tensor:
    """A frame (3, height, width), 0 to 1, in another light, and half of the time mirrored.

    Seed and digest of the pixels decide, and nothing else: what the teacher draws of it is kept.
    """
    if not seed:
        return frame
    random = np.random.default_rng([seed, int(pixels[:16], 16)])
    exposure, gains, mirrored = random.normal(0, 0.3), random.normal(0, 0.15, 3), random.random() < 0.5
    colors = frame ** math.exp(exposure) * torch.from_numpy(np.exp(gains)).float().view(3, 1, 1)
    return (colors.flip(-1) if mirrored else colors).clamp(0, 1)


def drawing_loss(images: Tensor, drawings: Tensor) -> Tensor:
    """The mean difference of images from drawings (n, 3, height, width), over those that are not NaN."""
    known = ~drawings[:, 0, 0, 0].isnan()
    return (images[known] - drawings[known]).abs().sum() / max(1, drawings[known].numel())


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
