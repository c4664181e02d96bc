"""What a view promises of its rows, and a request source expects of a request.

Of a view they are gates, not values: no expectation is part of the contract or its hash, and a build whose rows break a
promise writes nothing. Of a request source they decide values, see `transforms.requestfields`. Every class is frozen
and light, like the declarations beside them; `Expect` has a name for each:

    transform(..., expectations=[Expect.present("price"), Expect.between("price", 0, 1e6), Expect.rows(at_least=1)])
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from isthmus.features.errors import Problem
from isthmus.features.types import DataType

_SIZED = ("String", "Bytes")
_NUMBERS = ("Int32", "Int64", "Float32", "Float64")
_LONGEST = 1000
"""Characters up to which a text of a request is measured."""
_OF_ARRAYS = "none: arrays of a request keep their declared size, and nothing more"
_PYTHON = {"Bool": bool, "Int32": int, "Int64": int, "UnixTimestamp": datetime, "String": str, "Bytes": bytes}


@dataclass(frozen=True)
class Expectation:
    """Base of all expectations.

    Attributes:
        feature: whose values it is about; empty for one about the rows.
    """

    feature: str = ""


@dataclass(frozen=True)
class Present(Expectation):
    """At least this share of the rows has a value."""

    share: float = 1.0

    def __str__(self) -> str:
        return "always present" if self.share == 1.0 else f"present in at least {self.share:.6g} of the rows"


@dataclass(frozen=True)
class Between(Expectation):
    """Every value that is there lies within the bounds, both of them included. NaN does not."""

    low: Any = None
    high: Any = None

    def __str__(self) -> str:
        return _bounds(self.low, self.high)


@dataclass(frozen=True)
class Length(Expectation):
    """Every String (in characters), Bytes or Array that is there has a length within the bounds, both included."""

    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        return f"a length {_bounds(self.low, self.high)}"


@dataclass(frozen=True)
class OneOf(Expectation):
    """Every value that is there is one of these."""

    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(map(repr, self.values[:8]))
        return f"one of {shown}" + (f" and {len(self.values) - 8} more" if len(self.values) > 8 else "")


@dataclass(frozen=True)
class Unique(Expectation):
    """No value stands in two rows of the table."""

    def __str__(self) -> str:
        return "unique"


@dataclass(frozen=True)
class Rows(Expectation):
    """The table has a number of rows within the bounds, both of them included."""

    at_least: int = 0
    at_most: int | None = None

    def __str__(self) -> str:
        return f"rows {_bounds(self.at_least, self.at_most)}"


@dataclass(frozen=True)
class Fresh(Expectation):
    """The latest event time is no older than this, by the project's clock."""

    within: timedelta = timedelta(0)

    def __str__(self) -> str:
        return f"fresh within {self.within}".removesuffix(", 0:00:00")


@dataclass(frozen=True)
class NoDrift(Expectation):
    """Rows with event times after those of the training set in use have at most this population stability index.

    Without a training set, or without such rows, there is nothing to compare.
    """

    psi: float = 0.25

    def __str__(self) -> str:
        return f"drift (psi) at most {self.psi:.6g}"


class Expect:
    """The expectations, by the names under which a definition writes them."""

    @staticmethod
    def present(feature: str, *, share: float = 1.0) -> Present:
        """At least `share` of the rows have a value; by default all."""
        return Present(feature, share)

    @staticmethod
    def between(feature: str, low: Any = None, high: Any = None) -> Between:
        """Every number or time lies in [low, high]; None leaves a side open."""
        return Between(feature, low, high)

    @staticmethod
    def length(feature: str, low: int | None = None, high: int | None = None) -> Length:
        """Every String, Bytes or Array has a length in [low, high]; None leaves a side open."""
        return Length(feature, low, high)

    @staticmethod
    def one_of(feature: str, values: Sequence[Any]) -> OneOf:
        """Every value is one of these."""
        return OneOf(feature, tuple(values))

    @staticmethod
    def unique(feature: str) -> Unique:
        """No value stands in two rows of the table."""
        return Unique(feature)

    @staticmethod
    def rows(*, at_least: int = 0, at_most: int | None = None) -> Rows:
        """The table has this many rows."""
        return Rows(at_least=at_least, at_most=at_most)

    @staticmethod
    def fresh(*, within: timedelta) -> Fresh:
        """The latest event is no older than this."""
        return Fresh(within=within)

    @staticmethod
    def drift(feature: str, *, psi: float = 0.25) -> NoDrift:
        """What came after the training set looks like what was there when it was made."""
        return NoDrift(feature, psi)


_NAMES: dict[type, str] = {
    Present: "present", Between: "between", Length: "length", OneOf: "one_of", Unique: "unique", Rows: "rows",
    Fresh: "fresh", NoDrift: "drift",
}  # fmt: skip


