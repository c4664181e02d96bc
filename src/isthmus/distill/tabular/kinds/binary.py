"""Labels of 0 and 1."""

from functools import partial

import pyarrow as pa
import torch

from isthmus.distill.declaration import Tabular
from isthmus.distill.evaluation.metrics import auc, calibration_error, metrics, sigmoid
from isthmus.distill.losses.logits import binary_hard_targets, binary_soft_targets
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.tabular.answers import Probability
from isthmus.distill.tabular.calibration import create_calibrator
from isthmus.distill.tabular.kinds.kind import Kind
from isthmus.distill.tabular.leakage import LEAK_FROM, separation_auc
from isthmus.distill.tabular.student import UNCALIBRATED
from isthmus.distill.tabular.teacher import BINARY, Learner
from isthmus.distill.tasks.split import Split, binary_labels
from isthmus.distill.types import Answers, Index
from isthmus.features.values.columns import Values


class BinaryLabels(Kind):
    """A label of 0 or 1 in each row; each part has both."""

    metric = "auc"
    pipeline = "tabular-classification"

    def __init__(self, table: pa.Table, label: str, parts: Split, declared: Tabular) -> None:
        self.values = binary_labels(table, label, parts)
        self.targets = torch.tensor(self.values, dtype=torch.float32)
        self._calibration = declared.calibration

    @property
    def learner(self) -> Learner:
        return BINARY

    def answer(self) -> Probability:
        return Probability(create_calibrator(self._calibration))

    def objective(self, declared: Tabular) -> Objective:
        """Train on labels and soft targets (Hinton, Vinyals and Dean, 2015, arXiv:1503.02531)."""
        soft, weight = partial(binary_soft_targets, temperature=declared.temperature), declared.soft_weight
        return Objective({
            "labels": Term(binary_hard_targets, 1 - weight, student="student.logits", labels="labels"),
            "soft": Term(soft, weight, student="student.logits", teacher="teacher.logits"),
        })  # fmt: skip

    def quality(self, answers: Answers, rows: Index) -> dict[str, float]:
        labels = self.values[rows]
        figures = metrics(labels, sigmoid(answers["logits"]))
        if UNCALIBRATED in answers:
            figures["ece_uncalibrated"] = calibration_error(labels, sigmoid(answers[UNCALIBRATED]))
        return figures

    def score(self, answers: Answers, rows: Index) -> float:
        return auc(self.values[rows], answers["logits"])

    def chance(self, rows: Index) -> float:  # noqa: ARG002 - the same for all rows
        return 0.5

    def leak(self, column: Values, rows: Index) -> str:
        area = separation_auc(column, self.values[rows])
        return f"orders the labels of the training part with an AUC of {area:.4f}" if area >= LEAK_FROM else ""
