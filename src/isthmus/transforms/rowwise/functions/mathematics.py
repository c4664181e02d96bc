"""Functions of real numbers, from ONNX operators that runtimes implement for doubles."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Stacked, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.tensors import Tensor
from isthmus.transforms.rowwise.core.types import BOOLEAN, DOUBLE, LONG, VOID
from isthmus.transforms.rowwise.functions import exponentials
from isthmus.transforms.rowwise.functions.exponentials import polynomial

Real = Callable[[Tensor], Tensor]
"""A function from a tensor of doubles to a tensor of doubles."""


def doubles(node: ExpressionNode, values: Sequence[Value]) -> list[Value]:
    for value in values:
        if not (value.kind.numeric or value.kind == VOID):
            raise NotCompilableError(node, f"takes numbers, not {value.kind}", "a cast to double")
    return [casts.widened(value, DOUBLE) for value in values]


def _real(name: str, function: Callable[..., Tensor], null: Real | None = None, sides: int = 1) -> None:
    def apply(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
        arguments = doubles(node, values)
        missing = null(arguments[0].data) if null else None
        data = function(*(argument.data for argument in arguments))
        return graph.result(DOUBLE, data, arguments, null=missing)

    rule(name, sides)(apply)


def _kernel(operator: str) -> Real:
    return lambda x: x.graph.add(operator, x)


def _not_above(bound: float) -> Real:
    return lambda x: x <= bound


def _exp(x: Tensor) -> Tensor:
    return x.graph.stacked(exponentials.exp, x, never_minus_zero=True)


def _log(x: Tensor) -> Tensor:
    return x.graph.stacked(exponentials.log, x)


def _log_to(base: int) -> Real:
    return lambda x: _log(x) / math.log(base)


def _log1p(x: Tensor) -> Tensor:
    """Return log(1 + x) by Kahan's method: the rounding error of 1 + x cancels in log(1 + x) / ((1 + x) - 1)."""
    plus = x + 1.0
    back = plus - 1.0
    tiny = back.equals(0.0)
    safe = tiny.where(1.0, back)
    factor = _log(plus) / safe
    whole = x.graph.add("IsInf", x)
    return _keep_zero(factor * x, x, tiny | whole)


def _expm1(x: Tensor) -> Tensor:
    return _keep_zero(x.graph.stacked(exponentials.expm1, x), x)


_NEARLY_ALL = 709.0
"""Above this, e^x overflows before half of it does."""


def _sinh(x: Tensor) -> Tensor:
    size = abs(x)
    e = _expm1(size)
    one, half = map(x.graph.number, (1.0, 0.5))
    return _signed_like(_half_exp_or(size, half * (e + e / (e + one))), x)


def _cosh(x: Tensor) -> Tensor:
    size, half = abs(x), x.graph.number(0.5)
    e = _exp(size)
    return _half_exp_or(size, half * e + half / e)


def _half_exp_or(size: Tensor, near: Tensor) -> Tensor:
    half = size.graph.number(0.5)
    root = _exp(half * size)
    far = half * root * root
    return (size > _NEARLY_ALL).where(far, near)


def _signed_like(size: Tensor, x: Tensor) -> Tensor:
    return _keep_zero((x < 0.0).where(-size, size), x)


def _keep_zero(result: Tensor, x: Tensor, tiny: Tensor | None = None) -> Tensor:
    """Return `result`, but x itself where it is zero or tiny. See `Graph.where` for the order."""
    zero = tiny or x.equals(0.0)
    return (~zero).where(result, x)


_ATAN_P = (-8.750608600031904122785e-1, -1.615753718733365076637e1, -7.500855792314704667340e1,
           -1.228866684490136173410e2, -6.485021904942025371773e1)  # fmt: skip
_ATAN_Q = (2.485846490142306297962e1, 1.650270098316988542046e2, 4.328810604912902668951e2,
           4.853903996359136964868e2, 1.945506571482613964425e2)  # fmt: skip
_HALF_PI_REST = 6.123233995736765886130e-17
"""Pi / 2 minus its double."""


def _atan(x: Tensor, _numbers: Sequence[int]) -> Tensor:
    """Return the arc tangent by Cephes's rational function (Moshier 1989), with arguments reduced to [-0.66, 0.66]."""
    size = abs(x)
    one, zero = map(x.graph.number, (1.0, 0.0))
    far, near = size > 2.414213562373095, size <= 0.66
    # Numerator and denominator of the reduced slope; a small slope stays as it is.
    top = far.where(x.graph.number(-1.0), near.where(size, size - one))
    under = far.where(size, near.where(one, size + one))
    small = top / under
    z = small * small
    result = small * _rational(z, (0.0, *_ATAN_P), (1.0, *_ATAN_Q)) + small
    base, more = (far.where(x.graph.number(part), near.where(zero, part / 2)) for part in (math.pi / 2, _HALF_PI_REST))
    return _signed_like(base + (result + more), x)


