"""The same request, the same bits: a row alone, in a batch of seven and in one of four hundred.

TEST_BATCH_ROWS says how many rows of every function are compared. `python -m tests.transforms.request.test_batches`
prints for every function how many rows differ.
"""

import os
import random
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus.features.contract.schema import Column as Declared
from isthmus.features.contract.schema import TransformContract, request_column
from isthmus.features.request.graph import RowGraph
from isthmus.features.request.layout import MASKS, NOTES, Layout, output_name
from isthmus.features.types import Array, Bool, DataType, Float32, Float64, Int32, Int64, UnixTimestamp
from isthmus.features.values.columns import Mask, Values, objects
from isthmus.transforms.rowwise.compiler import compile_columns
from isthmus.transforms.rowwise.core.expressions import traced
from isthmus.transforms.rowwise.core.types import (
    BOOLEAN,
    BYTE,
    DOUBLE,
    FLOAT,
    INT,
    LONG,
    SHORT,
    TIMESTAMP,
    SqlType,
)
from tests.transforms.request.test_onerow import columns_of, graph_of, session
from tests.transforms.rowdraws import INPUTS, every, whatever
from tests.transforms.rowfunctions import DOUBLES, FLOATS, INTS, functions
from tests.transforms.rowproof import EDGES, Expression

ROWS = int(os.environ.get("TEST_BATCH_ROWS", "800"))
ALONE = 2000
"""How many of the rows are computed alone, too, at most."""
BATCH, LOT = 7, 400
_DTYPES: dict[SqlType, DataType] = {
    DOUBLE: Float64, FLOAT: Float32, LONG: Int64, INT: Int32, SHORT: Int32, BYTE: Int32, BOOLEAN: Bool,
    TIMESTAMP: UnixTimestamp, DOUBLES: Array(Float64), FLOATS: Array(Float32), INTS: Array(Int32),
}  # fmt: skip
_COLUMNS = {f"{kind}{turn}": kind for kind in _DTYPES for turn in range(3)}
"""The columns of an expression, as many of every type as one takes."""


@pytest.fixture(scope="module", autouse=True)
def _without_spark() -> Iterator[None]:
    with traced():
        yield


def _numbers(rng: np.random.Generator, kind: SqlType, count: int) -> "np.ndarray[tuple[int], np.dtype[np.generic]]":
    """Edges, numbers of all sizes, and those that a user has."""
    if not kind.fractional:
        numbers: np.ndarray[tuple[int], np.dtype[np.generic]]
        most = (0, 1) if kind == BOOLEAN else (max(kind.low, -(2**62)), min(kind.high, 2**62))
        parts = [rng.choice(np.array(EDGES[kind], np.int64), count), rng.integers(*most, count, endpoint=True)]
        small = np.clip(rng.integers(-99, 100, count), *most)
        numbers = np.choose(rng.integers(0, 3, count), [*parts, small])
        return numbers.astype(np.uint8 if kind == BOOLEAN else kind.numpy)
    draws = [
        rng.choice(np.array(EDGES[DOUBLE]), count),
        rng.normal(0, 1, count),
        rng.uniform(-750, 750, count),
        rng.choice([-1, 1], count) * np.exp2(rng.uniform(-1074, 1023.99, count)),
        rng.normal(0, 1e7, count),
        rng.uniform(-1, 1, count),
        rng.integers(-9, 10, count).astype(float),
        np.exp(rng.normal(0, 4, count)),
    ]
    with np.errstate(over="ignore"):
        return np.choose(rng.integers(0, len(draws), count), draws).astype(kind.numpy)


@cache
def column(name: str, count: int) -> Values:
    """The values of a column, the same every time."""
    kind, rng = _COLUMNS[name], np.random.default_rng(sum(name.encode()))
    data = _numbers(rng, kind.element or kind, count * (kind.size or 1))
    return Values(objects(data.reshape(count, kind.size), count) if kind.element else data, np.ones(count, bool))


def rows(graph: RowGraph, count: int) -> dict[str, Values]:
    """The columns of a function."""
    return {name: column(name, count) for name in graph.transform.inputs}


def graphs() -> Iterator[tuple[str, RowGraph]]:
    """Every function that computes floating-point numbers of numbers, by name and types."""
    for function in functions():
        for number, kinds in enumerate(function.kinds):
            if not {*kinds} <= _DTYPES.keys():
                continue
            columns = {f"{kind}{kinds[:turn].count(kind)}": kind for turn, kind in enumerate(kinds)}
            compiled = compile_columns({"z": function.written(*map(F.col, columns))}, columns)
            if not compiled.outputs["z"].fractional:
                continue
            inputs = tuple(request_column(name, _DTYPES[kind], kind.size or None) for name, kind in columns.items())
            graph = compiled.model.SerializeToString(deterministic=True)
            field = Declared("z", _DTYPES[compiled.outputs["z"]])
            yield (
                f"{function.name}({', '.join(map(str, kinds))})#{number}",
                RowGraph(TransformContract("z", (), inputs, (field,), graph)),
            )


