"""Rounding to whole numbers and to decimal digits, as in Spark."""

import math
from collections.abc import Sequence

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.tensors import Tensor
from isthmus.transforms.rowwise.core.types import BOOLEAN, DOUBLE, FLOAT, LONG
from isthmus.transforms.rowwise.functions.arithmetic import numbers


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
    low, high = graph.number(float(LONG.low)), graph.number(float(LONG.high))
    over, under = down >= high, down <= low
    odd = graph.add("IsNaN", down)
    inside = (over | under | odd).where(0.0, down).cast(LONG)
    return graph.result(LONG, under.where(LONG.low, over.where(LONG.high, inside)), [value])


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
    return graph.result(value.kind, _decimal(wide.data, digits, value.kind == FLOAT, even=even), [value])


def _coarse_from(digits: int) -> float:
    """Return the number from which neighboring doubles differ by at least 10^-digits."""
    return float(2.0 ** math.ceil(52 - digits * math.log2(10)))


def _decimal(x: Tensor, digits: int, narrow: bool, *, even: bool) -> Tensor:
    """Round as Spark does: take the shortest decimal number that reads as x, and round it half up or half even.

    That decimal is the tie itself if x is the double nearest to the tie; otherwise it is on the same side of the tie as
    x. Where doubles are coarser than decimals with `digits` digits, x is already rounded. Where they are coarser than
    decimals with one more digit, Java uses the nearest of those to x, unless a shorter decimal reads as x.
    """
    graph, size = x.graph, abs(x)
    scale, half, one = map(graph.number, (10.0**digits, 0.5, 1.0))
    least = graph.add("Floor", size * scale)
    # If the product was rounded up to a whole number, subtract 1.
    rounded_up = least / scale > size
    least = rounded_up.where(least - one, least)
    tie = (least + half) / scale
    above, equal = size > tie, size.equals(tie)
    if digits:
        place = (size - graph.add("Floor", size)) * scale
        rest = place - graph.add("Floor", place)
        last = graph.add("Round", rest * 10.0)
        low, high = (size.equals(whole / scale) for whole in (least, least + one))
        coarse = size >= _coarse_from(digits + 1)
        unlike = ~low
        beyond = high | (unlike & (last > 5.0))
        middle = unlike & last.equals(5.0)
        above, equal = graph.where(coarse, beyond, above, BOOLEAN), graph.where(coarse, middle, equal, BOOLEAN)
    up = equal
    if even:
        odd = graph.add("Mod", least, 2.0, fmod=1).equals(one)
        up = equal & odd
    up = above | up
    rounded = (least + up.where(one, 0.0)) / scale
    large = size >= _coarse_from(digits)
    as_is = large | (graph.add("IsNaN", x) | graph.add("IsInf", x))
    signed = (x < 0.0).where(-rounded, rounded)
    # A decimal cannot be a negative zero.
    signed = signed.equals(0.0).where(0.0, signed)
    result = as_is.where(x, signed)
    return result.cast(FLOAT) if narrow else result
