"""Predictions of a user's teacher, and their conversion to the scores that a kind of label learns from."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from isthmus.distill.teachers.teacher import LEAST, misfit
from isthmus.distill.types import Array
from isthmus.features.errors import ConfigurationError, DataError, Problem

Form = Literal["probabilities", "logits", "values"]


class Prediction(NamedTuple):
    """Outputs of a user's model for n rows, before they are converted to the label's scores.

    Attributes:
        form: meaning of the numbers.
        numbers: float64 (n,) or (n, classes); NaN in rows without an answer.
        classes: class names in the order of the columns; None if unknown.
        states: pooled last states, float64 (n, width), see `TeacherRows.states`.
    """

    form: Form
    numbers: Array
    classes: Sequence[str] | None = None
    states: Array | None = None


Convert = Callable[[Prediction, str], Array]
"""Converts a prediction to the scores of a label, NaN without an answer; the text names the teacher in errors."""


def probabilities(logits: Array) -> Array:
    """Return probabilities: of the second class for logits (teachers, n), of each class for (teachers, n, classes)."""
    if logits.ndim == 2:
        second: Array = 1 / (1 + np.exp(-logits))
        return second
    raised: Array = np.exp(logits - logits.max(-1, keepdims=True))
    shares: Array = raised / raised.sum(-1, keepdims=True)
    return shares


def logits(probabilities: Array) -> Array:
    """Return logits: of the second class for probabilities (n,), of each class for (n, classes)."""
    logs: Array = np.log(np.maximum(probabilities, LEAST))
    return logs if probabilities.ndim > 1 else logs - np.log(np.maximum(1 - probabilities, LEAST))


def binary_scores(prediction: Prediction, where: str) -> Array:
    """Return the logits of label 1, float64 (n,), from probabilities or logits (n,), (n, 1) or (n, 2).

    Raise a ConfigurationError if they are neither, or for more than two columns or classes other than 0 and 1, and a
    DataError if probabilities are outside 0 to 1.
    """
    form, numbers, classes, _ = prediction
    if form == "values":
        raise ConfigurationError(where, [Problem("output", "values", "probabilities or logits, for a Binary label")])
    if classes is not None and sorted(classes) not in (["0", "1"], ["False", "True"], ["0.0", "1.0"]):
        raise ConfigurationError(where, [Problem("classes", ", ".join(classes), "0 and 1, the labels")])
    if numbers.ndim == 2 and numbers.shape[1] == 1:
        numbers = numbers[:, 0]
    if numbers.ndim > 2 or (numbers.ndim == 2 and numbers.shape[1] != 2):
        shape = f"shape {numbers.shape}"
        raise ConfigurationError(where, [Problem("output", shape, f"({len(numbers)},) or ({len(numbers)}, 2)")])
    if form == "probabilities":
        _require_shares(numbers, where)
        numbers = logits(numbers) if numbers.ndim == 1 else np.log(np.maximum(numbers, LEAST))
    if numbers.ndim == 1:
        return numbers
    second = 1 if classes is None else list(classes).index(sorted(classes)[1])
    return numbers[:, second] - numbers[:, 1 - second]


def class_scores(prediction: Prediction, where: str, classes: Sequence[str]) -> Array:
    """Return logits float64 (n, classes) in the order of `classes`, from probabilities or logits.

    Raise a ConfigurationError if the prediction's classes are unknown or other classes, and a DataError for numbers
    that are not probabilities.
    """
    numbers = _ordered(prediction, where, classes)
    if prediction.form == "logits":
        return numbers
    _require_shares(numbers, where)
    return logits(numbers)


def several_scores(prediction: Prediction, where: str, classes: Sequence[str]) -> Array:
    """Return logits of independent classes, float64 (n, classes); NaN for all classes of a row that lacks one of them.

    Raise the same errors as `class_scores`, and a DataError for probabilities whose sum is 1 in every row.
    """
    numbers = _ordered(prediction, where, classes)
    numbers[np.isnan(numbers).any(1)] = np.nan
    if prediction.form == "logits":
        return numbers
    _require_shares(numbers, where)
    known = numbers[~np.isnan(numbers[:, 0])]
    exclusive = len(known) > 1 and np.allclose(known.sum(1), 1, atol=1e-3)
    if exclusive and not np.isin(known, (0, 1)).all():
        raise DataError(f"{where}: probabilities", f"the sum is 1 in each of {len(known):,} rows, as of a softmax",
                        expected="probabilities of independent classes, as of a sigmoid",
                        remedy="if each row has one class, declare Classes()")  # fmt: skip
    return logits(numbers.ravel()).reshape(numbers.shape)


def _ordered(prediction: Prediction, where: str, classes: Sequence[str]) -> Array:
    form, numbers, names, _ = prediction
    if form == "values" or numbers.ndim != 2:
        found = "values" if form == "values" else f"shape {numbers.shape}"
        expected = f"probabilities or logits of {len(classes)} classes for each row"
        raise ConfigurationError(where, [Problem("output", found, expected)])
    if names is None:
        expected = "an attribute classes_, a tuple (outputs, names), or classes=[...] of the declared teacher"
        raise ConfigurationError(where, [Problem("classes", "unknown", expected)])
    if numbers.shape[1] != len(names):
        raise ConfigurationError(where, [Problem("output", f"{numbers.shape[1]} columns", f"{len(names)} classes")])
    if problem := misfit(names, classes):
        raise ConfigurationError(where, [problem])
    return numbers[:, [names.index(name) for name in classes]]


def number_scores(prediction: Prediction, where: str) -> Array:
    """Return values, float64 (n,); raise a ConfigurationError unless the prediction has one value per row."""
    form, numbers, *_ = prediction
    if numbers.ndim == 2 and numbers.shape[1] == 1:
        numbers = numbers[:, 0]
    if form != "values" or numbers.ndim != 1:
        found = form if form != "values" else f"shape {numbers.shape}"
        raise ConfigurationError(where, [Problem("output", found, "one value for each row")])
    return numbers


def _require_shares(numbers: Array, where: str) -> None:
    wrong = (numbers < -1e-6) | (numbers > 1 + 1e-6)
    if wrong.any():
        raise DataError(f"{where}: probabilities", f"{numbers[wrong][0]:g}", expected="numbers from 0 to 1",
                        remedy='return logits with `decision_function`, or set gives="logits"')  # fmt: skip
