"""Declarations for tabular models: kinds of label, calibration of probabilities, and monitoring of predictions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, ClassVar, Literal, get_args

from isthmus.distill.settings import failed_checks
from isthmus.features.definition.failure import type_problems
from isthmus.features.definition.spec import Spine
from isthmus.features.errors import Problem, one_of
from isthmus.features.types import Array, Bool, DataType, Float32, Float64, Int32, Int64, String

MOST_CLASSES = 256
"""A label with more distinct values is a key rather than a class."""
MOST_RELEVANT = 30
"""Highest relevance; the gain of a row is 2**relevance - 1."""
Loss = Literal["squared", "absolute"]

_WHOLE = (Bool, Int32, Int64)
NUMBERS = (*_WHOLE, Float32, Float64)


class Label(ABC):
    """A kind of label. `gives` describes the prediction in messages.

    `key` is the key of the scores among the outputs of student and teacher.
    """

    key: ClassVar[str] = "logits"
    gives: ClassVar[str]

    @property
    def types(self) -> tuple[DataType, ...]:
        """Types that the label's column may have."""
        return NUMBERS

    @property
    def grouped_by(self) -> str | None:
        """Name of the column that groups rows, such as the query of a ranking; None if rows are independent.

        Rows with the same value stay in the same batch and in the same part of the split.
        """
        return None

    @abstractmethod
    def is_possible(self, value: float) -> bool:
        """Return True if `value` could be a prediction, so that a device may return it when its features are stale."""

    def problems(self, where: str) -> list[Problem]:  # noqa: ARG002 - for subclasses
        return []

    def spine_problems(self, where: str, spine: Spine, weight: str | None) -> list[Problem]:
        """Check the spine: the type of its label, the column `grouped_by`, and the numeric column `weight`, if any.

        `where` names the declaration in the messages. Return a list of problems, [] if it fits.
        """
        problems, (name, dtype) = [], (spine.label.name, spine.label.dtype)
        if dtype not in self.types:
            expected = f"{one_of(map(str, self.types))} for {self}"
            problems.append(Problem(f"{where}: label {name}", f"is of type {dtype}", expected))
        types = {name: dtype for entity in spine.entities for name, dtype in entity.join_keys.items()}
        types |= {field.name: field.dtype for field in spine.request.schema} if spine.request else {}
        columns = [*types, "event_timestamp"]
        numbers = [name for name, dtype in types.items() if dtype in NUMBERS]
        if weight is not None and weight not in numbers:
            expected = one_of(numbers) if numbers else "a request field of the spine that is a number"
            problems.append(Problem(f"{where}: weight", repr(weight), expected))
        if (within := self.grouped_by) is not None and within not in columns:
            problems.append(Problem(f"{where}: label, within", repr(within), one_of(columns)))
        return problems


@dataclass(frozen=True)
class Binary(Label):
    """A label of 0 or 1. The student predicts `probability`, the probability of a 1."""

    gives = "a probability"

    def is_possible(self, value: float) -> bool:
        return 0 <= value <= 1


@dataclass(frozen=True, kw_only=True)
class Classes(Label):
    """Texts or whole numbers, at most 256 different ones. The student predicts `probabilities`, one per class.

    The classes are those of the training part: whole numbers ascending, texts in the order of their code points.

    Attributes:
        several: True if a row has any number of classes. The label is then an `Array(String)`, empty for a row without
            classes, and the probabilities are independent of each other.
    """

    gives = "the probabilities of classes"
    several: bool = False

    @property
    def types(self) -> tuple[DataType, ...]:
        return (Array(String),) if self.several else (*_WHOLE, String)

    def is_possible(self, value: float) -> bool:  # noqa: ARG002 - no number fits
        return False

    def problems(self, where: str) -> list[Problem]:
        return type_problems(self, f"{where}: ")


