"""Calibration: what a student does with its probabilities after training, in torch and in its graph.

Parameters are buffers, saved with the weights. Until they are learned they change nothing.
"""

import math
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from onnx import TensorProto
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from isthmus.distill.evaluation.multiclass import log_softmax
from isthmus.distill.labels import Calibration, Isotonic, Temperature
from isthmus.distill.onnx.builder import Building
from isthmus.distill.types import Array, Index

COOLEST, HOTTEST = 1 / 20, 20.0
POINTS = 15
"""Of a rising map, at most."""
STEEPEST = 10.0
"""Of a line: a difference in the last bits of a logit becomes no more than that many times as large."""
_FAR = float(np.finfo(np.float32).max)
"""Where spare points are: beyond any logit."""


class Calibrated(nn.Module, ABC):
    """What is between a student's last layer and its probabilities: from logits to logits."""

    @abstractmethod
    def learn(self, logits: Array, labels: Index) -> None:
        """From the logits of the validation part, (n,) or (n, classes), and its (n,) labels."""

    @abstractmethod
    def forward(self, logits: Tensor) -> Tensor:
        """Calibrated logits."""

    @abstractmethod
    def write(self, build: Building, logits: str) -> str:
        """Adds the same to a graph, and returns the tensor."""


def calibrated(declared: Calibration | None) -> Calibrated | None:
    """What a declaration asks for, before it has learned."""
    kinds: dict[type, type[Calibrated]] = {Temperature: Scaled, Isotonic: Risen}
    return None if declared is None else kinds[type(declared)]()


class Scaled(Calibrated):
    """Logits divided by a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.inverse: Tensor
        self.register_buffer("inverse", torch.ones(()))

    def learn(self, logits: Array, labels: Index) -> None:
        """The temperature, 1/20 to 20, of the least log loss: its only minimum, as that is convex in the inverse."""
        wide = logits.astype(np.float64)
        if wide.ndim == 1:
            wide = np.stack([np.zeros_like(wide), wide], 1)
        rows = np.arange(len(labels))

        def loss(power: float) -> float:
            # Not clipped as the measures are: the loss of rows beyond the clip would be flat, with minima of its own.
            return float(-log_softmax(wide * np.exp(power))[rows, labels].mean())

        best = minimize_scalar(
            loss, bounds=(np.log(1 / HOTTEST), np.log(1 / COOLEST)),
            method="bounded", options={"xatol": 1e-6},
        )  # fmt: skip
        self.inverse.fill_(float(np.exp(best.x)))

    def forward(self, logits: Tensor) -> Tensor:
        """Divided."""
        return logits * self.inverse

    def write(self, build: Building, logits: str) -> str:
        """A multiplication."""
        inverse = build.constant("calibration/inverse", self.inverse.numpy())
        return build.add("Mul", [logits, inverse], "calibration/scaled")


class Risen(Calibrated):
    """A strictly rising map of the logit of a 1, by lines between points.

    Line k begins at (starts[k], values[k]), with the slope slopes[k]; the line before the first has the slope 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starts: Tensor
        self.values: Tensor
        self.slopes: Tensor
        for name in ("starts", "values", "slopes"):
            self.register_buffer(name, torch.zeros(POINTS))
        self._set(np.zeros(1), np.zeros(1))

    def learn(self, logits: Array, labels: Index) -> None:
        """The points: of blocks of rows in the order of their logits, their mean and the logit of the share of ones."""
        self._set(*points(logits.astype(np.float64), labels))

    def _set(self, starts: Array, values: Array) -> None:
        spare = POINTS - len(starts)
        slopes = [*np.diff(values) / np.diff(starts), 1.0]
        for buffer, numbers, far in (
            (self.starts, starts, _FAR), (self.values, values, _FAR), (self.slopes, slopes, 0.0),
        ):  # fmt: skip
            buffer.copy_(torch.tensor([*numbers, *[far] * spare]))

    def forward(self, logits: Tensor) -> Tensor:
        """The map. Of each line the part below a logit: all runtimes have these operators."""
        ends = torch.cat([self.starts[1:], self.starts.new_full((1,), _FAR)])
        parts = torch.minimum((logits[:, None] - self.starts).clamp(min=0), ends - self.starts)
        below = (logits - self.starts[0]).clamp(max=0)
        return self.values[0] + below + (parts * self.slopes).sum(1)

    def write(self, build: Building, logits: str) -> str:
        """Looks up the line: comparisons, whole numbers, and a product and a sum, all of them exact or rounded once.

        Nothing is above the end of its line, so that rounding does not make the map fall.
        """
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
    """The points of a rising map, from (n,) logits and their labels of 0 and 1: starts and values, both rising.

    Half the square root of n bins, at most 15 of them, are pooled until their shares of ones rise (Ayer et al., 1955,
    the "pool adjacent violators"), and where a line between two would be too steep. Half a one and half a zero are
    added to each bin, for bins that have none.
    """
    order = np.argsort(logits, kind="stable")
    # A bin's mean logit is the logit of its share only where its logits are alike: wide bins harm more than noisy ones.
    bins = max(1, min(POINTS, math.isqrt(len(order)) // 2))
    blocks: list[_Block] = []
    for part in np.array_split(order, bins):
        block = _Block(len(part) + 1.0, float(logits[part].mean()) * (len(part) + 1), float(labels[part].sum()) + 0.5)
        while blocks and block.falls_from(blocks[-1]):
            block = _Block(*map(sum, zip(blocks.pop(), block, strict=True)))
        blocks.append(block)
    return np.array([block.start for block in blocks]), np.array([block.value for block in blocks])


class _Block(NamedTuple):
    """The number of rows, the sum of their logits, and that of their labels."""

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
        """Whether the share of ones does not rise from the block before, or too steeply."""
        return not 0 < self.value - before.value <= STEEPEST * (self.start - before.start)
