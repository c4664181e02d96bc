"""Functions of real numbers. Functions without a kernel for doubles are composed of available kernels."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Stacked, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.types import BOOLEAN, DOUBLE, LONG, VOID
from isthmus.transforms.rowwise.functions import exponentials
from isthmus.transforms.rowwise.functions.exponentials import number, polynomial

Real = Callable[[Graph, str], str]
"""A function from a tensor of doubles to a tensor of doubles."""


def doubles(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> list[Value]:
    for value in values:
        if not (value.kind.numeric or value.kind == VOID):
            raise NotCompilableError(node, f"takes numbers, not {value.kind}", "a cast to double")
    return [casts.widened(graph, value, DOUBLE) for value in values]


def _real(
    name: str, function: Real | Callable[[Graph, str, str], str], null: Real | None = None, sides: int = 1
) -> None:
    def apply(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
        arguments = doubles(graph, node, values)
        missing = null(graph, arguments[0].data) if null else None
        data = function(graph, *(argument.data for argument in arguments))
        return graph.result(DOUBLE, data, arguments, null=missing)

    rule(name, sides)(apply)


def _kernel(operator: str) -> Real:
    return lambda graph, x: graph.add(operator, x)


def _not_above(bound: float) -> Real:
    """Return a mask of numbers not above a limit. NaN counts as above."""
    return lambda graph, x: graph.add("LessOrEqual", x, number(graph, bound))


def _exp(graph: Graph, x: str) -> str:
    return graph.together(exponentials.exp, x, signless=True)


def _log(graph: Graph, x: str) -> str:
    return graph.together(exponentials.log, x)


def _log_to(base: int) -> Real:
    return lambda graph, x: graph.add("Div", _log(graph, x), number(graph, math.log(base)))


def _log1p(graph: Graph, x: str) -> str:
    """Kahan's method: the rounding error of 1 + x cancels out in log(1 + x) / ((1 + x) - 1)."""
    unit = number(graph, 1.0)
    plus = graph.add("Add", x, unit)
    back = graph.add("Sub", plus, unit)
    tiny = graph.add("Equal", back, number(graph, 0.0))
    safe = graph.add("Where", tiny, unit, back)
    factor = graph.add("Div", _log(graph, plus), safe)
    whole = graph.add("IsInf", x)
    return _but_zero(graph, graph.add("Mul", factor, x), x, graph.add("Or", tiny, whole))


def _expm1(graph: Graph, x: str) -> str:
    return _but_zero(graph, graph.together(exponentials.expm1, x), x)


_NEARLY_ALL = 709.0
"""Above this, e^x overflows before half of it does."""


def _sinh(graph: Graph, x: str) -> str:
    size = graph.add("Abs", x)
    e = _expm1(graph, size)
    unit, half = number(graph, 1.0), number(graph, 0.5)
    near = graph.add("Mul", half, graph.add("Add", e, graph.add("Div", e, graph.add("Add", e, unit))))
    return _signed_like(graph, _half_exp_or(graph, size, near), x)


def _cosh(graph: Graph, x: str) -> str:
    size, half = graph.add("Abs", x), number(graph, 0.5)
    e = _exp(graph, size)
    return _half_exp_or(graph, size, graph.add("Add", graph.add("Mul", half, e), graph.add("Div", half, e)))


def _half_exp_or(graph: Graph, size: str, near: str) -> str:
    """Return `near`, or e^x / 2 computed by its root where e^x may overflow."""
    half = number(graph, 0.5)
    root = _exp(graph, graph.add("Mul", half, size))
    far = graph.add("Mul", graph.add("Mul", half, root), root)
    return graph.add("Where", graph.add("Greater", size, number(graph, _NEARLY_ALL)), far, near)


def _signed_like(graph: Graph, size: str, x: str) -> str:
    below = graph.add("Less", x, number(graph, 0.0))
    return _but_zero(graph, graph.add("Where", below, graph.add("Neg", size), size), x)


def _but_zero(graph: Graph, result: str, x: str, tiny: str | None = None) -> str:
    """Return `result`, but x itself where it is zero or tiny. See `Graph.where` for the order."""
    zero = tiny or graph.add("Equal", x, number(graph, 0.0))
    return graph.add("Where", graph.negated(zero), result, x)


_ATAN_P = (-8.750608600031904122785e-1, -1.615753718733365076637e1, -7.500855792314704667340e1,
           -1.228866684490136173410e2, -6.485021904942025371773e1)  # fmt: skip
_ATAN_Q = (2.485846490142306297962e1, 1.650270098316988542046e2, 4.328810604912902668951e2,
           4.853903996359136964868e2, 1.945506571482613964425e2)  # fmt: skip
_HALF_PI_REST = 6.123233995736765886130e-17
"""Pi / 2 minus its double."""


