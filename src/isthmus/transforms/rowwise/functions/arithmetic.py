"""Arithmetic of integers (an overflow is an error, as in Spark), IEEE 754 floating-point numbers, and bits."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Mask, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.tensors import Tensor
from isthmus.transforms.rowwise.core.types import BYTE, DOUBLE, INT, LONG, SHORT, SqlType, common


def numbers(node: ExpressionNode, values: Sequence[Value]) -> list[Value]:
    kind = common(value.kind for value in values)
    if kind is None or not kind.numeric:
        shown = ", ".join(str(value.kind) for value in values)
        raise NotCompilableError(node, f"takes numbers, not {shown}", "a cast to the intended type")
    return [casts.widened(value, kind) for value in values]


def _in_range(wide: Tensor, kind: SqlType) -> tuple[Tensor, Tensor]:
    low, high = map(wide.graph.number, (kind.low, kind.high))
    wrong = (wide < low) | (wide > high)
    return wide.cast(kind), wrong


def _whole(operator: str, kind: SqlType, left: Tensor, right: Tensor) -> tuple[Tensor, Mask]:
    graph = left.graph
    if kind != LONG:
        return _in_range(graph.add(operator, left.cast(LONG), right.cast(LONG)), kind)
    result = graph.add(operator, left, right)
    zero = graph.number(0)
    if operator == "Mul":
        return result, _product_overflows(left, right, result)
    # Overflow: the sum's sign differs from both summands. For a difference, `left` is the sum of result and `right`.
    first, second = (left, right) if operator == "Add" else (result, right)
    total = result if operator == "Add" else left
    signs = [graph.add("BitwiseXor", total, part) for part in (first, second)]
    return result, graph.add("BitwiseAnd", *signs) < zero


def _product_overflows(left: Tensor, right: Tensor, result: Tensor) -> Tensor:
    one, zero, minus, least = map(left.graph.number, (1, 0, -1, LONG.low))
    # Runtimes crash on a division by zero, and on dividing the least number by -1.
    special = right.equals(zero) | right.equals(minus)
    back = result / special.where(one, right)
    differs = ~back.equals(left)
    flipped = right.equals(minus) & left.equals(least)
    return (~special & differs) | flipped


@rule("+", 2, operator="Add")
@rule("-", 2, operator="Sub")
@rule("*", 2, operator="Mul")
@rule("try_add", 2, operator="Add", lenient=True)
@rule("try_subtract", 2, operator="Sub", lenient=True)
@rule("try_multiply", 2, operator="Mul", lenient=True)
def _sum(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, operator: str, lenient: bool = False) -> Value:
    left, right = numbers(node, values)
    kind = left.kind
    if kind.fractional:
        return graph.result(kind, graph.add(operator, left.data, right.data), [left, right])
    data, wrong = _whole(operator, kind, left.data, right.data)
    how = {"null": wrong} if lenient else {"wrong": wrong}
    return graph.result(kind, data, [left, right], **how)


def _by(graph: Graph, kind: SqlType, data: Tensor, left: Value, right: Value, zero: Mask, *, lenient: bool) -> Value:  # noqa: PLR0913 - a kernel and its two sides
    if lenient and zero is not None:
        left = replace(left, raises=graph.guarded(left.raises, ~zero))
        return graph.result(kind, data, [right, left], null=zero)
    return graph.result(kind, data, [right, left], wrong=zero)


@rule("/", 2, lenient=False)
@rule("try_divide", 2, lenient=True)
def _divided(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, lenient: bool) -> Value:
    numbers(node, values)
    left, right = (casts.widened(value, DOUBLE) for value in values)
    known = graph.is_number(right.data) and graph.number_of(right.data) != 0
    zero = None if known else right.data.equals(0.0)
    return _by(graph, DOUBLE, left.data / right.data, left, right, zero, lenient=lenient)


def _remainder(kind: SqlType, left: Tensor, right: Tensor) -> Tensor:
    """Return Java's remainder, with the sign of the left side. `right` is never 0."""
    graph = left.graph
    if kind.fractional:
        return graph.add("Mod", left, right, fmod=1)
    if graph.is_number(right) and graph.number_of(right) not in (0, -1):
        return left - left / right * right
    # Mod with fmod uses floating-point numbers. The remainder by -1 is 0; dividing the least number by -1 would crash.
    minus, one = graph.constant(-1, kind), graph.constant(1, kind)
    safe = right.equals(minus).where(one, right)
    return left - left / safe * safe


