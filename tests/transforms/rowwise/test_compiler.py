"""PySpark columns as graphs: what a runtime computes is what Apache Spark computes, of one function and of many.

TEST_EXPRESSIONS says how many expressions of expressions are drawn, TEST_SEED from where on.
"""

import hashlib
import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus.transforms import engine
from isthmus.transforms.rowwise.compiler import compile_columns
from isthmus.transforms.rowwise.core.expressions import NotCompilableError, node_of, traced
from isthmus.transforms.rowwise.core.types import DOUBLE, INT, STRING, array_of
from tests.transforms.rowdraws import INPUTS, SIMPLE, compound, edges, every, whatever
from tests.transforms.rowfunctions import PAGE, functions, page
from tests.transforms.rowproof import Expression, Proof

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def spark() -> "Iterator[SparkSession]":
    with engine.session("spark") as session:
        yield session


@pytest.fixture(scope="module")
def proof(spark: "SparkSession") -> Proof:
    """Every function on all of its types, as one graph."""
    return Proof(spark, {f"z{n}": one for n, one in enumerate(every())}, INPUTS)


@pytest.mark.accept
@pytest.mark.slowest
def test_at_the_edges(proof: Proof) -> None:
    chance = random.Random(0)
    rows = edges(chance, 1000)
    assert proof.differences(rows) == []
    assert proof.not_refused(rows, chance) == []


@pytest.mark.accept
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=4)
def test_of_whatever_values(proof: Proof, seed: int) -> None:
    chance = random.Random(seed)
    rows = {name: [whatever(chance, kind) for _ in range(50)] for name, kind in INPUTS.items()}
    assert proof.differences(rows) == []


# --- many at once


@pytest.mark.accept
@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=8)
def test_expressions_of_expressions(spark: "SparkSession", seed: int) -> None:
    chance = random.Random(seed)
    drawn = [compound(chance, 3) for _ in range(20)]
    assert _wrong(spark, chance, drawn) == []


def _wrong(spark: "SparkSession", chance: random.Random, drawn: list[Column]) -> list[str]:
    """Where Spark and the graph of some expressions differ on sixty rows of edges."""
    expressions = {f"z{n}": Expression(column, label=str(node_of(column))) for n, column in enumerate(drawn)}
    found = Proof(spark, expressions, SIMPLE)
    rows = {name: values[:60] for name, values in edges(chance, 60).items() if name in SIMPLE}
    return found.differences(rows) + found.not_refused(rows, chance)


EXPRESSIONS, SEED = int(os.environ.get("TEST_EXPRESSIONS", "25")), int(os.environ.get("TEST_SEED", "0"))
PORTION, DEPTH = min(50, EXPRESSIONS), 4


@pytest.mark.timeout(60 + EXPRESSIONS)
@pytest.mark.thorough
def test_very_many_expressions_of_expressions(spark: "SparkSession") -> None:
    wrong = []
    for seed in range(SEED, SEED + EXPRESSIONS, PORTION):
        chance = random.Random(seed)
        drawn = [compound(chance, chance.randint(2, DEPTH)) for _ in range(PORTION)]
        wrong += _wrong(spark, chance, drawn)
    assert not wrong, "\n".join(wrong)


def test_zeros_of_constants_keep_their_signs(spark: "SparkSession") -> None:
    """A runtime takes x + 0.0 for x, and of 0.0s chosen by one condition for all rows, what comes first."""
    half = F.lit(-0.0).cast("float") / F.lit(2)
    sums = [F.lit(0.0) + half, F.lit(0.0) + F.sqrt(F.lit(-0.0)), F.lit(0.0) + F.lit(-0.0), F.lit(-0.0) - F.lit(0.0),
            half + F.floor(F.lit(-0.5)), F.lit(-0.0) * F.lit(3.0) + F.col("a_double")]  # fmt: skip
    conditions = [F.lit(False), F.lit(1) > 2, F.sqrt(F.lit(4.0)) > 3, F.lit(True)]
    sums += [F.when(asked, F.abs("a_double")).otherwise(F.lit(-0.0)) for asked in conditions]
    assert _wrong(spark, random.Random(0), sums) == []


