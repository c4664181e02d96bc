"""Conversions between types: Spark's implicit casts, and `cast` in ANSI mode."""

from collections.abc import Sequence
from dataclasses import replace

from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Value
from isthmus.transforms.rowwise.core.types import BOOLEAN, DATE, DOUBLE, INT, LONG, STRING, TIMESTAMP, VOID, SqlType

DAY, SECOND = 86_400_000_000, 1_000_000
"""In microseconds."""


def widened(graph: Graph, value: Value, kind: SqlType) -> Value:
    """Convert a value to a wider type, or to the nearest number of a floating-point type."""
    if value.kind == kind:
        return value
    if value.kind == VOID:
        return replace(graph.literal(None, kind), raises=value.raises)
    if value.kind.tensor == kind.tensor:
        return Value(kind, value.data, value.valid, value.raises)
    data = graph.cast(value.data, kind)
    if (value.kind, kind) == (DATE, TIMESTAMP):
        days, most = graph.cast(value.data, LONG), LONG.high // DAY
        wrong = graph.add("Greater", graph.add("Abs", days), graph.constant(most, LONG))
        return graph.result(kind, graph.add("Mul", days, graph.constant(DAY, LONG)), [value], wrong=wrong)
    return Value(kind, data, value.valid, value.raises)


def floor_divided(graph: Graph, data: str, divisor: int) -> tuple[str, str]:
    """Return floor quotient and remainder of int64 numbers by a positive constant."""
    by = graph.constant(divisor, LONG)
    # The bits of a negative number are flipped before and after: subtracting the remainder could overflow.
    # Do not use Clip, Min, Max or Sign: for int64 beyond 32 bits, ONNX Runtime's are wrong on processors with AVX-512.
    minus, zero = graph.constant(-1, LONG), graph.constant(0, LONG)
    sign = graph.add("Where", graph.add("Less", data, zero), minus, zero)
    quotient = graph.add("BitwiseXor", graph.add("Div", graph.add("BitwiseXor", data, sign), by), sign)
    return quotient, graph.add("Mod", data, by)


def cast(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    (value,) = values
    kind = node.kind
    assert kind is not None  # noqa: S101 - of a cast
    if value.kind in (kind, VOID) or (value.kind, kind) == (DATE, TIMESTAMP):
        return widened(graph, value, kind)
    if value.kind == BOOLEAN and kind.numeric:
        return Value(kind, graph.cast(value.data, kind), value.valid, value.raises)
    if value.kind.numeric and kind == BOOLEAN:
        zero = graph.add("Equal", value.data, graph.constant(0, value.kind))
        return graph.result(kind, graph.negated(zero), [value])
    if value.kind.numeric and kind.numeric:
        return _number(graph, value, kind)
    if value.kind.integral and kind == STRING:
        return graph.result(kind, graph.cast(value.data, kind), [value])
    if value.kind == BOOLEAN and kind == STRING:
        texts = (graph.constant(text, STRING) for text in ("true", "false"))
        return graph.result(kind, graph.add("Where", value.data, *texts), [value])
    if (value.kind, kind) == (TIMESTAMP, DATE):
        return graph.result(kind, graph.cast(floor_divided(graph, value.data, DAY)[0], kind), [value])
    if value.kind == TIMESTAMP and kind == DOUBLE:
        micros = graph.cast(value.data, DOUBLE)
        return graph.result(kind, graph.add("Div", micros, graph.constant(float(SECOND), DOUBLE)), [value])
    if value.kind == TIMESTAMP and kind in (INT, LONG):
        seconds = graph.result(LONG, floor_divided(graph, value.data, SECOND)[0], [value])
        return _number(graph, seconds, kind)
    raise NotCompilableError(node, f"runtimes convert {value.kind} to {kind} in different ways",
                             "a cast among numbers, booleans and times, or of whole numbers to text")  # fmt: skip


def _number(graph: Graph, value: Value, kind: SqlType) -> Value:
    of, wrong = value.kind, None
    if not kind.integral or (of.integral and of.rank <= kind.rank):
        return widened(graph, value, kind)
    if of.integral:
        low, high = graph.constant(kind.low, of), graph.constant(kind.high, of)
        wrong = graph.either(graph.add("Less", value.data, low), graph.add("Greater", value.data, high))
        return graph.result(kind, graph.cast(value.data, kind), [value], wrong=wrong)
    return _truncated(graph, widened(graph, value, DOUBLE), kind)


def _truncated(graph: Graph, value: Value, kind: SqlType) -> Value:
    low, high = graph.constant(float(kind.low), DOUBLE), graph.constant(float(kind.high), DOUBLE)
    below = graph.add("LessOrEqual", graph.add("Floor", value.data), high)
    fits = graph.add("And", below, graph.add("GreaterOrEqual", graph.add("Ceil", value.data), low))
    zero = graph.constant(0.0, DOUBLE)
    # The result of casting a number that does not fit depends on the processor.
    data = graph.cast(graph.add("Where", fits, value.data, zero), kind)
    if kind == LONG:
        # The double nearest to the greatest number is 2^63, which Java converts to that number.
        edge = graph.add("Equal", value.data, high)
        outside = graph.add("Or", edge, graph.negated(fits))
        inside = graph.cast(graph.add("Where", outside, zero, value.data), kind)
        data = graph.add("Where", edge, graph.constant(kind.high, kind), inside)
    return graph.result(kind, data, [value], wrong=graph.negated(fits))
