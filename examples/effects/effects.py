"""The effect task: a generator teaches a small network to draw frames."""

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
from isthmus.teachers import NetworkTeacher, OutputCache, Teacher, fingerprint, identities
from isthmus.training import sha256

FOLDER = Path(__file__).parent / "data"
MARGIN = 16
"""Pixels at the edge of a frame that flicker ignores, because neighbors have other surroundings there."""


class Effects(Task):
    """Draws frames."""

    metric = "ssim"
    keys = ("image",)
    at_once = 8
    tolerance: Mapping[str, float] = {"fp32": 1e-4, "int8": 0.5}
    """Maximum difference of a color of a pixel in [0, 1]; the gates limit INT8 over whole images."""
    golden, compared = 0, 16
    about: Mapping[str, str] = {
        "teacher": "a generator, taught by the drawings of many photographs",
        "student": "a small network, taught by the generator and by the drawings of one photograph",
        "control": "the same network, taught by the drawings of that photograph alone",
    }
    paired: Sequence[str] = ("rocket",)
    """Photographs whose drawings student and control have; for all others they have only the frames."""
    repeats = 4
    """Repetitions per epoch of frames with a drawing, so that a batch has one or two."""
    seeds = 1
    """Augmented copies per epoch of frames without a drawing."""
    generator_shape: Mapping[str, int] = {"width": 24, "blocks": 5}
    generator_settings = Settings(steps=300, batch=16, learning_rate=1.5e-3)
    crop = 64
    """Side of the generator's training crops; small, so that a batch covers more frames."""
    shape: Mapping[str, int] = {"width": 16, "wider": 3, "blocks": 4}
    """Shape of the student, see `networks.Painter`."""

    def __init__(self, material: Material) -> None:
        train = material.parts.train
        known = np.isin(material.table["photograph"].take(pa.array(train)).to_pylist(), self.paired)
        if not known.any():
            raise DataError(
                material.declaration.where,
                "no training frame has a drawing",
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
                    "its pixels have changed since the table of frames was written",
                    expected=f"pixels with digest {pixels[:12]}",
                    remedy="run python photographs.py, isthmus build and isthmus features training-set again",
                )

    @cached_property
    def generator(self) -> Generator:
        """The teacher, trained on the drawings of all training photographs and no others."""
        rows = self.archive.tolist()
        FOLDER.mkdir(exist_ok=True)
        return taught(
            [self.places[row] for row in rows], [self.pixels[row] for row in rows], dict(self.generator_shape),
            self.generator_settings, self.crop, self.material.profile, FOLDER,
            self.material.progress,
        )  # fmt: skip

    def _shown(self, rows: list[int]) -> Tensor:
        """Return augmented frames, (n, 3, side, side) float32 in [0, 1]."""
        frames = []
        for row in rows:
            name, x, y = self.places[row]
            frames.append(augmented(part(seen(name), x, y), self.seed_of[row], self.pixels[row]))
        return torch.stack(frames)

    def _drawn(self, rows: list[int]) -> Tensor:
        """Return the effect on the frames."""
        return torch.stack([part(painted(name), x, y) for name, x, y in (self.places[row] for row in rows)])

    def teacher(self) -> Teacher:
        """Return the generator."""
        return NetworkTeacher(self.generator, self.keys, name="generator")

    def asked(self, rows: Index) -> Any:
        """Return frames."""
        return self._shown(rows.tolist())

    def student(self) -> nn.Module:
        """Return a U-Net of MobileNet blocks."""
        return Painter(**self.shape).to(memory_format=torch.channels_last)  # a third faster to train on a CPU

    def batch(self, rows: Tensor) -> Batch:
        """Return frames, with the effect as labels; NaN for frames without a drawing."""
        labels = self._drawn(rows.tolist())
        labels[~torch.from_numpy(np.isin(rows.numpy(), self.with_drawing))] = torch.nan
        return Batch((self._shown(rows.tolist()),), labels)

    def identities(self) -> Array:
        """Return identities of pixels and seed, so that the teacher's outputs for augmented frames are cached, too."""
        return identities(self.material.table.select(["frames__pixels", "seed"]))

    def options(self) -> dict[str, Any]:
        """Return the fingerprint of the augmentation, part of the identity of the teacher's outputs."""
        return {"augmented": fingerprint(augmented)}

    def content(self) -> str:
        """Return a digest of the frames, the effect and the selection of drawings."""
        return sha256({
            "training_set": self.material.training_set, "effect": fingerprint(effect), "paired": [*self.paired],
            "repeats": self.repeats, "seeds": self.seeds, "augmented": fingerprint(augmented),
        })  # fmt: skip

    def objective(self) -> Objective:
        """Return the terms: teacher's pixels, perceptual, adversarial, and the effect's drawings."""
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
        """Measure similarity to the teacher and flicker.

        * ssim, psnr: against the teacher's images; psnr in dB over all frames;
        * psnr_of_effect: against the effect's drawings;
        * change: mean difference, of 255, between a frame and its neighbor where both show the same;
        * flicker: change minus the teacher's change.
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

    def score(self, answers: Answers, rows: Index, taught: Answers) -> float:  # noqa: ARG002 - answers suffice
        """Return SSIM only, which selects weights."""
        return ssim(answers["image"], taught["image"])

    def _neighbors(self, rows: Index) -> list[tuple[int, int]]:
        """Return pairs of positions in `rows` whose frames are neighbors."""
        known = {self.places[row]: place for place, row in enumerate(rows.tolist())}
        after = [(place, known.get((name, x + PAN[0], y + PAN[1]))) for (name, x, y), place in known.items()]
        return [(first, second) for first, second in after if second is not None]

    def sliced(self, rows: Index) -> pa.Table:
        """Return photograph and contrast of each frame, for slices."""
        return self.material.table.select(["photograph", "contrast"]).take(rows)

    pipeline = "image-to-image"
    measured = ("teacher_multiply_adds", "student_multiply_adds", "fewer_multiply_adds", "worth")

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """Return the multiply-adds of a frame, their ratio, and `worth`.

        `worth` is the student's PSNR against the effect minus its control's, in dB.
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
        """Return the graph that maps a frame to a drawing."""
        return exported(student)

    def feeds(self, rows: Index) -> Feeds:
        """Return frames as inputs of the graph."""
        return {"frame": self._shown(rows.tolist()).numpy()}

    def edges(self, student: nn.Module) -> list[Case]:
        """Return a photograph whose last quarter is noise; a single case, because outputs are as large as frames."""
        fed = self.feeds(self.material.parts.test[:1])
        noise = np.random.default_rng(0).random((1, 3, SIDE // 4, SIDE), np.float32)
        fed["frame"][:, :, -SIDE // 4 :] = noise
        return [Case(fed, self.expected(student, fed))]

    def shipped(self, _taught: OutputCache) -> dict[str, tuple[bytes, str]]:
        """Return a photograph for the package's page."""
        name, x, y = self.places[int(self.material.parts.test[0])]
        pixels = np.ascontiguousarray(cut(photograph(name), x, y)).tobytes()
        return {"photograph.rgb": (pixels, f"a photograph, {SIDE} x {SIDE}, one byte each for red, green and blue")}


def extended(material: Material, known: Index, unknown: Index, repeats: int, seeds: int) -> Material:
    """Return material with `known` rows repeated and augmented copies of `unknown` rows, one per seed.

    The new column `seed` is 0 for frames without augmentation.
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
    """Return a frame (3, height, width) in [0, 1] with random exposure and colors, mirrored half of the time.

    The result depends only on seed and pixels, so the teacher's outputs can be cached.
    """
    if not seed:
        return frame
    random = np.random.default_rng([seed, int(pixels[:16], 16)])
    exposure, gains, mirrored = random.normal(0, 0.3), random.normal(0, 0.15, 3), random.random() < 0.5
    colors = frame ** math.exp(exposure) * torch.from_numpy(np.exp(gains)).float().view(3, 1, 1)
    return (colors.flip(-1) if mirrored else colors).clamp(0, 1)


def drawing_loss(images: Tensor, drawings: Tensor) -> Tensor:
    """Return the mean absolute difference of images and drawings (n, 3, height, width), ignoring NaN drawings."""
    known = ~drawings[:, 0, 0, 0].isnan()
    return (images[known] - drawings[known]).abs().sum() / max(1, drawings[known].numel())


def ssim(images: Array, wanted: Array) -> float:
    """Return the mean structural similarity (Wang et al., 2004, doi:10.1109/TIP.2003.819861; Gaussian, 1.5 pixels)."""
    options = {"channel_axis": 0, "data_range": 1.0, "gaussian_weights": True, "use_sample_covariance": False}
    return float(np.mean([structural_similarity(*pair, **options) for pair in zip(images, wanted, strict=True)]))


def psnr(images: Array, wanted: Array) -> float:
    """Return the peak signal-to-noise ratio in dB; infinite for equal images."""
    error = float(np.square(images - wanted, dtype=np.float64).mean())
    return -10 * math.log10(error) if error else math.inf


def changed(images: Array, pairs: list[tuple[int, int]]) -> float:
    """Return the mean difference, of 255, between neighbors where both show the same; NaN without pairs."""
    right, down = PAN
    inner = slice(MARGIN, SIDE - MARGIN - max(PAN))
    found = [
        np.abs(images[first][:, down:, right:][:, inner, inner] - images[second][:, inner, inner]).mean()
        for first, second in pairs
    ]
    return 255 * float(np.mean(found)) if found else math.nan
