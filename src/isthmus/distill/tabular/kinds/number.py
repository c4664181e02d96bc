"""Labels that are finite numbers."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

from isthmus.distill.declaration import Predictor
from isthmus.distill.evaluation.metrics import correlation, mae, r2, rmse
from isthmus.distill.labels import Number
from isthmus.distill.losses.objective import Objective, Term
from isthmus.distill.losses.regression import absolute_errors, squared_errors
from isthmus.distill.tabular.answers import NumberOutput
from isthmus.distill.tabular.kinds.kind import Kind
from isthmus.distill.tabular.leakage import LEAK_FROM, rank_correlation
from isthmus.distill.tabular.teacher import Learner
from isthmus.distill.tabular.users.prediction import Prediction, number_scores
from isthmus.distill.tasks.split import PARTS, Split, required_column
from isthmus.distill.types import Answers, Array, Index
from isthmus.features.errors import DataError
from isthmus.features.values.columns import Values

_FINEST = 1e-3
"""Largest allowed spacing of float32 numbers, in standard deviations of the label."""
_TOLERANCE = {"fp32": 1e-5, "int8": 0.2}
"""Tolerances in standard deviations of the label. A probability off by 0.05 means a logit off by 0.2 or more."""


class NumberLabels(Kind):
    """Labels that are finite numbers. Scores are standardized by mean and standard deviation of the training part."""

    key = Number.key
    more = False
    pipeline = "tabular-regression"

    def __init__(self, table: pa.Table, label: str, parts: Split, declared: Predictor) -> None:
        assert isinstance(declared.label, Number)  # noqa: S101 - a Number selects this kind
        self.values, train = _numbers(table, label), parts.train
        known = self.values[train]
        self._mean, self._scale = float(known.mean()), float(known.std())
        _require_scale(label, known, self._scale)
        largest = np.float32(np.abs(known).max())
        # Twice the float32 spacing: both a product and a sum are rounded.
        rounding = 2 * float(np.spacing(largest))
        self.tolerance = {name: share * self._scale + rounding for name, share in _TOLERANCE.items()}
        self.rounding = self.tolerance["fp32"]
        self.teacher_labels = (self.values - self._mean) / self._scale
        self.targets = torch.tensor(self.teacher_labels, dtype=torch.float32)
        self._bounds = float(self.teacher_labels[train].min()), float(self.teacher_labels[train].max())
        self._absolute = declared.label.loss == "absolute"
        self.metric = "mae" if self._absolute else "rmse"
        self._usual = float(np.median(known)) if self._absolute else self._mean
        loss = "absolute_error" if self._absolute else "squared_error"
        self.learner = Learner(HistGradientBoostingRegressor, self.key, {"loss": loss})
        self.recipe = {"loss": loss, "standard": [self._mean, self._scale]}

    def answer(self) -> NumberOutput:
        return NumberOutput("value", *self._bounds, self._scale, self._mean)

    def objective(self, declared: Predictor) -> Objective:
        loss = absolute_errors if self._absolute else squared_errors
        taught = Term(loss, declared.soft_weight, student="student.value", wanted="teacher.value")
        return self._weighted(loss, taught, declared, student="student.value", wanted="labels")

    def teacher_scores(self, prediction: Prediction, where: str) -> Array:
        scores: Array = (number_scores(prediction, where) - self._mean) / self._scale
        return scores

    def _values(self, answers: Answers) -> Array:
        values: Array = answers[self.key].astype(np.float64) * self._scale + self._mean
        return values

    def quality(self, answers: Answers, rows: Index) -> dict[str, float]:
        labels, values = self.values[rows], self._values(answers)
        return {"rmse": rmse(labels, values), "mae": mae(labels, values), "r2": r2(labels, values)}

    def score(self, answers: Answers, rows: Index) -> float:
        return (mae if self._absolute else rmse)(self.values[rows], self._values(answers))

    def chance(self, rows: Index) -> float:
        return (mae if self._absolute else rmse)(self.values[rows], np.full(len(rows), self._usual))

    def leak(self, column: Values, rows: Index) -> str:
        value = rank_correlation(column, self.values[rows])
        return (
            f"has a rank correlation of {value:.4f} with the labels of the training part" if value >= LEAK_FROM else ""
        )

    def agreement(self, student: Answers, teacher: Answers) -> dict[str, float]:
        return {"correlation": correlation(student[self.key], teacher[self.key])}


def _numbers(table: pa.Table, label: str) -> Array:
    column = required_column(table, label, "numbers")
    try:
        values: Array = pc.cast(column, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"column {label}", str(error), expected="numbers") from error
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        found = f"{len(wrong):,} of {len(values):,} rows are not finite, such as row {wrong[0]}: {values[wrong[0]]}"
        raise DataError(f"label {label}", found, expected="finite numbers", remedy="leave these rows out of the spine")
    most = np.finfo(np.float32).max
    beyond = np.flatnonzero(np.abs(values) > most)
    if len(beyond):
        found = f"{len(beyond):,} of {len(values):,} rows are too large, such as row {beyond[0]}: {values[beyond[0]]:g}"
        expected = f"numbers up to {most:g}: the output is float32"
        remedy = "leave these rows out of the spine, or use another unit"
        raise DataError(f"label {label}", found, expected=expected, remedy=remedy)
    return values


def _require_scale(label: str, known: Array, scale: float) -> None:
    if not scale > 0:
        remedy = "use a longer period or different shares"
        raise DataError(f"label {label}", f"only {known[0]:g} in the {PARTS[0]} part", expected="numbers that differ",
                        remedy=remedy)  # fmt: skip
    step = float(np.spacing(np.float32(np.abs(known).max())))
    if not step <= _FINEST * scale:
        raise DataError(
            f"label {label}", f"numbers up to {np.abs(known).max():g} with a standard deviation of {scale:g}",
            expected=f"numbers whose differences float32, the output type, can represent: its spacing is {step:g} here",
            remedy="subtract a constant in the spine, and add it to the predictions",
        )  # fmt: skip
