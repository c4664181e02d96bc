"""Request transforms: what a definition declares, compiled to a graph, and computed by an engine as it is written.

A request source with expectations or defaults is one, too: see `requestfields`.
"""

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.contract.contract import SEPARATOR, Column, TransformContract, optional
from isthmus.features.definition import codehash
from isthmus.features.definition.checks import sized
from isthmus.features.definition.codehash import parameters
from isthmus.features.definition.spec import AtRequest, RequestSource
from isthmus.features.errors import DataError, Problem
from isthmus.features.types import INPUTS
from isthmus.features.values.columns import ARROW, null_elements, other_sizes
from isthmus.transforms.request import fields as requestfields
from isthmus.transforms.request.check import REMEDY, Graphs
from isthmus.transforms.sources import first_line

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import SparkSession

    from isthmus.transforms.rowwise.core.types import SqlType

_ROW = "__row"
_BRANCH = "CANNOT_CONVERT_COLUMN_INTO_BOOL"
"""What PySpark says where Python's `if`, `and`, `or` or `not` is asked about a column."""


def compiled(transform: AtRequest, columns: Sequence[Column]) -> tuple[bytes, list[Problem]]:
    """The graph of a request transform, or what is wrong with it.

    Args:
        transform: the declaration.
        columns: what it takes.
    """
    from isthmus.transforms.rowwise.compiler import compile_columns
    from isthmus.transforms.rowwise.core.expressions import NotCompilableError, traced

    where, place = _named(transform), _place(transform)
    if problems := [problem for column in columns if (problem := _unusable(where, column))]:
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
        expected = "F.when(condition, value).otherwise(other)" if _BRANCH in str(error) else ""
        said = f"its function failed{at} with {type(error).__name__}: {first_line(error)}"
        return b"", [Problem(place, said, expected)]
    if problems := _misfits(place, transform, found):
        return b"", problems
    inputs = {column.name: _kind_of(column) for column in columns}
    # A request source may have arrays, too, which are none of what it gives.
    fields = [field for field in transform.schema if field.dtype.element is None]
    try:
        graph = compile_columns({field.name: found[field.name] for field in fields}, inputs)
    except NotCompilableError as error:
        return b"", [error.problem(where if error.node.place else place)]
    problems = [
        Problem(f"{place}, field {field.name}", f"its column is of type {graph.outputs[field.name]}",
                f"{field.dtype.spark}, because it is declared as {field.dtype}: cast it")
        for field in fields
        if graph.outputs[field.name].name != field.dtype.spark
    ]  # fmt: skip
    return graph.model.SerializeToString(deterministic=True), problems


def _unusable(where: str, column: Column) -> Problem | None:
    """Why a graph cannot take a column, if it cannot."""
    if (column.dtype.element or column.dtype) not in INPUTS:
        expected = f"one of {', '.join(map(str, INPUTS))}, or an Array of one of them"
        return Problem(f"{where}, input {column.name}", f"has type {column.dtype}", expected)
    if column.dtype.element is not None and column.size is None:
        feature = column.name.rpartition(SEPARATOR)[2]
        return Problem(f"{where}, input {column.name}", "its arrays may be of any size",
                       f"one size, since a graph takes no other: {sized(feature, column.dtype)}")  # fmt: skip
    return None


def _kind_of(column: Column) -> "SqlType":
    from isthmus.transforms.rowwise.core.types import TYPES, array_of

    if column.dtype.element is None:
        return TYPES[column.dtype.spark]
    assert column.size is not None  # noqa: S101 - looked at before
    return array_of(TYPES[column.dtype.element.spark], column.size)


def _misfits(place: str, transform: AtRequest, found: object) -> list[Problem]:
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


def _called(transform: AtRequest) -> "Mapping[str, SparkColumn]":
    """What the function makes of the columns of its parameters' names, request fields as their sources have them."""
    from pyspark.sql import functions

    if isinstance(transform, RequestSource):
        return requestfields.fields(transform)
    assert transform.function is not None  # noqa: S101 - checked together with all other declarations
    checked: dict[str, SparkColumn] = {}
    for part in transform.inputs:
        if isinstance(part, RequestSource):
            checked |= requestfields.fields(part)
    columns: Mapping[str, SparkColumn]
    columns = transform.function(
        **{name: checked.get(name, functions.col(name)) for name in parameters(transform.function)}
    )
    return columns


def _file(transform: AtRequest) -> str:
    function = None if isinstance(transform, RequestSource) else transform.function
    return function.__code__.co_filename if function else ""


