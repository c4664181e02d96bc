"""Weights of terms that change during training."""

import math
from dataclasses import dataclass
from typing import Literal

from isthmus.features.errors import ConfigurationError, Problem


@dataclass(frozen=True, slots=True)
class Schedule:
    """A weight that moves from `start` to `end` and stays there.

    With x = min(1, progress / until), the weight is start + (end - start) x for "linear", and start + (end - start) (1
    - cos(πx)) / 2 for "cosine".

    Attributes:
        start: weight at the beginning.
        end: weight from `until` on.
        curve: "linear", or "cosine", which changes slowly at both ends.
        until: share of the training at which `end` is reached, above 0 and at most 1.
    """

    start: float
    end: float
    curve: Literal["linear", "cosine"] = "linear"
    until: float = 1.0

    def __post_init__(self) -> None:
        problems = [
            Problem(name, repr(value), "a finite number")
            for name, value in (("start", self.start), ("end", self.end))
            if not math.isfinite(value)
        ]
        if self.curve not in ("linear", "cosine"):
            problems.append(Problem("curve", repr(self.curve), '"linear" or "cosine"'))
        if not 0 < self.until <= 1:
            problems.append(Problem("until", repr(self.until), "above 0, at most 1"))
        if problems:
            raise ConfigurationError("schedule of a weight", problems)

    def __call__(self, progress: float) -> float:
        """Return the weight at a finished share of the training, 0 to 1."""
        share = min(1.0, progress / self.until)
        if self.curve == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return (1 - share) * self.start + share * self.end