def _atan(graph: Graph, x: str, _numbers: Sequence[int]) -> str:
    """The rational function of Cephes (Moshier 1989), after reduction of the argument to [-0.66, 0.66]."""
    size = graph.add("Abs", x)
    unit, zero = number(graph, 1.0), number(graph, 0.0)
    far = graph.add("Greater", size, number(graph, 2.414213562373095))
    near = graph.add("LessOrEqual", size, number(graph, 0.66))
    # Numerator and denominator of the reduced slope; a small slope stays as it is.
    top = graph.add("Where", far, number(graph, -1.0), graph.add("Where", near, size, graph.add("Sub", size, unit)))
    under = graph.add("Where", far, size, graph.add("Where", near, unit, graph.add("Add", size, unit)))
    small = graph.add("Div", top, under)
    z = graph.add("Mul", small, small)
    result = graph.add("Add", graph.add("Mul", small, _rational(graph, z, (0.0, *_ATAN_P), (1.0, *_ATAN_Q))), small)
    base, more = (
        graph.add("Where", far, number(graph, part), graph.add("Where", near, zero, number(graph, part / 2)))
        for part in (math.pi / 2, _HALF_PI_REST)
    )
    return _signed_like(graph, graph.add("Add", base, graph.add("Add", result, more)), x)


def _together(function: Stacked, number: int = 0) -> Real:
    return lambda graph, x: graph.together(function, x, number)


atan = _together(_atan)


def _rational(graph: Graph, z: str, over: Sequence[float], under: Sequence[float]) -> str:
    """Return z p(z) / q(z) from the coefficients of both polynomials, which are evaluated together."""
    pairs = [graph.constant([[[p]], [[q]]], DOUBLE) for p, q in zip(over, under, strict=True)]
    both = polynomial(graph, z, pairs)
    p, q = (graph.add("Gather", both, graph.constant(place, LONG), axis=0) for place in (0, 1))
    return graph.add("Div", graph.add("Mul", z, p), q)


_ASIN_P = (3.47933107596021167570e-5, 7.91534994289814532176e-4, -4.00555345006794114027e-2, 2.01212532134862925881e-1,
           -3.25565818622400915405e-1, 1.66666666666666657415e-1)  # fmt: skip
_ASIN_Q = (7.70381505559019352791e-2, -6.88283971605453293030e-1, 2.02094576023350569471, -2.40339491173441421878)


def _arcsine(graph: Graph, x: str, _numbers: Sequence[int]) -> str:
    """The rational function of fdlibm below 0.5; above, computed from the complement."""
    size = graph.add("Abs", x)
    half, unit, two = (number(graph, value) for value in (0.5, 1.0, 2.0))
    steep = graph.add("GreaterOrEqual", size, half)
    z = graph.add("Where", steep, graph.add("Mul", half, graph.add("Sub", unit, size)), graph.add("Mul", size, size))
    # Small arguments keep their sign, and so does a zero; see `Graph.where` for the order.
    base = graph.add("Where", steep, graph.add("Sqrt", z), x)
    result = graph.add("Add", base, graph.add("Mul", base, _rational(graph, z, _ASIN_P, (0.0, *_ASIN_Q, 1.0))))
    rest = graph.add("Sub", graph.add("Mul", two, result), number(graph, _HALF_PI_REST))
    turned = graph.add("Sub", number(graph, math.pi / 2), rest)
    return graph.add("Where", steep, graph.add("Mul", turned, graph.add("Sign", x)), result)


def _acos(graph: Graph, x: str) -> str:
    """Computed as 2 atan(sqrt((1 - x) / (1 + x)))."""
    unit = number(graph, 1.0)
    ratio = graph.add("Div", graph.add("Sub", unit, x), graph.add("Add", unit, x))
    return graph.add("Mul", number(graph, 2.0), atan(graph, graph.add("Sqrt", ratio)))


def atan2(graph: Graph, y: str, x: str) -> str:
    """Return the angle of (x, y). For Spark, zero has no sign."""
    zero, pi = number(graph, 0.0), number(graph, math.pi)
    quotient = graph.add("Div", graph.add("Abs", y), graph.add("Abs", x))
    both_zero = graph.add("And", graph.add("Equal", y, zero), graph.add("Equal", x, zero))
    both_inf = graph.add("And", graph.add("IsInf", y), graph.add("IsInf", x))
    ratio = graph.add("Where", both_zero, zero, graph.add("Where", both_inf, number(graph, 1.0), quotient))
    first = atan(graph, ratio)
    # Pi minus its double is added last.
    turned = graph.add("Sub", pi, graph.add("Sub", first, number(graph, 1.2246467991473532e-16)))
    angle = graph.add("Where", graph.add("Less", x, zero), turned, first)
    return graph.where(graph.add("Less", y, zero), graph.add("Neg", angle), angle, DOUBLE)