def _together(function: Stacked, number: int = 0) -> Real:
    return lambda x: x.graph.stacked(function, x, number)


atan = _together(_atan)


def _rational(z: Tensor, over: Sequence[float], under: Sequence[float]) -> Tensor:
    graph = z.graph
    both = polynomial(z, [graph.constant([[[p]], [[q]]], DOUBLE) for p, q in zip(over, under, strict=True)])
    p, q = (graph.add("Gather", both, place, axis=0) for place in (0, 1))
    return z * p / q


_ASIN_P = (3.47933107596021167570e-5, 7.91534994289814532176e-4, -4.00555345006794114027e-2, 2.01212532134862925881e-1,
           -3.25565818622400915405e-1, 1.66666666666666657415e-1)  # fmt: skip
_ASIN_Q = (7.70381505559019352791e-2, -6.88283971605453293030e-1, 2.02094576023350569471, -2.40339491173441421878)


def _arcsine(x: Tensor, _numbers: Sequence[int]) -> Tensor:
    """Return the arc sine: by fdlibm's rational function for |x| below 0.5, else from the complement's arc sine."""
    graph, size = x.graph, abs(x)
    half, one, two = map(graph.number, (0.5, 1.0, 2.0))
    steep = size >= half
    z = steep.where(half * (one - size), size * size)
    # Small arguments keep their sign, and so does a zero; see `Graph.where` for the order.
    base = steep.where(graph.add("Sqrt", z), x)
    result = base + base * _rational(z, _ASIN_P, (0.0, *_ASIN_Q, 1.0))
    rest = two * result - _HALF_PI_REST
    turned = math.pi / 2 - rest
    return steep.where(turned * graph.add("Sign", x), result)


def _acos(x: Tensor) -> Tensor:
    one = x.graph.number(1.0)
    ratio = (one - x) / (one + x)
    return x.graph.number(2.0) * atan(x.graph.add("Sqrt", ratio))


def atan2(y: Tensor, x: Tensor) -> Tensor:
    # As in Spark, -0.0 counts as 0.0.
    graph = x.graph
    zero, pi = map(graph.number, (0.0, math.pi))
    quotient = abs(y) / abs(x)
    both_zero = y.equals(zero) & x.equals(zero)
    both_inf = graph.add("IsInf", y) & graph.add("IsInf", x)
    first = atan(both_zero.where(zero, both_inf.where(1.0, quotient)))
    # Pi minus its double is added last.
    turned = pi - (first - 1.2246467991473532e-16)
    angle = (x < zero).where(turned, first)
    return graph.where(y < zero, -angle, angle, DOUBLE)


def _cbrt(x: Tensor) -> Tensor:
    """Return e^(log |x| / 3) with the sign of x, refined by two steps of Halley's method."""
    graph, size = x.graph, abs(x)
    odd = size.equals(0.0) | graph.add("IsInf", size)
    one = graph.number(1.0)
    safe = odd.where(one, size)
    # Scaled so that nothing overflows or vanishes: 2^600 is the cube of 2^200.
    large, small = safe > 1e200, safe < 1e-200
    down, up = (
        large.where(graph.number(far), small.where(near, one))
        for far, near in ((2.0**-600, 2.0**600), (2.0**200, 2.0**-200))
    )
    middle = safe * down
    # Do not use Pow: its last bits depend on the runtime.
    root = _exp(_log(middle) / 3.0)
    for _ in range(2):
        cube = root * root * root
        off = cube - middle
        root = root - root * (off / (cube + cube + middle))
    return _signed_like(odd.where(size, root * up), x)


def _quotient(over: Real | None, under: Real) -> Real:
    def apply(x: Tensor) -> Tensor:
        top = over(x) if over else x.graph.number(1.0)
        return top / under(x)

    return apply


_SIN = (2.7314439779805667e-15, -7.643970233520291e-13, 1.6058977310482129e-10, -2.5052107616965613e-08,
        2.7557319219162993e-06, -0.00019841269841254974, 0.008333333333333316, -0.16666666666666666)  # fmt: skip
"""Coefficients of (sin r - r) / r^3 in r^2, from Chebyshev nodes up to pi / 2; error below half an ulp."""
_PI = (3.1415926534682512, 1.2154201012607932e-10, 4.044532497591901e-21)
"""Pi in three parts, the first two of 33 bits."""
_FAR = 2.0**20
"""Above this, the runtime's kernel is as accurate as the polynomial."""
_PADDING = 16


