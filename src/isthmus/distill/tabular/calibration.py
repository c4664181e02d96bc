"""Calibration of a student's probabilities after training, in PyTorch and in the exported ONNX graph."""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from onnx import TensorProto
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from isthmus.distill.evaluation.metrics import log_softmax
from isthmus.distill.labels import Calibration, Isotonic, Temperature
from isthmus.distill.onnx.builder import Building
from isthmus.distill.types import Array, Index

COOLEST, HOTTEST = 1 / 20, 20.0
POINTS = 15
"""Maximum number of points of an isotonic map."""
STEEPEST = 10.0
"""Maximum slope of a line, so that rounding differences between logits are amplified at most this much."""
_FAR = float(np.finfo(np.float32).max)
"""Position of unused points: beyond any logit."""


class Calibrator(nn.Module, ABC):
    """Maps a student's logits to calibrated logits. Saved with the weights; no effect before `learn`."""

    @abstractmethod
    def learn(self, logits: Array, labels: Index) -> None:
        """Fit this calibration in place after training.

        `logits` are the student's logits for the validation rows, (n,) or (n, classes), and `labels` their labels,
        (n,), or (n, classes) for independent classes.
        """

    @abstractmethod
    def forward(self, logits: Tensor) -> Tensor: ...

    @abstractmethod
    def write(self, build: Building, logits: str) -> str:
        """Add this calibration to the ONNX graph of a student, and return the name of the tensor of calibrated logits.

        `logits` is the name of the tensor to calibrate.
        """


def create_calibrator(declared: Calibration | None) -> Calibrator | None:
    kinds: dict[type, type[Calibrator]] = {Temperature: TemperatureCalibrator, Isotonic: IsotonicCalibrator}
    return None if declared is None else kinds[type(declared)]()


class TemperatureCalibrator(Calibrator):
    def __init__(self) -> None:
        super().__init__()
        self.inverse: Tensor
        self.register_buffer("inverse", torch.ones(()))

    def learn(self, logits: Array, labels: Index) -> None:
        wide = logits.astype(np.float64)
        if logits.shape == labels.shape:
            wide, labels = wide.ravel(), labels.ravel()
            wide = np.stack([np.zeros_like(wide), wide], 1)
        rows = np.arange(len(labels))

        def loss(power: float) -> float:
            # Unlike the metrics, do not clip: a clipped loss is flat in places, which adds minima.
            return float(-log_softmax(wide * np.exp(power))[rows, labels].mean())

        best = minimize_scalar(
            loss, bounds=(np.log(1 / HOTTEST), np.log(1 / COOLEST)),
            method="bounded", options={"xatol": 1e-6},
        )  # fmt: skip
        self.inverse.fill_(float(np.exp(best.x)))

    def forward(self, logits: Tensor) -> Tensor:
        return logits * self.inverse

    def write(self, build: Building, logits: str) -> str:
        inverse = build.constant("calibration/inverse", self.inverse.numpy())
        return build.add("Mul", [logits, inverse], "calibration/scaled")


class IsotonicCalibrator(Calibrator):
    """Increasing, piecewise linear map of logits: line k begins at (starts[k], values[k]) with slope slopes[k]."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: Tensor
        self.values: Tensor
        self.slopes: Tensor
        for name in ("starts", "values", "slopes"):
            self.register_buffer(name, torch.zeros(POINTS))
        self._set(np.zeros(1), np.zeros(1))

    def learn(self, logits: Array, labels: Index) -> None:
        self._set(*points(logits.astype(np.float64), labels))

    def _set(self, starts: Array, values: Array) -> None:
        spare = POINTS - len(starts)
        slopes = [*np.diff(values) / np.diff(starts), 1.0]
        for buffer, numbers, far in (
            (self.starts, starts, _FAR), (self.values, values, _FAR), (self.slopes, slopes, 0.0),
        ):  # fmt: skip
            buffer.copy_(torch.tensor([*numbers, *[far] * spare]))

    def forward(self, logits: Tensor) -> Tensor:
        # Add up the rises of all lines below each logit: every runtime can do this.
        ends = torch.cat([self.starts[1:], self.starts.new_full((1,), _FAR)])
        parts = torch.minimum((logits[:, None] - self.starts).clamp(min=0), ends - self.starts)
        below = (logits - self.starts[0]).clamp(max=0)
        return self.values[0] + below + (parts * self.slopes).sum(1)

    def write(self, build: Building, logits: str) -> str:
        # Find each logit's line and apply it, capped at its end.
        starts, values, slopes = (buffer.numpy() for buffer in (self.starts, self.values, self.slopes))
        tables = {
            "start": np.insert(starts, 0, starts[0]), "value": np.insert(values, 0, values[0]),
            "slope": np.insert(slopes, 0, np.float32(1)), "end": np.append(values, np.float32(_FAR)),
        }  # fmt: skip
        axis = build.constant("calibration/axis", np.array([1]))
        column = build.add("Unsqueeze", [logits, axis], "calibration/column")
        passed = build.add(
            "GreaterOrEqual", [column, build.constant("calibration/starts", starts)], "calibration/passed"
        )
        whole = build.add("Cast", [passed], "calibration/whole", to=TensorProto.INT64)
        line = build.add("ReduceSum", [whole, axis], "calibration/line", keepdims=0)
        start, value, slope, end = (
            build.add("Gather", [build.constant(f"calibration/{name}s_of_lines", table), line], f"calibration/{name}")
            for name, table in tables.items()
        )
        risen = build.add("Mul", [build.add("Sub", [logits, start], "calibration/above"), slope], "calibration/risen")
        return build.add("Min", [build.add("Add", [value, risen], "calibration/mapped"), end], "calibration/bounded")


def points(logits: Array, labels: Index) -> tuple[Array, Array]:
    """Fit an increasing, piecewise linear calibration; return the start of each line and its calibrated logit.

    `logits` are (n,), and `labels` their labels, 0 or 1. Sorts the logits into sqrt(n) / 2 bins, at least 1 and at most
    15. Merges adjacent bins until the share of ones increases from bin to bin ("pool adjacent violators", Ayer et al.,
    1955) and no line is steeper than `STEEPEST` (10). Adds half a one and half a zero to each bin, so that no share is
    0 or 1.
    """
    order = np.argsort(logits, kind="stable")
    # A bin's mean logit represents the bin only if its logits are close, so prefer noisy bins to wide ones.
    bins = max(1, min(POINTS, math.isqrt(len(order)) // 2))
    blocks: list[_Block] = []
    for part in np.array_split(order, bins):
        block = _Block(len(part) + 1.0, float(logits[part].mean()) * (len(part) + 1), float(labels[part].sum()) + 0.5)
        while blocks and block.falls_from(blocks[-1]):
            block = _Block(*map(sum, zip(blocks.pop(), block, strict=True)))
        blocks.append(block)
    return np.array([block.start for block in blocks]), np.array([block.value for block in blocks])


class _Block(NamedTuple):
    """Sums over the rows of a bin, with the pseudo counts: number of rows, logits and labels."""

    rows: float
    logits: float
    ones: float

    @property
    def start(self) -> float:
        return self.logits / self.rows

    @property
    def value(self) -> float:
        return math.log(self.ones / (self.rows - self.ones))

    def falls_from(self, before: "_Block") -> bool:
        return not 0 < self.value - before.value <= STEEPEST * (self.start - before.start)
