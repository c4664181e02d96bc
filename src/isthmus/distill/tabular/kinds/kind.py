"""What is particular to a kind of label: what is learned from it, what is measured, what is answered."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Self

import pyarrow as pa
import torch
from torch import Tensor

from isthmus.distill.declaration import Tabular
from isthmus.distill.evaluation.metrics import agreement
from isthmus.distill.losses.objective import Objective
from isthmus.distill.tabular.answers import Answer
from isthmus.distill.tabular.teacher import Learner
from isthmus.distill.tasks.split import Split
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.values.columns import Values
from isthmus.package.manifest import ROUNDING


class Kind(ABC):
    """The labels of n rows. Scores of students and teachers are in the form of `Answer.scores`.

    Attributes:
        key: of the scores among the outputs of a student and its teacher.
        metric: the figure of `quality` by which weights are selected.
        more: whether more of it is better.
        pipeline: the hub's name of such models; None if it has none.
        tolerance: the largest absolute difference between the graph's answers in each precision and the student's.
        rounding: how far apart two processors may be in an answer.
        values: the labels, (n,), as `quality` takes them.
        targets: the labels, (n, ...), as the objective takes them.
        groups: the number of each row's group, (n,); None without groups.
        classes: their names, in the order of the logits; None without.
    """

    key: str = "logits"
    metric: str
    more = True
    pipeline: str | None = None
    tolerance: Mapping[str, float] = {"fp32": 1e-5, "int8": 0.05}
    rounding: float = ROUNDING
    values: Array
    targets: Tensor
    groups: Index | None = None
    classes: Sequence[str] | None = None

    @abstractmethod
    def __init__(self, table: pa.Table, label: str, parts: Split, declared: Tabular) -> None:
        """Raises a DataError if the column is none of such labels, or a part has too few of them."""

    @property
    @abstractmethod
    def learner(self) -> Learner:
        """The teacher's."""

    @property
    def taught(self) -> Array:
        """The labels as the learner takes them, (n,)."""
        return self.values

    @property
    def recipe(self) -> Mapping[str, Any]:
        """What a teacher's answers depend on beside the column, its options and its rows; plain data."""
        return {}

    @abstractmethod
    def answer(self) -> Answer:
        """The end of a new student."""

    @abstractmethod
    def objective(self, declared: Tabular) -> Objective:
        """What a student is trained for."""

    @abstractmethod
    def quality(self, answers: Answers, rows: Index) -> dict[str, float]:
        """Figures of a model's scores of these rows."""

    @abstractmethod
    def score(self, answers: Answers, rows: Index) -> float:
        """The `metric` alone."""

    @abstractmethod
    def chance(self, rows: Index) -> float:
        """The `metric` of a model on these rows that knows no input."""

    @abstractmethod
    def leak(self, column: Values, rows: Index) -> str:
        """How an input says the label by itself, in words; empty if it does not. `column` has these rows."""

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:
        """How alike scores are: of logits."""
        return agreement(student[self.key], teacher[self.key])

    def take(self, rows: Index) -> Self:
        """The labels of these rows, in their order."""
        kind = copy.copy(self)
        kind.values, kind.targets = self.values[rows], self.targets[torch.from_numpy(rows)]
        kind.groups = None if self.groups is None else self.groups[rows]
        return kind
