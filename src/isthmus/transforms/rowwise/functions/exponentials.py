"""Exponentials and logarithms from single IEEE 754 operations, whose bits do not depend on batch, runtime or machine.

Kernels of runtimes compute several numbers at once by one formula, and left-over numbers by another. A row alone would
therefore differ in its last bit from the same row in a batch.
"""

import math
from collections.abc import Sequence

from isthmus.transforms.rowwise.core.graph import Graph
from isthmus.transforms.rowwise.core.types import DOUBLE, FLOAT, LONG


def number(graph: Graph, value: float) -> str:
    return graph.constant(value, DOUBLE)


def polynomial(graph: Graph, x: str, coefficients: Sequence[str]) -> str:
    """Evaluate by Horner's rule. The coefficient of the highest power comes first."""
    result = coefficients[0]
    for coefficient in coefficients[1:]:
        result = graph.add("Add", graph.add("Mul", result, x), coefficient)
    return result


_LN2 = (6.93147180369123816490e-01, 1.90821492927058770002e-10)
"""The logarithm of 2 in two parts, the first of 33 bits: its products with exponents are exact."""
_LOG2_E = 1.44269504088896338700

# --- exponentials

_EXP = (4.13813679705723846039e-08, -1.65339022054652515390e-06, 6.61375632143793436117e-05,
        -2.77777777770155933842e-03, 1.66666666666666019037e-01)  # fmt: skip
"""Coefficients of fdlibm's e_exp.c (Sun Microsystems, 1993)."""
_LEAST, _STEP = 1075, 32
"""e^x vanishes below 2^-1075. A power of 2 is one of 32 neighboring powers times one of every 32nd power."""
_COARSE = [*(2.0 ** (_STEP * place - 1064) for place in range(66)), math.inf, math.inf]
_FINE = [2.0 ** (place - 11) for place in range(_STEP)]
_UNCOARSE = [1 / power if power > 2.0**-1022 else 0.0 for power in _COARSE]
_VANISHED, _HUGE = 745.14, 1e308


class _Exponential:
    """e^x as 2^k e^r with r = x - k ln 2: `coarse * fine` is 2^k, and `high - rest` is e^r - 1.

    `high`, x minus the high part of k ln 2, is exact. Where |x| is above `limit` or NaN, x counts as 0.
    """

    def __init__(self, graph: Graph, x: str, limit: float) -> None:
        self._graph, self._x = graph, x
        self._inside = graph.add("LessOrEqual", graph.add("Abs", x), number(graph, limit))
        safe = graph.add("Where", self._inside, x, number(graph, 0.0))
        k = graph.add("Round", graph.add("Mul", safe, number(graph, _LOG2_E)))
        self.high = graph.add("Sub", safe, graph.add("Mul", k, number(graph, _LN2[0])))
        low = graph.add("Mul", k, number(graph, _LN2[1]))
        r = graph.add("Sub", self.high, low)
        z = graph.add("Mul", r, r)
        c = graph.add("Sub", r, graph.add("Mul", z, polynomial(graph, z, [number(graph, part) for part in _EXP])))
        ratio = graph.add("Div", graph.add("Mul", r, c), graph.add("Sub", number(graph, 2.0), c))
        self.rest = graph.add("Sub", low, ratio)
        place = graph.add("Add", graph.cast(k, LONG), graph.constant(_LEAST, LONG))
        self.row = graph.add("Div", place, graph.constant(_STEP, LONG))
        self.coarse = graph.add("Gather", graph.constant(_COARSE, DOUBLE), self.row)
        column = graph.add("BitwiseAnd", place, graph.constant(_STEP - 1, LONG))
        self.fine = graph.add("Gather", graph.constant(_FINE, DOUBLE), column)

    def but_outside(self, result: str, least: float, below: float) -> str:
        """Return `result`, but `below` where x < `least`, and infinity or NaN where x is far above or NaN."""
        graph = self._graph
        above = graph.add("Mul", self._x, number(graph, _HUGE))
        known = graph.add("Where", self._inside, result, above)
        return graph.add("Where", graph.add("Less", self._x, number(graph, least)), number(graph, below), known)


def exp(graph: Graph, x: str, _numbers: Sequence[int]) -> str:
    """Return e^x with an error below 1 ulp, by fdlibm's steps."""
    parts = _Exponential(graph, x, _VANISHED)
    power = graph.add("Sub", number(graph, 1.0), graph.add("Sub", parts.rest, parts.high))
    result = graph.add("Mul", graph.add("Mul", power, parts.fine), parts.coarse)
    return parts.but_outside(result, -_VANISHED, 0.0)


