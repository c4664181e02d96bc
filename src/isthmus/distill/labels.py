"""What a model of tables predicts, how its probabilities are calibrated, and how answers meet labels: declarations."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Literal, get_args

from isthmus.distill.settings import failed_checks
from isthmus.features.definition.failure import mistyped
from isthmus.features.definition.spec import Spine
from isthmus.features.errors import Problem, one_of
from isthmus.features.types import Bool, DataType, Float32, Float64, Int32, Int64, String

MOST_CLASSES = 256
"""Beyond that many, a label is a key and no class."""
MOST_RELEVANT = 30
"""The gain of a row is 2 to the power of its relevance, minus 1."""
Loss = Literal["squared", "absolute"]

_WHOLE = (Bool, Int32, Int64)
_NUMBERS = (*_WHOLE, Float32, Float64)


class Label(ABC):
    """A kind of label.

    Attributes:
        types: of a label's column.
        gives: what the student answers, in words.
    """

    types: ClassVar[tuple[DataType, ...]] = _NUMBERS
    gives: ClassVar[str]

    @property
    def grouped_by(self) -> str | None:
        """The column whose values are groups of rows, which no part of a split and no batch cuts."""
        return None

    @abstractmethod
    def stands_for(self, value: float) -> bool:
        """Whether a student may have answered a number, so that it can be a default."""

    def problems(self, where: str) -> list[Problem]:  # noqa: ARG002 - of subclasses
        """The invalid values, each with what would be valid."""
        return []


@dataclass(frozen=True)
class Binary(Label):
    """0 or 1. The student answers with the `probability` of a 1."""

    gives = "a probability"

    def stands_for(self, value: float) -> bool:
        """A probability."""
        return 0 <= value <= 1


@dataclass(frozen=True)
class Classes(Label):
    """Texts or whole numbers, at most 256 of them. The student answers with the `probabilities` of all.

    The classes are those of the training part: whole numbers ascending, texts in the order of their code points.
    """

    types = (*_WHOLE, String)
    gives = "the probabilities of classes"

    def stands_for(self, value: float) -> bool:  # noqa: ARG002 - none does
        """No number is an answer."""
        return False


@dataclass(frozen=True, kw_only=True)
class Number(Label):
    """Any number that float32 has. The student answers with a `value`, between the labels of the training part.

    Attributes:
        loss: "squared", for the mean of what may come, measured by rmse; or "absolute", for its median, by mae.
    """

    gives = "a number"
    loss: Loss = "squared"

    def stands_for(self, value: float) -> bool:
        """A finite number."""
        return math.isfinite(value)

    def problems(self, where: str) -> list[Problem]:
        """Of the loss."""
        known = get_args(Loss)
        wrong = Problem(f"{where}: loss", repr(self.loss), " or ".join(map(repr, known)))
        return [] if self.loss in known else [wrong]


@dataclass(frozen=True, kw_only=True)
class Rank(Label):
    """How relevant the rows of a group are, from 0 (not at all) to 30. The student answers with a `score`.

    A score orders the rows of its group, the highest first. It says nothing by itself, nor of rows of two groups.

    Attributes:
        within: the column whose values are the groups: a join key or a request field of the spine, or
            "event_timestamp".
        at: the rows of a group that count in ndcg, from the top.
    """

    types = (*_WHOLE, Float32, Float64)
    gives = "a score"
    within: str
    at: int = 10

    @property
    def grouped_by(self) -> str:
        """The column of groups."""
        return self.within

    def stands_for(self, value: float) -> bool:
        """A finite number."""
        return math.isfinite(value)

    def problems(self, where: str) -> list[Problem]:
        """Of the column, and of the rows that count."""
        checks = [
            ("within", self.within, isinstance(self.within, str), "the name of a column"),
            ("at", self.at, type(self.at) is int and self.at >= 1, "a whole number of at least 1"),
        ]
        return [
            Problem(f"{where}: {name}", repr(value), expected) for name, value, holds, expected in checks if not holds
        ]


class Calibration(ABC):
    """How the student's probabilities become the shares of rows that turn out so: learned on the validation part.

    `labels` are the kinds of labels that it is for.
    """

    labels: ClassVar[tuple[type[Label], ...]]


@dataclass(frozen=True)
class Temperature(Calibration):
    """All logits are divided by the number that makes the labels likeliest (Guo et al., 2017, arXiv:1706.04599)."""

    labels = (Binary, Classes)


@dataclass(frozen=True)
class Isotonic(Calibration):
    """A rising, piecewise linear map of the logit (after Zadrozny and Elkan, KDD 2002).

    Its points are shares of ones over bins of equal mass, pooled until they rise. It rises strictly, so that the order
    of rows, and the AUC, stay but for rounding.
    """

    labels = (Binary,)


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """How recorded answers of a model find the labels that become known later: `isthmus monitor`.

    The label of an answer is that of the spine's row with the same join keys and request fields whose `event_timestamp`
    is nearest to the moment of the answer.

    Attributes:
        within: how far apart the two moments may be.
        match: the join keys and request fields by which rows are found; None for all of them that a request has. Leave
            out a field that an app may know otherwise than the spine.
        slices: the join keys and request fields by whose values quality is measured, too; None for all of them
            but the join keys of private views.
    """

    within: timedelta = timedelta(hours=1)
    match: Sequence[str] | None = None
    slices: Sequence[str] | None = None

    def problems(self, where: str, spine: Spine) -> list[Problem]:
        """The invalid values, each with what would be valid."""
        if wrong := mistyped(self, f"{where}: "):
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
    """The join keys and request fields of a spine, without arrays."""
    keys = [key for entity in spine.entities for key in entity.join_keys]
    fields = [field.name for field in spine.request.schema if field.dtype.element is None] if spine.request else []
    return list(dict.fromkeys([*keys, *fields]))
