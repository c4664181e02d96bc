"""Expectations: rules for the rows of a view or the fields of a request. They are not part of a contract or hash."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from isthmus.features.errors import Problem, did_you_mean, one_of
from isthmus.features.types import DataType

_SIZED = ("String", "Bytes")
_NUMBERS = ("Int32", "Int64", "Float32", "Float64")
_LONGEST = 1000
"""The greatest length, in characters, that a graph can check on a request's text."""
_NO_ARRAY_RULE = "neither a rule nor a default: only the declared size of an array is checked"
_PYTHON = {"Bool": bool, "Int32": int, "Int64": int, "UnixTimestamp": datetime, "String": str, "Bytes": bytes}


@dataclass(frozen=True)
class Expectation:
    """Base class of all rules. `feature` is a feature's name, or "" for a rule about the rows of a table."""

    feature: str


@dataclass(frozen=True)
class Present(Expectation):
    """Rule: at least `share` of the rows have a value, by default all rows."""

    share: float = field(default=1.0, kw_only=True)

    def __str__(self) -> str:
        return "always present" if self.share == 1.0 else f"present in at least {self.share:.6g} of the rows"


@dataclass(frozen=True)
class Between(Expectation):
    """Rule: every non-null number or time is within the inclusive bounds. None means no bound. NaN breaks the rule."""

    low: Any = None
    high: Any = None

    def __str__(self) -> str:
        return _bounds(self.low, self.high)


@dataclass(frozen=True)
class Length(Expectation):
    """Rule: every non-null String (in characters), Bytes or Array has a length within the inclusive bounds."""

    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        return f"a length {_bounds(self.low, self.high)}"


@dataclass(frozen=True)
class OneOf(Expectation):
    """Rule: every non-null value is one of `values`."""

    values: Sequence[Any]

    def __post_init__(self) -> None:
        if isinstance(self.values, Iterable) and not isinstance(self.values, str):
            object.__setattr__(self, "values", tuple(self.values))

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.values[:8]))
        return f"one of {shown}" + (f" and {len(self.values) - 8} more" if len(self.values) > 8 else "")


@dataclass(frozen=True)
class Unique(Expectation):
    """Rule: no two rows of the table have the same value."""

    def __str__(self) -> str:
        return "unique"


@dataclass(frozen=True)
class RowCount(Expectation):
    """Rule: the table has from `at_least` to `at_most` rows, inclusive. None means no limit."""

    feature: str = field(default="", init=False)
    at_least: int = field(default=0, kw_only=True)
    at_most: int | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        return f"rows {_bounds(self.at_least, self.at_most)}"


@dataclass(frozen=True)
class Fresh(Expectation):
    """Rule: the latest event time of the rows is at most `within` ago, by the project's clock."""

    feature: str = field(default="", init=False)
    within: timedelta = field(kw_only=True)

    def __str__(self) -> str:
        return f"fresh within {self.within}".removesuffix(", 0:00:00")


@dataclass(frozen=True)
class NoDrift(Expectation):
    """Rule: the rows after the training set in use have a population stability index of at most `psi` against it.

    The rule also holds if chance or usual variation explains a greater index, and without a training set or later rows.
    """

    psi: float = field(default=0.25, kw_only=True)

    def __str__(self) -> str:
        return f"drift (psi) at most {self.psi:.6g}"


class Expect:
    """The expectations that definitions can use, for example `Expect.between("price", 0, 1e6)`.

    A build whose rows break one writes nothing. A request value that breaks one is replaced by the default of its
    field; without a default, its row is rejected.
    """

    present = Present
    between = Between
    length = Length
    one_of = OneOf
    unique = Unique
    rows = RowCount
    fresh = Fresh
    drift = NoDrift


BY_ROW = (Present, Between, OneOf, Length)
"""Expectations that each row meets or breaks by itself, so that a request can be checked."""
_NAMES = {kind: name for name, kind in vars(Expect).items() if isinstance(kind, type)}


def problems(owner: str, fields: dict[str, DataType], expectations: Sequence[Expectation]) -> Iterator[Problem]:
    for expectation in expectations:
        where = f"{owner}, Expect.{_NAMES[type(expectation)]}"
        dtype = None
        if not isinstance(expectation, RowCount | Fresh):
            where += f"({expectation.feature!r})"
            dtype = fields.get(expectation.feature) if isinstance(expectation.feature, str) else None
            if dtype is None:
                near = did_you_mean(str(expectation.feature), fields)
                yield Problem(where, f"no such feature{near}", one_of(fields))
                continue
        if (wrong := _wrong(expectation, dtype)) is not None:
            yield Problem(where, *wrong)