def _named(transform: AtRequest) -> str:
    return f"request {'source' if isinstance(transform, RequestSource) else 'transform'} {transform.name}"


def _place(transform: AtRequest) -> str:
    """It by its name, and where its function stands."""
    function = None if isinstance(transform, RequestSource) else transform.function
    return _named(transform) + (f" ({codehash.location(function)})" if function else "")


def schema_with(schema: pa.Schema, transforms: Iterable[TransformContract]) -> pa.Schema:
    """The columns of a training set, with those of request transforms.

    Raises:
        DataError: a column is missing that a transform takes, or two columns would share a name.
    """
    for transform in transforms:
        where = f"request transform {transform.name}"
        having = optional([transform]).union(schema.names)
        if missing := [name for name in transform.inputs if name not in having]:
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
    transforms: Sequence[tuple[AtRequest, TransformContract]],
    joined: Iterable[pa.RecordBatch],
    graphs: Graphs | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a training set in their order, with what an engine computes of them.

    Args:
        spark: a session of the engine.
        transforms: each with its contract, whose fields are computed.
        joined: the rows so far.
        graphs: what the rows are held to besides; None for the engine alone.

    Raises:
        DataError: the engine or a graph refused a row, or a column has values of another type than the transform takes.
    """
    for batch in joined:
        columns, schema = batch.columns, schema_with(batch.schema, [contract for _, contract in transforms])
        for transform, contract in transforms:
            columns += _computed(spark, batch, transform, contract, graphs)
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _computed(
    spark: "SparkSession",
    batch: pa.RecordBatch,
    transform: AtRequest,
    contract: TransformContract,
    graphs: Graphs | None,
) -> list[pa.Array]:
    from pyspark.errors import PySparkException

    if not len(batch):
        return [pa.array([], ARROW[field.dtype.name]) for field in contract.fields]
    place = _place(transform)
    rows = {name: _taken(place, batch, name, contract) for name in contract.inputs}
    try:
        # Engines owe nobody an order of rows.
        frame: Any = spark.createDataFrame(pa.table({**rows, _ROW: pa.array(range(len(batch)), pa.int64())}))
        wanted = _called(transform)
        found = frame.select(_ROW, *(wanted[field.name].alias(field.name) for field in contract.fields)).toArrow()
    except PySparkException as error:
        said = f"the engine refused it: {first_line(error)}"
        if graphs:
            graphs.require(place, contract.name, batch, rows, said)
        raise DataError(place, said, remedy=REMEDY) from error
    if graphs:
        graphs.require(place, contract.name, batch, rows)
    found = found.sort_by(_ROW).combine_chunks()
    return [found[field.name].cast(ARROW[field.dtype.name]).combine_chunks() for field in contract.fields]


def _taken(place: str, batch: pa.RecordBatch, name: str, contract: TransformContract) -> pa.Array:
    """A column in the type that the transform takes: a spine of the user's own may have another one, or none.

    What the API would refuse in a request is refused: a text for a number, a time without a zone.
    """
    types = {field.name: field.dtype for field in contract.request}
    sizes = {field.name: field.size for field in contract.request}
    if name not in batch.schema.names:
        return pa.nulls(len(batch), ARROW[types[name].name])
    column = batch[name]
    if name not in types:
        return column
    where, wanted = f"{place}, column {name}", ARROW[types[name].name]
    if _kind(column.type) not in ("null", _kind(wanted)):
        zone = " with a time zone" if _kind(wanted) == "time" else ""
        raise DataError(where, f"has type {column.type}", expected=f"values of type {types[name]}{zone}")
    try:
        found = column.cast(wanted)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(where, str(error), expected=f"values of type {types[name]}") from error
    narrow, wide = found, column
    if pa.types.is_list(wanted):
        if nulls := null_elements(found):
            raise DataError(where, f"its arrays hold {nulls} nulls", expected=f"values of type {types[name]}")
        if others := other_sizes(found, sizes[name] or 0):
            raise DataError(where, f"an array of {len(found[others[0]])} elements in row {others[0]}",
                            expected=f"{sizes[name]}, as declared")  # fmt: skip
        if not pa.types.is_null(column.type):
            narrow, wide = pc.list_flatten(found), pc.list_flatten(column)
    if narrow.type == pa.float32() and pc.any(pc.and_(pc.is_inf(narrow), pc.is_finite(wide))).as_py():
        raise DataError(where, "a number is too large", expected=f"values of type {types[name]}")
    return found


def _kind(kind: pa.DataType) -> str:
    """What the values of an Arrow type are, whatever their width."""
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"array of {_kind(kind.value_type)}"
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return "time"
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else str(kind)
