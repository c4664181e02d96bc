"""The declaration of a distillation: which features each model sees, and how the student learns."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.features.errors import Problem
from isthmus.features.spec import FeatureService, Spine


@dataclass(frozen=True)
class Distillation:
    """A teacher, a student and how the one learns from the other.

    Attributes:
        name: unique within the project; the name of the model and the start of its package folder.
        spine: the examples and their label.
        teacher: what the teacher sees: everything the server has.
        student: what the student sees: only what the device has when it predicts.
        teacher_rounds: trees of the gradient boosting.
        teacher_learning_rate: weight of each tree.
        hidden: width of the student's hidden layers, first to last.
        dropout: share of hidden units left out in a training step.
        learning_rate: the largest step of AdamW.
        weight_decay: decoupled weight decay of AdamW.
        temperature: T of the distillation loss; larger softens the teacher's probabilities.
        soft_weight: share of the teacher's term in the loss; 0 learns from the labels alone.
        split: shares of the training, validation and test parts, in order of event time.
        min_lift: share of the reference's lift over an AUC of 0.5 that the student must keep to be packaged.
        seed: of the student's weights, batches and dropout.
        description: for people.
    """

    name: str
    spine: Spine
    teacher: FeatureService
    student: FeatureService
    teacher_rounds: int = 60
    teacher_learning_rate: float = 0.15
    hidden: Sequence[int] = (64, 32)
    dropout: float = 0.1
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    temperature: float = 2.0
    soft_weight: float = 0.7
    split: tuple[float, float, float] = (0.7, 0.1, 0.2)
    min_lift: float = 0.95
    seed: int = 0
    description: str = ""

    def problems(self) -> list[Problem]:
        """Everything wrong in the values, one entry each."""
        checks = [
            (
                "name",
                bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", self.name)),
                "a letter, then letters, digits, - or _",
            ),
            ("teacher_rounds", self.teacher_rounds >= 1, "at least 1"),
            ("teacher_learning_rate", 0 < self.teacher_learning_rate <= 1, "more than 0, at most 1"),
            ("hidden", all(width >= 1 for width in self.hidden), "widths of at least 1"),
            ("dropout", 0 <= self.dropout < 1, "at least 0, less than 1"),
            ("learning_rate", 0 < self.learning_rate < math.inf, "more than 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "at least 0"),
            ("temperature", 0 < self.temperature < math.inf, "more than 0"),
            ("soft_weight", 0 <= self.soft_weight <= 1, "0 to 1"),
            (
                "split",
                len(self.split) == 3 and all(share > 0 for share in self.split) and math.isclose(sum(self.split), 1),
                "three shares above 0 whose sum is 1",
            ),
            ("min_lift", 0 <= self.min_lift < math.inf, "at least 0"),
            ("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1"),
        ]
        where = f"distillation {self.name}"
        return [
            Problem(f"{where}: {key}", repr(getattr(self, key)), expected) for key, good, expected in checks if not good
        ]
