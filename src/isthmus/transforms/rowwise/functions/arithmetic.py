"""Arithmetic: integers, whose overflow Spark refuses, IEEE 754 floating-point numbers, and bits."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Mask, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.types import BYTE, DOUBLE, INT, LONG, SHORT, SqlType, common


def numbers(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> list[Value]:
    kind = common(value.kind for value in values)
    if kind is None or not kind.numeric:
        shown = ", ".join(str(value.kind) for value in values)
        raise NotCompilableError(node, f"takes numbers, not {shown}", "a cast to the intended type")
    return [casts.widened(graph, value, kind) for value in values]


def in_range(graph: Graph, wide: str, kind: SqlType) -> tuple[str, str]:
    """Convert int64 numbers to a narrower type; also return a mask of numbers that do not fit."""
    low, high = graph.constant(kind.low, LONG), graph.constant(kind.high, LONG)
    wrong = graph.add("Or", graph.add("Less", wide, low), graph.add("Greater", wide, high))
    return graph.cast(wide, kind), wrong


def _whole(graph: Graph, operator: str, kind: SqlType, left: str, right: str) -> tuple[str, Mask]:
    """Return a sum, difference or product of whole numbers, and a mask of overflows."""
    if kind != LONG:
        return in_range(graph, graph.add(operator, graph.cast(left, LONG), graph.cast(right, LONG)), kind)
    result = graph.add(operator, left, right)
    zero = graph.constant(0, LONG)
    if operator == "Mul":
        return result, _product_overflows(graph, left, right, result)
    # Overflow: the sum's sign differs from both summands. For a difference, `left` is the sum of result and `right`.
    first, second = (left, right) if operator == "Add" else (result, right)
    total = result if operator == "Add" else left
    signs = [graph.add("BitwiseXor", total, part) for part in (first, second)]
    return result, graph.add("Less", graph.add("BitwiseAnd", *signs), zero)


def _product_overflows(graph: Graph, left: str, right: str, result: str) -> str:
    unit, zero, minus = (graph.constant(number, LONG) for number in (1, 0, -1))
    least = graph.constant(LONG.low, LONG)
    # Runtimes crash on a division by zero, and on dividing the least number by -1.
    special = graph.add("Or", graph.add("Equal", right, zero), graph.add("Equal", right, minus))
    back = graph.add("Div", result, graph.add("Where", special, unit, right))
    differs = graph.negated(graph.add("Equal", back, left))
    flipped = graph.add("And", graph.add("Equal", right, minus), graph.add("Equal", left, least))
    return graph.add("Or", graph.add("And", graph.negated(special), differs), flipped)


@rule("+", 2, operator="Add")
@rule("-", 2, operator="Sub")
@rule("*", 2, operator="Mul")
@rule("try_add", 2, operator="Add", lenient=True)
@rule("try_subtract", 2, operator="Sub", lenient=True)
@rule("try_multiply", 2, operator="Mul", lenient=True)
def _sum(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, operator: str, lenient: bool = False) -> Value:
    left, right = numbers(graph, node, values)
    kind = left.kind
    if kind.fractional:
        return graph.result(kind, graph.add(operator, left.data, right.data), [left, right])
    data, wrong = _whole(graph, operator, kind, left.data, right.data)
    how = {"null": wrong} if lenient else {"wrong": wrong}
    return graph.result(kind, data, [left, right], **how)


def _by(graph: Graph, kind: SqlType, data: str, left: Value, right: Value, zero: Mask, *, lenient: bool) -> Value:  # noqa: PLR0913 - a kernel and its two sides
    """Return the result of a division. Division by `zero` is refused, or null if `lenient`, even for a null dividend.

    Spark evaluates the divisor first: if it is null, nothing else is computed.
    """
    if lenient and zero is not None:
        left = replace(left, raises=graph.guarded(left.raises, graph.negated(zero)))
        return graph.result(kind, data, [right, left], null=zero)
    return graph.result(kind, data, [right, left], wrong=zero)


@rule("/", 2, lenient=False)
@rule("try_divide", 2, lenient=True)
def _divided(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, lenient: bool) -> Value:
    numbers(graph, node, values)
    left, right = (casts.widened(graph, value, DOUBLE) for value in values)
    known = graph.is_number(right.data) and graph.number(right.data) != 0
    zero = None if known else graph.add("Equal", right.data, graph.constant(0.0, DOUBLE))
    data = graph.add("Div", left.data, right.data)
    return _by(graph, DOUBLE, data, left, right, zero, lenient=lenient)


def _remainder(graph: Graph, kind: SqlType, left: str, right: str) -> str:
    """Return Java's remainder, with the sign of the left side. `right` is never 0."""
    if kind.fractional:
        return graph.add("Mod", left, right, fmod=1)
    if graph.is_number(right) and graph.number(right) not in (0, -1):
        return graph.add("Sub", left, graph.add("Mul", graph.add("Div", left, right), right))
    # Mod with fmod uses floating-point numbers. The remainder by -1 is 0; dividing the least number by -1 would crash.
    minus, unit = graph.constant(-1, kind), graph.constant(1, kind)
    safe = graph.add("Where", graph.add("Equal", right, minus), unit, right)
    return graph.add("Sub", left, graph.add("Mul", graph.add("Div", left, safe), safe))


