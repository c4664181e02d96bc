"""What a model does to a number or a text before its network sees it. Declarations; importing this loads no pyspark.

Each step is a PySpark expression of one column and of what is learned about it from the training part. `fitting`
learns; the expressions themselves, compiled, are the head of the student's graph. Numbers are Spark floats here, as in
the graph; a null and a NaN are both missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from pyspark.sql import Column

VOCABULARY = 254
"""Most words of a text column, unless something else is asked for."""
WIDTH = 12
"""Numbers in the vector of a word, unless something else is asked for."""


@dataclass(frozen=True)
class Step:
    """Base of the steps of a number. A null goes through all of them but `Impute` as it is.

    Attributes:
        told: what the parameters of `column` are, in words.
    """

    told: ClassVar[tuple[str, ...]] = ()

    def misfit(self) -> str:
        """What is expected of its settings, if they are not so; else empty."""
        return ""

    def learned(self, _value: "Column", /) -> "list[Column]":
        """Aggregates of the values so far, of which `parameters` are made; the value is null where it is not finite."""
        return []

    def parameters(self, _found: Sequence[float | None], /) -> tuple[float, ...]:
        """What `column` is told about one column: of the aggregates, which are None for a column without values."""
        return ()

    def column(self, value: "Column", *_parameters: "Column") -> "Column":
        """The expression."""
        return value


@dataclass(frozen=True)
class Log1p(Step):
    """log(1 + x); null where x is not above -1."""

    def column(self, value: "Column", *_parameters: "Column") -> "Column":
        """The expression."""
        from pyspark.sql import functions

        return functions.log1p(value.cast("double")).cast("float")


@dataclass(frozen=True)
class Clip(Step):
    """Holds a number between two quantiles of the training part.

    Attributes:
        low: share of the values below the lower bound.
        high: share of the values below the upper bound.
    """

    told = ("from", "to")
    low: float = 0.01
    high: float = 0.99

    def misfit(self) -> str:
        """What is expected of its settings, if they are not so; else empty."""
        found = _number(self.low) and _number(self.high) and 0 <= self.low <= self.high <= 1
        return "" if found else "shares, 0 <= low <= high <= 1"

    def learned(self, value: "Column", /) -> "list[Column]":
        """Both quantiles."""
        from pyspark.sql import functions

        return [functions.percentile_approx(value, share, 10_000) for share in (self.low, self.high)]

    def parameters(self, found: Sequence[float | None], /) -> tuple[float, ...]:
        """The bounds."""
        low, high = found
        return (low or 0.0, high or 0.0)

    def column(self, value: "Column", *parameters: "Column") -> "Column":
        """The expression."""
        return _within(value, *parameters)


@dataclass(frozen=True)
class Impute(Step):
    """Puts a number where there is none.

    Attributes:
        value: the number, or "mean" or "median" of the training part.
    """

    told = ("with",)
    value: float | str = "mean"

    def misfit(self) -> str:
        """What is expected of its settings, if they are not so; else empty."""
        value = self.value
        known = value in ("mean", "median") if isinstance(value, str) else _number(value) and abs(value) <= _GREATEST
        return "" if known else "'mean', 'median' or a number of 32 bits"

    def learned(self, value: "Column", /) -> "list[Column]":
        """The mean or the median."""
        from pyspark.sql import functions

        match self.value:
            case "mean":
                return [functions.avg(value)]
            case "median":
                return [functions.percentile_approx(value, 0.5, 10_000)]
        return []

    def parameters(self, found: Sequence[float | None], /) -> tuple[float, ...]:
        """The number."""
        return (found[0] or 0.0 if found else float(self.value),)

    def column(self, value: "Column", *parameters: "Column") -> "Column":
        """The expression."""
        from pyspark.sql import functions

        return functions.coalesce(value, parameters[0])


@dataclass(frozen=True)
class Standardize(Step):
    """(x - mean) / standard deviation of the training part, held within a limit so that a wild value drowns no other.

    Attributes:
        limit: the largest absolute result.
    """

    told = ("by mean", "and 1 / standard deviation")
    limit: float = 4.0

    def misfit(self) -> str:
        """What is expected of its settings, if they are not so; else empty."""
        return "" if _number(self.limit) and self.limit > 0 else "a limit above 0"

    def learned(self, value: "Column", /) -> "list[Column]":
        """Mean and standard deviation."""
        from pyspark.sql import functions

        return [functions.avg(value), functions.stddev_pop(value)]

    def parameters(self, found: Sequence[float | None], /) -> tuple[float, ...]:
        """The mean, and 1 / the standard deviation: of a constant column, 1."""
        mean, spread = found
        # A smaller one would vanish in float32.
        return (mean or 0.0, 1 / spread if spread and spread > _TINY else 1.0)

    def column(self, value: "Column", *parameters: "Column") -> "Column":
        """The expression."""
        from pyspark.sql import functions

        mean, inverse = parameters
        limit = functions.lit(self.limit).cast("float")
        return _within((value - mean) * inverse, -limit, limit)


@dataclass(frozen=True)
class Words:
    """Base of what can be made of a text: the place of a word among the most frequent ones of the training part.

    Null, the empty text and a word that is not among them have place 0.

    Attributes:
        size: most words that have a place.
    """

    size: int = VOCABULARY

    def misfit(self) -> str:
        """What is expected of its settings, if they are not so; else empty."""
        return "" if _counts(self.size) else "a size of at least 1"


@dataclass(frozen=True)
class Embed(Words):
    """A learned vector for each word.

    Attributes:
        width: numbers in a vector; half as many as there are places, where that is less.
    """

    width: int = WIDTH

    def misfit(self) -> str:
        """What is expected of its settings, if they are not so; else empty."""
        return "" if _counts(self.size) and _counts(self.width) else "a size and a width of at least 1"


@dataclass(frozen=True)
class OneHot(Words):
    """A number for each word and one for all others: 1 for the word that it is, else 0."""


@dataclass(frozen=True)
class Ordinal:
    """A number between 0 and 1: the place of a word in an order, over their number. 0 for all others.

    Attributes:
        words: from the least on.
    """

    words: tuple[str, ...]

    def misfit(self) -> str:
        """What is expected of its settings, if they are not so; else empty."""
        listed = isinstance(self.words, tuple | list) and all(isinstance(word, str) and word for word in self.words)
        found = listed and 1 <= len(set(self.words)) == len(self.words)
        return "" if found else "at least one word, each once, none of them empty"


@dataclass(frozen=True)
class Hashed(Words):
    """A learned vector for each of a few buckets, into which words of the training part fall by Spark's hash.

    Attributes:
        buckets: how many.
        width: as in `Embed`.
    """

    size: int = 100_000
    buckets: int = 64
    width: int = WIDTH

    def misfit(self) -> str:
        """What is expected of its settings, if they are not so; else empty."""
        sound = all(map(_counts, (self.size, self.buckets, self.width)))
        return "" if sound else "a size, buckets and a width of at least 1"


Text = Embed | OneHot | Ordinal | Hashed

_KINDS: dict[str, type[Step | Text]] = {
    kind.__name__: kind for kind in (Log1p, Clip, Impute, Standardize, Embed, OneHot, Ordinal, Hashed)
}


def described(step: Step | Text) -> dict[str, Any]:
    """A step as plain data."""
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(step).items()}
    return {"step": type(step).__name__, **settings}


def restored(data: Mapping[str, Any]) -> Any:
    """The inverse of `described`."""
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    kind: Any = _KINDS[str(settings.pop("step"))]
    return kind(**settings)


_TINY = 1.1754943508222875e-38
"""The smallest normal float32."""
_GREATEST = 3.4028234663852886e38
"""The greatest finite float32."""


def _number(value: object) -> bool:
    return isinstance(value, int | float)


def _counts(size: object) -> bool:
    return isinstance(size, int) and size >= 1


def _within(value: "Column", low: "Column", high: "Column") -> "Column":
    # greatest and least pass over a null.
    from pyspark.sql import functions

    return functions.when(value.isNotNull(), functions.greatest(functions.least(value, high), low))
