"""The settings of a training run: duration, learning rate, and selection of the best weights."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from isthmus.features.definition.failure import type_problems
from isthmus.features.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """Settings of a training run.

    Attributes:
        epochs: passes over the data; set either this or `steps`.
        steps: optimizer steps.
        batch: rows per step, over all processes.
        accumulation: number of parts into which each process divides its share of a batch, to save memory; changes
            results only by rounding.
        learning_rate: maximum learning rate of AdamW.
        weight_decay: decoupled weight decay of AdamW.
        schedule: decay of the learning rate after the warm-up: to zero, or "constant".
        warm_up: share of the steps over which the learning rate rises.
        clip: maximum norm of all gradients together; None to not clip.
        gate: metric that selects the best weights; None for the last weights.
        best: "max" if a higher gate is better, else "min".
        patience: evaluations without a better gate after which training stops; None to never stop early.
        evaluate_every: steps between evaluations; None to evaluate after each epoch. The last step is always evaluated.
        checkpoint_steps: steps between checkpoints; None to not write them by steps.
        checkpoint_seconds: seconds between checkpoints; None to not write them by time. A run that ends or is stopped
            by a signal always writes a last checkpoint.
        seed: seed of the row order and of everything random in a step.
    """

    epochs: int | None = None
    steps: int | None = None
    batch: int = 1024
    accumulation: int = 1
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warm_up: float = 0.1
    clip: float | None = None
    gate: str | None = None
    best: Literal["max", "min"] = "max"
    patience: int | None = None
    evaluate_every: int | None = None
    checkpoint_steps: int | None = None
    checkpoint_seconds: float | None = 60.0
    seed: int = 0

    def problems(self, where: str) -> list[Problem]:
        if wrong := type_problems(self, f"{where}: "):
            return wrong
        counts = ("batch", "accumulation")
        maybe = ("epochs", "steps", "patience", "evaluate_every", "checkpoint_steps")
        checks = [
            *((key, getattr(self, key) >= 1, "at least 1") for key in counts),
            *((key, getattr(self, key) is None or getattr(self, key) >= 1, "at least 1") for key in maybe),
            ("steps", (self.steps is None) != (self.epochs is None), "either epochs or steps"),
            ("learning_rate", 0 < self.learning_rate < math.inf, "more than 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "at least 0"),
            ("schedule", self.schedule in ("cosine", "linear", "constant"), "cosine, linear or constant"),
            ("warm_up", 0 <= self.warm_up <= 1, "0 to 1"),
            ("clip", self.clip is None or 0 < self.clip < math.inf, "more than 0"),
            ("best", self.best in ("max", "min"), "max or min"),
            ("patience", self.patience is None or self.gate is not None, "None, since `gate` is None"),
            ("checkpoint_seconds", self.checkpoint_seconds is None or self.checkpoint_seconds > 0, "more than 0"),
            ("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1"),
        ]
        return failed_checks(self, where, checks)

    def identity(self) -> dict[str, Any]:
        """Return all settings that affect the trained weights, by name: all except `checkpoint_...`.

        A run resumes from a checkpoint only if these settings are unchanged.
        """
        return {key: value for key, value in asdict(self).items() if not key.startswith("checkpoint")}

    def total(self, rows: int) -> int:
        """Return the number of optimizer steps of a training run: `steps` if set, else `epochs` passes over the rows.

        `rows` is the number of training rows.
        """
        return self.steps or (self.epochs or 0) * math.ceil(rows / self.batch)

    def rate(self, step: int, total: int) -> float:
        """Return the factor, 0 to 1, by which to multiply `learning_rate` at a step, for warm-up and schedule.

        `step` counts from 0. `total` is the number of steps of the run (see the method `total`).
        """
        rise = round(self.warm_up * total)
        if step < rise:
            return (step + 1) / rise
        if self.schedule == "constant":
            return 1.0
        left = (total - step) / (total - rise + 1)
        return left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


Settings = TrainingSettings


def failed_checks(declared: object, where: str, checks: Iterable[tuple[str, bool, str]]) -> list[Problem]:
    return [
        Problem(f"{where}: {key}", repr(getattr(declared, key)), expected) for key, good, expected in checks if not good
    ]
