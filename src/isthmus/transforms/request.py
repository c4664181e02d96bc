"""Request transforms: what a definition declares, compiled to a graph, and computed by an engine as it is written."""

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from isthmus.features import code
from isthmus.features.columns import ARROW
from isthmus.features.contract import Column, TransformContract
from isthmus.features.declarations import parameters
from isthmus.features.errors import DataError, Problem
from isthmus.features.spec import RequestTransform
from isthmus.transforms.sources import first_line

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import SparkSession

_ROW = "__row"
_SPARK = {"Bool": "boolean", "Int32": "int", "Int64": "bigint", "Float32": "float", "Float64": "double",
          "UnixTimestamp": "timestamp", "String": "string"}  # fmt: skip
"""What Spark calls the types that graphs have."""


def compiled(transform: RequestTransform, columns: Sequence[Column]) -> tuple[bytes, list[Problem]]:
    """The graph of a request transform, or what is wrong with it.

    Args:
        transform: the declaration.
        columns: what its function takes.
    """
    from isthmus.transforms.rowwise.compiler import compile_columns
    from isthmus.transforms.rowwise.expressions import NotCompilableError, traced
    from isthmus.transforms.rowwise.types import TYPES

    where = f"request transform {transform.name}"
    assert transform.function is not None  # noqa: S101 - checked together with all other declarations
    place = f"{where} ({code.location(transform.function)})"
    problems = [
        Problem(f"{where}, input {column.name}", f"has type {column.dtype}", f"one of {', '.join(_SPARK)}")
        for column in columns
        if column.dtype.name not in _SPARK
    ]
    if problems:
        return b"", problems
    try:
        with traced():
            found = _called(transform)
    except Exception as error:  # noqa: BLE001 - the user's own code may raise anything
        lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == _file(transform)]
        at = f" in line {lines[-1].lineno}" if lines else ""
        return b"", [Problem(place, f"its function failed{at} with {type(error).__name__}: {first_line(error)}")]
    if problems := _misfits(place, transform, found):
        return b"", problems
    inputs = {column.name: TYPES[_SPARK[column.dtype.name]] for column in columns}
    try:
        graph = compile_columns({field.name: found[field.name] for field in transform.schema}, inputs)
    except NotCompilableError as error:
        return b"", [error.problem(where)]
    problems = [
        Problem(f"{place}, field {field.name}", f"its column is of type {graph.outputs[field.name]}",
                f"{_SPARK[field.dtype.name]}, because it is declared as {field.dtype}: cast it")
        for field in transform.schema
        if graph.outputs[field.name].name != _SPARK[field.dtype.name]
    ]  # fmt: skip
    return graph.model.SerializeToString(deterministic=True), problems


def _misfits(place: str, transform: RequestTransform, found: object) -> list[Problem]:
    """What is wrong in what a function returned."""
    from pyspark.sql import Column as SparkColumn

    names = [field.name for field in transform.schema]
    expected = f"a dict with a Column for each of {', '.join(names)}"
    if not isinstance(found, Mapping):
        return [Problem(place, f"its function returned {type(found).__name__}", expected)]
    problems = [Problem(place, f"its function returned no {name}", expected) for name in names if name not in found]
    problems += [Problem(place, f"its function returned {name!r}, which its schema lacks", expected)
                 for name in found if name not in names]  # fmt: skip
    return problems + [
        Problem(f"{place}, field {name}", f"its function returned {type(column).__name__}", "a Column")
        for name, column in found.items()
        if not isinstance(column, SparkColumn)
    ]


def _called(transform: RequestTransform) -> "Mapping[str, SparkColumn]":
    """What the function makes of the columns of its parameters' names."""
    from pyspark.sql import functions

    assert transform.function is not None  # noqa: S101 - checked together with all other declarations
    columns: Mapping[str, SparkColumn]
    columns = transform.function(**{name: functions.col(name) for name in parameters(transform.function)})
    return columns


def _file(transform: RequestTransform) -> str:
    assert transform.function is not None  # noqa: S101 - checked together with all other declarations
    return transform.function.__code__.co_filename


class Computation:
    """Request transforms, computed by an engine for the rows of a training set.

    Args:
        spark: a session of the engine.
        transforms: each with its contract.
        schema: the columns of the training set so far.

    Attributes:
        schema: the columns with those that are computed, `transform__field`.
    """

    def __init__(
        self,
        spark: "SparkSession",
        transforms: Sequence[tuple[RequestTransform, TransformContract]],
        schema: pa.Schema,
    ) -> None:
        self._spark, self._transforms = spark, transforms
        self.schema = schema_with(schema, [contract for _, contract in transforms])

    def batches(self, joined: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of each batch in their order, with what is computed of them.

        Raises:
            DataError: the engine refused a row.
        """
        for batch in joined:
            columns = batch.columns
            for transform, contract in self._transforms:
                columns += self._computed(batch, transform, contract)
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _computed(
        self, batch: pa.RecordBatch, transform: RequestTransform, contract: TransformContract
    ) -> list[pa.Array]:
        from pyspark.errors import PySparkException

        if not len(batch):
            return [pa.array([], ARROW[field.dtype.name]) for field in contract.fields]
        assert transform.function is not None  # noqa: S101 - a contract without functions does not compile
        place = f"request transform {transform.name} ({code.location(transform.function)})"
        taken = parameters(transform.function)
        # Engines owe nobody an order of rows.
        rows = pa.table([*(batch[name] for name in taken), pa.array(range(len(batch)), pa.int64())], [*taken, _ROW])
        try:
            frame: Any = self._spark.createDataFrame(rows)
            found = frame.select(_ROW, *(column.alias(name) for name, column in _called(transform).items())).toArrow()
        except PySparkException as error:
            raise DataError(place, f"the engine refused it: {first_line(error)}",
                            remedy="correct it, or leave such rows out of the spine") from error  # fmt: skip
        found = found.sort_by(_ROW).combine_chunks()
        return [found[field.name].cast(ARROW[field.dtype.name]).combine_chunks() for field in contract.fields]


def schema_with(schema: pa.Schema, transforms: Iterable[TransformContract]) -> pa.Schema:
    """The columns of a training set, with those of request transforms.

    Raises:
        DataError: a column is missing that a transform takes.
    """
    for transform in transforms:
        for field in transform.fields:
            schema = schema.append(pa.field(transform.full_name(field.name), ARROW[field.dtype.name]))
    return schema