def _cbrt(graph: Graph, x: str) -> str:
    """Return e^(log |x| / 3) with the sign of x, refined by two steps of Halley's method."""
    size = graph.add("Abs", x)
    odd = graph.add("Or", graph.add("Equal", size, number(graph, 0.0)), graph.add("IsInf", size))
    unit = number(graph, 1.0)
    safe = graph.add("Where", odd, unit, size)
    # Scaled so that nothing overflows or vanishes: 2^600 is the cube of 2^200.
    large = graph.add("Greater", safe, number(graph, 1e200))
    small = graph.add("Less", safe, number(graph, 1e-200))
    down, up = (
        graph.add("Where", large, number(graph, far), graph.add("Where", small, number(graph, near), unit))
        for far, near in ((2.0**-600, 2.0**600), (2.0**200, 2.0**-200))
    )
    middle = graph.add("Mul", safe, down)
    # Do not use Pow: its last bits depend on the runtime.
    root = _exp(graph, graph.add("Div", _log(graph, middle), number(graph, 3.0)))
    for _ in range(2):
        cube = graph.add("Mul", graph.add("Mul", root, root), root)
        off = graph.add("Sub", cube, middle)
        under = graph.add("Add", graph.add("Add", cube, cube), middle)
        root = graph.add("Sub", root, graph.add("Mul", root, graph.add("Div", off, under)))
    better = graph.add("Mul", root, up)
    return _signed_like(graph, graph.add("Where", odd, size, better), x)


def _quotient(over: Real | None, under: Real) -> Real:
    def apply(graph: Graph, x: str) -> str:
        top = over(graph, x) if over else number(graph, 1.0)
        return graph.add("Div", top, under(graph, x))

    return apply


_SIN = (2.7314439779805667e-15, -7.643970233520291e-13, 1.6058977310482129e-10, -2.5052107616965613e-08,
        2.7557319219162993e-06, -0.00019841269841254974, 0.008333333333333316, -0.16666666666666666)  # fmt: skip
"""Coefficients of (sin r - r) / r^3 in r^2, from Chebyshev nodes up to pi / 2; error below half an ulp."""
_PI = (3.1415926534682512, 1.2154201012607932e-10, 4.044532497591901e-21)
"""Pi in three parts, the first two of 33 bits."""
_FAR = 2.0**20
"""Above this, the runtime's kernel is as accurate as the polynomial."""
_PADDING = 16


def _circular(graph: Graph, x: str, turns: Sequence[int]) -> str:
    """Return sine (turn 0) or cosine (turn 1, a quarter turn more) of angles (k, n), after reduction by half turns.

    Kernels of runtimes lose the last bits near a zero of the function.
    """
    unit = number(graph, 1.0)
    column = np.array(turns)[:, None]
    quarter = graph.constant(column / 2, DOUBLE)
    # Do not use Round: it returns -0.0, and the differences below would turn that into 0.0.
    angle = graph.add("Mul", x, number(graph, 1 / math.pi))
    half_turns = graph.add("Floor", graph.add("Add", angle, graph.constant(column / 2 + 0.5, DOUBLE)))
    reduced = graph.add("Sub", half_turns, quarter) if any(turns) else half_turns
    # The first product is exact.
    high = graph.add("Sub", x, graph.add("Mul", reduced, number(graph, _PI[0])))
    step = graph.add("Mul", reduced, number(graph, _PI[1]))
    rest = graph.add("Sub", high, step)
    lost = graph.add("Sub", graph.add("Sub", high, rest), step)
    r = graph.add("Sub", rest, graph.add("Sub", graph.add("Mul", reduced, number(graph, _PI[2])), lost))
    z = graph.add("Mul", r, r)
    series = polynomial(graph, z, [number(graph, value) for value in _SIN])
    sine = graph.add("Mul", r, graph.add("Add", unit, graph.add("Mul", z, series)))
    odd = graph.add("BitwiseAnd", graph.cast(half_turns, LONG), graph.constant(1, LONG))
    result = graph.add("Mul", sine, graph.add("Gather", graph.constant([1.0, -1.0], DOUBLE), odd))
    far = graph.add("GreaterOrEqual", graph.add("Abs", x), number(graph, _FAR))
    return graph.add("Where", far, _by_kernel(graph, x, turns), result)


