"""Labels that give the relevance of each row within its group."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import pyarrow as pa
import torch
from sklearn.ensemble import HistGradientBoostingRegressor
from torch import Tensor

from isthmus.distill.declaration import Predictor
from isthmus.distill.evaluation.metrics import chance_ndcg, ndcg, reciprocal_rank
from isthmus.distill.labels import MOST_RELEVANT, Rank
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.losses.ranking import graded_lists, grouped_lists
from isthmus.distill.tabular.answers import MOST_SCORE, NumberOutput
from isthmus.distill.tabular.kinds.kind import Kind
from isthmus.distill.tabular.leakage import LEAK_FROM, separation_auc
from isthmus.distill.tabular.teacher import Learner
from isthmus.distill.tabular.users.prediction import Prediction, number_scores
from isthmus.distill.tasks.split import PARTS, Split, group_numbers, whole_numbers
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.errors import DataError
from isthmus.features.values.columns import Values


class RankLabels(Kind):
    """Labels that are the relevance of rows within groups, from 0.

    The teacher is a regressor, since scikit-learn has no listwise boosting.
    """

    key = Rank.key
    metric = "ndcg"
    tolerance: Mapping[str, float] = {"fp32": 1e-4, "int8": 0.2}
    """Scores are logits: a difference of 0.2 makes a row 1.2 times as likely to come first."""
    rounding = 1e-4
    learner = Learner(HistGradientBoostingRegressor, key, {"loss": "squared_error"})

    def __init__(self, table: pa.Table, label: str, parts: Split, declared: Predictor) -> None:
        assert isinstance(declared.label, Rank)  # noqa: S101 - a Rank selects this kind
        self.values, self._at = _relevance(table, label), declared.label.at
        self.groups = group_numbers(table, declared.label.within)
        for part in PARTS:
            _require_order(label, part, self.values, self.groups, getattr(parts, part))
        self.targets = torch.from_numpy(np.stack([self.values, self.groups], 1))
        known = self.values[parts.train].astype(np.float64)
        self.teacher_labels = (self.values - known.mean()) / known.std()
        self.recipe = {"relevance": [float(known.mean()), float(known.std())]}

    def answer(self) -> NumberOutput:
        return NumberOutput("score", -MOST_SCORE, MOST_SCORE)

    def objective(self, declared: Predictor) -> Objective:
        soft, weight = partial(_by_teacher, temperature=declared.temperature), declared.soft_weight
        taught = Term(soft, weight, student="student.score", teacher="teacher.score", labels="labels")
        return self._weighted(_by_labels, taught, declared, student="student.score", labels="labels")

    def teacher_scores(self, prediction: Prediction, where: str) -> Array:
        return number_scores(prediction, where)

    def quality(self, answers: Answers, rows: Index) -> dict[str, float]:
        return {"ndcg": self.score(answers, rows), "mrr": reciprocal_rank(*self._ordered(answers, rows))}

    def score(self, answers: Answers, rows: Index) -> float:
        return ndcg(*self._ordered(answers, rows), self._at)

    def _ordered(self, answers: Answers, rows: Index) -> tuple[Index, Array, Index]:
        assert self.groups is not None  # noqa: S101 - set by the constructor
        return self.values[rows], answers[self.key], self.groups[rows]

    def chance(self, rows: Index) -> float:
        assert self.groups is not None  # noqa: S101 - set by the constructor
        return chance_ndcg(self.values[rows], self.groups[rows], self._at)

    def leak(self, column: Values, rows: Index) -> str:
        area = separation_auc(column, (self.values[rows] > 0).astype(np.int64))
        return (
            f"separates the relevant rows of the training part with an AUC of {area:.4f}" if area >= LEAK_FROM else ""
        )

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:  # noqa: ARG002 - scales differ
        return {}


def _by_labels(student: Tensor, labels: Tensor) -> Tensor:
    return graded_lists(student, labels[:, 0], labels[:, 1])


def _by_teacher(student: Tensor, teacher: Tensor, labels: Tensor, *, temperature: float) -> Tensor:
    return grouped_lists(student, teacher, labels[:, 1], temperature=temperature)


def _relevance(table: pa.Table, label: str) -> Index:
    values = whole_numbers(table, label, pa.int64())
    wrong = values[(values < 0) | (values > MOST_RELEVANT)]
    if len(wrong):
        found = f"{len(wrong):,} values such as {wrong[0]}"
        raise DataError(f"label {label}", found, expected=f"whole numbers from 0 to {MOST_RELEVANT}")
    return values


def _require_order(label: str, part: str, values: Index, groups: Index, rows: Index) -> None:
    _, numbers = np.unique(groups[rows], return_inverse=True)
    high, low = np.zeros(numbers.max() + 1, np.int64), np.full(numbers.max() + 1, MOST_RELEVANT)
    np.maximum.at(high, numbers, values[rows])
    np.minimum.at(low, numbers, values[rows])
    if not (high > low).any():
        raise DataError(
            f"label {label}",
            f"all rows of a group are equally relevant, in each of the {len(high):,} groups of the {part} part",
            expected="a group with rows of different relevance", remedy="check the group column, `within`",
        )  # fmt: skip