def expm1(graph: Graph, x: str, _numbers: Sequence[int]) -> str:
    """Return e^x - 1 as 2^k (e^r - 1) + (2^k - 1), scaled down until the end; 0.0 for -0.0."""
    parts = _Exponential(graph, x, 710.0)
    less = graph.add("Mul", graph.add("Sub", parts.high, parts.rest), parts.fine)
    unit = graph.add("Gather", graph.constant(_UNCOARSE, DOUBLE), parts.row)
    result = graph.add("Mul", graph.add("Add", less, graph.add("Sub", parts.fine, unit)), parts.coarse)
    return parts.but_outside(result, -60.0, -1.0)


# --- logarithms

_LOG = (1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
        2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01)  # fmt: skip
"""Coefficients of fdlibm's e_log.c (Sun Microsystems, 1993)."""
_FAR, _MOVE = 500, 540
"""Numbers beyond 2^500 or below 2^-500 are scaled by 2^540, so that the powers below suffice."""
_PRIME = 541
"""Modulo this prime, 540 consecutive powers of 2 have the remainders 1 to 540, each once."""
_POWERS = [0.0] * _PRIME
for _power in range(_PRIME - 1):
    _POWERS[pow(2, _power, _PRIME)] = float(_power)
_ROOT, _HALF_LAST_BIT = 2.0**52 * 2.0**0.5, 2.0**-53


def log(graph: Graph, x: str, _numbers: Sequence[int]) -> str:
    """Return the natural logarithm, with an error below 1 ulp, like fdlibm; x itself unless positive and finite."""
    power, m = _normal(graph, x, inside := _positive(graph, x))
    f = graph.add("Sub", m, number(graph, 1.0))
    s = graph.add("Div", f, graph.add("Add", f, number(graph, 2.0)))
    z = graph.add("Mul", s, s)
    series = graph.add("Mul", z, polynomial(graph, z, [number(graph, part) for part in _LOG]))
    half = graph.add("Mul", graph.add("Mul", f, number(graph, 0.5)), f)
    curved = graph.add("Mul", s, graph.add("Add", half, series))
    low = graph.add("Add", curved, graph.add("Mul", power, number(graph, _LN2[1])))
    rest = graph.add("Sub", graph.add("Sub", half, low), f)
    return graph.add("Where", inside, graph.add("Sub", graph.add("Mul", power, number(graph, _LN2[0])), rest), x)


def _positive(graph: Graph, x: str) -> str:
    above = graph.add("Greater", x, number(graph, 0.0))
    return graph.add("And", above, graph.add("Less", x, number(graph, math.inf)))


def _normal(graph: Graph, x: str, inside: str) -> tuple[str, str]:
    """Return k and x / 2^k, between sqrt(1/2) and sqrt(2); 0 and 1 where not `inside`."""
    zero, unit = number(graph, 0.0), number(graph, 1.0)
    safe = graph.add("Where", inside, x, unit)
    large = graph.add("Greater", safe, number(graph, 2.0**_FAR))
    small = graph.add("Less", safe, number(graph, 2.0**-_FAR))
    scale, moved = (
        graph.add("Where", large, number(graph, up), graph.add("Where", small, number(graph, down), other))
        for up, down, other in ((2.0**-_MOVE, 2.0**_MOVE, unit), (float(_MOVE), -float(_MOVE), zero))
    )
    middle = graph.add("Mul", safe, scale)
    # The distance of a number to the next smaller one is a power of 2. A product with 1 - 2^-53 would give the smaller
    # number, too, but ONNX Runtime treats this factor as 1 and drops it.
    wide = graph.add("Mul", middle, number(graph, _ROOT))
    next_smaller = graph.add("Sub", wide, graph.add("Mul", wide, number(graph, _HALF_LAST_BIT)))
    power = graph.add("Sub", wide, next_smaller)
    below = graph.add("Less", power, unit)
    whole = graph.add("Where", below, graph.add("Div", number(graph, 2.0), power), power)
    place = graph.cast(graph.add("Mod", whole, number(graph, float(_PRIME)), fmod=1), LONG)
    places = graph.cast(graph.add("Gather", graph.constant(_POWERS, FLOAT), place), DOUBLE)
    exponent = graph.add("Where", below, graph.add("Sub", unit, places), places)
    return graph.add("Add", exponent, moved), graph.add("Div", middle, power)