def test_the_shape_is_kept_where_only_a_stacked_function_needs_it() -> None:
    with traced():
        column = F.cot(F.lit(-1.0) / F.col("a"))
    # The checker of ONNX rejects a graph without the node Shape.
    assert compile_columns({"z": column}, {"a": INT}).outputs == {"z": DOUBLE}


# --- what no graph can hold


@pytest.mark.parametrize(
    ("column", "found", "instead"),
    [
        (lambda: F.sha2("s", 256), "graphs have no sha2", "Hashed among the steps"),
        (lambda: F.expr("a + 1"), "SQL text", "functions of pyspark"),
        (lambda: F.col("nowhere"), "is not an input", "one of a, d, s, x"),
        (lambda: F.col("s") < "b", "do not order texts", "== or isin"),
        (lambda: F.col("s") + 1, "takes numbers, not string, int", "cast"),
        (lambda: F.col("s").cast("int"), "runtimes convert string to int in different ways", "a cast among"),
        (lambda: F.udf(lambda x: x)("a"), "Python function", "built-in"),
        (lambda: F.sum("a").over(__import__("pyspark.sql", fromlist=["Window"]).Window.partitionBy("s")),
         "reads other rows", "a transform of a view"),
        (lambda: F.lit(__import__("decimal").Decimal("1.5")), "literal that graphs do not support", "a float"),
        (lambda: F.exists(F.array("a"), lambda item: item + 1), "takes booleans", "a comparison"),
        (lambda: F.col("x") == F.col("x"), "do not compare whole arrays", "their elements"),
        (lambda: F.col("x") >= F.col("x"), "do not compare whole arrays", "their elements"),
        (lambda: F.col("x").eqNullSafe(F.col("x")), "do not compare whole arrays", "their elements"),
        (lambda: F.col("x").isin(F.col("x")), "do not compare whole arrays", "their elements"),
        (lambda: F.array_contains(F.array("x"), F.col("x")), "do not compare whole arrays", "their elements"),
        (lambda: F.round("d", -1), "rounds to", "0 to 9"),
        (lambda: F.date_trunc("century", F.timestamp_seconds("a")), "unknown unit 'century'", "year"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_in_words(
    spark: "SparkSession", column: Any, found: str, instead: str
) -> None:
    del spark
    with traced(), pytest.raises(NotCompilableError) as refused:
        compile_columns({"z": column()}, {"a": INT, "d": DOUBLE, "s": STRING, "x": array_of(DOUBLE, 3)})
    problem = refused.value.problem("request transform moment")
    assert found in str(problem)
    assert instead in problem.expected


def test_a_refusal_says_where_it_stands(spark: "SparkSession") -> None:
    del spark
    with traced(), pytest.raises(NotCompilableError) as refused:
        compile_columns({"z": F.col("a") + F.length("s")}, {"a": INT, "s": STRING})
    assert "test_compiler.py:" in refused.value.problem("request transform moment").where


def test_no_rows(proof: Proof) -> None:
    found = proof.computed({name: [] for name in INPUTS})
    assert {values.shape for values in found.values()} == {(0,)}
    assert found["z0"].dtype == np.int32


def test_the_graph_of_every_function_keeps_its_bytes() -> None:
    """The hash of a contract covers them: if this digest changes, so do the contracts of users."""
    digest = hashlib.sha256()
    with traced():
        for expression in every():
            model = compile_columns({"z": expression.column}, INPUTS).model
            digest.update(model.SerializeToString(deterministic=True))
    assert digest.hexdigest() == "34d0af9f94e9115fd3ee96617f34c4394127e0be5cbb2f1647f6ddf0069ed272"


def test_the_table_of_functions_is_that_of_the_proof() -> None:
    assert PAGE.read_text() == page()
    assert len({(function.family, function.name) for function in functions()}) >= 80
