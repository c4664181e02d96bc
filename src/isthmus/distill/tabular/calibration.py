"""Calibration: what a student does with its probabilities after training, in torch and in its graph.

Parameters are buffers, saved with the weights. Until they are learned they change nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from onnx import TensorProto
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from isthmus.distill.evaluation.metrics import log_loss, sigmoid
from isthmus.distill.evaluation.multiclass import multiclass_log_loss
from isthmus.distill.labels import Calibration, Isotonic, Temperature
from isthmus.distill.onnx.builder import Building
from isthmus.distill.types import Array, Index

COOLEST, HOTTEST = 1 / 20, 20.0
SEGMENTS = 16
"""Lines of an isotonic map, at most."""
BIN_ROWS = 100
STEEPEST = 30.0
"""Of a line: a difference in the last bits of a probability becomes no more than that many times as large."""
LEAST = 1e-7
"""No probability is closer to 0 or 1."""

Squash = Callable[[Tensor], Tensor]


class Calibrated(nn.Module, ABC):
    """What is between a student's logits and its probabilities."""

    @abstractmethod
    def learn(self, logits: Array, labels: Index) -> None:
        """From the logits of the validation part, (n,) or (n, classes), and its (n,) labels."""

    @abstractmethod
    def logits(self, raw: Tensor) -> Tensor:
        """Calibrated logits, float32, of raw ones."""

    @abstractmethod
    def forward(self, raw: Tensor, squash: Squash) -> Tensor:
        """Calibrated probabilities of raw logits; `squash` is their sigmoid or softmax."""

    @abstractmethod
    def write(self, build: Building, raw: str, squash: str, name: str) -> None:
        """Adds the same to a graph, as a tensor of this name; `squash` is an operator."""


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

        def loss(power: float) -> float:
            divided = wide * np.exp(power)
            return multiclass_log_loss(labels, divided) if divided.ndim == 2 else log_loss(labels, sigmoid(divided))

        best = minimize_scalar(
            loss, bounds=(np.log(1 / HOTTEST), np.log(1 / COOLEST)),
            method="bounded", options={"xatol": 1e-6},
        )  # fmt: skip
        self.inverse.fill_(float(np.exp(best.x)))

    def logits(self, raw: Tensor) -> Tensor:
        """Divided."""
        return raw * self.inverse

    def forward(self, raw: Tensor, squash: Squash) -> Tensor:
        """Of the divided logits."""
        return squash(raw * self.inverse)

    def write(self, build: Building, raw: str, squash: str, name: str) -> None:
        """A multiplication more."""
        inverse = build.constant("calibration/inverse", self.inverse.numpy())
        build.add(squash, [build.add("Mul", [raw, inverse], f"{name}/scaled")], name)


