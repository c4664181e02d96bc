"""The task class of a `Picture`: a student that draws images as its teacher does."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss

from isthmus.distill.causal.models import call_function
from isthmus.distill.declaration import Predictor
from isthmus.distill.image.files import ImageFiles
from isthmus.distill.image.task import ImageTask, Unlabeled
from isthmus.distill.language.image import GAIN, Picture
from isthmus.distill.losses.adversarial import Adversarial, PatchDiscriminator
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.losses.perceptual import Perceptual
from isthmus.distill.outputs.form import OutputFormat
from isthmus.distill.tabular.answers import NumberOutput
from isthmus.distill.tabular.kinds.kind import Kind
from isthmus.distill.tabular.users.prediction import Prediction
from isthmus.distill.tasks.split import PARTS
from isthmus.distill.tasks.task import Batch, Material
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.contract.schema import sha256
from isthmus.features.errors import ConfigurationError, DataError, Problem, extra
from isthmus.features.types import String

KEY = "picture"
_BEYOND = 0.01
"""Largest distance of a teacher's colors from [0, 1] that is clipped."""


class PictureOutput(NumberOutput):
    """Output layer for pictures (n, 3, side, side): clip colors to [0, 1]."""

    width = 0

    def scores(self, last: Tensor) -> Tensor:
        return last

    def forward(self, scores: Tensor) -> Tensor:
        return self.calibrate(scores)


class PictureLabels(Unlabeled):
    """Wanted pictures of some or no rows, None for a label that is not a String. `PictureTask` compares the teacher's.

    Args:
        wanted: pictures; None if the spine's label is not a String.
        side: pixels of a side.
    """

    key = KEY
    metric = "ssim"
    pipeline = "image-to-image"
    tolerance: Mapping[str, float] = {"fp32": 1e-4, "int8": 0.5}
    """Differences of one color of one pixel; gates limit the error of whole pictures."""

    def __init__(self, wanted: ImageFiles | None, side: int) -> None:
        self.wanted, self._size = wanted, (3, side, side)

    def answer(self) -> PictureOutput:
        return PictureOutput(KEY, 0, 1)

    def objective(self, declared: Predictor) -> Objective:
        picture, soft = declared.label, declared.soft_weight
        assert isinstance(picture, Picture)  # noqa: S101 - a Picture selects this kind
        pair = {"student": f"student.{KEY}", "teacher": f"teacher.{KEY}"}
        terms = {"pixels": Term(l1_loss, soft, input=pair["student"], target=pair["teacher"])}
        if picture.features is not None:
            network = call_function(picture.features, "features of a Picture")
            layers = [name for name, _ in network.named_children()] if isinstance(network, nn.Sequential) else []
            if not layers:
                found = f"returns a {type(network).__name__}"
                problem = Problem(picture.features, found, "a torch.nn.Sequential of at least one module")
                raise ConfigurationError("features of a Picture", [problem])
            terms["perceptual"] = Term(Perceptual(network, layers), soft * picture.perceptual, **pair)
        if picture.adversarial:
            discriminator = PatchDiscriminator(3, width=16)
            terms["adversarial"] = Term(Adversarial(discriminator), soft * picture.adversarial, **pair)
        if self.wanted is None:
            return Objective(terms)
        labels = Term(label_distance, 1 - soft or 1.0, pictures=pair["student"], labels="labels")
        return Objective(terms, {"labels": labels}) if soft == 1 else Objective({**terms, "labels": labels})

    def teacher_scores(self, prediction: Prediction, where: str) -> Array:
        """Return the teacher's pictures, clipped to [0, 1].

        Raise a ConfigurationError if they have another size, and a DataError if colors are NaN or more than 0.01
        outside [0, 1].
        """
        numbers, expected = prediction.numbers, (len(prediction.numbers), *self._size)
        if numbers.shape != expected:
            found = f"shape {numbers.shape}"
            raise ConfigurationError(where, [Problem("output", found, f"{expected}, the shape of the images")])
        if not (numbers.min() >= -_BEYOND and numbers.max() <= 1 + _BEYOND):  # also for NaN
            found = f"colors from {numbers.min():g} to {numbers.max():g}"
            raise DataError(where, found, expected="finite numbers from 0 to 1", remedy="scale and clip them")
        return numbers.clip(0, 1)

    def quality(self, answers: Answers, rows: Index) -> dict[str, float]:
        """Return SSIM and PSNR against the labels of the rows that have one; {} without labels."""
        if self.wanted is None:
            return {}
        known = self.wanted.places[rows] >= 0
        pictures, labels = answers[KEY][known], self.wanted[rows[known]]
        return {"ssim_of_label": ssim(pictures, labels), "psnr_of_label": psnr(pictures, labels)}

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:  # noqa: ARG002 - `quality` has it
        return {}