def request_problems(
    owner: str, fields: dict[str, DataType], expectations: Sequence[Expectation], defaults: Mapping[str, Any]
) -> Iterator[Problem]:
    invalid = list(problems(owner, fields, expectations))
    yield from invalid
    for expectation in [] if invalid else expectations:
        where = f"{owner}, Expect.{_NAMES[type(expectation)]}({expectation.feature!r})"
        match expectation:
            case _ if fields[expectation.feature].element is not None:
                yield Problem(where, "the field is an Array", _NO_ARRAY_RULE)
            case Present(share=share) if share != 1:
                yield Problem(where, f"share={share!r}", "no share: a request is a single row")
            case Between(low=low, high=high) if fields[expectation.feature].name.startswith("Int"):
                # Engines compare integers with fractions as doubles, which cannot hold every integer.
                bounds = tuple(bound for bound in (low, high) if bound is not None)
                if (wrong := _wrong_values(bounds, fields[expectation.feature].name)) is not None:
                    yield Problem(where, *wrong)
            case Length(low=low, high=high) if max(low or 0, high or 0) > _LONGEST:
                yield Problem(where, f"a bound of {max(low or 0, high or 0)}", f"{_LONGEST} characters at most")
    for name, value in defaults.items():
        where = f"{owner}, default of {name!r}"
        if name not in fields:
            yield Problem(where, f"no such field{did_you_mean(name, fields)}", one_of(fields))
        elif fields[name].element is not None:
            yield Problem(where, "the field is an Array", _NO_ARRAY_RULE)
        elif (wrong := _wrong_values((value,), fields[name].name)) is not None:
            yield Problem(where, *wrong)
        elif not invalid:
            yield from (Problem(where, repr(value), str(expectation)) for expectation in expectations
                        if expectation.feature == name and not _fits(expectation, value))  # fmt: skip


def _fits(expectation: Expectation, value: Any) -> bool:
    match expectation:
        case Between(low=low, high=high):
            return bool((low is None or value >= low) and (high is None or value <= high))
        case Length(low=low, high=high):
            return bool((low or 0) <= len(value) and (high is None or len(value) <= high))
        case OneOf(values=values):
            return value in values
    return True


def _wrong(expectation: Expectation, dtype: DataType | None) -> tuple[str, str] | None:
    name = "" if dtype is None else dtype.name
    match expectation:
        case Present(share=share) if not _number(share) or not 0 < share <= 1:
            return f"share={share!r}", "more than 0, at most 1"
        case Between() if name not in (*_NUMBERS, "UnixTimestamp"):
            return f"the feature has type {name}", "a number or a time; check other sizes with Expect.length"
        case Between(low=low, high=high):
            return _wrong_bounds(low, high, name)
        case Length() if name not in _SIZED and (dtype is None or dtype.element is None):
            return f"the feature has type {name}", "String, Bytes or an Array"
        case Length(low=low, high=high):
            return _wrong_bounds(low, high, "a length")
        case OneOf() | Unique() if dtype is not None and dtype.element is not None:
            return f"the feature has type {name}", "a type that is not an Array"
        case OneOf(values=values) if not isinstance(values, tuple):
            return f"values={values!r}", f"a list: [{values!r}]"
        case OneOf(values=values):
            return _wrong_values(values, name)
        case RowCount(at_least=low, at_most=high):
            return _wrong_bounds(low, high, "a length")
        case Fresh(within=within) if not isinstance(within, timedelta) or within <= timedelta(0):
            return f"within={within!r}", "a positive timedelta"
        case NoDrift(psi=psi) if not _number(psi) or not 0 < psi < math.inf:
            return f"psi={psi!r}", "a positive number"
    return None


def _wrong_bounds(low: Any, high: Any, name: str) -> tuple[str, str] | None:
    bounds = [bound for bound in (low, high) if bound is not None]
    if not bounds:
        return "no bound is set", "low, high or both"
    for bound in bounds:
        if name == "UnixTimestamp":
            if not isinstance(bound, datetime) or bound.utcoffset() is None:
                return f"bound {bound!r}", "a datetime with a time zone"
        elif not _number(bound) or (isinstance(bound, float) and math.isnan(bound)):
            return f"bound {bound!r}", "a number"
        elif name == "a length" and (not isinstance(bound, int) or bound < 0):
            return f"bound {bound!r}", "a whole number, 0 or more"
    if len(bounds) == 2 and low > high:
        return f"{low} is greater than {high}", "low at most high"
    return None


def _wrong_values(values: Sequence[Any], name: str) -> tuple[str, str] | None:
    if not values:
        return "the list is empty", "at least one value"
    for value in values:
        fits = _number(value) if name.startswith("Float") else type(value) is _PYTHON.get(name, type(value))
        if not fits or (isinstance(value, datetime) and value.utcoffset() is None) or _too_large(value, name):
            return f"value {value!r}", f"values of {name}"
    return None


def _too_large(value: Any, name: str) -> bool:
    return name.startswith("Int") and not -(1 << int(name[3:]) - 1) <= value < 1 << int(name[3:]) - 1


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bounds(low: Any, high: Any) -> str:
    if high is None:
        return f"at least {low}"
    return f"at most {high}" if low is None else f"from {low} to {high}"