class Risen(Calibrated):
    """A strictly rising map of the probability of a 1, by lines between points.

    Line k begins at (starts[k], values[k]), with the slope slopes[k]; starts rise from 0, and spare lines are at 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.starts: Tensor
        self.values: Tensor
        self.slopes: Tensor
        for name in ("starts", "values", "slopes"):
            self.register_buffer(name, torch.zeros(SEGMENTS + 1))
        self._set(np.array([0.0, 1.0]), np.array([0.0, 1.0]))

    def learn(self, logits: Array, labels: Index) -> None:
        """The points: of blocks of rows in the order of their probability, their mean and the share of ones."""
        self._set(*points(sigmoid(logits), labels))

    def _set(self, starts: Array, values: Array) -> None:
        spare = SEGMENTS + 1 - len(starts)
        slopes = np.append(np.diff(values) / np.diff(starts), [0.0] * (spare + 1))
        for buffer, numbers in ((self.starts, starts), (self.values, values)):
            buffer.copy_(torch.from_numpy(np.append(numbers, [numbers[-1]] * spare)))
        self.slopes.copy_(torch.from_numpy(slopes))

    def _mapped(self, chances: Tensor) -> Tensor:
        starts, slopes = (part.to(chances.dtype) for part in (self.starts, self.slopes))
        # Of each line the part below a probability. All runtimes have these operators.
        parts = torch.minimum((chances[:, None] - starts[:-1]).clamp(min=0), starts[1:] - starts[:-1])
        return self.values[0] + (parts * slopes[:-1]).sum(1)

    def logits(self, raw: Tensor) -> Tensor:
        """In float64 in between: logits of probabilities near 0 and 1 need all their digits."""
        return torch.logit(self._mapped(torch.sigmoid(raw.double())), eps=LEAST).float()

    def forward(self, raw: Tensor, squash: Squash) -> Tensor:
        """The map of the raw probabilities."""
        return self._mapped(squash(raw))

    def write(self, build: Building, raw: str, squash: str, name: str) -> None:
        """Looks up the line: comparisons, whole numbers, and a product and a sum, all of them exact or rounded once.

        No answer is above the end of its line, so that rounding does not make the map fall.
        """
        chance = build.add(squash, [raw], f"{name}/raw")
        axis = build.constant("calibration/axis", np.array([1]))
        column = build.add("Unsqueeze", [chance, axis], f"{name}/column")
        limits = build.constant("calibration/limits", self.starts[1:-1].numpy())
        passed = build.add("GreaterOrEqual", [column, limits], f"{name}/passed")
        whole = build.add("Cast", [passed], f"{name}/whole", to=TensorProto.INT64)
        line = build.add("ReduceSum", [whole, axis], f"{name}/line", keepdims=0)
        starts, values, slopes, ends = (
            build.add("Gather", [build.constant(f"calibration/{part}", numbers.numpy()), line], f"{name}/{part}")
            for part, numbers in (
                ("starts", self.starts), ("values", self.values), ("slopes", self.slopes), ("ends", self.values[1:]),
            )
        )  # fmt: skip
        above = build.add("Sub", [chance, starts], f"{name}/above")
        risen = build.add("Mul", [above, slopes], f"{name}/risen")
        build.add("Min", [build.add("Add", [values, risen], f"{name}/mapped"), ends], name)


def points(chances: Array, labels: Index) -> tuple[Array, Array]:
    """The points of a rising map, from (n,) probabilities and their labels of 0 and 1: starts and values, both rising.

    Bins of at least 100 rows, at most 15 of them, are pooled until their shares of ones rise (Ayer et al., 1955, the
    "pool adjacent violators"), and where a line between two would be too steep. Half a one and half a zero are added to
    each bin, for bins that have none. The first point is at 0, the last at 1.
    """
    order = np.argsort(chances, kind="stable")
    bins = max(1, min(SEGMENTS - 1, len(order) // BIN_ROWS))
    blocks: list[tuple[float, float, float]] = []
    for part in np.array_split(order, bins):
        # Rows, the sum of their probabilities, and of their labels.
        block = (len(part) + 1.0, float(chances[part].sum() + chances[part].mean()), float(labels[part].sum() + 0.5))
        while blocks and _falls(blocks[-1], block):
            rows, sums, ones = blocks.pop()
            block = (rows + block[0], sums + block[1], ones + block[2])
        blocks.append(block)
    x, y = (np.array([block[part] / block[0] for block in blocks]) for part in (1, 2))
    first, last = max(LEAST, y[0] - STEEPEST * x[0]), min(1 - LEAST, y[-1] + STEEPEST * (1 - x[-1]))
    inside = (x > 0) & (x < 1)
    return np.array([0.0, *x[inside], 1.0]), np.array([first, *y[inside], last])


def _falls(block: tuple[float, float, float], following: tuple[float, float, float]) -> bool:
    """Whether the share of ones does not rise from a block to the next, or too steeply."""
    across = following[1] / following[0] - block[1] / block[0]
    up = following[2] / following[0] - block[2] / block[0]
    return not 0 < up <= STEEPEST * across
