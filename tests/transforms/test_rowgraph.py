"""A request transform in the runtime: what it gives for columns, with nulls, refusals, and in any batch."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus.features.columns import Values
from isthmus.features.contract import Column, TransformContract, request_column
from isthmus.features.errors import ContractMismatch, RequestError
from isthmus.features.rowgraph import RowGraph
from isthmus.features.spec import Field, RequestSource, RequestTransform
from isthmus.features.types import Bool, DataType, Float32, Float64, Int32, Int64, String, UnixTimestamp
from isthmus.transforms.request import compiled

TAKEN: dict[str, DataType] = {"at": UnixTimestamp, "x": Float64, "y": Float64, "n": Int64, "word": String, "flag": Bool}
GIVEN: dict[str, DataType] = {
    "hour": Int32, "sine": Float64, "cosine": Float64, "angle": Float64, "ratio": Float64, "share": Float64,
    "word_too": String, "known": Bool, "both": Bool, "next": Int64, "one": Int32,
}  # fmt: skip
DATA: dict[DataType, Any] = {
    UnixTimestamp: np.int64,
    Float64: np.float64,
    Int64: np.int64,
    String: object,
    Bool: np.uint8,
}


def moment(
    at: SparkColumn, x: SparkColumn, y: SparkColumn, n: SparkColumn, word: SparkColumn, flag: SparkColumn
) -> dict[str, SparkColumn]:
    return {
        "hour": F.hour(at), "sine": F.sin(x), "cosine": F.cos(F.sin(x) + y), "angle": F.asin(F.sin(y)),
        "ratio": x / y, "share": F.try_divide(x, y), "word_too": F.concat(word, F.lit("!")), "known": word.isNotNull(),
        "both": flag & (n > 0), "next": n + 1, "one": F.lit(1),
    }  # fmt: skip


def _graph() -> RowGraph:
    source = RequestSource("now", [Field(name, dtype) for name, dtype in TAKEN.items()])
    transform = RequestTransform("moment", [source], [Field(name, dtype) for name, dtype in GIVEN.items()], moment)
    taken = tuple(request_column(name, dtype) for name, dtype in TAKEN.items())
    graph, problems = compiled(transform, taken)
    assert problems == []
    return RowGraph(TransformContract("moment", (), taken, tuple(Column(*field) for field in GIVEN.items()), graph))


GRAPH = _graph()


def _rows(chance: random.Random, count: int) -> dict[str, Values]:
    def value(dtype: DataType) -> Any:
        if dtype == Float64:
            return chance.choice([0.0, -0.0, 1e-9, 3.5, -7.25, 1e5, 1e6, np.inf, np.nan, chance.gauss(0, 100)])
        if dtype == String:
            return chance.choice(["", "a", "é"])
        return chance.randint(0, 1) if dtype == Bool else chance.choice([0, -1, 3_037_000_500, -(1 << 62), 1 << 62])

    columns = {}
    for name, dtype in TAKEN.items():
        valid = np.array([chance.random() < 0.8 for _ in range(count)], bool)
        data = [value(dtype) if there else None if dtype == String else 0 for there in valid]
        columns[name] = Values(np.array(data, DATA[dtype]), valid)
    return columns


def _bits(values: Values) -> list[Any]:
    data = values.data
    if data.dtype == np.float64:  # any NaN is as good as another: IEEE 754 leaves its sign and payload open
        data = np.where(np.isnan(data), np.nan, data).view(np.int64)
    return list(zip(data.tolist(), values.valid.tolist(), strict=True))


@given(st.integers(0, 1 << 32), st.integers(2, 40))
def test_a_row_is_the_same_in_any_batch(seed: int, count: int) -> None:
    rows = _rows(random.Random(seed), count)
    whole = GRAPH.run(rows)
    assert [*whole.values] == [*GIVEN]
    for place in range(count):
        one = GRAPH.run({name: Values(row.data[[place]], row.valid[[place]]) for name, row in rows.items()})
        for name in GIVEN:
            assert _bits(one.values[name]) == _bits(whole.values[name])[place : place + 1], name
            assert bool(one.refused.get(name, [False])[0]) == bool(whole.refused.get(name, [False] * count)[place])


@given(st.integers(0, 1 << 32))
def test_nothing_stands_under_a_null(seed: int) -> None:
    rows = _rows(random.Random(seed), 30)
    found = GRAPH.run(rows)
    for name, dtype in GIVEN.items():
        values = found.values[name]
        assert {*values.data[~values.valid].tolist()} <= {None if dtype == String else 0}
    assert found.values["hour"].valid.tolist() == rows["at"].valid.tolist()
    assert found.values["known"].data.tolist() == rows["word"].valid.tolist()


def test_what_is_refused_is_null_and_named() -> None:
    rows = _rows(random.Random(1), 3)
    there = np.ones(3, bool)
    rows |= {"x": Values(np.ones(3), there), "y": Values(np.array([1.0, 0.0, 2.0]), there)}
    rows["n"] = Values(np.array([1, 2, (1 << 63) - 1]), there)
    found = GRAPH.run(rows)
    assert {name: mask.tolist() for name, mask in found.refused.items()} == {
        "ratio": [False, True, False], "next": [False, False, True],
    }  # fmt: skip
    assert found.values["ratio"].valid.tolist() == [True, False, True]
    assert found.values["share"].valid.tolist() == [True, False, True]
    with pytest.raises(RequestError, match="field ratio") as refused:
        GRAPH.require(rows, lambda _: GRAPH, str)
    assert "row 1" in str(refused.value)


def test_a_constant_beyond_a_float_is_infinite_without_a_word() -> None:
    source = RequestSource("now", [Field("x", Float32)])
    far = RequestTransform("far", [source], [Field("y", Bool)], lambda x: {"y": x < F.lit(1e300).cast("float")})
    graph, problems = compiled(far, [request_column("x", Float32)])
    assert problems == []
    transform = TransformContract("far", (), (request_column("x", Float32),), (Column("y", Bool),), graph)
    found = RowGraph(transform).run({"x": Values(np.array([3e38, np.inf], np.float32), np.array([True, True]))})
    assert found.values["y"].data.tolist() == [1, 0]


def test_no_rows() -> None:
    found = GRAPH.run(_rows(random.Random(0), 0))
    assert {values.data.shape for values in found.values.values()} == {(0,)}
    assert found.values["known"].data.dtype == np.uint8
    assert not found.refused


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(ContractMismatch, match="moment"):
        RowGraph(TransformContract("moment", (), (), (), b"no graph"))
