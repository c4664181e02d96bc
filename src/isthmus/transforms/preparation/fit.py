"""What the steps before a network learn from the training part of a training set, by an engine."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from isthmus.transforms.preparation.steps import Embed, Hashed, OneHot, Ordinal, Step, Text, described, restored

if TYPE_CHECKING:
    import onnx
    from pyspark.sql import Column, DataFrame

LEARNED = "preparation.json"
"""The file of a package that tells what was learned. The graph holds it."""
INDICATOR_SHARE = 0.01
"""A number that is missing in a smaller share of the training rows gets no missing indicator."""


class FittedNumber(msgspec.Struct, frozen=True):
    """A number with its steps.

    Attributes:
        name: its column.
        steps: the steps, in order, as plain data.
        parameters: what each was told.
        indicator: whether its absence is a number of its own.
    """

    name: str
    steps: tuple[dict[str, Any], ...]
    parameters: tuple[tuple[float, ...], ...]
    indicator: bool

    @property
    def chain(self) -> list[Step]:
        """The steps."""
        return [restored(step) for step in self.steps]

    def __str__(self) -> str:
        parts = [" ".join([str(step), *(f"{word} {value:.6g}" for word, value in zip(step.told, told, strict=True))])
                 for step, told in zip(self.chain, self.parameters, strict=True)]  # fmt: skip
        return ", ".join([*parts, *(["1 where it is missing"] if self.indicator else [])]) or "as it is"


class FittedText(msgspec.Struct, frozen=True):
    """A text with what is made of it.

    Attributes:
        name: its column.
        how: what is made of it, as plain data.
        places: word to its place, from 1 on, in the order in which they were found.
    """

    name: str
    how: dict[str, Any]
    places: dict[str, int]

    @property
    def text(self) -> Text:
        """What is made of it."""
        text: Text = restored(self.how)
        return text

    @property
    def count(self) -> int:
        """The number of places, 0 included."""
        text = self.text
        return text.buckets + 1 if isinstance(text, Hashed) else len(self.places) + 1

    def __str__(self) -> str:
        return f"{self.text} with {len(self.places):,} words"


class Preparation(msgspec.Struct, frozen=True):
    """What the training part taught about the inputs of a network.

    Attributes:
        numbers: the numbers, in the order of `Tensors.numeric`.
        texts: the texts, in the order of `Tensors.categories`.
    """

    numbers: tuple[FittedNumber, ...]
    texts: tuple[FittedText, ...]

    @property
    def width(self) -> int:
        """How many numbers the network sees."""
        spelled = sum(text.count for text in self.texts if isinstance(text.text, OneHot))
        ordered = sum(isinstance(text.text, Ordinal) for text in self.texts)
        return len(self.numbers) + sum(number.indicator for number in self.numbers) + spelled + ordered

    @property
    def embedded(self) -> dict[int, tuple[int, int]]:
        """The texts that have a learned vector for each place: position to how many there are, and numbers in each."""
        return {
            position: (fitted.count, min(text.width, (fitted.count + 1) // 2))
            for position, fitted in enumerate(self.texts)
            if isinstance(text := fitted.text, Embed | Hashed)
        }


def fit(rows: "DataFrame", numbers: Mapping[str, Sequence[Step]], texts: Mapping[str, Text]) -> Preparation:
    """What steps learn from rows.

    Args:
        rows: the training part.
        numbers: column to its steps.
        texts: column to what is made of it.
    """
    parameters: dict[str, list[tuple[float, ...]]] = {name: [] for name in numbers}
    shares = _collected(rows, {name: [_missing(rows, name)] for name in numbers})
    # Each step learns from what the steps before it give: as many passes as a column has steps that learn.
    for turn in range(max(map(len, numbers.values()), default=0)):
        asked = {}
        for name, steps in numbers.items():
            if turn < len(steps):
                value = chain(number(rows, name), steps[:turn], [_literals(one) for one in parameters[name]])
                asked[name] = steps[turn].learned(_finite(value))
        found = _collected(rows, {name: columns for name, columns in asked.items() if columns})
        for name in asked:
            told = numbers[name][turn].parameters(found.get(name, ()))
            # The last digits of a mean depend on the order of the rows, which engines owe nobody.
            parameters[name].append(tuple(float(np.float32(one)) for one in told))
    fitted = [
        FittedNumber(
            name, tuple(map(described, steps)), tuple(parameters[name]), INDICATOR_SHARE <= (shares[name][0] or 0.0) < 1
        )
        for name, steps in numbers.items()
    ]
    places = (FittedText(name, described(text), _places(rows, name, text)) for name, text in texts.items())
    return Preparation(tuple(fitted), tuple(places))


def training_part(rows: "DataFrame", before: int) -> "DataFrame":
    """The rows before a moment, in microseconds, whose labels were known by then."""
    from pyspark.sql import functions

    moment = functions.timestamp_micros(functions.lit(before))
    return rows.where((functions.col("event_timestamp") < moment) & (functions.col("known_at") <= moment))


def chain_graph(steps: Sequence[Step], counts: Sequence[int]) -> "onnx.ModelProto":
    """The graph of all steps of a number `x`, which gives `y`: 0 where it is null after them.

    Args:
        steps: the steps.
        counts: how many parameters each takes. They are inputs behind `x`, none of them null, NaN or -0.0, so that
            columns with the same steps can share the graph.
    """
    from pyspark.sql import functions

    from isthmus.transforms.rowwise.compiler import compile_columns
    from isthmus.transforms.rowwise.core.expressions import traced
    from isthmus.transforms.rowwise.core.types import FLOAT

    told = [[f"p{turn}_{n}" for n in range(count)] for turn, count in enumerate(counts)]
    with traced():
        value = chain(functions.col("x"), steps, [[functions.col(name) for name in part] for part in told])
        value = functions.coalesce(value, functions.lit(0.0).cast("float"))
    parameters = [name for part in told for name in part]
    return compile_columns({"y": value}, dict.fromkeys(["x", *parameters], FLOAT), parameters).model


def place_graph(places: Mapping[str, int]) -> "onnx.ModelProto":
    """The graph of the place of a word `x`, which is "" for null; it gives `place`."""
    from pyspark.sql import functions

    from isthmus.transforms.rowwise.compiler import compile_columns
    from isthmus.transforms.rowwise.core.expressions import traced
    from isthmus.transforms.rowwise.core.types import STRING

    with traced():
        value = place(functions.col("x"), places)
    return compile_columns({"place": value}, {"x": STRING}, ["x"]).model


def number(rows: "DataFrame", name: str) -> "Column":
    """A number, a time in microseconds or a boolean as the float that a network sees; null where it is null or NaN."""
    from pyspark.sql import functions

    value = rows[name]
    as_float = (functions.unix_micros(value) if dict(rows.dtypes)[name] == "timestamp" else value).cast("float")
    return functions.when(~functions.isnan(as_float), as_float)


def chain(value: "Column", steps: Sequence[Step], parameters: "Sequence[Sequence[Column]]") -> "Column":
    """All steps of a number."""
    for step, told in zip(steps, parameters, strict=True):
        value = step.column(value, *told)
    return value


def place(value: "Column", places: Mapping[str, int]) -> "Column":
    """The place of a word; 0 for all others and for null."""
    from pyspark.sql import functions

    nowhere = functions.lit(0).cast("bigint")
    if not places:
        return nowhere
    pairs = [
        part for word, place in places.items() for part in (functions.lit(word), functions.lit(place).cast("bigint"))
    ]
    return functions.coalesce(functions.element_at(functions.create_map(*pairs), value), nowhere)


def _literals(parameters: Sequence[float]) -> "list[Column]":
    from pyspark.sql import functions

    return [functions.lit(parameter).cast("float") for parameter in parameters]


def _missing(rows: "DataFrame", name: str) -> "Column":
    from pyspark.sql import functions

    return functions.avg(number(rows, name).isNull().cast("double"))


def _finite(value: "Column") -> "Column":
    from pyspark.sql import functions

    wide = value.cast("double")
    return functions.when(functions.abs(wide) < math.inf, wide)


def _collected(rows: "DataFrame", aggregates: "Mapping[str, Sequence[Column]]") -> dict[str, list[float | None]]:
    """Aggregates of all rows, in one pass."""
    flat = [(name, column) for name, columns in aggregates.items() for column in columns]
    if not flat:
        return {}
    values = rows.agg(*(column.alias(f"a{n}") for n, (_, column) in enumerate(flat))).collect()[0]
    found: dict[str, list[float | None]] = {name: [] for name in aggregates}
    for (name, _), value in zip(flat, values, strict=True):
        found[name].append(value)
    return found


def _places(rows: "DataFrame", name: str, text: Text) -> dict[str, int]:
    """Word to its place."""
    from pyspark.sql import functions

    if isinstance(text, Ordinal):
        return {word: place for place, word in enumerate(text.words, 1)}
    word = rows[name].alias("word")
    counted = rows.where(rows[name] != "").groupBy(word).agg(functions.count("*").alias("rows"))
    # Ties are broken by the word, so that the order is fixed.
    kept = counted.orderBy(functions.desc("rows"), "word").limit(text.size)
    if isinstance(text, Hashed):
        bucket = functions.pmod(functions.hash("word"), functions.lit(text.buckets)) + 1
        return {row["word"]: row["bucket"] for row in kept.select("word", bucket.alias("bucket")).collect()}
    return {row["word"]: place for place, row in enumerate(kept.select("word").collect(), 1)}
