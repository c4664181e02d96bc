"""Spark's values beside those of the graph that a runtime computes, on the same rows."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus.features.request.layout import MASKS, NOTES, VALID, Layout, array_input_name, input_name
from isthmus.features.request.layout import output_name as tensor_of
from isthmus.transforms.rowwise.compiler import Compiled, compile_columns
from isthmus.transforms.rowwise.core.types import (
    BOOLEAN,
    BYTE,
    DATE,
    DOUBLE,
    FLOAT,
    INT,
    LONG,
    SHORT,
    STRING,
    TIMESTAMP,
    SqlType,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

DAY = 86_400_000_000
RAISES, THERE = " raises", " valid"
_DOUBLES = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1.005, 2.675, 0.1, 0.3, 3.7, -3.7, 22.5, 17.8, 710.0, -745.0, 1e-8,
    100.123456, 100000.5, 1048575.3, 1e-300, 5e-324, 1e300, -1e300, 1.7976931348623157e308, 2.0**53 + 2, 2.0**63,
    -(2.0**63), math.nan, math.inf, -math.inf, math.pi, math.pi / 2, 1.593823177452897, 11.232424877053448,
    3870198567751.6406, 28777857293346.547, -452878346913806.06, 321638726418482.7, 51138765821.020035,
]  # fmt: skip
EDGES: dict[SqlType, list[Any]] = {
    BOOLEAN: [True, False],
    BYTE: [0, 1, -1, 7, 127, -128],
    SHORT: [0, 1, -1, 300, 32767, -32768],
    INT: [0, 1, -1, 2, 7, -7, 46341, -46341, 2**31 - 1, -(2**31)],
    LONG: [0, 1, -1, 3, -7, 2**53 + 1, 3037000500, -3037000500, 2**63 - 1, -(2**63)],
    DOUBLE: _DOUBLES,
    FLOAT: [float(np.float32(value)) for value in _DOUBLES if not math.isfinite(value) or abs(value) < 3e38],
    STRING: ["", "a", "b", "A b", "é", "a%b", "a_b", "a.b", "x\ny", "(a)", "%", "\\"],
    DATE: [0, 1, -1, 59, 60, 365, -365, 11016, 18321, 19782, -25567, -719162, 2932896],
    TIMESTAMP: [
        0, 1, -1, 10**6, -(10**6), 1_709_164_800_000_000, 1_709_251_199_999_999, DAY - 1, -62_135_596_800_000_000,
        253_402_300_799_999_999, 1_234_567_890_123_456, 3_037_000_500, -3_037_000_500,
    ],
}  # fmt: skip
"""What goes wrong first, by type; dates in days, times in microseconds."""

_ARROW = {
    BOOLEAN: pa.bool_(), BYTE: pa.int8(), SHORT: pa.int16(), INT: pa.int32(), LONG: pa.int64(), FLOAT: pa.float32(),
    DOUBLE: pa.float64(), STRING: pa.string(), DATE: pa.date32(), TIMESTAMP: pa.timestamp("us", tz="UTC"),
}  # fmt: skip
_PLAIN = {DATE: pa.int32(), TIMESTAMP: pa.int64()}

Rows = Mapping[str, Sequence[Any]]
"""Values by column, None for null."""


@dataclass(frozen=True)
class Expression:
    """An expression to try.

    Attributes:
        column: it.
        ulps: how far apart floating-point results may be.
        label: what to call it in a message.
    """

    column: "Column"
    ulps: int = 0
    label: str = ""


class Proof:
    """Expressions over some columns, compiled, in one graph.

    Args:
        spark: Apache Spark, which is right.
        expressions: by any names.
        inputs: the columns and their types.
    """

    def __init__(
        self, spark: "SparkSession", expressions: Mapping[str, Expression], inputs: Mapping[str, SqlType]
    ) -> None:
        self._spark, self._expressions = spark, expressions
        self.compiled: Compiled = compile_columns({name: one.column for name, one in expressions.items()}, inputs)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        self._session = ort.InferenceSession(
            self.compiled.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def differences(self, rows: Rows) -> list[str]:
        """Every expression on every row: what Spark says otherwise, or refuses although the graph does not."""
        found = self.computed(rows)
        table = _arrow(rows, self.compiled.inputs)
        columns = []
        for n, (name, one) in enumerate(self._expressions.items()):
            # Spark computes what a condition asks for and nothing else, and so refuses nothing that we have refused.
            table = table.append_column(f"keep_{n}", pa.array(~found[name + RAISES]))
            columns.append(F.when(F.col(f"keep_{n}"), one.column).alias(f"found_{n}"))
        try:
            answers = self._spark.createDataFrame(table).select(*columns).toArrow()
        except PySparkException as error:
            refused = self._refused(table, range(len(columns)))
            return refused or [f"Spark refused all of them at once: {str(error).partition(chr(10))[0][:200]}"]
        differing = []
        for n, (name, one) in enumerate(self._expressions.items()):
            differing += self._compared(name, one, answers[f"found_{n}"], found, rows)
        return differing

    def computed(self, rows: Rows) -> dict[str, Any]:
        """What the graph says: values by name, and under other names where they are valid and where refused."""
        layout = Layout.loads(self._session.get_modelmeta().custom_metadata_map[NOTES])
        names = [*map(tensor_of, layout.outputs), MASKS]
        *tensors, masks = self._session.run(names, _feed(rows, self.compiled.inputs, layout))
        found = {name: row for tensor, fields in zip(tensors, layout.outputs.values(), strict=True)
                 for name, row in zip(fields, tensor, strict=True)}  # fmt: skip
        valid, raises = masks[: len(layout.fields)], masks[len(layout.fields) :]
        found |= {name + RAISES: row for name, row in zip(layout.fields, raises, strict=True)}
        return found | {name + THERE: row for name, row in zip(layout.fields, valid & ~raises, strict=True)}

    def not_refused(self, rows: Rows, chance: random.Random) -> list[str]:
        """For each expression one row that the graph refuses: those that Spark does not."""
        found = self.computed(rows)
        wrong = []
        for name, one in self._expressions.items():
            refused = np.flatnonzero(found[name + RAISES])
            if len(refused):
                place = int(chance.choice(refused.tolist()))
                row = {column: [values[place]] for column, values in rows.items()}
                table = _arrow(row, self.compiled.inputs)
                try:
                    value = str(self._spark.createDataFrame(table).select(one.column.cast("string")).toArrow()[0][0])
                except PySparkException:
                    continue
                wrong.append(f"{one.label or name}: refused, by Spark {value}: {row}")
        return wrong

    def _refused(self, table: pa.Table, numbers: Sequence[int]) -> list[str]:
        """Which of some expressions Spark refuses although the graph does not, by halves."""
        names = list(self._expressions)
        columns = [F.when(F.col(f"keep_{n}"), self._expressions[names[n]].column).alias(f"found_{n}") for n in numbers]
        try:
            self._spark.createDataFrame(table).select(*columns).toArrow()
        except PySparkException as error:
            if len(numbers) == 1:
                label = self._expressions[names[numbers[0]]].label or names[numbers[0]]
                return [f"{label}: Spark refused it: {str(error).partition(chr(10))[0][:200]}"]
            half = len(numbers) // 2
            return [*self._refused(table, numbers[:half]), *self._refused(table, numbers[half:])]
        return []

    def _compared(
        self, name: str, one: Expression, answer: pa.ChunkedArray, found: Mapping[str, Any], rows: Rows
    ) -> list[str]:
        kind, label = self.compiled.outputs[name], one.label or name
        if answer.type != _ARROW[kind]:
            return [f"{label}: has type {kind}, by Spark {answer.type}"]
        spark = (answer.cast(_PLAIN[kind]) if kind in _PLAIN else answer).to_pylist()
        wrong = []
        for place, (expected, value) in enumerate(zip(spark, found[name].tolist(), strict=True)):
            if found[name + RAISES][place]:
                continue
            there = bool(found[name + THERE][place])
            if there != (expected is not None) or (there and not _same(expected, value, kind, one.ulps)):
                row = {column: values[place] for column, values in rows.items()}
                wrong.append(f"{label}: {value if there else None!r}, by Spark {expected!r}: {row}")
        return wrong[:3]


def _same(expected: Any, value: Any, kind: SqlType, ulps: int) -> bool:
    if not kind.fractional or expected != expected or value != value:
        return bool(expected == value or (expected != expected and value != value))
    if expected == value:
        return math.copysign(1, expected) == math.copysign(1, value)
    one, other = (_place(number, kind) for number in (expected, value))
    return abs(one - other) <= ulps


def _place(number: float, kind: SqlType) -> int:
    """Where a floating-point number stands among all of them."""
    bits = int(np.array(number, kind.numpy).view(np.int64 if kind == DOUBLE else np.int32))
    return bits if bits >= 0 else -(bits & (LONG if kind == DOUBLE else INT).high)


def _arrow(rows: Rows, kinds: Mapping[str, SqlType]) -> pa.Table:
    columns = {}
    for name, kind in kinds.items():
        if kind.element:
            columns[name] = pa.array(rows[name], pa.list_(_ARROW[kind.element]))
        else:
            columns[name] = pa.array(rows[name], _PLAIN.get(kind, _ARROW[kind])).cast(_ARROW[kind])
    return pa.table(columns)


def _feed(rows: Rows, kinds: Mapping[str, SqlType], layout: Layout) -> dict[str, Any]:
    data = {}
    for name, kind in kinds.items():
        zero: Any = [0] * kind.size if kind.element else "" if kind == STRING else 0
        filled = [zero if value is None else value for value in rows[name]]
        data[name] = np.array(filled, kind.numpy).reshape(len(filled), *([kind.size] if kind.element else []))
    feed = {input_name(element): np.array([data[name] for name in names]) for element, names in layout.inputs.items()}
    feed[input_name(VALID)] = np.array([[value is not None for value in rows[name]] for name in layout.masks], bool)
    return feed | {array_input_name(n): np.ascontiguousarray(data[n].T) for n, kind in kinds.items() if kind.element}
