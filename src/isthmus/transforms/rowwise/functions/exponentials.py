"""Exponentials and logarithms from single IEEE 754 operations, whose bits do not depend on batch, runtime or machine.

ONNX runtimes compute Exp and Log differently for the last few numbers of a batch.
"""

import math
from collections.abc import Sequence

from isthmus.transforms.rowwise.core.tensors import Operand, Tensor
from isthmus.transforms.rowwise.core.types import DOUBLE, FLOAT, LONG


def polynomial(x: Tensor, coefficients: Sequence[Operand]) -> Tensor:
    first, *following = coefficients
    result = first if isinstance(first, Tensor) else x.graph.number(first)
    for coefficient in following:
        result = result * x + coefficient
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

    def __init__(self, x: Tensor, limit: float) -> None:
        graph = x.graph
        self._x = x
        self._inside = abs(x) <= limit
        safe = self._inside.where(x, 0.0)
        k = graph.add("Round", safe * _LOG2_E)
        self.high = safe - k * _LN2[0]
        low = k * _LN2[1]
        r = self.high - low
        z = r * r
        c = r - z * polynomial(z, list(map(graph.number, _EXP)))
        self.rest = low - r * c / (2.0 - c)
        place = k.cast(LONG) + _LEAST
        self.row = place / _STEP
        self.coarse = graph.add("Gather", graph.constant(_COARSE, DOUBLE), self.row)
        column = graph.add("BitwiseAnd", place, _STEP - 1)
        self.fine = graph.add("Gather", graph.constant(_FINE, DOUBLE), column)

    def with_limits(self, result: Tensor, least: float, below: float) -> Tensor:
        """Return `result`, but `below` where x < `least`, infinity where x is above the limit, and NaN for NaN."""
        known = self._inside.where(result, self._x * _HUGE)
        return (self._x < least).where(below, known)


def exp(x: Tensor, _numbers: Sequence[int]) -> Tensor:
    parts = _Exponential(x, _VANISHED)
    power = x.graph.number(1.0) - (parts.rest - parts.high)
    return parts.with_limits(power * parts.fine * parts.coarse, -_VANISHED, 0.0)


def expm1(x: Tensor, _numbers: Sequence[int]) -> Tensor:
    parts = _Exponential(x, 710.0)
    less = (parts.high - parts.rest) * parts.fine
    unit = x.graph.add("Gather", x.graph.constant(_UNCOARSE, DOUBLE), parts.row)
    return parts.with_limits((less + (parts.fine - unit)) * parts.coarse, -60.0, -1.0)


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


def log(x: Tensor, _numbers: Sequence[int]) -> Tensor:
    inside = (x > 0.0) & (x < math.inf)
    power, m = _normal(x, inside)
    f = m - 1.0
    s = f / (f + 2.0)
    z = s * s
    series = z * polynomial(z, list(map(x.graph.number, _LOG)))
    half = f * 0.5 * f
    low = s * (half + series) + power * _LN2[1]
    rest = half - low - f
    return inside.where(power * _LN2[0] - rest, x)


def _normal(x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Split x into k and x / 2^k, between sqrt(1/2) and sqrt(2). Return 0 and 1 where the mask `inside` is false."""
    graph = x.graph
    zero, one = graph.number(0.0), graph.number(1.0)
    safe = inside.where(x, one)
    large, small = safe > 2.0**_FAR, safe < 2.0**-_FAR
    scale, moved = (
        large.where(graph.number(up), small.where(down, other))
        for up, down, other in ((2.0**-_MOVE, 2.0**_MOVE, one), (float(_MOVE), -float(_MOVE), zero))
    )
    middle = safe * scale
    # The distance of a number to the next smaller one is a power of 2. A product with 1 - 2^-53 would give the smaller
    # number, too, but ONNX Runtime treats this factor as 1 and drops it.
    wide = middle * _ROOT
    next_smaller = wide - wide * _HALF_LAST_BIT
    power = wide - next_smaller
    below = power < one
    whole = below.where(2.0 / power, power)
    place = graph.add("Mod", whole, float(_PRIME), fmod=1).cast(LONG)
    places = graph.add("Gather", graph.constant(_POWERS, FLOAT), place).cast(DOUBLE)
    exponent = below.where(one - places, places)
    return exponent + moved, middle / power
