"""Labels of 0 and 1."""

import pyarrow as pa
import torch

from isthmus.distill.declaration import Predictor
from isthmus.distill.evaluation.metrics import auc, calibration_error, metrics, sigmoid
from isthmus.distill.losses.logits import binary_hard_targets, binary_soft_targets
from isthmus.distill.losses.objective import Objective
from isthmus.distill.tabular.answers import UNCALIBRATED, Probability
from isthmus.distill.tabular.calibration import create_calibrator
from isthmus.distill.tabular.kinds.kind import Kind
from isthmus.distill.tabular.leakage import LEAK_FROM, separation_auc
from isthmus.distill.tabular.teacher import BINARY
from isthmus.distill.tabular.users.prediction import Prediction, binary_scores
from isthmus.distill.tasks.split import Split, binary_labels
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.values.columns import Values


class BinaryLabels(Kind):
    metric = "auc"
    pipeline = "tabular-classification"
    learner = BINARY

    def __init__(self, table: pa.Table, label: str, parts: Split, declared: Predictor) -> None:
        self.values = self.teacher_labels = binary_labels(table, label, parts)
        self.targets = torch.tensor(self.values, dtype=torch.float32)
        self._calibration = declared.calibration

    def answer(self) -> Probability:
        return Probability(create_calibrator(self._calibration))

    def objective(self, declared: Predictor) -> Objective:
        return self._taught(binary_hard_targets, binary_soft_targets, declared)

    def teacher_scores(self, prediction: Prediction, where: str) -> Array:
        return binary_scores(prediction, where)

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
