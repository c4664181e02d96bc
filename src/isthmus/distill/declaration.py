"""The declaration of a distillation: which features each model sees, and how the student learns."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol

from isthmus.features.contract import one_of
from isthmus.features.errors import Problem
from isthmus.features.spec import FeatureService, Spine
from isthmus.features.types import DataType, String
from isthmus.transforms.steps import Embed, Impute, Standardize, Step, Text

DEFAULT: tuple[Step, ...] = (Standardize(), Impute(0.0))
"""What is done to a number, unless something else is declared."""


class Named(Protocol):
    """An input: its name and its type."""

    @property
    def name(self) -> str:
        """Its column."""

    @property
    def dtype(self) -> DataType:
        """Its type."""


class Plan(NamedTuple):
    """What is done to each input: the steps of the numbers, and what is made of the texts."""

    numbers: Mapping[str, Sequence[Step]]
    texts: Mapping[str, Text]


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
        preparation: what is done to the student's inputs: input, or pattern of inputs with * and ?, to the steps of a
            number or to what is made of a text. The first pattern that fits counts; for others, numbers are
            standardized and texts embedded.
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
    preparation: Mapping[str, Sequence[Step] | Text] = field(default_factory=dict)
    min_lift: float = 0.95
    seed: int = 0
    description: str = ""

    def plan(self, inputs: Sequence[Named]) -> Plan:
        """What is done to each input of the student."""
        numbers: dict[str, tuple[Step, ...]] = {}
        texts: dict[str, Text] = {}
        for item in inputs:
            chosen = next((how for name, how in self.preparation.items() if fnmatchcase(item.name, name)), None)
            if item.dtype == String:
                texts[item.name] = Embed() if chosen is None or isinstance(chosen, Sequence) else chosen
            else:
                numbers[item.name] = tuple(chosen) if isinstance(chosen, Sequence) else DEFAULT
        return Plan(numbers, texts)

    def misfits(self, inputs: Sequence[Named]) -> list[Problem]:
        """What in the preparation does not fit the student's inputs."""
        problems = []
        for pattern, how in self.preparation.items():
            where = f"distillation {self.name}: preparation of {pattern!r}"
            found = [item for item in inputs if fnmatchcase(item.name, pattern)]
            if not found:
                problems.append(
                    Problem(where, "no input of the student has such a name", one_of(i.name for i in inputs))
                )
            steps = isinstance(how, Sequence) and not isinstance(how, str)
            if not (isinstance(how, Text) or (steps and all(isinstance(step, Step) for step in how))):
                problems.append(Problem(where, repr(how), "a list of Log1p, Clip, Impute and Standardize, or one of "
                                        "Embed, OneHot, Ordinal and Hashed"))  # fmt: skip
                continue
            several = how if isinstance(how, Sequence) else [how]
            problems += [Problem(where, repr(one), one.misfit()) for one in several if one.misfit()]
            for item in found:
                if (item.dtype == String) == steps:
                    kind = "a text, which has no steps" if steps else f"of type {item.dtype}, which has no words"
                    expected = "Embed, OneHot, Ordinal or Hashed" if steps else "a list of steps"
                    problems.append(Problem(where, f"{item.name} is {kind}", expected))
        return problems

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