def problems(owner: str, fields: dict[str, DataType], expectations: Sequence[Expectation]) -> Iterator[Problem]:
    """What is wrong with the expectations of a view or a request source.

    Args:
        owner: which one.
        fields: the types of its features, by name.
        expectations: in the order of the declaration.
    """
    for expectation in expectations:
        where = f"{owner}, Expect.{_NAMES[type(expectation)]}"
        dtype = None
        if not isinstance(expectation, Rows | Fresh):
            where += f"({expectation.feature!r})"
            dtype = fields.get(expectation.feature) if isinstance(expectation.feature, str) else None
            if dtype is None:
                yield Problem(where, "there is no such feature", "one of " + ", ".join(fields))
                continue
        if (found := _wrong(expectation, dtype)) is not None:
            yield Problem(where, *found)


def request_problems(
    owner: str, fields: dict[str, DataType], expectations: Sequence[Expectation], defaults: Mapping[str, Any]
) -> Iterator[Problem]:
    """What is wrong with what a request source expects and with its defaults.

    Args:
        owner: the request source.
        fields: the types of its fields, by name.
        expectations: in the order of the declaration.
        defaults: values by field.
    """
    found = list(problems(owner, fields, expectations))
    yield from found
    for expectation in [] if found else expectations:
        where = f"{owner}, Expect.{_NAMES[type(expectation)]}({expectation.feature!r})"
        match expectation:
            case _ if fields[expectation.feature].element is not None:
                yield Problem(where, "the field is an Array", _OF_ARRAYS)
            case Present(share=share) if share != 1:
                yield Problem(where, f"share={share!r}", "none: a request is one row")
            case Between(low=low, high=high) if fields[expectation.feature].name.startswith("Int"):
                # Engines compare whole numbers with fractions as doubles, which do not hold all of them.
                bounds = tuple(bound for bound in (low, high) if bound is not None)
                if (wrong := _wrong_values(bounds, fields[expectation.feature].name)) is not None:
                    yield Problem(where, *wrong)
            case Length(low=low, high=high) if max(low or 0, high or 0) > _LONGEST:
                yield Problem(where, f"a bound of {max(low or 0, high or 0)}", f"{_LONGEST} characters at most")
    for name, value in defaults.items():
        where = f"{owner}, default of {name!r}"
        if name not in fields:
            yield Problem(where, "there is no such field", "one of " + ", ".join(fields))
        elif fields[name].element is not None:
            yield Problem(where, "the field is an Array", _OF_ARRAYS)
        elif (wrong := _wrong_values((value,), fields[name].name)) is not None:
            yield Problem(where, *wrong)
        elif not found:
            yield from (Problem(where, repr(value), str(one)) for one in expectations
                        if one.feature == name and not _kept(one, value))  # fmt: skip


def _kept(expectation: Expectation, value: Any) -> bool:
    """Whether a value is as expected."""
    match expectation:
        case Between(low=low, high=high):
            return bool((low is None or value >= low) and (high is None or value <= high))
        case Length(low=low, high=high):
            return bool((low or 0) <= len(value) and (high is None or len(value) <= high))
        case OneOf(values=values):
            return value in values
    return True


def _wrong(expectation: Expectation, dtype: DataType | None) -> tuple[str, str] | None:
    """What was found and what is expected, if an expectation on values of this type makes no sense."""
    name = "" if dtype is None else dtype.name
    match expectation:
        case Present(share=share) if not _number(share) or not 0 < share <= 1:
            return f"share={share!r}", "more than 0, at most 1"
        case Between() if name not in (*_NUMBERS, "UnixTimestamp"):
            return f"the feature has type {name}", "a number or a time; for the size of others there is Expect.length"
        case Between(low=low, high=high):
            return _wrong_bounds(low, high, name)
        case Length() if name not in _SIZED and (dtype is None or dtype.element is None):
            return f"the feature has type {name}", "String, Bytes or an Array"
        case Length(low=low, high=high):
            return _wrong_bounds(low, high, "a length")
        case OneOf() | Unique() if dtype is not None and dtype.element is not None:
            return f"the feature has type {name}", "a type that is no Array"
        case OneOf(values=values):
            return _wrong_values(values, name)
        case Rows(at_least=low, at_most=high):
            return _wrong_bounds(low, high, "a length")
        case Fresh(within=within) if not isinstance(within, timedelta) or within <= timedelta(0):
            return f"within={within!r}", "a positive timedelta"
        case NoDrift(psi=psi) if not _number(psi) or not 0 < psi < math.inf:
            return f"psi={psi!r}", "a positive number"
    return None


def _wrong_bounds(low: Any, high: Any, name: str) -> tuple[str, str] | None:
    given = [bound for bound in (low, high) if bound is not None]
    if not given:
        return "it has no bound", "low, high or both"
    for bound in given:
        if name == "UnixTimestamp":
            if not isinstance(bound, datetime) or bound.utcoffset() is None:
                return f"bound {bound!r}", "a datetime with a time zone"
        elif not _number(bound) or math.isnan(bound):
            return f"bound {bound!r}", "a number"
        elif name == "a length" and (not isinstance(bound, int) or bound < 0):
            return f"bound {bound!r}", "a whole number, 0 or more"
    if len(given) == 2 and low > high:
        return f"{low} is greater than {high}", "bounds that a value can meet"
    return None


def _wrong_values(values: tuple[Any, ...], name: str) -> tuple[str, str] | None:
    if not values:
        return "it names no value", "at least one"
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
