"""Output layers of tabular students, each in torch, in NumPy and as ONNX nodes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.distill.evaluation.metrics import log_softmax, sigmoid
from isthmus.distill.onnx.builder import Building
from isthmus.distill.tabular.calibration import Calibrator
from isthmus.distill.types import Array

UNCALIBRATED = "uncalibrated"
"""Key of the logits before calibration."""
MOST_SCORE = 16.0
"""Upper bound of a ranking score: a row that scores 16 more is nine million times as likely to come first."""


class StudentOutput(nn.Module, ABC):
    """Output layer of a student: maps the last linear layer's output, float32 (n, `width`), to the graph's output."""

    name: str
    width: int = 1
    shape: Sequence[int | str] = ("N",)

    def __init__(self, calibration: Calibrator | None = None) -> None:
        super().__init__()
        self.calibration = calibration

    def scores(self, last: Tensor) -> Tensor:
        return last[:, 0]

    def calibrate(self, scores: Tensor) -> Tensor:
        calibrated: Tensor = scores if self.calibration is None else self.calibration(scores)
        return calibrated

    def outputs(self, last: Tensor) -> Tensor | dict[str, Tensor]:
        """Return uncalibrated scores in training mode, calibrated or clipped ones in eval mode.

        In eval mode, a layer with a calibration returns a dict with calibrated `logits` and `uncalibrated` logits.
        """
        scores = self.scores(last)
        if self.training:
            return scores
        final = self.calibrate(scores)
        return final if self.calibration is None else {"logits": final, UNCALIBRATED: scores}

    @abstractmethod
    def forward(self, scores: Tensor) -> Tensor:
        """Calibrate or clip scores, and convert them to the graph's output, such as probabilities."""

    @abstractmethod
    def from_scores(self, scores: Array) -> Array:
        """Convert scores, already calibrated or clipped, to the graph's output, such as probabilities, in float64."""

    @abstractmethod
    def to_scores(self, answers: Array) -> Array:
        """Convert the graph's output, such as probabilities, back to calibrated or clipped scores, for metrics."""

    @abstractmethod
    def write(self, build: Building, last: str, name: str) -> None:
        """Add ONNX nodes that do the same as `scores` and `forward`, to export a student.

        `last` names the tensor with the output of the last linear layer. `name` is the name for the graph's output.
        """

    def _calibrated(self, build: Building, logits: str) -> str:
        return logits if self.calibration is None else self.calibration.write(build, logits)


class LabelStudent(nn.Module):
    """A network from tensors to the last layer's outputs (n, `answer.width`), and the output layer `answer`."""

    def __init__(self, network: nn.Module, answer: StudentOutput) -> None:
        super().__init__()
        self.network, self.answer = network, answer

    def last(self, *inputs: Tensor) -> Tensor:
        last: Tensor = self.network(*inputs)
        return last

    def forward(self, *inputs: Tensor) -> Tensor | dict[str, Tensor]:
        """Return what `StudentOutput.outputs` says."""
        return self.answer.outputs(self.last(*inputs))


class Probability(StudentOutput):
    name = "probability"

    def forward(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(self.calibrate(scores))

    def from_scores(self, scores: Array) -> Array:
        return sigmoid(scores)

    def to_scores(self, answers: Array) -> Array:
        chances = answers.astype(np.float64)
        with np.errstate(divide="ignore"):
            return np.log(chances) - np.log1p(-chances)

    def write(self, build: Building, last: str, name: str) -> None:
        build.add("Sigmoid", [self._calibrated(build, _flat(build, last, "logit"))], name)


class Probabilities(StudentOutput):
    name = "probabilities"

    def __init__(self, classes: int, calibration: Calibrator | None = None) -> None:
        super().__init__(calibration)
        self.width, self.shape = classes, ("N", classes)

    def scores(self, last: Tensor) -> Tensor:
        return last

    def forward(self, scores: Tensor) -> Tensor:
        return torch.softmax(self.calibrate(scores), -1)

    def from_scores(self, scores: Array) -> Array:
        return np.exp(log_softmax(scores))

    def to_scores(self, answers: Array) -> Array:
        return np.log(np.maximum(answers.astype(np.float64), np.finfo(np.float32).tiny))

    def write(self, build: Building, last: str, name: str) -> None:
        build.add("Softmax", [self._calibrated(build, last)], name)


class SeveralProbabilities(Probability, Probabilities):
    """Output layer for the probabilities of classes that are independent of each other, shape (n, classes)."""

    name = Probabilities.name

    def write(self, build: Building, last: str, name: str) -> None:
        build.add("Sigmoid", [self._calibrated(build, last)], name)


class NumberOutput(StudentOutput):
    """Output layer for a number, shape (n,): clip to [low, high], multiply by scale, add mean."""

    def __init__(self, name: str, low: float, high: float, scale: float = 1.0, mean: float = 0.0) -> None:
        super().__init__()
        self.name = name
        self.low: Tensor
        self.high: Tensor
        self.scale: Tensor
        self.mean: Tensor
        for key, value in (("low", low), ("high", high), ("scale", scale), ("mean", mean)):
            self.register_buffer(key, torch.tensor(value, dtype=torch.float32))

    def calibrate(self, scores: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(scores, self.low), self.high)

    def forward(self, scores: Tensor) -> Tensor:
        return self.calibrate(scores) * self.scale + self.mean

    def from_scores(self, scores: Array) -> Array:
        return scores.astype(np.float64) * float(self.scale) + float(self.mean)

    def to_scores(self, answers: Array) -> Array:
        return (answers.astype(np.float64) - float(self.mean)) / float(self.scale)

    def write(self, build: Building, last: str, name: str) -> None:
        low, high, scale, mean = (
            build.constant(f"{name}/{key}", getattr(self, key).numpy()) for key in ("low", "high", "scale", "mean")
        )
        flat = _flat(build, last, f"{name}/flat")
        bounded = build.add("Clip", [flat, low, high], f"{name}/bounded")
        build.add("Add", [build.add("Mul", [bounded, scale], f"{name}/scaled"), mean], name)


def _flat(build: Building, last: str, name: str) -> str:
    return build.add("Squeeze", [last, build.constant("last_axis", np.array([1], np.int64))], name)
