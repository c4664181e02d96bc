"""Labels that name any number of classes for each row."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from sklearn.ensemble import HistGradientBoostingClassifier

from isthmus.distill.declaration import Predictor
from isthmus.distill.evaluation.metrics import agreement, calibration_error, log_loss, multilabel_metrics, sigmoid
from isthmus.distill.losses.logits import binary_hard_targets, binary_soft_targets
from isthmus.distill.losses.objective import Objective
from isthmus.distill.tabular.answers import UNCALIBRATED, SeveralProbabilities
from isthmus.distill.tabular.calibration import create_calibrator
from isthmus.distill.tabular.kinds.classes import known_classes
from isthmus.distill.tabular.kinds.kind import Kind
from isthmus.distill.tabular.leakage import LEAK_FROM, separation_auc
from isthmus.distill.tabular.teacher import Learner
from isthmus.distill.tabular.users.prediction import Prediction, several_scores
from isthmus.distill.tasks.split import PARTS, Split, required_column
from isthmus.distill.types import Answers, Array, Index, evenly_spaced
from isthmus.features.errors import DataError
from isthmus.features.values.arrow import null_elements
from isthmus.features.values.columns import Values

_LEAK_ROWS = 10_000
"""Most rows for the leak check of a class; they limit the time for many classes."""


class SeveralLabels(Kind):
    """Labels that are sets of classes. `values` has 1 for the classes of a row and 0 for the others, (n, classes)."""

    metric = "log_loss"
    more = False
    pipeline = "tabular-classification"

    def __init__(self, table: pa.Table, label: str, parts: Split, declared: Predictor) -> None:
        column = _column(table, label)
        names, rows = column.flatten(), pc.list_parent_indices(column).to_numpy()
        known = known_classes(label, {part: column.take(getattr(parts, part)).flatten() for part in PARTS})
        places = pc.fill_null(pc.index_in(names, value_set=known), -1).to_numpy()
        self.classes = tuple(known.to_pylist())
        self.values = self.teacher_labels = np.zeros((len(column), len(known)), np.int8)
        self.values[rows[places >= 0], places[places >= 0]] = 1
        self.targets = torch.from_numpy(self.values).float()
        self._shares = self.values[parts.train].mean(0)
        if (always := self._shares == 1).any():
            found = f"all rows of the {PARTS[0]} part have the class {self.classes[int(always.argmax())]}"
            raise DataError(f"label {label}", found, expected="classes that some rows do not have",
                            remedy="leave the class out in the spine")  # fmt: skip
        self._calibration = declared.calibration
        self.learner = Learner(HistGradientBoostingClassifier, self.key, classes=self.classes)
        self.recipe = {"classes": list(self.classes), "several": True}

    def answer(self) -> SeveralProbabilities:
        return SeveralProbabilities(len(self.classes or ()), create_calibrator(self._calibration))

    def objective(self, declared: Predictor) -> Objective:
        return self._taught(binary_hard_targets, binary_soft_targets, declared)

    def teacher_scores(self, prediction: Prediction, where: str) -> Array:
        return several_scores(prediction, where, self.classes or ())

    def quality(self, answers: Answers, rows: Index) -> dict[str, float]:
        labels = self.values[rows]
        figures = multilabel_metrics(labels, answers["logits"])
        if UNCALIBRATED in answers:
            raw = sigmoid(answers[UNCALIBRATED])
            figures["ece_uncalibrated"] = calibration_error(labels.ravel(), raw.ravel())
        return figures

    def score(self, answers: Answers, rows: Index) -> float:
        return log_loss(self.values[rows], sigmoid(answers["logits"]))

    def chance(self, rows: Index) -> float:
        return log_loss(self.values[rows], np.broadcast_to(self._shares, (len(rows), len(self._shares))))

    def leak(self, column: Values, rows: Index) -> str:
        some = evenly_spaced(len(rows), _LEAK_ROWS)
        values, labels = column.take(some), self.values[rows[some]]
        areas = [separation_auc(values, labels[:, place]) for place in range(labels.shape[1])]
        place = int(np.argmax(areas))
        return (
            f"orders the rows of the training part by the class {(self.classes or ())[place]} with an AUC of "
            f"{areas[place]:.4f}"
            if areas[place] >= LEAK_FROM
            else ""
        )

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:
        """Return the share of rows with the same set of classes, and the divergence of the independent classes."""
        ours, theirs = student[self.key], teacher[self.key]
        same = ((ours > 0) == (theirs > 0)).all(1).mean()
        return {"agreement": float(same), "kl": agreement(ours.ravel(), theirs.ravel())["kl"] * ours.shape[1]}


def _column(table: pa.Table, label: str) -> pa.ListArray:
    column = required_column(table, label, expected := "arrays of class names")
    try:
        names = column.cast(pa.list_(pa.string())).combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"column {label}", str(error), expected=expected) from error
    if nulls := null_elements(names):
        raise DataError(f"column {label}", f"{nulls:,} nulls inside of arrays", expected=expected,
                        remedy="leave them out in the spine")  # fmt: skip
    return names
