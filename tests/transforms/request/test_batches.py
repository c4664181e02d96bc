"""The same request, the same bits: a row alone, in a batch of seven and in one of four hundred.

TEST_BATCH_ROWS says how many rows of every function are compared. `python -m tests.transforms.request.test_batches`
prints for every function how many rows differ.
"""

import os
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus.features.contract.contract import Column as Declared
from isthmus.features.contract.contract import TransformContract, request_column
from isthmus.features.request.graph import RowGraph
from isthmus.features.types import Float32, Float64, Int64
from isthmus.features.values.columns import Values
from isthmus.transforms.rowwise.compiler import compile_columns
from isthmus.transforms.rowwise.core.expressions import traced
from isthmus.transforms.rowwise.core.types import DOUBLE, FLOAT, LONG
from tests.transforms.rowfunctions import functions
from tests.transforms.rowproof import EDGES

ROWS = int(os.environ.get("TEST_BATCH_ROWS", "5600"))
ALONE = 2000
"""How many of the rows are computed alone, too, at most."""
BATCH, LOT = 7, 400
_KINDS = {"a": DOUBLE, "b": DOUBLE, "c": DOUBLE, "s": FLOAT, "t": FLOAT}
_DTYPES = {DOUBLE: Float64, FLOAT: Float32, LONG: Int64}


@pytest.fixture(scope="module", autouse=True)
def _without_spark() -> Iterator[None]:
    with traced():
        yield


def rows(count: int) -> dict[str, Values]:
    """Columns of doubles: edges, numbers of all sizes, and those that a user has."""
    rng = np.random.default_rng(0)

    def column(turn: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        parts = [
            rng.choice(np.array(EDGES[DOUBLE]), count),
            rng.normal(0, 1, count),
            rng.uniform(-750, 750, count),
            rng.choice([-1, 1], count) * np.exp2(rng.uniform(-1074, 1023.99, count)),
            rng.normal(0, 1e7, count),
            rng.uniform(-1, 1, count),
            rng.integers(-9, 10, count).astype(float),
            np.exp(rng.normal(0, 4, count)),
        ]
        values: np.ndarray[tuple[int], np.dtype[np.float64]] = np.choose(rng.integers(0, len(parts), count), parts)
        return np.roll(values, turn)

    there = np.ones(count, bool)
    drawn = {name: column(turn) for turn, name in enumerate(_KINDS)}
    with np.errstate(over="ignore"):
        return {name: Values(values.astype(_KINDS[name].numpy), there) for name, values in drawn.items()}


def graphs() -> Iterator[tuple[str, RowGraph]]:
    """Every function that computes floating-point numbers of such numbers, by name and types."""
    for function in functions():
        for number, kinds in enumerate(function.kinds):
            names = {DOUBLE: iter("abc"), FLOAT: iter("st")}
            if not all(kind in names for kind in kinds):
                continue
            columns = [next(names[kind]) for kind in kinds]
            column = function.written(*map(F.col, columns))
            compiled = compile_columns({"z": column}, {name: _KINDS[name] for name in columns})
            if compiled.outputs["z"] not in _DTYPES or not compiled.outputs["z"].fractional:
                continue
            taken = tuple(request_column(name, _DTYPES[_KINDS[name]]) for name in columns)
            graph = compiled.model.SerializeToString(deterministic=True)
            field = Declared("z", _DTYPES[compiled.outputs["z"]])
            yield (
                f"{function.name}({', '.join(map(str, kinds))})#{number}",
                RowGraph(TransformContract("z", (), taken, (field,), graph)),
            )


def bits(
    graph: RowGraph, columns: Mapping[str, Values], size: int, count: int
) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The bits of the first rows, in batches of a size; any NaN is as good as another, and a null is a number apart."""
    parts = []
    for start in range(0, count, size):
        place = slice(start, min(start + size, count))
        value = graph.run({name: values.take(place) for name, values in columns.items()}).values["z"]
        data = np.where(np.isnan(value.data), value.data.dtype.type(np.nan), value.data)
        whole = data.view(f"i{data.dtype.itemsize}").astype(np.int64)
        parts.append(np.where(value.valid, whole, 123456789))
    return np.concatenate(parts)


def differing(graph: RowGraph, columns: Mapping[str, Values]) -> tuple[int, int]:
    """How many rows differ in batches of seven, and how many alone, from a batch of four hundred."""
    taken = {name: columns[name] for name in graph.transform.inputs}
    count = len(columns["a"].data)
    lot = bits(graph, taken, LOT, count)
    alone = min(ALONE, count)
    return (
        int(np.count_nonzero(bits(graph, taken, BATCH, count) != lot)),
        int(np.count_nonzero(bits(graph, taken, 1, alone) != lot[:alone])),
    )


@pytest.mark.thorough
def test_a_row_has_the_same_bits_alone_and_among_seven_and_four_hundred() -> None:
    columns = rows(ROWS)
    wrong = {name: found for name, graph in graphs() if any(found := differing(graph, columns))}
    assert wrong == {}


if __name__ == "__main__":
    with traced():
        drawn = rows(ROWS)
        print(f"{ROWS:,} rows in batches of {BATCH} and {LOT}, {min(ALONE, ROWS):,} alone")  # noqa: T201 - a report
        for name, graph in graphs():
            print(name, *differing(graph, drawn), flush=True)  # noqa: T201 - likewise
