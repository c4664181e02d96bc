"""Conversions between types: Spark's implicit casts, and `cast` in ANSI mode."""

from collections.abc import Sequence
from dataclasses import replace

from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Value
from isthmus.transforms.rowwise.core.tensors import Tensor
from isthmus.transforms.rowwise.core.types import BOOLEAN, DATE, DOUBLE, INT, LONG, STRING, TIMESTAMP, VOID, SqlType

DAY, SECOND = 86_400_000_000, 1_000_000
"""A day and a second, in microseconds."""


def widened(value: Value, kind: SqlType) -> Value:
    graph = value.data.graph
    if value.kind == kind:
        return value
    if value.kind == VOID:
        return replace(graph.literal(None, kind), raises=value.raises)
    if value.kind.tensor == kind.tensor:
        return Value(kind, value.data, value.valid, value.raises)
    data = value.data.cast(kind)
    if (value.kind, kind) == (DATE, TIMESTAMP):
        days = value.data.cast(LONG)
        wrong = abs(days) > LONG.high // DAY
        return graph.result(kind, days * DAY, [value], wrong=wrong)
    return Value(kind, data, value.valid, value.raises)


def floor_divided(data: Tensor, divisor: int) -> tuple[Tensor, Tensor]:
    graph = data.graph
    by, minus, zero = map(graph.number, (divisor, -1, 0))
    # The bits of a negative number are flipped before and after: subtracting the remainder could overflow.
    # Do not use Clip, Min, Max or Sign: for int64 beyond 32 bits, ONNX Runtime's are wrong on processors with AVX-512.
    sign = (data < zero).where(minus, zero)
    quotient = graph.add("BitwiseXor", graph.add("BitwiseXor", data, sign) / by, sign)
    return quotient, graph.add("Mod", data, by)


def cast(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    (value,) = values
    kind = node.kind
    assert kind is not None  # noqa: S101 - of a cast
    if value.kind in (kind, VOID) or (value.kind, kind) == (DATE, TIMESTAMP):
        return widened(value, kind)
    if value.kind == BOOLEAN and kind.numeric:
        return Value(kind, value.data.cast(kind), value.valid, value.raises)
    if value.kind.numeric and kind == BOOLEAN:
        return graph.result(kind, ~value.data.equals(graph.constant(0, value.kind)), [value])
    if value.kind.numeric and kind.numeric:
        return _number(graph, value, kind)
    if value.kind.integral and kind == STRING:
        return graph.result(kind, value.data.cast(kind), [value])
    if value.kind == BOOLEAN and kind == STRING:
        texts = (graph.constant(text, STRING) for text in ("true", "false"))
        return graph.result(kind, value.data.where(*texts), [value])
    if (value.kind, kind) == (TIMESTAMP, DATE):
        return graph.result(kind, floor_divided(value.data, DAY)[0].cast(kind), [value])
    if value.kind == TIMESTAMP and kind == DOUBLE:
        return graph.result(kind, value.data.cast(DOUBLE) / float(SECOND), [value])
    if value.kind == TIMESTAMP and kind in (INT, LONG):
        seconds = graph.result(LONG, floor_divided(value.data, SECOND)[0], [value])
        return _number(graph, seconds, kind)
    raise NotCompilableError(node, f"runtimes convert {value.kind} to {kind} in different ways",
                             "a cast among numbers, booleans and times, or of whole numbers to text")  # fmt: skip


def _number(graph: Graph, value: Value, kind: SqlType) -> Value:
    of = value.kind
    if not kind.integral or (of.integral and of.rank <= kind.rank):
        return widened(value, kind)
    if of.integral:
        low, high = graph.constant(kind.low, of), graph.constant(kind.high, of)
        wrong = (value.data < low) | (value.data > high)
        return graph.result(kind, value.data.cast(kind), [value], wrong=wrong)
    return _truncated(graph, widened(value, DOUBLE), kind)


def _truncated(graph: Graph, value: Value, kind: SqlType) -> Value:
    low, high = graph.number(float(kind.low)), graph.number(float(kind.high))
    fits = (graph.add("Floor", value.data) <= high) & (graph.add("Ceil", value.data) >= low)
    # The result of casting a number that does not fit depends on the processor.
    data = fits.where(value.data, 0.0).cast(kind)
    if kind == LONG:
        # The double nearest to the greatest number is 2^63, which Java converts to that number.
        edge = value.data.equals(high)
        inside = (edge | ~fits).where(0.0, value.data).cast(kind)
        data = edge.where(kind.high, inside)
    return graph.result(kind, data, [value], wrong=~fits)