def _circular(x: Tensor, turns: Sequence[int]) -> Tensor:
    """Return sine (turn 0) or cosine (turn 1, a quarter turn more) of angles (k, n), after reduction by half turns.

    Kernels of runtimes lose the last bits near a zero of the function.
    """
    graph = x.graph
    one = graph.number(1.0)
    column = np.array(turns)[:, None]
    quarter = graph.constant(column / 2, DOUBLE)
    # Do not use Round: it returns -0.0, and the differences below would turn that into 0.0.
    half_turns = graph.add("Floor", x * (1 / math.pi) + graph.constant(column / 2 + 0.5, DOUBLE))
    reduced = half_turns - quarter if any(turns) else half_turns
    # The first product is exact.
    high = x - reduced * _PI[0]
    step = reduced * _PI[1]
    rest = high - step
    lost = high - rest - step
    r = rest - (reduced * _PI[2] - lost)
    z = r * r
    series = polynomial(z, list(map(graph.number, _SIN)))
    sine = r * (one + z * series)
    odd = graph.add("BitwiseAnd", half_turns.cast(LONG), 1)
    result = sine * graph.add("Gather", graph.constant([1.0, -1.0], DOUBLE), odd)
    far = abs(x) >= _FAR
    return far.where(_by_kernel(x, turns), result)


def _by_kernel(x: Tensor, turns: Sequence[int]) -> Tensor:
    """Return sine or cosine by the runtime's kernel, with padding: it uses another formula for the last few numbers."""
    graph, column = x.graph, np.array(turns)[:, None]
    padded = graph.add("Concat", x, graph.constant(np.zeros((len(turns), _PADDING)), DOUBLE), axis=1)
    kernels = [graph.add(kernel, padded) for turn, kernel in enumerate(("Sin", "Cos")) if turn in turns]
    if len(kernels) == 2:
        kernels = [graph.constant(column, BOOLEAN).where(kernels[1], kernels[0])]
    begin, end = (graph.constant(places, LONG) for places in ([0, 0], [len(turns), -_PADDING]))
    return graph.add("Slice", kernels[0], begin, end)


def _tanh(x: Tensor) -> Tensor:
    """Return e / (e + 2) with e = e^2x - 1. From 0.55 on, return 1 - 2 / (e + 2): there an error of e matters less."""
    size, two = abs(x), x.graph.number(2.0)
    e = _expm1(two * size)
    under = e + two
    far = x.graph.number(1.0) - two / under
    steep = size < 0.55
    return _signed_like(steep.where(e / under, far), x)


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
_real("degrees", lambda x: x * (180.0 / math.pi))
_real("radians", lambda x: x * (math.pi / 180.0))
_real("rint", _kernel("Round"))
_real("signum", lambda x: (x.graph.number(0.0) < abs(x)).where(x.graph.add("Sign", x), x))


def _pow(x: Tensor, y: Tensor) -> Tensor:
    """Return x to the power y, as Java does: NaN if y is NaN, or if x is 1 or -1 and y is infinite."""
    graph = x.graph
    if graph.is_number(y) and math.isfinite(graph.number_of(y)):
        # A kernel multiplies for a square or cube of many rows, but not for one row. Java multiplies for a square.
        return x * x if graph.number_of(y) == 2 else graph.add("Pow", x, graph.row(y))
    y = graph.row(y)
    one = graph.number(1.0)
    nan = (abs(x).equals(one) & graph.add("IsInf", y)) | graph.add("IsNaN", y)
    return nan.where(graph.number(math.nan), graph.add("Pow", x, y))


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """Return sqrt(x² + y²). Sides are scaled by the greater one, so squares do not overflow unless the result does."""
    graph, x, y = x.graph, abs(x), abs(y)
    big, small = graph.add("Max", x, y), graph.add("Min", x, y)
    zero, one = map(graph.number, (0.0, 1.0))
    ratio = small / big.equals(zero).where(one, big)
    result = big * graph.add("Sqrt", one + ratio * ratio)
    infinite = graph.add("IsInf", x) | graph.add("IsInf", y)
    return infinite.where(math.inf, result)


_real("power", _pow, sides=2)
_real("atan2", atan2, sides=2)
_real("hypot", _hypot, sides=2)
_real("pow", _pow, sides=2)


@rule("log", 1, 2)
def _logarithm(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    sides = doubles(node, values)
    logs = [_log(side.data) for side in sides]
    null = graph.either(*(side.data <= 0.0 for side in sides))
    data = logs[1] / logs[0] if len(logs) == 2 else logs[0]
    return graph.result(DOUBLE, data, sides, null=null)


@rule("pi", 0, value=math.pi)
@rule("e", 0, value=math.e)
def _constant(graph: Graph, _node: ExpressionNode, _values: Sequence[Value], *, value: float) -> Value:
    return graph.literal(value, DOUBLE)
