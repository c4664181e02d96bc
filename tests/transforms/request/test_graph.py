"""A request transform in the runtime: what it gives for columns, with nulls, refusals, and in any batch."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus.features.contract.schema import Column, TransformContract, request_column
from isthmus.features.definition.spec import Field, RequestSource, RequestTransform
from isthmus.features.errors import ContractMismatch, DataError, RequestError
from isthmus.features.request.graph import RowGraph
from isthmus.features.types import Array, Bool, DataType, Float32, Float64, Int32, Int64, String, UnixTimestamp
from isthmus.features.values.columns import Values, from_python
from isthmus.transforms.request.compute import compiled

TAKEN: dict[str, DataType] = {"at": UnixTimestamp, "x": Float64, "y": Float64, "n": Int64, "word": String, "flag": Bool}
GIVEN: dict[str, DataType] = {
    "hour": Int32, "sine": Float64, "cosine": Float64, "angle": Float64, "ratio": Float64, "share": Float64,
    "word_too": String, "known": Bool, "both": Bool, "next": Int64, "one": Int32, "square": Float64, "cube": Float64,
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
        "both": flag & (n > 0), "next": n + 1, "one": F.lit(1), "square": x**2,
        "cube": x**3,
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


def test_a_text_that_is_not_ascii_is_named_where_it_is_to_blame() -> None:
    names = ("word", "other", "plain", "n")
    source = RequestSource("now", [Field(name, Int64 if name == "n" else String) for name in names])

    def cased(word: SparkColumn, other: SparkColumn, plain: SparkColumn, n: SparkColumn) -> dict[str, SparkColumn]:
        return {"cased": F.concat(F.lower(word), F.upper(other), plain, (10 % n).cast("string"))}

    taken = tuple(request_column(field.name, field.dtype) for field in source.schema)
    made, problems = compiled(RequestTransform("t", [source], [Field("cased", String)], cased), taken)
    assert problems == []
    graph = RowGraph(TransformContract("t", (), taken, (Column("cased", String),), made))

    def said(*row: Any) -> str:
        given = {one.name: from_python([good, value], one.dtype)
                 for one, good, value in zip(taken, ("a", "b", "ü", 1), row, strict=True)}  # fmt: skip
        with pytest.raises(RequestError) as caught:
            graph.require(given, dict[str, RowGraph]().__getitem__, str)
        return str(caught.value)

    where, ascii_alone = (
        "request transform t, field cased: cannot be computed in row 1, where ",
        "; expected only ASCII",
    )
    assert said("é", "b", "ü", 1).startswith(where + "word is 'é'" + ascii_alone)
    assert said("é", "😀", "ü", 1).startswith(where + "word is 'é', other is '😀'" + ascii_alone)
    # Another cause is not hidden.
    zero = said("é", "b", "ü", 0)
    assert zero == where + "word is 'é', other is 'b', plain is 'ü', n is 0; expected values for which it is defined"


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


SIZE = 3
ARRAYS: dict[str, DataType] = {
    "floats": Float32, "doubles": Float64, "longs": Int64, "times": UnixTimestamp, "words": String, "flags": Bool,
}  # fmt: skip


def of_arrays(
    floats: SparkColumn, doubles: SparkColumn, longs: SparkColumn, times: SparkColumn, words: SparkColumn,
    flags: SparkColumn, one: SparkColumn, scale: SparkColumn,
) -> dict[str, SparkColumn]:  # fmt: skip
    products = F.zip_with(floats, doubles, lambda x, y: x.cast("double") * y)
    return {
        "dot": F.aggregate(products, F.lit(0.0), lambda total, x: total + x),
        "scaled": F.aggregate(F.transform(floats, lambda x: x * floats[0]), F.lit(0.0), lambda t, x: t + x) * scale,
        "last": longs[2], "later": F.array_max(times), "word": F.concat(words[0], words[2]),
        "every": F.forall(flags, lambda x: x), "only": one[0], "there": floats.isNotNull(),
    }  # fmt: skip


def _graph_of_arrays() -> RowGraph:
    taken = tuple(request_column(name, Array(dtype), SIZE) for name, dtype in ARRAYS.items())
    taken += (request_column("one", Array(Int32), 1), request_column("scale", Float64))
    given = {"dot": Float64, "scaled": Float64, "last": Int64, "later": UnixTimestamp, "word": String, "every": Bool,
             "only": Int32, "there": Bool}  # fmt: skip
    source = RequestSource("now", [Field(column.name, column.dtype, size=column.size) for column in taken])
    transform = RequestTransform("now", [source], [Field(*field) for field in given.items()], of_arrays)
    graph, problems = compiled(transform, taken)
    assert problems == []
    return RowGraph(TransformContract("now", (), taken, tuple(Column(*field) for field in given.items()), graph))


OF_ARRAYS = _graph_of_arrays()


def _arrays_by_hand(row: dict[str, Any]) -> dict[str, Any]:
    floats, doubles, words, flags = row["floats"], row["doubles"], row["words"], row["flags"]
    dot = scaled = None
    if floats is not None and doubles is not None:
        dot = np.float64(0)
        for x, y in zip(floats, doubles, strict=True):
            dot += np.float64(np.float32(x)) * y
    if floats is not None and row["scale"] is not None:
        scaled = np.float64(0)
        for x in floats:
            scaled += np.float64(np.float32(x) * np.float32(floats[0]))
        scaled *= row["scale"]
    return {
        "dot": dot, "scaled": scaled, "last": row["longs"] and row["longs"][2],
        "later": row["times"] and max(row["times"]), "word": words and words[0] + words[2],
        "every": None if flags is None else all(flags), "only": row["one"] and row["one"][0],
        "there": floats is not None,
    }  # fmt: skip


@given(st.integers(0, 1 << 32), st.integers(0, 12))
def test_arrays_are_those_of_their_rows(seed: int, count: int) -> None:
    chance = random.Random(seed)

    def value(dtype: DataType) -> Any:
        if dtype in (Float32, Float64):
            return float(np.float32(chance.choice([0.0, -0.0, 1e-9, 3.5, -7.25, np.inf, np.nan, chance.gauss(0, 9)])))
        if dtype == String:
            return chance.choice(["", "a", "é"])
        return chance.random() < 0.7 if dtype == Bool else chance.randint(-9, 1 << 30)

    def some(dtype: DataType, size: int) -> list[Any]:
        return [[value(dtype) for _ in range(size)] if chance.random() < 0.8 else None for _ in range(count)]

    rows = {name: some(dtype, SIZE) for name, dtype in ARRAYS.items()} | {"one": some(Int32, 1)}
    columns = {name: from_python(data, Array(ARRAYS.get(name, Int32))) for name, data in rows.items()}
    rows["scale"] = [value(Float64) if chance.random() < 0.8 else None for _ in range(count)]
    columns["scale"] = from_python(rows["scale"], Float64)
    found = OF_ARRAYS.run(columns).values
    with np.errstate(invalid="ignore"):
        wanted = [_arrays_by_hand({name: data[n] for name, data in rows.items()}) for n in range(count)]
    for field in OF_ARRAYS.transform.fields:
        assert _bits(found[field.name]) == _bits(from_python([row[field.name] for row in wanted], field.dtype)), field


def test_an_array_of_another_size_is_no_row_of_a_graph() -> None:
    columns = {name: from_python([[1] * SIZE, [1] * (SIZE + 1)], Array(Int64)) for name in ("longs", "times")}
    columns |= {name: from_python([None, None], Array(dtype)) for name, dtype in ARRAYS.items() if name not in columns}
    columns |= {"one": from_python([None, None], Array(Int32)), "scale": from_python([None, None], Float64)}
    with pytest.raises(DataError, match="column longs: an array of 4 elements in row 1; expected 3"):
        OF_ARRAYS.run(columns)


def test_what_is_no_graph_is_refused() -> None:
    with pytest.raises(ContractMismatch, match="moment"):
        RowGraph(TransformContract("moment", (), (), (), b"no graph"))
