"""Fit the steps before a model's network to the training part of a training set, by queries of an engine."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from isthmus.transforms.preparation.steps import Embed, Encoding, Hashed, OneHot, Ordinal, Step, described, restored

if TYPE_CHECKING:
    import onnx
    from pyspark.sql import Column, DataFrame

LEARNED = "preparation.json"
"""File of a package that describes the learned parameters in the graph."""
INDICATOR_SHARE = 0.01
"""Numbers missing in a smaller share of the training rows, or in all of them, get no missing indicator."""


class FittedNumber(msgspec.Struct, frozen=True):
    """A numeric input and its fitted steps. With `indicator`, the network also gets 1 where the number is missing."""

    name: str
    steps: tuple[dict[str, Any], ...]
    parameters: tuple[tuple[float, ...], ...]
    indicator: bool

    @property
    def chain(self) -> list[Step]:
        return [restored(step) for step in self.steps]

    def __str__(self) -> str:
        parts = []
        for step, parameters in zip(self.chain, self.parameters, strict=True):
            values = (f"{label} {value:.6g}" for label, value in zip(step.labels, parameters, strict=True))
            parts.append(" ".join([str(step), *values]))
        return ", ".join([*parts, *(["1 where it is missing"] if self.indicator else [])]) or "as it is"


class FittedText(msgspec.Struct, frozen=True):
    """A text input and its encoding. `places` maps each word to its place, from 1, or to its `Hashed` bucket."""

    name: str
    how: dict[str, Any]
    places: dict[str, int]

    @property
    def text(self) -> Encoding:
        text: Encoding = restored(self.how)
        return text

    @property
    def count(self) -> int:
        text = self.text
        return text.buckets + 1 if isinstance(text, Hashed) else len(self.places) + 1

    def __str__(self) -> str:
        return f"{self.text} with {len(self.places):,} words"


class Preparation(msgspec.Struct, frozen=True):
    """The fitted steps and encodings of a network's inputs, in the order of `Tensors.numeric` and `.categories`."""

    numbers: tuple[FittedNumber, ...]
    texts: tuple[FittedText, ...]

    @property
    def width(self) -> int:
        spelled = sum(text.count for text in self.texts if isinstance(text.text, OneHot))
        ordered = sum(isinstance(text.text, Ordinal) for text in self.texts)
        return len(self.numbers) + sum(number.indicator for number in self.numbers) + spelled + ordered

    @property
    def embedded(self) -> dict[int, tuple[int, int]]:
        return {
            position: (fitted.count, min(text.width, (fitted.count + 1) // 2))
            for position, fitted in enumerate(self.texts)
            if isinstance(text := fitted.text, Embed | Hashed)
        }


def fit(rows: "DataFrame", numbers: Mapping[str, Sequence[Step]], texts: Mapping[str, Encoding]) -> Preparation:
    """Learn the parameters of the steps before a student's network from training rows, by queries on the engine.

    `numbers` has the steps of each numeric column, such as Clip and Standardize, and `texts` the encoding of each text
    column. Filter the rows by `training_part` first, so that the student does not learn from later rows.
    """
    from pyspark.sql import functions

    from isthmus.transforms.preparation import expressions

    values = {name: expressions.number(rows, name) for name in numbers}
    parameters: dict[str, list[tuple[float, ...]]] = {name: [] for name in numbers}
    shares = _collected(rows, {name: [functions.avg(v.isNull().cast("double"))] for name, v in values.items()})
    # Each step learns from the results of earlier steps, so there is one pass per position in a chain.
    for turn in range(max(map(len, numbers.values()), default=0)):
        aggregates = {}
        for name, steps in numbers.items():
            if turn < len(steps):
                literals = [[functions.lit(value).cast("float") for value in step] for step in parameters[name]]
                value = expressions.chain(values[name], steps[:turn], literals)
                aggregates[name] = expressions.aggregates(steps[turn], value)
        results = _collected(rows, {name: columns for name, columns in aggregates.items() if columns})
        for name in aggregates:
            learned = expressions.parameters(numbers[name][turn], results.get(name, ()))
            # The last digits of a mean depend on the order of the rows, which engines do not guarantee.
            parameters[name].append(tuple(float(np.float32(value)) for value in learned))
    fitted = [
        FittedNumber(
            name,
            tuple(map(described, steps)),
            tuple(parameters[name]),
            # The elements of an array are missing together.
            INDICATOR_SHARE <= (shares[name][0] or 0.0) < 1 and (not name.endswith("]") or name.endswith("[0]")),
        )
        for name, steps in numbers.items()
    ]
    places = (FittedText(name, described(text), _places(rows, name, text)) for name, text in texts.items())
    return Preparation(tuple(fitted), tuple(places))


def training_part(rows: "DataFrame", before: int) -> "DataFrame":
    """Keep the rows to learn from: those before the time `before` whose labels were known by then.

    `before` is in microseconds since 1970 UTC.
    """
    from pyspark.sql import functions

    moment = functions.timestamp_micros(functions.lit(before))
    return rows.where((functions.col("event_timestamp") < moment) & (functions.col("known_at") <= moment))


def chain_graph(steps: Sequence[Step], counts: Sequence[int]) -> "onnx.ModelProto":
    """Compile the steps of a numeric column to an ONNX graph, which becomes part of a student's package.

    The graph applies the steps in order to its input `x`. Its output `y` is 0 for null. `counts` has the number of
    learned parameters of each step. Each parameter is an input, too, and must not be null, NaN or -0.0.
    """
    from pyspark.sql import functions

    from isthmus.transforms.preparation import expressions
    from isthmus.transforms.rowwise.compiler import compile_columns
    from isthmus.transforms.rowwise.core.expressions import traced
    from isthmus.transforms.rowwise.core.types import FLOAT

    names = [[f"p{turn}_{n}" for n in range(count)] for turn, count in enumerate(counts)]
    with traced():
        value = expressions.chain(functions.col("x"), steps, [list(map(functions.col, step)) for step in names])
        value = functions.coalesce(value, functions.lit(0.0).cast("float"))
    parameters = [name for step in names for name in step]
    return compile_columns({"y": value}, dict.fromkeys(["x", *parameters], FLOAT), parameters).model


def place_graph(places: Mapping[str, int]) -> "onnx.ModelProto":
    from pyspark.sql import functions

    from isthmus.transforms.preparation import expressions
    from isthmus.transforms.rowwise.compiler import compile_columns
    from isthmus.transforms.rowwise.core.expressions import traced
    from isthmus.transforms.rowwise.core.types import STRING

    with traced():
        value = expressions.place(functions.col("x"), places)
    return compile_columns({"place": value}, {"x": STRING}, ["x"]).model


def _collected(rows: "DataFrame", aggregates: "Mapping[str, Sequence[Column]]") -> dict[str, list[float | None]]:
    # All aggregates in a single pass.
    flat = [(name, column) for name, columns in aggregates.items() for column in columns]
    if not flat:
        return {}
    values = rows.agg(*(column.alias(f"a{n}") for n, (_, column) in enumerate(flat))).collect()[0]
    results: dict[str, list[float | None]] = {name: [] for name in aggregates}
    for (name, _), value in zip(flat, values, strict=True):
        results[name].append(value)
    return results


def _places(rows: "DataFrame", name: str, text: Encoding) -> dict[str, int]:
    from pyspark.sql import functions

    if isinstance(text, Ordinal):
        return {word: place for place, word in enumerate(text.words, 1)}
    word = rows[name].alias("word")
    counted = rows.where(rows[name] != "").groupBy(word).agg(functions.count("*").alias("rows"))
    # Ties are broken by the word, so that the order is fixed.
    frequent = counted.orderBy(functions.desc("rows"), "word").limit(text.size)
    if isinstance(text, Hashed):
        bucket = functions.pmod(functions.hash("word"), functions.lit(text.buckets)) + 1
        return {row["word"]: row["bucket"] for row in frequent.select("word", bucket.alias("bucket")).collect()}
    return {row["word"]: place for place, row in enumerate(frequent.select("word").collect(), 1)}
