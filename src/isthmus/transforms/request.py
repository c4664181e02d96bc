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
        if "NO_ACTIVE_OR_DEFAULT_SESSION" in str(error):
            expected = "built-in functions of pyspark.sql.functions: no Python function, and no DataFrame"
            return b"", [Problem(place, f"its function asks for a Spark session{at}", expected)]
        return b"", [Problem(place, f"its function failed{at} with {type(error).__name__}: {first_line(error)}")]
    if problems := _misfits(place, transform, found):
        return b"", problems
    inputs = {column.name: TYPES[_SPARK[column.dtype.name]] for column in columns}
    try:
        graph = compile_columns({field.name: found[field.name] for field in transform.schema}, inputs)
    except NotCompilableError as error:
        return b"", [error.problem(where if error.node.place else place)]
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


def schema_with(schema: pa.Schema, transforms: Iterable[TransformContract]) -> pa.Schema:
    """The columns of a training set, with those of request transforms.

    Raises:
        DataError: a column is missing that a transform takes, or two columns would share a name.
    """
    for transform in transforms:
        where = f"request transform {transform.name}"
        if missing := [name for name in transform.taken if name not in schema.names]:
            raise DataError(where, f"the rows have no column {', '.join(missing)}", expected="what its function takes",
                            remedy="give the spine such a column")  # fmt: skip
        for field in transform.fields:
            name = transform.full_name(field.name)
            if name in schema.names:
                raise DataError(where, f"the rows have a column {name} already", remedy="rename the spine's column")
            schema = schema.append(pa.field(name, ARROW[field.dtype.name]))
    return schema


def computed(
    spark: "SparkSession",
    transforms: Sequence[tuple[RequestTransform, TransformContract]],
    joined: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """The rows of a training set in their order, with what an engine computes of them.

    Args:
        spark: a session of the engine.
        transforms: each with its contract, whose fields are computed.
        joined: the rows so far.

    Raises:
        DataError: the engine refused a row, or a column has values of another type than the transform takes.
    """
    for batch in joined:
        columns, schema = batch.columns, schema_with(batch.schema, [contract for _, contract in transforms])
        for transform, contract in transforms:
            columns += _computed(spark, batch, transform, contract)
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _computed(
    spark: "SparkSession", batch: pa.RecordBatch, transform: RequestTransform, contract: TransformContract
) -> list[pa.Array]:
    from pyspark.errors import PySparkException

    if not len(batch):
        return [pa.array([], ARROW[field.dtype.name]) for field in contract.fields]
    assert transform.function is not None  # noqa: S101 - a contract without functions does not compile
    place = f"request transform {transform.name} ({code.location(transform.function)})"
    rows = {name: _taken(place, batch[name], name, contract) for name in parameters(transform.function)}
    # Engines owe nobody an order of rows.
    rows[_ROW] = pa.array(range(len(batch)), pa.int64())
    try:
        frame: Any = spark.createDataFrame(pa.table(rows))
        wanted = _called(transform)
        found = frame.select(_ROW, *(wanted[field.name].alias(field.name) for field in contract.fields)).toArrow()
    except PySparkException as error:
        raise DataError(place, f"the engine refused it: {first_line(error)}",
                        remedy="correct it, or leave such rows out of the spine") from error  # fmt: skip
    found = found.sort_by(_ROW).combine_chunks()
    return [found[field.name].cast(ARROW[field.dtype.name]).combine_chunks() for field in contract.fields]


def _taken(place: str, column: pa.Array, name: str, contract: TransformContract) -> pa.Array:
    """A column in the type that the transform takes: a spine of the user's own may have another one."""
    types = {field.name: field.dtype for field in contract.request}
    if name not in types:
        return column
    try:
        return column.cast(ARROW[types[name].name])
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{place}, column {name}", str(error), expected=f"values of type {types[name]}") from error