@dataclass(frozen=True, kw_only=True)
class Number(Label):
    """A number within the range of float32. The student predicts `value`, within the range of the training labels.

    Attributes:
        loss: "squared" predicts the mean and is measured by rmse; "absolute" predicts the median and is measured by
            mae.
    """

    key = "value"
    gives = "a number"
    loss: Loss = "squared"

    def is_possible(self, value: float) -> bool:
        return math.isfinite(value)

    def problems(self, where: str) -> list[Problem]:
        known = get_args(Loss)
        return failed_checks(self, where, [("loss", self.loss in known, " or ".join(map(repr, known)))])


@dataclass(frozen=True, kw_only=True)
class Rank(Label):
    """The relevance of rows within a group, from 0 (not relevant) to 30. The student predicts `score`.

    Within a group, rows with higher scores come first. Scores of different groups cannot be compared.

    Attributes:
        within: column whose equal values form a group: a join key or a request field of the spine, or
            "event_timestamp".
        at: number of top rows per group that count in ndcg.
    """

    key = "score"
    gives = "a score"
    within: str
    at: int = 10

    @property
    def grouped_by(self) -> str:
        return self.within

    def is_possible(self, value: float) -> bool:
        return math.isfinite(value)

    def problems(self, where: str) -> list[Problem]:
        checks = [
            ("within", isinstance(self.within, str), "the name of a column"),
            ("at", type(self.at) is int and self.at >= 1, "a whole number of at least 1"),
        ]
        return failed_checks(self, where, checks)


SEVERAL = Classes(several=True)


def can_balance(label: object) -> bool:
    """Return True if `class_weight="balanced"` can weigh the classes of a label."""
    return isinstance(label, Binary | Classes) and label != SEVERAL


def attributes(declared: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass for an identity, which a new attribute that is False does not change."""
    return {name: value for name, value in asdict(declared).items() if value is not False}


class Calibration(ABC):
    """A calibration of probabilities, fitted to the validation part; `labels` are the supported kinds of label."""

    labels: ClassVar[tuple[type[Label], ...]]


@dataclass(frozen=True)
class Temperature(Calibration):
    """Divide all logits by the number that makes the labels most likely (Guo et al., 2017, arXiv:1706.04599)."""

    labels = (Binary, Classes)


@dataclass(frozen=True)
class Isotonic(Calibration):
    """A calibration that maps the logit by an increasing, piecewise linear function (Zadrozny and Elkan, KDD 2002).

    Its points are the shares of ones in bins of equal mass, pooled until they increase. The map is strictly increasing,
    so the order of rows, and with it the AUC, does not change except for rounding.
    """

    labels = (Binary,)


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """The rules by which `isthmus answers monitor` matches recorded predictions with labels that become known later.

    The label of a prediction is taken from the spine's row with the same join keys and request fields whose
    `event_timestamp` is nearest to the time of the prediction.

    Attributes:
        within: largest allowed difference between the time of the prediction and the `event_timestamp`.
        match: join keys and request fields that must be equal; None for all of them that a request has. Leave out a
            field whose value in the app may differ from the spine.
        slices: join keys and request fields by whose values quality is also measured; None for all except the join keys
            of private views.
    """

    within: timedelta = timedelta(hours=1)
    match: Sequence[str] | None = None
    slices: Sequence[str] | None = None

    def problems(self, where: str, spine: Spine) -> list[Problem]:
        if wrong := type_problems(self, f"{where}: "):
            return wrong
        problems = failed_checks(self, where, [("within", self.within >= timedelta(0), "at least 0")])
        known = _matchable(spine)
        for name, chosen in (("match", self.match), ("slices", self.slices)):
            unknown = [column for column in chosen or () if column not in known]
            problems += [Problem(f"{where}: {name}", repr(column), one_of(known)) for column in unknown]
        if self.match is not None and not self.match:
            problems.append(Problem(f"{where}: match", "[]", one_of(known)))
        return problems


def _matchable(spine: Spine) -> list[str]:
    keys = [key for entity in spine.entities for key in entity.join_keys]
    fields = [field.name for field in spine.request.schema if field.dtype.element is None] if spine.request else []
    return list(dict.fromkeys([*keys, *fields]))