def _nonzero(kind: SqlType, data: Tensor) -> tuple[Tensor, Mask]:
    graph = data.graph
    if graph.is_number(data) and graph.number_of(data) != 0:
        return data, None
    zero = data.equals(graph.constant(0, kind))
    return zero.where(graph.constant(1, kind), data), zero


@rule("% mod", 2)
@rule("try_mod", 2, lenient=True)
@rule("pmod", 2, positive=True)
def _modulo(
    graph: Graph, node: ExpressionNode, values: Sequence[Value], *, lenient: bool = False, positive: bool = False
) -> Value:
    left, right = numbers(node, values)
    kind = left.kind
    divisor, zero = _nonzero(kind, right.data)
    if positive and kind.integral and graph.is_number(divisor) and graph.number_of(divisor) > 0:
        return _by(graph, kind, graph.add("Mod", left.data, divisor), left, right, zero, lenient=lenient)
    data = _remainder(kind, left.data, divisor)
    if positive:
        negative = data < graph.constant(0, kind)
        data = graph.where(negative, _remainder(kind, data + divisor, divisor), data, kind)
    return _by(graph, kind, data, left, right, zero, lenient=lenient)


@rule("negative", 1, operator="Neg")
@rule("abs", 1, operator="Abs")
def _signed(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, operator: str) -> Value:
    (value,) = numbers(node, values)
    kind = value.kind
    if kind in (BYTE, SHORT):
        data, wrong = _in_range(graph.add(operator, value.data).cast(LONG), kind)
        return graph.result(kind, data, [value], wrong=wrong)
    least = value.data.equals(graph.constant(kind.low, kind)) if kind.integral else None
    return graph.result(kind, graph.add(operator, value.data), [value], wrong=least)


@rule("positive", 1)
def _positive(_graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    return numbers(node, values)[0]


# --- bits


@rule("&", 2, operator="BitwiseAnd")
@rule("|", 2, operator="BitwiseOr")
@rule("^", 2, operator="BitwiseXor")
@rule("~", 1, operator="BitwiseNot")
def _bitwise(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, operator: str) -> Value:
    sides = numbers(node, values)
    kind = sides[0].kind
    if not kind.integral:
        raise NotCompilableError(node, f"takes whole numbers, not {kind}", "a cast to int or bigint")
    return graph.result(kind, graph.add(operator, *(side.data for side in sides)), sides)


def _power_of_two(places: Tensor) -> Tensor:
    graph = places.graph
    return graph.add("Gather", graph.constant([*(1 << n for n in range(63)), LONG.low], LONG), places)


def _left(kind: SqlType, data: Tensor, places: Tensor) -> Tensor:
    graph = data.graph
    product = data.cast(LONG) * _power_of_two(places)
    if kind == LONG:
        return product
    # The low 32 bits, with their sign.
    low, sign = graph.add("BitwiseAnd", product, (1 << 32) - 1), graph.number(1 << 31)
    return (graph.add("BitwiseXor", low, sign) - sign).cast(kind)


def _right(kind: SqlType, data: Tensor, places: Tensor) -> Tensor:
    graph, wide = data.graph, data.cast(LONG)
    # Round down: for a negative number, shift the bits of its complement.
    negative = wide < 0
    bits = negative.where(graph.add("BitwiseNot", wide), wide)
    last = places.equals(63)
    power = last.where(graph.number(1), _power_of_two(places))
    moved = last.where(graph.number(0), bits / power)
    return negative.where(graph.add("BitwiseNot", moved), moved).cast(kind)


@rule("shiftleft", 2, move=_left)
@rule("shiftright", 2, move=_right)
def _shifted(
    graph: Graph, node: ExpressionNode, values: Sequence[Value], *, move: Callable[[SqlType, Tensor, Tensor], Tensor]
) -> Value:
    value, count = values
    if not value.kind.integral or not count.kind.integral or count.kind == LONG:
        raise NotCompilableError(node, f"shifts {value.kind} by {count.kind}", "int or bigint, by an int")
    value = casts.widened(value, value.kind if value.kind == LONG else INT)
    # Java takes the count modulo the number of bits.
    bits = graph.constant(63 if value.kind == LONG else 31, INT)
    places = graph.add("BitwiseAnd", count.data, bits).cast(LONG)
    return graph.result(value.kind, move(value.kind, value.data, places), [value, count])
