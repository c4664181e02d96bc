"""The base of tasks that predict a label: what they share, whether the input is a row of features or a text."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from isthmus.distill.declaration import Predictor
from isthmus.distill.labels import SEVERAL, Binary, Classes, Label, Number, Rank
from isthmus.distill.language.teachers import DeclaredTeacher, abstains
from isthmus.distill.losses.objective import Objective
from isthmus.distill.tabular.answers import UNCALIBRATED, StudentOutput
from isthmus.distill.tabular.kinds.binary import BinaryLabels
from isthmus.distill.tabular.kinds.classes import ClassLabels
from isthmus.distill.tabular.kinds.kind import Kind
from isthmus.distill.tabular.kinds.number import NumberLabels
from isthmus.distill.tabular.kinds.rank import RankLabels
from isthmus.distill.tabular.kinds.several import SeveralLabels
from isthmus.distill.tabular.kinds.terms import declared_objective, over_known_rows
from isthmus.distill.tabular.kinds.weights import row_weights, weighted, weighted_targets
from isthmus.distill.tabular.tensors import scalar_columns
from isthmus.distill.tabular.users.sources import TeacherRows
from isthmus.distill.tabular.users.teacher import UserTeacher, sources
from isthmus.distill.tasks.answers import student_answers
from isthmus.distill.tasks.split import PARTS, Split
from isthmus.distill.tasks.task import Material, Task
from isthmus.distill.teachers.teacher import ANSWERED
from isthmus.distill.types import Answers, Array, Index, evenly_spaced
from isthmus.features.errors import DataError
from isthmus.features.values.columns import Values
from isthmus.package.inputs import Feeds, ModelInput

KINDS: Mapping[type, type[Kind]] = {
    Binary: BinaryLabels, Classes: ClassLabels, Number: NumberLabels, Rank: RankLabels,
}  # fmt: skip

_Read = tuple[pa.Table, Sequence[ModelInput]]
"""A table, and the inputs that a model reads of it."""


class LabelTask(Task):
    """Predicts the label of the spine. `Kind` has everything that depends on the kind of label."""

    declared: Predictor
    texts: Collection[str] = ()
    """Features that a user's function gets as texts, not as categories."""
    states = False
    """True if the teacher also returns its pooled last states."""
    images: Callable[[Index], Array] | None = None
    """Returns the images of rows for teachers; None if they get features."""
    pooling: Literal["mean", "first"] | None = None
    """How a `Pretrained` makes vectors of its last states; None for its logits."""

    def __init__(self, material: Material, declared: Predictor) -> None:
        super().__init__(material)
        self.declared = declared
        self._kind = self._labels(declared)
        train = self.labeled(material.parts.train)
        self._row_weights = row_weights(material.table, declared, self._kind.values, train)
        self._label_type = self._kind.targets.dtype
        if self._row_weights is not None:
            self._kind.targets = weighted_targets(self._kind.targets, self._row_weights)
        self.metric, self.more, self.keys = self._kind.metric, self._kind.more, (self._kind.key,)
        self.classes, self.pipeline = self._kind.classes, self._kind.pipeline
        self.tolerance, self.rounding = self._kind.tolerance, self._kind.rounding
        self._answer = self._kind.answer()

    def _labels(self, declared: Predictor) -> Kind:
        assert isinstance(declared.label, Label)  # noqa: S101 - an Embedding or a Picture has a task of its own
        material = self.material
        kind = SeveralLabels if declared.label == SEVERAL else KINDS[type(declared.label)]
        if material.labeled is None:
            return kind(material.table, material.label, material.parts, declared)
        known, place = np.flatnonzero(material.labeled), np.cumsum(material.labeled) - 1
        train, validation, test = (place[self.labeled(getattr(material.parts, name))] for name in PARTS)
        if not len(train):
            raise DataError(f"label {material.label}", f"null in all rows of the {PARTS[0]} part", expected="labels",
                            remedy="use a longer period or different shares")  # fmt: skip
        parts = Split(train, validation, test, material.parts.boundaries)
        labels = kind(material.table.take(known), material.label, parts, declared)
        return labels.spread(known, len(place))

    def _user_teacher(
        self, declared: Sequence[tuple[DeclaredTeacher, float]], read: _Read | None = None
    ) -> UserTeacher:
        """Create a teacher that reads some inputs of a table, by default those of the teacher's service."""
        material = self.material
        table, inputs = read or (material.table, material.teacher_inputs)
        rows = TeacherRows(
            table, inputs, self.labeled(material.parts.train), self._kind.fitted_labels(),
            self.classes, self._recipe(), material.declaration.spine, material.root, material.profile.threads,
            numeric=self._kind.key != "logits", texts=self.texts, images=self.images,
            states=self.states and read is None, pooling=self.pooling,
        )  # fmt: skip
        return UserTeacher(
            sources(declared, rows), self._kind.key, rows, convert=self._kind.teacher_scores,
            abstains=any(teacher.missing == "labels" for teacher, _ in declared),
        )  # fmt: skip

    def _recipe(self) -> dict[str, Any]:
        label, split_by = self.declared.label, self.material.declaration.split_by
        return {
            "training_set": self.material.training_set,
            "label": self.material.label,
            "split": list(self.material.declaration.split),
            **({} if split_by is None else {"split_by": split_by}),
            # Leave this out for binary labels, so that their cached outputs stay valid.
            **({} if isinstance(label, Binary) else {"kind": type(label).__name__, **self._kind.recipe}),
        }

    def identities(self) -> Array:
        names = np.zeros((self.material.table.num_rows, 2), np.int64)
        names[:, 1] = np.arange(len(names))
        return names.view(np.uint8)

    def asked(self, rows: Index) -> Any:
        return rows

    def labeled(self, rows: Index) -> Index:
        return rows if self.material.labeled is None else rows[self.material.labeled[rows]]

    def groups(self, rows: Index) -> Index | None:
        return None if self._kind.groups is None else self._kind.groups[rows]

    def after_training(self, student: nn.Module) -> None:
        assert isinstance(student.answer, StudentOutput)  # noqa: S101 - each student of these tasks has one
        if (calibration := student.answer.calibration) is not None:
            rows = self.material.parts.validation
            raw = student_answers(self, student, rows, torch.device("cpu"))[UNCALIBRATED]
            calibration.learn(raw, self._kind.values[rows])

    def _leaks(self, *read: _Read) -> list[str]:
        train, values = self.labeled(self.material.parts.train), dict[str, Values]()
        rows = train[evenly_spaced(len(train), 100_000)]
        for table, inputs in read:
            values |= scalar_columns(table.take(rows), inputs)
        return [f"{name} {leak}" for name, column in values.items() if (leak := self._kind.leak(column, rows))]

    def objective(self) -> Objective:
        objective = self._kind.objective(self.declared)
        if self.declared.objective is not None:
            objective = declared_objective(self.declared.objective, objective)
        objective = over_known_rows(objective, labels=not self._kind.complete, answers=abstains(self.declared.teacher))
        return objective if self._row_weights is None else weighted(objective, self._label_type)

    def quality(self, answers: Answers, rows: Index, _teacher: Answers) -> dict[str, float]:
        """Return metrics of a model; for a teacher that may abstain, of the rows that it answers, and their share."""
        if ANSWERED not in answers:
            return self._kind.quality(answers, rows)
        known, share = answers[ANSWERED] > 0, float((answers[ANSWERED] > 0).mean())
        if not known.any():
            where, found = self.material.declaration.where, f"the teacher answers none of {len(rows):,} rows"
            raise DataError(where, found, expected="answers in the validation and the test part")
        figures = self._kind.quality({key: values[known] for key, values in answers.items()}, rows[known])
        return {**figures, ANSWERED: share}

    def score(self, answers: Answers, rows: Index, _teacher: Answers) -> float:
        return self._kind.score(answers, rows)

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:
        if ANSWERED in teacher:
            known = teacher[ANSWERED] > 0
            student, teacher = ({key: values[known] for key, values in each.items()} for each in (student, teacher))
        return self._kind.agreement(student, teacher)

    def measures(self, quality: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        chance, sign = self._kind.chance(self.material.parts.test), 1 if self.more else -1
        lifts = {name: sign * (quality[name][self.metric] - chance) for name in ("reference", "student")}
        return {"lift_kept": lifts["student"] / lifts["reference"]} if lifts["reference"] > 0 else {}

    def replies(self, run: Callable[[Feeds], Answers], rows: Index) -> Answers:
        return {self._kind.key: self._answer.to_scores(run(self.feeds(rows))[self._answer.name])}
