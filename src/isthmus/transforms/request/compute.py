"""Compile request transforms, and request sources with checks or defaults, to ONNX; compute them by an engine."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.contract.schema import SEPARATOR, Column, Contract, TransformContract, optional_fields
from isthmus.features.definition import codehash
from isthmus.features.definition.checks import size_hint
from isthmus.features.definition.spec import AtRequest, RequestSource
from isthmus.features.errors import DataError, Problem
from isthmus.features.request.graph import RowGraph
from isthmus.features.types import INPUTS
from isthmus.features.values.arrow import ARROW, from_arrow, null_elements, wrong_size_rows
from isthmus.transforms.request import fields as requestfields
from isthmus.transforms.sources import failing_line, first_line

if TYPE_CHECKING:
    from pyspark.sql import Column as SparkColumn
    from pyspark.sql import SparkSession

    from isthmus.transforms.rowwise.core.types import SqlType


_ROW = "__row"
_BRANCH = "CANNOT_CONVERT_COLUMN_INTO_BOOL"
"""PySpark's error for a column in Python's `if`, `and`, `or` or `not`."""


REMEDY = "correct it, or drop such rows from the spine"


class Graphs:
    """Check rows of a training set by the ONNX graphs that serving uses for a contract's request transforms.

    The graphs refuse some values that an engine accepts. A model must not learn from such rows. A graph is opened on
    first use.
    """

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._graph = lru_cache(None)(lambda name: RowGraph(contract.transforms[name]))
        keys = (column.name for view in contract.views.values() for column in view.keys)
        self._identity = ["event_timestamp", *dict.fromkeys(keys)]

    def require(
        self, place: str, name: str, batch: pa.RecordBatch, rows: Mapping[str, pa.Array], refusal: str = ""
    ) -> None:
        """Check that the graph of the request transform `name` computes every row; raise a DataError if not.

        `rows` has the inputs of the transform by name. The error names the transform by `place`, and the first such row
        by the keys and time in `batch`. `refusal` is the error of the Spark query over the same rows, if the query
        failed. It is quoted unless the row breaks an expectation.
        """
        graph, inputs = self._graph(name), self._contract.transform_inputs(self._contract.transforms[name])
        columns = {column.name: from_arrow(rows[column.name], column.dtype) for column in inputs}
        refused = graph.first_refusal(columns, graph.run(columns), self._graph)
        if refused is None:
            return
        at = ", ".join(f"{key}={batch[key][refused.row]}" for key in self._identity if key in batch.schema.names)
        text = f"{refused.shown} at {at}" if refused.rule else f"cannot be computed at {at}, where {refused.shown}"
        if refusal and not refused.rule:
            text += f" ({refusal})"
        raise DataError(f"{place}, field {refused.field}", text, expected=refused.expected, remedy=REMEDY)


def compiled(transform: AtRequest, columns: Sequence[Column]) -> tuple[bytes, list[Problem]]:
    """Compile a request transform, or the checks of a request source, to an ONNX graph for serving.

    `columns` are the inputs. Returns the serialized graph and a list of problems, for `isthmus apply` to show. Ignore
    the graph if there are problems. An error in the user's function is a problem, too, and is not raised.
    """
    from isthmus.transforms.rowwise.compiler import compile_columns
    from isthmus.transforms.rowwise.core.expressions import NotCompilableError, traced

    where, place = _named(transform), _place(transform)
    if problems := [problem for column in columns if (problem := _unusable(where, column))]:
        return b"", problems
    try:
        with traced():
            computed_columns = _call(transform)
    except Exception as error:  # noqa: BLE001 - user code may raise anything
        at = failing_line(error, _function(transform))
        if "NO_ACTIVE_OR_DEFAULT_SESSION" in str(error):
            expected = "built-in functions of pyspark.sql.functions; Python functions and DataFrames are not supported"
            return b"", [Problem(place, f"its function asks for a Spark session{at}", expected)]
        expected = "F.when(condition, value).otherwise(other)" if _BRANCH in str(error) else ""
        failure = f"its function failed{at} with {type(error).__name__}: {first_line(error)}"
        return b"", [Problem(place, failure, expected)]
    if problems := _misfits(place, transform, computed_columns):
        return b"", problems
    inputs = {column.name: _sql_type(column) for column in columns}
    # The arrays of a request source are not computed fields.
    fields = [field for field in transform.schema if field.dtype.element is None]
    try:
        graph = compile_columns({field.name: computed_columns[field.name] for field in fields}, inputs)
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
    if (column.dtype.element or column.dtype) not in INPUTS:
        expected = f"one of {', '.join(map(str, INPUTS))}, or an Array of these"
        return Problem(f"{where}, input {column.name}", f"has type {column.dtype}", expected)
    if column.dtype.element is not None and column.size is None:
        feature = column.name.rpartition(SEPARATOR)[2]
        return Problem(f"{where}, input {column.name}", "its arrays may be of any size",
                       f"a fixed size, which graphs need: {size_hint(feature, column.dtype)}")  # fmt: skip
    return None


def _sql_type(column: Column) -> "SqlType":
    from isthmus.transforms.rowwise.core.types import TYPES, array_of

    if column.dtype.element is None:
        return TYPES[column.dtype.spark]
    assert column.size is not None  # noqa: S101 - see `_unusable`
    return array_of(TYPES[column.dtype.element.spark], column.size)


def _misfits(place: str, transform: AtRequest, result: object) -> list[Problem]:
    from pyspark.sql import Column as SparkColumn

    names = [field.name for field in transform.schema]
    expected = f"a dict with a Column for each of {', '.join(names)}"
    if not isinstance(result, Mapping):
        return [Problem(place, f"its function returned {type(result).__name__}", expected)]
    problems = [Problem(place, f"its function returned no {name}", expected) for name in names if name not in result]
    problems += [Problem(place, f"its function returned {name!r}, which its schema lacks", expected)
                 for name in result if name not in names]  # fmt: skip
    return problems + [
        Problem(f"{place}, field {name}", f"its function returned {type(column).__name__}", "a Column")
        for name, column in result.items()
        if not isinstance(column, SparkColumn)
    ]


def _call(transform: AtRequest) -> "Mapping[str, SparkColumn]":
    # A function gets the checked values of request sources.
    from pyspark.sql import functions

    if isinstance(transform, RequestSource):
        return requestfields.fields(transform)
    assert transform.function is not None  # noqa: S101 - `Declarations` has checked it
    checked: dict[str, SparkColumn] = {}
    for part in transform.inputs:
        if isinstance(part, RequestSource):
            checked |= requestfields.fields(part)
    columns: Mapping[str, SparkColumn]
    columns = transform.function(
        **{name: checked.get(name, functions.col(name)) for name in codehash.parameters(transform.function)}
    )
    return columns


def _function(transform: AtRequest) -> Callable[..., Any] | None:
    return None if isinstance(transform, RequestSource) else transform.function


def _named(transform: AtRequest) -> str:
    return f"request {'source' if isinstance(transform, RequestSource) else 'transform'} {transform.name}"


def _place(transform: AtRequest) -> str:
    function = _function(transform)
    return _named(transform) + (f" ({codehash.location(function)})" if function else "")


def schema_with(schema: pa.Schema, transforms: Iterable[TransformContract]) -> pa.Schema:
    for transform in transforms:
        where = f"request transform {transform.name}"
        available = optional_fields([transform]).union(schema.names)
        if missing := [name for name in transform.inputs if name not in available]:
            raise DataError(
                where, f"the rows have no column {', '.join(missing)}", expected="every input of its function",
                remedy="add the column to the rows; for a spine, declare it with @spine(request=...)",
            )  # fmt: skip
        for field in transform.fields:
            name = transform.full_name(field.name)
            if name in schema.names:
                raise DataError(where, f"the rows already have a column {name}", remedy="rename the spine's column")
            schema = schema.append(pa.field(name, ARROW[field.dtype.name]))
    return schema


def append_fields(
    spark: "SparkSession",
    transforms: Sequence[tuple[AtRequest, TransformContract]],
    joined: Iterable[pa.RecordBatch],
    graphs: Graphs | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a training set with the fields of request transforms appended. Rows keep their order.

    Runs one query on the engine per batch and transform. With `graphs`, also checks that the graphs of serving compute
    every row. Raises a DataError if the engine or a graph cannot compute a row, an input is missing or has a wrong
    type, or a batch already has a column with the name of a field.
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
    rows = {name: _input(place, batch, name, contract) for name in contract.inputs}
    try:
        # Engines do not guarantee the order of rows.
        frame: Any = spark.createDataFrame(pa.table({**rows, _ROW: pa.array(range(len(batch)), pa.int64())}))
        columns = _call(transform)
        results = frame.select(_ROW, *(columns[field.name].alias(field.name) for field in contract.fields)).toArrow()
    except PySparkException as error:
        refusal = f"the engine refused it: {first_line(error)}"
        if graphs:
            graphs.require(place, contract.name, batch, rows, refusal)
        raise DataError(place, refusal, remedy=REMEDY) from error
    if graphs:
        graphs.require(place, contract.name, batch, rows)
    results = results.sort_by(_ROW).combine_chunks()
    return [results[field.name].cast(ARROW[field.dtype.name]).combine_chunks() for field in contract.fields]


def _input(place: str, batch: pa.RecordBatch, name: str, contract: TransformContract) -> pa.Array:
    field = next((field for field in contract.request if field.name == name), None)
    if field is None:
        return batch[name]
    arrow = ARROW[field.dtype.name]
    if name not in batch.schema.names:
        return pa.nulls(len(batch), arrow)
    column = batch[name]
    where, expected = f"{place}, column {name}", f"values of type {field.dtype}"
    if _kind(column.type) not in ("null", _kind(arrow)):
        zone = " with a time zone" if _kind(arrow) == "time" else ""
        raise DataError(where, f"has type {column.type}", expected=expected + zone)
    try:
        values = column.cast(arrow)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(where, str(error), expected=expected) from error
    narrow, wide = values, column
    if pa.types.is_list(arrow):
        if nulls := null_elements(values):
            raise DataError(where, f"its arrays hold {nulls} nulls", expected=expected)
        if misfits := wrong_size_rows(values, field.size or 0):
            raise DataError(where, f"an array of {len(values[misfits[0]])} elements in row {misfits[0]}",
                            expected=f"{field.size}, as declared")  # fmt: skip
        if not pa.types.is_null(column.type):
            narrow, wide = pc.list_flatten(values), pc.list_flatten(column)
    if narrow.type == pa.float32() and pc.any(pc.and_(pc.is_inf(narrow), pc.is_finite(wide))).as_py():
        raise DataError(where, "a number is too large", expected=expected)
    return values


def _kind(kind: pa.DataType) -> str:
    # The width of a type does not matter.
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return "number"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"array of {_kind(kind.value_type)}"
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return "time"
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else str(kind)
