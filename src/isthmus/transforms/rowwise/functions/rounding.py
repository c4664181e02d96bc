"""Rounding to whole numbers and to decimal digits, as in Spark."""

import math
from collections.abc import Sequence

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.types import BOOLEAN, DOUBLE, FLOAT, LONG
from isthmus.transforms.rowwise.functions.arithmetic import numbers
from isthmus.transforms.rowwise.functions.exponentials import number


@rule("floor", 1, operator="Floor")
@rule("ceil", 1, operator="Ceil")
@rule("ceiling", 1, operator="Ceil")
def _to_whole(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, operator: str) -> Value:
    (value,) = numbers(graph, node, values)
    if value.kind.integral:
        return casts.widened(graph, value, LONG)
    value = casts.widened(graph, value, DOUBLE)
    # Java's conversion: NaN is 0, and numbers out of range become the nearest limit.
    down = graph.add(operator, value.data)
    low, high = number(graph, float(LONG.low)), number(graph, float(LONG.high))
    over, under = graph.add("GreaterOrEqual", down, high), graph.add("LessOrEqual", down, low)
    odd = graph.either(over, under, graph.add("IsNaN", down))
    assert odd is not None  # noqa: S101 - of three masks
    inside = graph.cast(graph.add("Where", odd, number(graph, 0.0), down), LONG)
    data = graph.add("Where", over, graph.constant(LONG.high, LONG), inside)
    data = graph.add("Where", under, graph.constant(LONG.low, LONG), data)
    return graph.result(LONG, data, [value])


@rule("round", 1, 2, even=False)
@rule("bround", 1, 2, even=True)
def _rounded(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, even: bool) -> Value:
    (value,) = numbers(graph, node, values[:1])
    digits = 0
    if len(values) == 2:
        argument = node.arguments[1]
        if argument.name != "literal" or not isinstance(argument.value, int) or not 0 <= argument.value <= 9:
            raise NotCompilableError(node, f"rounds to {argument} digits", "a number of digits from 0 to 9")
        digits = argument.value
    if value.kind.integral:
        return value
    wide = casts.widened(graph, value, DOUBLE)
    if value.kind == FLOAT and digits:
        raise NotCompilableError(node, "rounds a float to digits", "a cast to double first, or round without digits")
    return graph.result(value.kind, _decimal(graph, wide.data, digits, value.kind == FLOAT, even=even), [value])


def _coarse_from(digits: int) -> float:
    """Return the number from which neighboring doubles differ by at least 10^-digits."""
    return float(2.0 ** math.ceil(52 - digits * math.log2(10)))


def _decimal(graph: Graph, x: str, digits: int, narrow: bool, *, even: bool) -> str:
    """Round as Spark does: take the shortest decimal number that reads as x, and round it half up or half even.

    That decimal is the tie itself if x is the double nearest to the tie; otherwise it is on the same side of the tie as
    x. Where doubles are coarser than decimals with `digits` digits, x is already rounded. Where they are coarser than
    decimals with one more digit, Java uses the nearest of those to x, unless a shorter decimal reads as x.
    """
    size = graph.add("Abs", x)
    scale, half, unit = (number(graph, value) for value in (10.0**digits, 0.5, 1.0))
    least = graph.add("Floor", graph.add("Mul", size, scale))
    # If the product was rounded up to a whole number, subtract 1.
    rounded_up = graph.add("Greater", graph.add("Div", least, scale), size)
    least = graph.add("Where", rounded_up, graph.add("Sub", least, unit), least)
    tie = graph.add("Div", graph.add("Add", least, half), scale)
    above, equal = graph.add("Greater", size, tie), graph.add("Equal", size, tie)
    if digits:
        place = graph.add("Mul", graph.add("Sub", size, graph.add("Floor", size)), scale)
        rest = graph.add("Sub", place, graph.add("Floor", place))
        last = graph.add("Round", graph.add("Mul", rest, number(graph, 10)))
        low, high = (
            graph.add("Equal", size, graph.add("Div", whole, scale)) for whole in (least, graph.add("Add", least, unit))
        )
        coarse = graph.add("GreaterOrEqual", size, number(graph, _coarse_from(digits + 1)))
        unlike = graph.negated(low)
        beyond = graph.add("Or", high, graph.add("And", unlike, graph.add("Greater", last, number(graph, 5.0))))
        middle = graph.add("And", unlike, graph.add("Equal", last, number(graph, 5.0)))
        above, equal = graph.where(coarse, beyond, above, BOOLEAN), graph.where(coarse, middle, equal, BOOLEAN)
    up = equal
    if even:
        odd = graph.add("Equal", graph.add("Mod", least, number(graph, 2.0), fmod=1), unit)
        up = graph.add("And", equal, odd)
    up = graph.add("Or", above, up)
    rounded = graph.add("Div", graph.add("Add", least, graph.add("Where", up, unit, number(graph, 0.0))), scale)
    large = graph.add("GreaterOrEqual", size, number(graph, _coarse_from(digits)))
    as_is = graph.add("Or", large, graph.add("Or", graph.add("IsNaN", x), graph.add("IsInf", x)))
    signed = graph.add("Where", graph.add("Less", x, number(graph, 0.0)), graph.add("Neg", rounded), rounded)
    # A decimal cannot be a negative zero.
    zero = graph.add("Equal", signed, number(graph, 0.0))
    signed = graph.add("Where", zero, number(graph, 0.0), signed)
    result = graph.add("Where", as_is, x, signed)
    return graph.cast(result, FLOAT) if narrow else result