def bits(
    graph: RowGraph, columns: Mapping[str, Values], size: int, count: int
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The bits of the first rows, in batches of a size; any NaN is as good as another, and a null is a number apart."""
    data = np.empty(count, graph.transform.fields[0].dtype.numpy)
    valid = np.empty(count, bool)
    for start in range(0, count, size):
        place = slice(start, min(start + size, count))
        value = graph.run({name: values.take(place) for name, values in columns.items()}).values["z"]
        data[place], valid[place] = value.data, value.valid
    data[np.isnan(data)] = np.nan
    whole = data.view(f"i{data.dtype.itemsize}").astype(np.int64)
    return np.where(valid, whole, 123456789)


def differing(graph: RowGraph, count: int, alone: int) -> tuple[int, int]:
    """How many rows differ in batches of seven, and how many of the first alone, from a batch of four hundred."""
    columns = rows(graph, count)
    lot = bits(graph, columns, LOT, count)
    return (
        int(np.count_nonzero(bits(graph, columns, BATCH, count) != lot)),
        int(np.count_nonzero(bits(graph, columns, 1, alone) != lot[:alone])),
    )


def test_a_row_has_the_same_bits_alone_and_among_seven_and_four_hundred() -> None:
    wrong = {name: found for name, graph in graphs() if any(found := differing(graph, ROWS, min(ALONE, ROWS)))}
    assert wrong == {}


def everything() -> tuple[bytes, dict[str, Expression]]:
    """Every function on all of its types, texts and times included, as one graph, and each by its field."""
    expressions = {f"z{n}": expression for n, expression in enumerate(every())}
    return graph_of({name: expression.column for name, expression in expressions.items()}, INPUTS), expressions


def drawn(count: int) -> dict[str, Values]:
    chance = random.Random(0)
    return columns_of({name: [whatever(chance, kind) for _ in range(count)] for name, kind in INPUTS.items()}, INPUTS)


def canonical(tensor: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """What two tensors are compared by: bits, where any NaN is as good as another."""
    if tensor.dtype.kind != "f":
        return tensor
    return np.where(np.isnan(tensor), tensor.dtype.type(np.nan), tensor).view(f"i{tensor.dtype.itemsize}")


def unlike(
    layout: Layout, one: Mapping[str, "np.ndarray[Any, Any]"], other: Mapping[str, "np.ndarray[Any, Any]"]
) -> dict[str, Mask]:
    """The fields of two answers of a graph to the rows in which they differ."""
    (valid, raises), masks = np.split(one[MASKS], 2), np.split(other[MASKS], 2)
    answered = {name: valid[place] & ~raises[place] for place, name in enumerate(layout.fields)}
    differing = {
        name: (valid[place] != masks[0][place]) | (raises[place] != masks[1][place])
        for place, name in enumerate(layout.fields)
    }
    for element, fields in layout.outputs.items():
        left, right = (canonical(side[output_name(element)]) for side in (one, other))
        for place, name in enumerate(fields):
            differing[name] |= answered[name] & (left[place] != right[place])
    return {name: rows for name, rows in differing.items() if rows.any()}


def test_every_type_has_the_same_bits_alone_and_among_seven_and_four_hundred() -> None:
    graph, expressions = everything()
    runtime = session(graph)
    layout = Layout.loads(runtime.get_modelmeta().custom_metadata_map[NOTES])
    names, columns = [*map(output_name, layout.outputs), MASKS], drawn(LOT)

    def answers(size: int) -> dict[str, "np.ndarray[Any, Any]"]:
        parts = []
        for start in range(0, LOT, size):
            batch = {name: values.take(slice(start, start + size)) for name, values in columns.items()}
            parts.append(runtime.run(names, layout.feeds(batch)))
        tensors = (np.concatenate(batches, axis=1) for batches in zip(*parts, strict=True))
        return dict(zip(names, tensors, strict=True))

    among = answers(LOT)
    for size in (1, BATCH):
        assert [expressions[name].label for name in unlike(layout, among, answers(size))] == []


if __name__ == "__main__":
    with traced():
        print(f"{ROWS:,} rows: how many differ in batches of {BATCH} from {LOT}, and alone")  # noqa: T201 - a report
        for name, graph in graphs():
            print(name, *differing(graph, ROWS, ROWS), flush=True)  # noqa: T201 - likewise