def _by_kernel(graph: Graph, x: str, turns: Sequence[int]) -> str:
    """Return sine or cosine by the runtime's kernel, which uses another formula for the last few numbers of a tensor.

    Zeros are appended, so that these last numbers are padding.
    """
    column = np.array(turns)[:, None]
    padded = graph.add("Concat", x, graph.constant(np.zeros((len(turns), _PADDING)), DOUBLE), axis=1)
    kernels = [graph.add(kernel, padded) for turn, kernel in enumerate(("Sin", "Cos")) if turn in turns]
    if len(kernels) == 2:
        kernels = [graph.add("Where", graph.constant(column, BOOLEAN), kernels[1], kernels[0])]
    begin, end = (graph.constant(places, LONG) for places in ([0, 0], [len(turns), -_PADDING]))
    return graph.add("Slice", kernels[0], begin, end)


def _tanh(graph: Graph, x: str) -> str:
    """Return e / (e + 2) with e = e^2x - 1; from 0.55 on, 1 - 2 / (e + 2), where an error of e matters less."""
    size, two = graph.add("Abs", x), number(graph, 2.0)
    e = _expm1(graph, graph.add("Mul", two, size))
    under = graph.add("Add", e, two)
    far = graph.add("Sub", number(graph, 1.0), graph.add("Div", two, under))
    steep = graph.add("Less", size, number(graph, 0.55))
    return _signed_like(graph, graph.add("Where", steep, graph.add("Div", e, under), far), x)


_sin, _cos = _together(_circular, 0), _together(_circular, 1)
_real("sqrt", _kernel("Sqrt"))
_real("cbrt", _cbrt)
_real("exp", _exp)
_real("expm1", _expm1)
_real("ln", _log, _not_above(0.0))
_real("log10", _log_to(10), _not_above(0.0))
_real("log2", _log_to(2), _not_above(0.0))
_real("log1p", _log1p, _not_above(-1.0))
_real("sin", _sin)
_real("cos", _cos)
_real("tan", _quotient(_sin, _cos))
_real("cot", _quotient(_cos, _sin))
_real("sec", _quotient(None, _cos))
_real("csc", _quotient(None, _sin))
_real("asin", _together(_arcsine))
_real("acos", _acos)
_real("atan", atan)
_real("sinh", _sinh)
_real("cosh", _cosh)
_real("tanh", _tanh)
_real("degrees", lambda graph, x: graph.add("Mul", x, number(graph, 180.0 / math.pi)))
_real("radians", lambda graph, x: graph.add("Mul", x, number(graph, math.pi / 180.0)))
_real("rint", _kernel("Round"))
_real(
    "signum",
    lambda graph, x: graph.add(
        "Where", graph.add("Less", number(graph, 0.0), graph.add("Abs", x)), graph.add("Sign", x), x
    ),
)


def _pow(graph: Graph, x: str, y: str) -> str:
    """Java's power: NaN for an exponent of NaN, and for 1 or -1 to infinity."""
    if graph.is_number(y) and math.isfinite(graph.number(y)):
        # A kernel multiplies for a square or cube of many rows, but not for one row. Java multiplies for a square.
        return graph.add("Mul", x, x) if graph.number(y) == 2 else graph.add("Pow", x, graph.row(y))
    y = graph.row(y)
    unit = number(graph, 1.0)
    edge = graph.add("And", graph.add("Equal", graph.add("Abs", x), unit), graph.add("IsInf", y))
    nan = graph.add("Or", edge, graph.add("IsNaN", y))
    return graph.add("Where", nan, number(graph, math.nan), graph.add("Pow", x, y))


def _hypot(graph: Graph, x: str, y: str) -> str:
    """Scale by the greater side, so that it overflows only if the result does."""
    x, y = graph.add("Abs", x), graph.add("Abs", y)
    big, small = graph.add("Max", x, y), graph.add("Min", x, y)
    zero, unit = number(graph, 0.0), number(graph, 1.0)
    ratio = graph.add("Div", small, graph.add("Where", graph.add("Equal", big, zero), unit, big))
    result = graph.add("Mul", big, graph.add("Sqrt", graph.add("Add", unit, graph.add("Mul", ratio, ratio))))
    infinite = graph.add("Or", graph.add("IsInf", x), graph.add("IsInf", y))
    return graph.add("Where", infinite, number(graph, math.inf), result)


_real("power", _pow, sides=2)
_real("atan2", atan2, sides=2)
_real("hypot", _hypot, sides=2)
_real("pow", _pow, sides=2)


@rule("log", 1, 2)
def _logarithm(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    """Base e, or the base in the first argument."""
    sides = doubles(graph, node, values)
    logs = [_log(graph, side.data) for side in sides]
    null = graph.either(*(_not_above(0.0)(graph, side.data) for side in sides))
    data = graph.add("Div", logs[1], logs[0]) if len(logs) == 2 else logs[0]
    return graph.result(DOUBLE, data, sides, null=null)


@rule("pi", 0, value=math.pi)
@rule("e", 0, value=math.e)
def _constant(graph: Graph, _node: ExpressionNode, _values: Sequence[Value], *, value: float) -> Value:
    return graph.literal(value, DOUBLE)
