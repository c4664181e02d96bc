"""What is done to the inputs of a network: what the graph computes is what Spark computes, and what NumPy does."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus.distill.declaration import DEFAULT, Plan, Tabular
from isthmus.distill.tabular.preparation import Prepare, fit_preparation, grouped, preparation_graph
from isthmus.distill.tabular.tensors import TabularTensors
from isthmus.features.types import Float32, Int64, String
from isthmus.package.inputs import ModelInput
from isthmus.transforms import engine
from isthmus.transforms.preparation import expressions, fit
from isthmus.transforms.preparation.fit import Preparation
from isthmus.transforms.preparation.steps import (
    Clip,
    Embed,
    Encoding,
    Hashed,
    Impute,
    Log1p,
    OneHot,
    Ordinal,
    Standardize,
    Step,
)
from tests.distill.support import declaration

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAN, INF = math.nan, math.inf


@pytest.fixture
def spark() -> "Iterator[SparkSession]":
    with engine.session("spark") as session:
        yield session


@pytest.fixture
def sail() -> "Iterator[SparkSession]":
    with engine.session("sail") as session:
        yield session


STEPS: dict[str, list[Step]] = {
    "usual": [Standardize(), Impute(0.0)],
    "same": [Standardize(), Impute(0.0)],
    "clipped": [Clip(0.1, 0.9), Impute("median"), Standardize(2.0)],
    "third": [Standardize(), Impute(0.0)],
    "wide": [Log1p(), Standardize(), Impute("mean")],
    "raw": [],
    "time": [Standardize()],
    "flag": [Impute(0.5)],
}
TEXTS: dict[str, Encoding] = {
    "carrier": Embed(3, width=1), "origin": OneHot(2), "size": Ordinal(("small", "large")), "dest": Hashed(buckets=4),
    "silent": Embed(),
}  # fmt: skip


def rows(count: int = 500, seed: int = 0) -> pa.Table:
    draw = np.random.default_rng(seed)
    odd = np.array([NAN, INF, -INF, 3e38, -3e38, 0.0, -0.0, -1.0])

    def numbers(missing: float) -> pa.Array:
        values = np.where(draw.random(count) < 0.1, draw.choice(odd, count), draw.normal(5, 3, count))
        return pa.array(values.astype(np.float32), mask=draw.random(count) < missing)

    def words(known: list[str]) -> pa.Array:
        return pa.array(draw.choice(known, count).tolist(), pa.string(), mask=draw.random(count) < 0.1)

    columns = {
        "usual": numbers(0.2), "same": numbers(0.0), "third": numbers(0.5),
        "clipped": numbers(0.3), "wide": numbers(0.1), "raw": numbers(0.1),
        "time": pa.array(draw.integers(0, 2**50, count), pa.timestamp("us", tz="UTC")),
        "flag": pa.array(draw.random(count) < 0.5, mask=draw.random(count) < 0.3),
        "carrier": words(["AA", "UA", "UA", "é", "B6", "", "it's"]), "origin": words(["x", "y", "y", "z"]),
        "size": words(["small", "large", "other"]), "dest": words([f"d{n}" for n in range(20)]),
        "silent": pa.nulls(count, pa.string()),
    }  # fmt: skip
    moment = pa.array(np.arange(count), pa.timestamp("us", tz="UTC"))
    return pa.table({**columns, "event_timestamp": moment, "known_at": moment})


def tensors_of(table: pa.Table) -> TabularTensors:
    def number(name: str) -> np.ndarray[Any, Any]:
        column = table[name].cast(pa.int64()) if pa.types.is_timestamp(table[name].type) else table[name]
        return np.array([NAN if value is None else value for value in column.to_pylist()]).astype(np.float32)

    numeric = np.stack([number(name) for name in STEPS], axis=1)
    return TabularTensors(numeric, np.array([[row or "" for row in table[n].to_pylist()] for n in TEXTS], object).T)


def naive(
    train: int, tensors: TabularTensors, parameters: list[tuple[tuple[float, ...], ...]], groups: list[list[int]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """All of it by NumPy, a column at a time, in doubles. Quantiles are as they were found: engines estimate them."""

    def quantile(values: np.ndarray[Any, Any], share: float, found: float) -> float:
        assert (values < found).mean() - 0.02 <= share <= (values <= found).mean() + 0.02
        return found

    made, absent, places = [], [], []
    for position, steps in enumerate(STEPS.values()):
        column = tensors.numeric[:, position].astype(np.float64)
        missing = np.isnan(column)
        for step, told in zip(steps, parameters[position], strict=True):
            known = column[:train][np.isfinite(column[:train])]
            match step:
                case Log1p():
                    column = np.log1p(np.where(column > -1, column, NAN))
                case Clip(low, high):
                    column = np.clip(column, quantile(known, low, told[0]), quantile(known, high, told[1]))
                case Impute(value):
                    fill = known.mean() if value == "mean" else value
                    fill = quantile(known, 0.5, told[0]) if value == "median" else fill
                    column = np.where(np.isnan(column), fill, column)
                case Standardize(limit):
                    spread = known.std() or 1.0
                    with np.errstate(over="ignore"):
                        column = np.clip((column - known.mean()) / spread, -limit, limit)
        made.append(np.where(np.isnan(column), 0.0, column))
        if 0.01 <= missing[:train].mean() < 1:
            absent.append(missing.astype(float))
    for position, text in enumerate(TEXTS.values()):
        words = tensors.categories[:, position].tolist()
        counts = Counter(word for word in words[:train] if word)
        order = sorted(counts, key=lambda word: (-counts[word], word))
        index = [order.index(word) + 1 if word in order else 0 for word in words]
        match text:
            case Embed(size):
                places.append([place if place <= size else 0 for place in index])
            case OneHot(size):
                made_of = np.array([place if place <= size else 0 for place in index])
                absent += list((made_of[:, None] == np.arange(1 + min(size, len(order)))).T.astype(float))
            case Ordinal(known_words):
                absent.append(np.array([(known_words.index(w) + 1) / 2 if w in known_words else 0 for w in words]))
            case Hashed():
                places.append(index)  # compared apart
    order = [place for group in groups for place in group]
    return np.stack([*(made[place] for place in order), *absent], axis=1), np.array(places).T


def test_a_graph_is_what_numpy_says(sail: "SparkSession") -> None:
    table = rows()
    preparation = fit_preparation(sail.createDataFrame(table), Plan(STEPS, TEXTS), 400)
    assert msgspec.json.decode(msgspec.json.encode(preparation), type=Preparation) == preparation
    data = tensors_of(table)
    numbers, places = Prepare(preparation, preparation_graph(preparation))(data)
    assert numbers.shape == (500, preparation.width)
    assert preparation.embedded == {0: (4, 1), 3: (5, 3), 4: (1, 1)}, "half as many numbers as places, or fewer"
    learned_of = [number.parameters for number in preparation.numbers]
    expected, index = naive(400, data, learned_of, grouped(preparation.numbers))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(numbers[finite], expected[finite], rtol=2e-5, atol=2e-5)
    assert np.array_equal(numbers[~finite], expected[~finite].astype(np.float32))
    assert np.array_equal(places[:, [0, 2]], index[:, [0, 2]])
    hashed = preparation.texts[3]
    assert set(hashed.places.values()) <= set(range(1, 5))
    assert places[:, 1].tolist() == [hashed.places.get(word, 0) for word in data.categories[:, 3]]
    assert preparation_graph(preparation) == preparation_graph(preparation)


@pytest.mark.accept
def test_a_graph_is_what_the_engine_computes_to_the_bit(spark: "SparkSession") -> None:
    table = rows(seed=1).append_column("row", pa.array(range(500)))
    frame = spark.createDataFrame(table)
    plan = Plan({name: steps for name, steps in STEPS.items() if not any(isinstance(s, Log1p) for s in steps)}, TEXTS)
    preparation = fit_preparation(frame, plan, 400)
    columns = {
        number.name: expressions.chain(expressions.number(frame, number.name), number.chain, [
            [F.lit(value).cast("float") for value in told] for told in number.parameters
        ])
        for number in preparation.numbers
    }  # fmt: skip
    columns |= {text.name: expressions.place(frame[text.name], text.places) for text in preparation.texts}
    found = (
        frame.select("row", *(column.alias(f"{name}_") for name, column in columns.items())).toArrow().sort_by("row")
    )
    data = tensors_of(table)
    keep = [list(STEPS).index(name) for name in plan.numbers]
    numbers, places = Prepare(preparation, preparation_graph(preparation))(
        TabularTensors(data.numeric[:, keep], data.categories)
    )
    order = [preparation.numbers[place] for group in grouped(preparation.numbers) for place in group]
    for position, number in enumerate(order):
        engine_says = np.array([0.0 if v is None else v for v in found[f"{number.name}_"].to_pylist()], np.float32)
        assert (engine_says.view(np.int32) == numbers[:, position].copy().view(np.int32)).all(), number.name
    for position, place in enumerate(preparation.embedded):
        assert found[f"{preparation.texts[place].name}_"].to_pylist() == places[:, position].tolist()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])  # one session for all
@given(st.lists(st.none() | st.floats(width=32), min_size=1, max_size=20), st.sampled_from(sorted(STEPS)))
def test_no_number_is_too_wild(sail: "SparkSession", values: list[float | None], chain: str) -> None:
    steps = STEPS[chain] or [Impute(0.0)]
    table = pa.table({"x": pa.array(values, pa.float32())})
    preparation = fit.fit(sail.createDataFrame(table), {"x": steps}, {})
    numeric = np.array([[NAN if value is None else value] for value in values], np.float32)
    numbers, _ = Prepare(preparation, preparation_graph(preparation))(
        TabularTensors(numeric, np.empty((len(values), 0), object))
    )
    assert not np.isnan(numbers).any()
    if any(isinstance(step, Standardize) for step in steps):
        assert np.isfinite(numbers).all()


INPUTS = [ModelInput("distance", Float32), ModelInput("hour", Int64), ModelInput("carrier", String)]


def test_what_is_declared_is_found_by_name() -> None:
    declared = declaration(preparation={"dist*": [Log1p()], "*": [Impute("mean")], "carrier": OneHot(5)})
    assert not declaration(preparation={"dist*": [Log1p()], "carrier": OneHot(5)}).preparation_problems(INPUTS)
    assert isinstance(declared.task, Tabular)
    assert declared.task.plan(INPUTS).numbers == {"distance": (Log1p(),), "hour": (Impute("mean"),)}
    assert Tabular().plan(INPUTS) == Plan(dict.fromkeys(["distance", "hour"], DEFAULT), {"carrier": Embed()})


@pytest.mark.parametrize(("preparation", "message"), [
    ({"distanc": [Log1p()]}, "no input of the student has this name"),
    ({"carrier": [Log1p()]}, "carrier is a String, which takes an encoding; expected Embed"),
    ({"hour": OneHot()}, "hour is of type Int64, which takes steps; expected a list of steps"),
    ({"hour": Log1p()}, r"Log1p\(\); expected a list of Log1p"),
    ({"hour": ["log"]}, r"\['log'\]; expected a list"),
    ({"hour": [Impute("mode")]}, r"Impute\(value='mode'\); expected 'mean', 'median' or a number of 32 bits"),
    ({"hour": [Log1p(), Impute(math.nan)]}, "expected 'mean', 'median' or a number"),
    ({"hour": [Impute(1e39)]}, "expected 'mean', 'median' or a number"),
    ({"hour": [Clip(0.99, 0.01)]}, r"Clip\(low=0.99, high=0.01\); expected shares, 0 <= low <= high <= 1"),
    ({"hour": [Clip(-1, 2)]}, "expected shares"),
    ({"hour": [Impute(cast("Any", None)), Clip(cast("Any", "1"))]}, "expected shares"),
    ({"hour": [Standardize(0)]}, "expected a limit above 0"),
    ({"hour": [Standardize(math.nan)]}, "expected a limit above 0"),
    ({"carrier": OneHot(0)}, r"OneHot\(size=0\); expected a size of at least 1"),
    ({"carrier": Embed(cast("Any", 2.5))}, "expected a size and a width of at least 1"),
    ({"carrier": Embed(width=0)}, "expected a size and a width of at least 1"),
    ({"carrier": Hashed(buckets=0)}, "expected a size, buckets and a width of at least 1"),
    ({"carrier": Hashed(width=0)}, "expected a size, buckets and a width of at least 1"),
    ({"carrier": Ordinal(("a", "a"))}, "expected at least one word, without duplicates or empty texts"),
    ({"carrier": Ordinal(())}, "expected at least one word"),
    ({"carrier": Ordinal(("", "a"))}, "expected at least one word"),
    ({"carrier": Ordinal(cast("Any", "low"))}, "expected at least one word"),
])  # fmt: skip
def test_what_does_not_fit_is_named(preparation: Any, message: str) -> None:

    problems = declaration(preparation=preparation).preparation_problems(INPUTS)
    assert any(re.search(message, str(problem)) for problem in problems), problems
