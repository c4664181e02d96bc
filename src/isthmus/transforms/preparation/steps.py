"""Declarations of the steps before a model's network, without pyspark. Null and NaN both mean a missing number."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

VOCABULARY = 254
"""Default maximum number of words of a text column."""
WIDTH = 12
"""Default size of a word's vector."""


class Setting:
    """Base of the steps for numbers and the encodings for texts."""

    def valid_values_hint(self) -> str:
        match self:
            case Clip(low=low, high=high) if not (_number(low) and _number(high) and 0 <= low <= high <= 1):
                return "shares, 0 <= low <= high <= 1"
            case Impute("mean" | "median"):
                return ""
            case Impute(value) if isinstance(value, str) or not _number(value) or not abs(value) <= _GREATEST:
                return "'mean', 'median' or a number of 32 bits"
            case Standardize(limit) if not (_number(limit) and limit > 0):
                return "a limit above 0"
            case Embed(size, width) if not _counts(size, width):
                return "a size and a width of at least 1"
            case Hashed(size, buckets, width) if not _counts(size, buckets, width):
                return "a size, buckets and a width of at least 1"
            case Words(size) if not _counts(size):
                return "a size of at least 1"
            case Ordinal(words):
                listed = isinstance(words, tuple | list) and all(isinstance(word, str) and word for word in words)
                if not (listed and 1 <= len(set(words)) == len(words)):
                    return "at least one word, without duplicates or empty texts"
        return ""


@dataclass(frozen=True)
class Step(Setting):
    """Base of the steps for a number. All but `Impute` leave a null unchanged. `labels` name parameters in reports."""

    labels: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Log1p(Step):
    """Replaces a number x by log(1 + x), or by null where x <= -1."""


@dataclass(frozen=True)
class Clip(Step):
    """Limits a number to two quantiles of the training part.

    Attributes:
        low: share of the values below the lower bound.
        high: share of the values below the upper bound.
    """

    labels = ("from", "to")
    low: float = 0.01
    high: float = 0.99


@dataclass(frozen=True)
class Impute(Step):
    """Replaces a missing number: null or NaN.

    Attributes:
        value: a number, or "mean" or "median" to use the mean or median of the training part's finite numbers. These
            are 0 for a column without finite numbers.
    """

    labels = ("with",)
    value: float | str = "mean"


@dataclass(frozen=True)
class Standardize(Step):
    """Replaces x by (x - mean) / standard deviation of the training part, limited so that outliers do not dominate.

    A column that is constant in the training part is divided by 1.

    Attributes:
        limit: largest absolute result.
    """

    labels = ("by mean", "and 1 / standard deviation")
    limit: float = 4.0


@dataclass(frozen=True)
class Words(Setting):
    """Base of the encodings of a text by its place, 1, 2, …, among the most frequent words of the training part.

    A word is the whole text of a row; texts are not split. Null, the empty text and all other words have place 0.

    Attributes:
        size: maximum number of words with a place above 0.
    """

    size: int = VOCABULARY


@dataclass(frozen=True)
class Embed(Words):
    """Encodes a text by a learned vector for each word.

    Attributes:
        width: size of a vector. It is reduced to half the number of places (with place 0) if that is smaller.
    """

    width: int = WIDTH


@dataclass(frozen=True)
class OneHot(Words):
    """Encodes a text by one number per word: 1 for the text's own word, else 0. All unknown words share one number."""


@dataclass(frozen=True)
class Ordinal(Setting):
    """Encodes a text by its place in an order of words, divided by the number of words; 0 if the text is unknown.

    Attributes:
        words: words in ascending order.
    """

    words: tuple[str, ...]


@dataclass(frozen=True)
class Hashed(Words):
    """Encodes a text by a learned vector for each bucket of words, for columns with many words.

    Spark's hash assigns the `size` most frequent words of the training part to buckets. Null, the empty text and all
    other words share one more vector.

    Attributes:
        buckets: number of buckets.
        width: size of a vector, as in `Embed`.
    """

    size: int = 100_000
    buckets: int = 64
    width: int = WIDTH


Encoding = Embed | OneHot | Ordinal | Hashed

_KINDS: dict[str, type[Step | Encoding]] = {
    kind.__name__: kind for kind in (Log1p, Clip, Impute, Standardize, Embed, OneHot, Ordinal, Hashed)
}
_GREATEST = 3.4028234663852886e38
"""Greatest finite float32."""


def described(step: Step | Encoding) -> dict[str, Any]:
    settings = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(step).items()}
    return {"step": type(step).__name__, **settings}


def restored(data: Mapping[str, Any]) -> Any:
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    kind: Any = _KINDS[str(settings.pop("step"))]
    return kind(**settings)


def _number(value: object) -> bool:
    return isinstance(value, int | float)


def _counts(*sizes: object) -> bool:
    return all(isinstance(size, int) and size >= 1 for size in sizes)
