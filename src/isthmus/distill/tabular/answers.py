"""The end of a student: from its last layer to what its graph answers, in torch, in NumPy and as nodes.

Students, teachers and labels are compared in the form of `scores`: of the logits, or of numbers in standard form.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.distill.evaluation.metrics import sigmoid
from isthmus.distill.evaluation.multiclass import log_softmax
from isthmus.distill.onnx.builder import Building
from isthmus.distill.tabular.calibration import Calibrated
from isthmus.distill.types import Array

MOST_SCORE = 16.0
"""A row that scores that much more than another is nine million times as likely to come first."""


class Answer(nn.Module, ABC):
    """What a student makes of its last layer, float32 (n, width).

    Attributes:
        name: of the graph's output.
        width: of the last layer.
        shape: sizes of the graph's output.
        calibration: of its probabilities, if any.
    """

    name: str
    width: int = 1
    shape: Sequence[int | str] = ("N",)

    def __init__(self, calibration: Calibrated | None = None) -> None:
        super().__init__()
        self.calibration = calibration

    def scores(self, last: Tensor) -> Tensor:
        """The form for losses: float32 (n,)."""
        return last[:, 0]

    def final(self, scores: Tensor) -> Tensor:
        """The scores of a student that is trained: calibrated, or within bounds."""
        calibrated: Tensor = scores if self.calibration is None else self.calibration(scores)
        return calibrated

    @abstractmethod
    def forward(self, scores: Tensor) -> Tensor:
        """What the graph answers."""

    @abstractmethod
    def computed(self, scores: Array) -> Array:
        """Likewise from final scores, in float64."""

    @abstractmethod
    def replied(self, answers: Array) -> Array:
        """The inverse of `computed`."""

    @abstractmethod
    def write(self, build: Building, last: str, name: str) -> None:
        """Adds the nodes from the last layer to the answer, as a tensor of this name."""

    def _calibrated(self, build: Building, logits: str) -> str:
        return logits if self.calibration is None else self.calibration.write(build, logits)


class Probability(Answer):
    """The probability of a 1."""

    name = "probability"

    def forward(self, scores: Tensor) -> Tensor:
        """Probabilities (n,)."""
        return torch.sigmoid(self.final(scores))

    def computed(self, scores: Array) -> Array:
        """Probabilities (n,)."""
        return sigmoid(scores)

    def replied(self, answers: Array) -> Array:
        """Logits (n,)."""
        chances = answers.astype(np.float64)
        with np.errstate(divide="ignore"):
            return np.log(chances) - np.log1p(-chances)

    def write(self, build: Building, last: str, name: str) -> None:
        """A sigmoid."""
        build.add("Sigmoid", [self._calibrated(build, _flat(build, last, "logit"))], name)


class Probabilities(Answer):
    """The probabilities of classes."""

    name = "probabilities"

    def __init__(self, classes: int, calibration: Calibrated | None = None) -> None:
        super().__init__(calibration)
        self.width, self.shape = classes, ("N", classes)

    def scores(self, last: Tensor) -> Tensor:
        """Logits (n, classes)."""
        return last

    def forward(self, scores: Tensor) -> Tensor:
        """Probabilities (n, classes)."""
        return torch.softmax(self.final(scores), -1)

    def computed(self, scores: Array) -> Array:
        """Probabilities (n, classes)."""
        return np.exp(log_softmax(scores))

    def replied(self, answers: Array) -> Array:
        """Logits (n, classes): the logarithms, at least those of the smallest float32."""
        return np.log(np.maximum(answers.astype(np.float64), np.finfo(np.float32).tiny))

    def write(self, build: Building, last: str, name: str) -> None:
        """A softmax."""
        build.add("Softmax", [self._calibrated(build, last)], name)


class Line(Answer):
    """A number: the last layer within bounds, times a scale, plus a mean. All of them are saved with the weights."""

    def __init__(self, name: str, low: float, high: float, scale: float = 1.0, mean: float = 0.0) -> None:
        super().__init__()
        self.name = name
        self.low: Tensor
        self.high: Tensor
        self.scale: Tensor
        self.mean: Tensor
        for key, value in (("low", low), ("high", high), ("scale", scale), ("mean", mean)):
            self.register_buffer(key, torch.tensor(value, dtype=torch.float32))

    def final(self, scores: Tensor) -> Tensor:
        """Within the bounds."""
        return torch.minimum(torch.maximum(scores, self.low), self.high)

    def forward(self, scores: Tensor) -> Tensor:
        """Numbers (n,)."""
        return self.final(scores) * self.scale + self.mean

    def computed(self, scores: Array) -> Array:
        """Numbers (n,)."""
        return scores.astype(np.float64) * float(self.scale) + float(self.mean)

    def replied(self, answers: Array) -> Array:
        """In standard form, (n,)."""
        return (answers.astype(np.float64) - float(self.mean)) / float(self.scale)

    def write(self, build: Building, last: str, name: str) -> None:
        """Bounds, and what takes a number out of its standard form."""
        low, high, scale, mean = (
            build.constant(f"{name}/{key}", getattr(self, key).numpy()) for key in ("low", "high", "scale", "mean")
        )
        flat = _flat(build, last, f"{name}/flat")
        bounded = build.add("Clip", [flat, low, high], f"{name}/bounded")
        build.add("Add", [build.add("Mul", [bounded, scale], f"{name}/scaled"), mean], name)


def _flat(build: Building, last: str, name: str) -> str:
    return build.add("Squeeze", [last, build.constant("last_axis", np.array([1], np.int64))], name)
