"""ONNX operators for single values, in Python. Results have the same bits as ONNX Runtime, except in NaN."""

import math
import operator
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# Only operators that IEEE 754, two's complement and ONNX define to the last bit are here, so results hold on every
# machine. Powers and sines are not. Values are Python's bool, int, float and str, in the range and precision of their
# type.

Function = Callable[[Any, Any], Any]
"""Takes two values: a single form of call is fastest, and C functions have it, too."""
Applied = tuple[Function, Any]
"""A function, and its second argument for a unary operator; None repeats the first argument."""

_LOW = {"int32": -(1 << 31), "int64": -(1 << 63)}
_pack, _unpack = struct.Struct("f").pack, struct.Struct("f").unpack


def single(value: float) -> float:
    try:
        nearest: float = _unpack(_pack(value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return nearest


def _singles(function: Function) -> Function:
    """Compute in float32. Rounding a double is exact for +, -, *, / and sqrt: 53 bits are at least 2 * 24 + 2."""
    return lambda a, b: single(function(a, b))


def _wrapped(element: str, function: Function) -> Function:
    low = _LOW[element]
    high, span = -low, -2 * low

    def apply(a: int, b: int) -> int:
        result: int = function(a, b)
        return result if low <= result < high else (result - low) % span + low

    return apply


def _divided(a: float, b: float) -> float:
    try:
        return a / b
    except ZeroDivisionError:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, a) * math.copysign(1.0, b)


def _quotient(a: int, b: int) -> int:
    return a // b if (a < 0) == (b < 0) else -(-a // b)


def _remainder(a: float, b: float) -> float:
    return math.nan if math.isinf(a) or b == 0 else math.fmod(a, b)


def _greater(a: Any, b: Any) -> Any:
    return a if a > b or a != a else b


def _smaller(a: Any, b: Any) -> Any:
    return a if a < b or a != a else b


def _floor(a: float, _: Any) -> float:
    return a // 1.0 if a - a == 0.0 else a  # a zero keeps its sign


def _ceil(a: float, _: Any) -> float:
    return -(-a // 1.0) if a - a == 0.0 else a


def _round(a: float, _: Any) -> float:
    return math.copysign(round(a), a) if a - a == 0.0 else a


def _root(a: float, _: Any) -> float:
    return math.sqrt(a) if a >= 0.0 else math.nan


def _sign(a: float, _: Any) -> float:
    return float((a > 0) - (a < 0)) if a == a else a


_COMPARISONS: dict[str, Function] = {
    "Equal": operator.eq, "Less": operator.lt, "LessOrEqual": operator.le, "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
}  # fmt: skip
_DOUBLES = _COMPARISONS | {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": _divided, "Mod": _remainder,
    "Max": _greater, "Min": _smaller,
    "Floor": _floor, "Ceil": _ceil, "Round": _round, "Sqrt": _root, "Sign": _sign, "IsNaN": operator.ne,
    "IsInf": lambda a, _: math.isinf(a), "Abs": math.copysign, "Neg": operator.mul,
}  # fmt: skip
_SECOND = {"Abs": 1.0, "Neg": -1.0}
"""Factor of a floating-point number, or the number that gives it a sign."""
_INTEGERS = _COMPARISONS | {
    "Mod": operator.mod, "Max": _greater, "Min": _smaller, "BitwiseAnd": operator.and_, "BitwiseOr": operator.or_,
    "BitwiseXor": operator.xor, "BitwiseNot": lambda a, _: ~a,
}  # fmt: skip
_OVERFLOWING: dict[str, Function] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": _quotient,
    "Abs": lambda a, _: abs(a), "Neg": lambda a, _: -a,
}  # fmt: skip
_BY_ELEMENT: dict[str, dict[str, Function]] = {
    "double": _DOUBLES,
    "float": _DOUBLES | {name: _singles(_DOUBLES[name]) for name in ("Add", "Sub", "Mul", "Div", "Sqrt")},
    "bool": {"Equal": operator.eq, "And": operator.and_, "Or": operator.or_, "Not": lambda a, _: not a},
    "string": {"Equal": operator.eq, "StringConcat": operator.add},
} | {
    element: _INTEGERS | {name: _wrapped(element, function) for name, function in _OVERFLOWING.items()}
    for element in _LOW
}  # fmt: skip


def function(name: str, element: str, attributes: Mapping[str, Any]) -> Applied | None:
    """Return a Python function for an ONNX operator, to compute single values without ONNX Runtime.

    Return None if the operator is not supported. `element` is the element type of the operands. `attributes` are those
    of the ONNX node, but "to" of a Cast is the name of an element type. The function always takes two values. For a
    unary operator, pass the second value that is returned here. If that is None, pass the operand twice.
    """
    match name, element:
        case "Cast", _:
            return _cast(element, attributes["to"])
        case "LabelEncoder", "string" | "int64":
            return _encoder(element, attributes)
        case "StringNormalizer", "string":
            return _normalizer(attributes)
        case "RegexFullMatch", "string":
            return _pattern(attributes["pattern"].decode())
    fractional = element in ("double", "float")
    # Floating-point numbers have fmod's remainder; the remainder of integers has the divisor's sign.
    if name == "Mod" and bool(attributes.get("fmod")) != fractional:
        return None
    known = _BY_ELEMENT[element].get(name)
    return (known, _SECOND.get(name) if fractional else None) if known else None


def _cast(element: str, to: str) -> Applied | None:
    low = _LOW.get(to, 0)

    def truncated(a: float, _: Any) -> int:
        # Out of range, return the result of x86 processors. Graphs ignore it, since other processors differ.
        return int(a) if low - 1 < a < -low else low

    match element, to:
        case "double", "float":
            return (lambda a, _: single(a)), None
        case (("double" | "float"), ("int32" | "int64")):
            return truncated, None
        case (("bool" | "int32" | "int64"), "double"):
            return operator.mul, 1.0
        case (("bool" | "int32" | "int64"), "float"):
            return _rounded, None
        case "bool", ("int32" | "int64"):
            return (lambda a, _: int(a)), None
        case "int64", "int32":
            return _wrapped("int32", lambda a, _: a), None
        case (("int32" | "int64"), "string"):
            return (lambda a, _: str(a)), None
    return None


def _rounded(a: int, _: Any) -> float:
    """Convert to float32, through a double only if that is exact."""
    return single(float(a)) if abs(a) < 1 << 53 else float(np.int64(a).astype(np.float32))


def _encoder(element: str, attributes: Mapping[str, Any]) -> Applied | None:
    keys, values = attributes.get(f"keys_{element}s"), attributes.get("values_int64s")
    if keys is None or values is None:
        return None
    table = {key.decode() if element == "string" else key: value for key, value in zip(keys, values, strict=True)}
    return table.get, attributes.get("default_int64", -1)


def _normalizer(attributes: Mapping[str, Any]) -> Applied | None:
    change = {b"LOWER": bytes.lower, b"UPPER": bytes.upper}.get(attributes.get("case_change_action", b""))
    if change is None or attributes.get("locale") != b"C" or "stopwords" in attributes:
        return None
    return (lambda a, _: change(a.encode()).decode()), None


_LITERAL = re.compile(r"(?:\\[^\w\s]|[^\\.+*?()|\[\]{}^$])*")
_FIXED_SIZE = re.compile(r"(?:\\[^\w\s]|[^\\+*?()|\[\]{}^$])*")


def _pattern(pattern: str) -> Applied | None:
    """Return a matcher for a regular expression, or None if Python may be slower than RE2.

    Python is as fast if only `.` and `.*` are special characters, and for the test for ASCII.
    """
    # Python's `re` tries the whole text from every position, unless nothing but the end follows `.*`.
    if pattern == r"[\x00-\x7f]*":
        return (lambda a, _: a.isascii()), None
    parts = pattern.removeprefix("(?s)").split(".*")
    if not pattern.startswith("(?s)"):
        return None
    if len(parts) == 1 or (len(parts) == 2 and not parts[1]):
        if not _FIXED_SIZE.fullmatch(parts[0]):
            return None
        matching = re.compile(pattern).fullmatch
        return (lambda a, _: matching(a) is not None), None
    if not all(map(_LITERAL.fullmatch, parts)):
        return None
    begin, *middle, end = (re.sub(r"\\(.)", r"\1", part, flags=re.DOTALL) for part in parts)
    if not middle:
        least = len(begin) + len(end)
        return (lambda a, _: len(a) >= least and a.startswith(begin) and a.endswith(end)), None
    return ((lambda a, _: middle[0] in a), None) if len(middle) == 1 and not begin + end else None