class PictureTask(ImageTask):
    """Draws the picture that the teacher draws."""

    form = OutputFormat()
    measured = (GAIN,)
    compared = 16

    _kind: PictureLabels

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        self.golden = 0  # a picture is as large as its image

    def _labels(self, declared: Predictor) -> Kind:  # noqa: ARG002 - the constructor reads it
        material, side = self.material, self._images.side
        wanted = None
        if material.declaration.spine.label.dtype == String:
            wanted = self._read(material, material.label, side)
            wanted.places[self._seeds > 0] = -1
            for part in (PARTS[0], PARTS[2]):  # to learn, and to measure what the labels gain
                if not (wanted.places[getattr(material.parts, part)] >= 0).any():
                    found = f"null in all rows of the {part} part"
                    remedy = "use other shares, or a label that is a number to learn from the teacher alone"
                    raise DataError(f"label {material.label}", found, expected="paths of pictures", remedy=remedy)
        return PictureLabels(wanted, side)

    def labeled(self, rows: Index) -> Index:
        wanted = self._kind.wanted
        return rows if wanted is None else rows[wanted.places[rows] >= 0]

    def batch(self, rows: Tensor) -> Batch:
        wanted, places = self._kind.wanted, rows.numpy()
        images = torch.from_numpy(self._shown(places))
        return Batch((images,), None if wanted is None else torch.from_numpy(wanted[places]))

    def quality(self, answers: Answers, rows: Index, teacher: Answers) -> dict[str, float]:
        """Return SSIM and PSNR in dB against the teacher's pictures, and against the labels of rows that have one."""
        near = {"ssim": ssim(answers[KEY], teacher[KEY]), "psnr": psnr(answers[KEY], teacher[KEY])}
        return {**near, **self._kind.quality(answers, rows)}

    def score(self, answers: Answers, rows: Index, teacher: Answers) -> float:  # noqa: ARG002 - also without labels
        return ssim(answers[KEY], teacher[KEY])

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        figures = [quality[name].get("psnr_of_label", math.nan) for name in ("student", "control")]
        return {} if self._kind.wanted is None else {GAIN: figures[0] - figures[1]}

    def content(self) -> str:
        wanted = self._kind.wanted
        return sha256({"images": super().content(), "wanted": None if wanted is None else wanted.digest()})


def label_distance(pictures: Tensor, labels: Tensor) -> Tensor:
    """Return the mean absolute difference of pictures and labels, (n, 3, height, width); labels of NaN are skipped."""
    known = ~labels[:, 0, 0, 0].isnan()
    return (pictures[known] - labels[known]).abs().sum() / max(1, labels[known].numel())


def ssim(pictures: Array, wanted: Array) -> float:
    """Return the mean structural similarity (Wang et al., 2004, doi:10.1109/TIP.2003.819861); NaN without pictures."""
    with extra("image"):
        from skimage.metrics import structural_similarity as similarity
    options = {"channel_axis": 0, "data_range": 1.0, "gaussian_weights": True, "use_sample_covariance": False}
    found = [similarity(*pair, **options) for pair in zip(pictures, wanted, strict=True)]  # type: ignore[no-untyped-call]
    return float(np.mean(found)) if found else math.nan


def psnr(pictures: Array, wanted: Array) -> float:
    """Return the peak signal-to-noise ratio in dB; infinite for equal pictures, NaN without pictures."""
    error = float(np.square(pictures - wanted, dtype=np.float64).mean()) if len(pictures) else math.nan
    return math.inf if error == 0 else -10 * math.log10(error)
