"""Labels that name one of several classes."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from sklearn.ensemble import HistGradientBoostingClassifier

from isthmus.distill.declaration import Predictor
from isthmus.distill.evaluation.metrics import confidence_error, multiclass_log_loss, multiclass_metrics
from isthmus.distill.labels import MOST_CLASSES
from isthmus.distill.losses.logits import hard_targets, soft_targets
from isthmus.distill.losses.objective import Objective
from isthmus.distill.tabular.answers import UNCALIBRATED, Probabilities
from isthmus.distill.tabular.calibration import create_calibrator
from isthmus.distill.tabular.kinds.kind import Kind
from isthmus.distill.tabular.leakage import LEAK_FROM, mean_recall
from isthmus.distill.tabular.teacher import Learner
from isthmus.distill.tabular.users.prediction import Prediction, class_scores
from isthmus.distill.tasks.split import PARTS, Split, required_column, whole_numbers
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.errors import DataError
from isthmus.features.values.columns import Values
from isthmus.package.manifest import LONGEST

_SHOWN = 5


class ClassLabels(Kind):
    """Labels that are classes, as texts or whole numbers. `values` has class indexes from 0."""

    metric = "log_loss"
    more = False
    pipeline = "tabular-classification"

    def __init__(self, table: pa.Table, label: str, parts: Split, declared: Predictor) -> None:
        column = _column(table, label)
        named = {part: column.take(getattr(parts, part)) for part in PARTS}
        known = known_classes(label, named)
        self.classes = tuple(map(str, known.to_pylist()))
        places = pc.fill_null(pc.index_in(column, value_set=known), -1)
        self.values = self.teacher_labels = pc.cast(places, pa.int64()).to_numpy(zero_copy_only=False)
        self.targets = torch.from_numpy(self.values.copy())
        self._shares = np.bincount(self.values[parts.train]) / len(parts.train)
        self._calibration = declared.calibration
        self.learner = Learner(HistGradientBoostingClassifier, self.key, classes=self.classes)
        self.recipe = {"classes": list(self.classes)}

    def answer(self) -> Probabilities:
        return Probabilities(len(self.classes or ()), create_calibrator(self._calibration))

    def objective(self, declared: Predictor) -> Objective:
        return self._taught(hard_targets, soft_targets, declared)

    def teacher_scores(self, prediction: Prediction, where: str) -> Array:
        return class_scores(prediction, where, self.classes or ())

    def fitted_labels(self) -> Array:
        return np.array(self.classes)[self.values]

    def quality(self, answers: Answers, rows: Index) -> dict[str, float]:
        labels = self.values[rows]
        figures = multiclass_metrics(labels, answers["logits"])
        if UNCALIBRATED in answers:
            figures["ece_uncalibrated"] = confidence_error(labels, answers[UNCALIBRATED])
        return figures

    def score(self, answers: Answers, rows: Index) -> float:
        return multiclass_log_loss(self.values[rows], answers["logits"])

    def chance(self, rows: Index) -> float:
        logits = np.broadcast_to(np.log(self._shares), (len(rows), len(self._shares)))
        return multiclass_log_loss(self.values[rows], logits)

    def leak(self, column: Values, rows: Index) -> str:
        recall = mean_recall(column, self.values[rows])
        return (
            f"predicts the classes of the training part with a mean recall of {recall:.4f}"
            if recall >= LEAK_FROM
            else ""
        )


def known_classes(label: str, named: Mapping[str, pa.Array]) -> pa.Array:
    """Return the classes of the training part, sorted. `named` has the classes that the rows of each part name.

    Raise a DataError if there are too few or too many, or if a later part has other classes.
    """
    where, expected = f"label {label}", f"2 to {MOST_CLASSES} classes"
    known, remedy = pc.unique(named[PARTS[0]]).sort(), "use a longer period or different shares"
    if len(known) < 2:
        found = f"{f'only {known[0]}' if len(known) else 'no class'} in the {PARTS[0]} part"
        raise DataError(where, found, expected=expected, remedy=remedy)
    if len(known) > MOST_CLASSES:
        raise DataError(where, f"{len(known):,} classes in the {PARTS[0]} part", expected=expected,
                        remedy="merge rare classes in the spine, or use a Number label for a quantity")  # fmt: skip
    if wrong := [name for name in map(str, known.to_pylist()) if not name.isprintable() or len(name) > LONGEST]:
        raise DataError(where, f"a class is {wrong[0][:60]!r}", expected=f"at most {LONGEST} printable characters")
    for part in PARTS[1:]:
        new = named[part].filter(pc.invert(pc.is_in(named[part], value_set=known)))
        if len(new):
            names = ", ".join(map(str, pc.unique(new).to_pylist()[:_SHOWN]))
            raise DataError(
                where, f"{len(new):,} labels of the {part} part name a class that no row of the {PARTS[0]} part has: "
                f"{names}", expected="only classes that a student can learn",
                remedy=f"{remedy}, or merge rare classes in the spine",
            )  # fmt: skip
    return known


def _column(table: pa.Table, label: str) -> pa.Array:
    column = required_column(table, label, "classes: texts or whole numbers")
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.large_string()).combine_chunks()
    return pa.array(whole_numbers(table, label, pa.int64()))
