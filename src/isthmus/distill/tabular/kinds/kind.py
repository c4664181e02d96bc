"""Base of the kinds of label: what the models learn, how they are measured, and what the student outputs."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from isthmus.distill.declaration import Predictor
from isthmus.distill.evaluation.metrics import agreement
from isthmus.distill.labels import Label
from isthmus.distill.losses.logits import IGNORED
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.tabular.answers import StudentOutput
from isthmus.distill.tabular.teacher import Learner
from isthmus.distill.tabular.users.prediction import Prediction
from isthmus.distill.tasks.split import Split
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.values.columns import Values
from isthmus.package.manifest import ROUNDING


class Kind(ABC):
    """The labels of n rows, with everything in a tabular task that depends on the kind of label.

    Attributes:
        key: key of the scores among the outputs of student and teacher; for scores see `StudentOutput.scores`.
        metric: metric in `quality` that selects the weights.
        more: True if a higher metric is better.
        tolerance: largest absolute difference allowed between the student and its graph, per precision.
        rounding: largest difference between the outputs of two processors.
        values: labels, (n,) or (n, classes), for `quality`.
        targets: labels, (n, ...), for the losses.
        teacher_labels: labels that the teacher is trained on: standardized for numbers and ranks, else `values`.
        recipe: plain data that determines the teacher's outputs in addition to the label column, options and rows.
        groups: group number of each row, (n,), for ranking; else None.
        classes: class names in the order of the logits, or None if the label has no classes.
        complete: True if every row has a label. Else `values` and `targets` have -1, NaN or `IGNORED` for the others.
    """

    key: str = Label.key
    metric: str
    more = True
    pipeline: str | None = None
    tolerance: Mapping[str, float] = {"fp32": 1e-5, "int8": 0.05}
    rounding: float = ROUNDING
    values: Array
    targets: Tensor
    teacher_labels: Array
    learner: Learner
    recipe: Mapping[str, Any] = {}
    groups: Index | None = None
    classes: Sequence[str] | None = None
    complete = True

    @abstractmethod
    def __init__(self, table: pa.Table, label: str, parts: Split, declared: Predictor) -> None:
        """Read the label column; raise a DataError if a value does not fit, or a part has too few distinct labels."""

    @abstractmethod
    def answer(self) -> StudentOutput:
        """Create an output layer for a new student, suited to this kind of label."""

    @abstractmethod
    def objective(self, declared: Predictor) -> Objective: ...

    @abstractmethod
    def teacher_scores(self, prediction: Prediction, where: str) -> Array:
        """Convert what a user's teacher predicts to scores, float64 (n,) or (n, classes); NaN without an answer.

        Raise a ConfigurationError or a DataError at `where` if the prediction does not fit the label.
        """

    def fitted_labels(self) -> Array:
        """Return the labels, (n,) or (n, classes), to which a user's teacher is fitted."""
        return self.values

    def _taught(self, hard: Callable[..., Tensor], soft: Callable[..., Tensor], declared: Predictor) -> Objective:
        """Return an objective with labels and soft targets (Hinton, Vinyals and Dean, 2015, arXiv:1503.02531)."""
        softened, weight = partial(soft, temperature=declared.temperature), declared.soft_weight
        taught = Term(softened, weight, student="student.logits", teacher="teacher.logits")
        return self._weighted(hard, taught, declared, student="student.logits", labels="labels")

    def _weighted(self, hard: Callable[..., Tensor], taught: Term, declared: Predictor, **sources: str) -> Objective:
        """Return an objective with a loss of labels and a term of the teacher; with soft_weight=1, of the term alone.

        `sources` has the sources of the arguments of `hard`, first the student's output, then the labels.
        """
        if declared.soft_weight == 1:
            return Objective({"soft": taught}, {"labels": Term(hard, **sources)})
        return Objective({"labels": Term(hard, 1 - declared.soft_weight, **sources), "soft": taught})

    @abstractmethod
    def quality(self, answers: Answers, rows: Index) -> dict[str, float]:
        """Return all metrics of a model on some rows, by name.

        `rows` has row numbers of the training set. `answers` has the model's scores for these rows, under its `key`.
        """

    @abstractmethod
    def score(self, answers: Answers, rows: Index) -> float:
        """Return only the metric that `self.metric` names, which is faster than `quality`; same arguments."""

    @abstractmethod
    def chance(self, rows: Index) -> float:
        """Return the metric that a model without inputs would reach on these rows: the baseline for a student's gain.

        The metric is the one that `self.metric` names. `rows` has row numbers of the training set.
        """

    @abstractmethod
    def leak(self, column: Values, rows: Index) -> str:
        """Describe how a single input reveals the label, to stop before training; return "" if it does not.

        `column` has the input's values for `rows`, which are row numbers of the training set.
        """

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:
        return agreement(student[self.key], teacher[self.key])

    def spread(self, rows: Index, count: int) -> Self:
        """Return the labels of `count` rows, of which only `rows`, ascending, have the labels of this object."""
        kind = copy.copy(self)
        for name in ("values", "teacher_labels"):
            labels = getattr(self, name)
            whole = np.full((count, *labels.shape[1:]), np.nan if labels.dtype.kind == "f" else -1, labels.dtype)
            whole[rows] = labels
            setattr(kind, name, whole)
        gap = math.nan if self.targets.is_floating_point() else IGNORED
        kind.targets = torch.full((count, *self.targets.shape[1:]), gap, dtype=self.targets.dtype)
        kind.targets[torch.from_numpy(rows)] = self.targets
        kind.complete = False
        return kind

    def take(self, rows: Index) -> Self:
        kind = copy.copy(self)
        kind.values, kind.targets = self.values[rows], self.targets[torch.from_numpy(rows)]
        kind.teacher_labels = self.teacher_labels[rows]
        kind.groups = None if self.groups is None else self.groups[rows]
        return kind