def _nonzero(graph: Graph, kind: SqlType, data: str) -> tuple[str, Mask]:
    if graph.is_number(data) and graph.number(data) != 0:
        return data, None
    zero = graph.add("Equal", data, graph.constant(0, kind))
    return graph.add("Where", zero, graph.constant(1, kind), data), zero


@rule("%", 2)
@rule("mod", 2)
@rule("try_mod", 2, lenient=True)
@rule("pmod", 2, positive=True)
def _modulo(
    graph: Graph, node: ExpressionNode, values: Sequence[Value], *, lenient: bool = False, positive: bool = False
) -> Value:
    left, right = numbers(graph, node, values)
    kind = left.kind
    divisor, zero = _nonzero(graph, kind, right.data)
    if positive and kind.integral and graph.is_number(divisor) and graph.number(divisor) > 0:
        return _by(graph, kind, graph.add("Mod", left.data, divisor), left, right, zero, lenient=lenient)
    data = _remainder(graph, kind, left.data, divisor)
    if positive:
        negative = graph.add("Less", data, graph.constant(0, kind))
        around = _remainder(graph, kind, graph.add("Add", data, divisor), divisor)
        data = graph.where(negative, around, data, kind)
    return _by(graph, kind, data, left, right, zero, lenient=lenient)


@rule("negative", 1, operator="Neg")
@rule("abs", 1, operator="Abs")
def _signed(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, operator: str) -> Value:
    (value,) = numbers(graph, node, values)
    kind = value.kind
    if kind in (BYTE, SHORT):
        data, wrong = in_range(graph, graph.cast(graph.add(operator, value.data), LONG), kind)
        return graph.result(kind, data, [value], wrong=wrong)
    least = graph.add("Equal", value.data, graph.constant(kind.low, kind)) if kind.integral else None
    return graph.result(kind, graph.add(operator, value.data), [value], wrong=least)


@rule("positive", 1)
def _positive(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    return numbers(graph, node, values)[0]


# --- bits


@rule("&", 2, operator="BitwiseAnd")
@rule("|", 2, operator="BitwiseOr")
@rule("^", 2, operator="BitwiseXor")
@rule("~", 1, operator="BitwiseNot")
def _bitwise(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, operator: str) -> Value:
    sides = numbers(graph, node, values)
    kind = sides[0].kind
    if not kind.integral:
        raise NotCompilableError(node, f"takes whole numbers, not {kind}", "a cast to int or bigint")
    return graph.result(kind, graph.add(operator, *(side.data for side in sides)), sides)


def _power_of_two(graph: Graph, places: str) -> str:
    """Return 2^n from a table for n from 0 to 62, int64; for 63 the least number, as wrap-around does."""
    return graph.add("Gather", graph.constant([*(1 << n for n in range(63)), LONG.low], LONG), places)


def _left(graph: Graph, kind: SqlType, data: str, places: str) -> str:
    product = graph.add("Mul", graph.cast(data, LONG), _power_of_two(graph, places))
    if kind == LONG:
        return product
    # The low 32 bits, with their sign.
    low = graph.add("BitwiseAnd", product, graph.constant((1 << 32) - 1, LONG))
    sign = graph.constant(1 << 31, LONG)
    return graph.cast(graph.add("Sub", graph.add("BitwiseXor", low, sign), sign), kind)


def _right(graph: Graph, kind: SqlType, data: str, places: str) -> str:
    wide = graph.cast(data, LONG)
    # Round down: for a negative number, shift the bits of its complement.
    negative = graph.add("Less", wide, graph.constant(0, LONG))
    bits = graph.add("Where", negative, graph.add("BitwiseNot", wide), wide)
    last = graph.add("Equal", places, graph.constant(63, LONG))
    power = graph.add("Where", last, graph.constant(1, LONG), _power_of_two(graph, places))
    moved = graph.add("Where", last, graph.constant(0, LONG), graph.add("Div", bits, power))
    return graph.cast(graph.add("Where", negative, graph.add("BitwiseNot", moved), moved), kind)


@rule("shiftleft", 2, move=_left)
@rule("shiftright", 2, move=_right)
def _shifted(
    graph: Graph, node: ExpressionNode, values: Sequence[Value], *, move: Callable[[Graph, SqlType, str, str], str]
) -> Value:
    value, count = values
    if not value.kind.integral or not count.kind.integral or count.kind == LONG:
        raise NotCompilableError(node, f"shifts {value.kind} by {count.kind}", "int or bigint, by an int")
    value = casts.widened(graph, value, value.kind if value.kind == LONG else INT)
    # Java takes the count modulo the number of bits.
    bits = graph.constant(63 if value.kind == LONG else 31, INT)
    places = graph.cast(graph.add("BitwiseAnd", count.data, bits), LONG)
    return graph.result(value.kind, move(graph, value.kind, value.data, places), [value, count])
