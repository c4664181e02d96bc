"""Every function that a graph has: how it is written in PySpark, on which types, and how close it comes to Spark."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus.transforms.rowwise.compiler import compile_columns
from isthmus.transforms.rowwise.core.expressions import traced
from isthmus.transforms.rowwise.core.types import (
    BOOLEAN,
    BYTE,
    DATE,
    DOUBLE,
    FLOAT,
    INT,
    LONG,
    SHORT,
    STRING,
    TIMESTAMP,
    SqlType,
    array_of,
)

NUMBERS = (BYTE, SHORT, INT, LONG, FLOAT, DOUBLE)
WHOLE = (BYTE, SHORT, INT, LONG)
PAIRS = ((INT, INT), (LONG, LONG), (DOUBLE, DOUBLE), (FLOAT, FLOAT), (BYTE, BYTE), (INT, LONG), (FLOAT, INT),
         (SHORT, INT), (LONG, DOUBLE), (FLOAT, DOUBLE))  # fmt: skip
COMPARABLE = (*PAIRS, (DATE, DATE), (TIMESTAMP, TIMESTAMP), (DATE, TIMESTAMP), (BOOLEAN, BOOLEAN))
MOMENTS = (DATE, TIMESTAMP)
DOUBLES, INTS, FLOATS = (array_of(kind, 3) for kind in (DOUBLE, INT, FLOAT))


@dataclass(frozen=True)
class Function:
    """One function.

    Attributes:
        name: as a user of PySpark writes it.
        family: the part of the table it stands in.
        written: the expression.
        kinds: the types it is tried on.
        ulps: how many floating-point numbers there may be between Spark's value and the graph's; 0 is exact.
    """

    name: str
    family: str
    written: Callable[..., Column]
    kinds: tuple[tuple[SqlType, ...], ...]
    ulps: int = 0


def functions() -> Iterator[Function]:
    """All of them."""
    yield from _arithmetic()
    yield from _logic()
    yield from _casts()
    yield from _mathematics()
    yield from _calendar()
    yield from _texts()
    yield from _arrays()


def _map(*parts: Any) -> Column:
    return F.create_map(*map(F.lit, parts))


def _each(kinds: Sequence[SqlType]) -> tuple[tuple[SqlType, ...], ...]:
    return tuple((kind,) for kind in kinds)


def _arithmetic() -> Iterator[Function]:
    two: dict[str, Callable[..., Column]] = {
        "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
        "%": lambda a, b: a % b, "pmod": F.pmod, "try_add": F.try_add, "try_subtract": F.try_subtract,
        "try_multiply": F.try_multiply, "try_divide": F.try_divide, "try_mod": F.try_mod,
    }  # fmt: skip
    for name, written in two.items():
        yield Function(name, "arithmetic", written, PAIRS)
    yield Function("1 / a * b", "arithmetic", lambda a, b: 1.0 / a * b, ((DOUBLE, DOUBLE), (FLOAT, FLOAT)))
    yield Function("1 % a", "arithmetic", lambda a: F.lit(1) % a, _each(NUMBERS))
    yield Function("0.0 + a", "arithmetic", lambda a: 0.0 + a, _each((DOUBLE, FLOAT)))
    yield Function("- (negative)", "arithmetic", lambda a: -a, _each(NUMBERS))
    yield Function("abs", "arithmetic", F.abs, _each(NUMBERS))
    yield Function("positive", "arithmetic", F.positive, _each(NUMBERS))
    bits = ((INT, INT), (LONG, LONG), (BYTE, BYTE), (SHORT, SHORT), (INT, LONG))
    yield Function("bitwiseAND", "arithmetic", lambda a, b: a.bitwiseAND(b), bits)
    yield Function("bitwiseOR", "arithmetic", lambda a, b: a.bitwiseOR(b), bits)
    yield Function("bitwiseXOR", "arithmetic", lambda a, b: a.bitwiseXOR(b), bits)
    yield Function("bitwise_not", "arithmetic", F.bitwise_not, _each(WHOLE))
    for places in (0, 1, 5, 31, 33, 63):
        yield Function("shiftleft", "arithmetic", lambda a, n=places: F.shiftleft(a, n), _each((INT, LONG, BYTE)))
        yield Function("shiftright", "arithmetic", lambda a, n=places: F.shiftright(a, n), _each((INT, LONG)))


def _logic() -> Iterator[Function]:
    order: dict[str, Callable[..., Column]] = {
        "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
        "greatest": F.greatest, "least": F.least,
    }  # fmt: skip
    for name, written in order.items():
        yield Function(name, "comparison", written, COMPARABLE)
    same: dict[str, Callable[..., Column]] = {
        "==": lambda a, b: a == b, "!=": lambda a, b: a != b, "eqNullSafe": lambda a, b: a.eqNullSafe(b),
        "equal_null": F.equal_null,
    }  # fmt: skip
    for name, written in same.items():
        yield Function(name, "comparison", written, (*COMPARABLE, (STRING, STRING)))
    yield Function("between", "comparison", lambda a, b: a.between(b, b + 1), ((DOUBLE, DOUBLE), (INT, DOUBLE)))
    yield Function("isin", "comparison", lambda a: a.isin(1, 2, 7), _each((INT, LONG, DOUBLE)))
    yield Function("isin", "comparison", lambda a: a.isin(1, None), _each((INT,)))
    yield Function("isin", "comparison", lambda a: a.isin("a", "é"), _each((STRING,)))
    yield Function("&", "logic", lambda a, b: a & b, ((BOOLEAN, BOOLEAN),))
    yield Function("|", "logic", lambda a, b: a | b, ((BOOLEAN, BOOLEAN),))
    yield Function("~", "logic", lambda a: ~a, _each((BOOLEAN,)))
    towns = ("a", 1, "A b", -7, "é", 2**31 - 1)
    yield Function("create_map(…)[a]", "vocabulary", lambda a: _map(*towns)[a], _each((STRING,)))
    yield Function(
        "element_at(create_map(…), a)", "vocabulary", lambda a: F.element_at(_map(*towns), a), _each((STRING,))
    )
    numbers = (0, "none", 7, "seven", -(2**31), "")
    yield Function("create_map(…)[a]", "vocabulary", lambda a: _map(*numbers)[a], _each((INT, BYTE)))
    shares = (2**53 + 1, -0.0, -7, 0.1)
    yield Function("create_map(…)[a]", "vocabulary", lambda a: _map(*shares)[a], _each((LONG,)))
    yield Function("isNull", "null", lambda a: a.isNull(), _each((INT, STRING, DOUBLE, BOOLEAN)))
    yield Function("isNotNull", "null", lambda a: a.isNotNull(), _each((INT, STRING)))
    yield Function("isnan", "null", F.isnan, _each((DOUBLE, FLOAT)))
    yield Function("nanvl", "null", F.nanvl, ((DOUBLE, DOUBLE), (FLOAT, FLOAT), (FLOAT, DOUBLE)))
    for name in ("coalesce", "ifnull", "nvl", "nullif"):
        yield Function(name, "null", getattr(F, name), (*COMPARABLE, (STRING, STRING)))
    yield Function("nvl2", "null", F.nvl2, ((INT, DOUBLE, INT), (STRING, BOOLEAN, BOOLEAN)))
    yield Function("when", "choice", lambda a, b, c: F.when(a > b, c).when(a < b, a).otherwise(b),
                   ((INT, INT, LONG), (DOUBLE, DOUBLE, DOUBLE), (FLOAT, DOUBLE, INT)))  # fmt: skip
    yield Function("when", "choice", lambda a, b: F.when(b != 0, a / b), PAIRS)
    yield Function("when", "choice", lambda a, b, c: F.when(a, b).otherwise(c),
                   ((BOOLEAN, BOOLEAN, BOOLEAN), (BOOLEAN, STRING, STRING), (BOOLEAN, DATE, TIMESTAMP)))  # fmt: skip
    yield Function("raise_error", "choice", lambda a, b: F.when(a > b, F.raise_error(F.lit("no"))).otherwise(a),
                   ((INT, INT), (DOUBLE, DOUBLE), (TIMESTAMP, DATE)))  # fmt: skip
    yield Function("raise_error", "choice", lambda a, b: F.coalesce(a, F.raise_error(b).cast("string")),
                   ((STRING, STRING),))  # fmt: skip
    yield Function("when", "choice", lambda a, b: F.when(~a, b).otherwise(-b), ((BOOLEAN, DOUBLE), (BOOLEAN, FLOAT)))


def _casts() -> Iterator[Function]:
    for kind in (*NUMBERS, BOOLEAN):
        kinds = _each((*NUMBERS, BOOLEAN))
        yield Function(f"cast to {kind}", "cast", lambda a, to=kind.name: a.cast(to), kinds)
    yield Function("cast to string", "cast", lambda a: a.cast("string"), _each((*WHOLE, BOOLEAN, STRING)))
    yield Function("cast to date", "cast", lambda a: a.cast("date"), _each((TIMESTAMP,)))
    yield Function("cast to timestamp", "cast", lambda a: a.cast("timestamp"), _each((DATE,)))
    for name in ("bigint", "int", "double"):
        yield Function(f"cast to {name}", "cast", lambda a, to=name: a.cast(to), _each((TIMESTAMP,)))


def _mathematics() -> Iterator[Function]:
    ulps = {
        "sqrt": 0, "cbrt": 2, "exp": 2, "expm1": 4, "ln": 2, "log10": 4, "log2": 4, "log1p": 4, "sin": 16, "cos": 16,
        "tan": 32, "cot": 32, "sec": 32, "csc": 32, "asin": 4, "acos": 4, "atan": 2, "sinh": 4, "cosh": 4, "tanh": 4,
        "degrees": 1, "radians": 1, "rint": 0, "signum": 0,
    }  # fmt: skip
    for name, most in ulps.items():
        yield Function(name, "mathematics", getattr(F, name), _each((DOUBLE, FLOAT, INT)), most)
    yield Function("log", "mathematics", F.log, _each((DOUBLE,)), 2)
    yield Function(
        "log (of a base)",
        "mathematics",
        lambda a: F.log(3.0, a),  # type: ignore[call-arg, arg-type]  # its stub lacks the base
        _each((DOUBLE,)),
        4,
    )
    yield Function("pow", "mathematics", F.pow, ((DOUBLE, DOUBLE), (INT, INT)), 2)
    yield Function("**", "mathematics", lambda a: a**2, _each((DOUBLE, INT)), 2)
    yield Function("**", "mathematics", lambda a: a**3, _each((DOUBLE,)), 2)
    yield Function("atan2", "mathematics", F.atan2, ((DOUBLE, DOUBLE),), 4)
    yield Function("hypot", "mathematics", F.hypot, ((DOUBLE, DOUBLE),), 2)
    yield Function("pi", "mathematics", lambda a: a * F.pi(), _each((DOUBLE,)))
    yield Function("e", "mathematics", lambda a: a * F.e(), _each((DOUBLE,)))
    for name in ("floor", "ceil", "ceiling"):
        yield Function(name, "rounding", getattr(F, name), _each((INT, LONG, DOUBLE, FLOAT)))
    for digits in (0, 1, 2, 3, 5):
        yield Function("round", "rounding", lambda a, n=digits: F.round(a, n), _each((DOUBLE,)))
        yield Function("bround", "rounding", lambda a, n=digits: F.bround(a, n), _each((DOUBLE,)))
    yield Function("round", "rounding", F.round, _each((INT, LONG, FLOAT)))
    yield Function("bround", "rounding", F.bround, _each((INT, FLOAT)))


def _calendar() -> Iterator[Function]:
    for name in ("year", "month", "day", "dayofmonth", "quarter", "dayofweek", "weekday", "dayofyear", "weekofyear",
                 "last_day", "to_date"):  # fmt: skip
        yield Function(name, "calendar", getattr(F, name), _each(MOMENTS))
    for name in ("hour", "minute", "second", "unix_seconds", "unix_millis", "unix_micros"):
        yield Function(name, "calendar", getattr(F, name), _each((TIMESTAMP,)))
    for name in ("timestamp_seconds", "timestamp_millis", "timestamp_micros"):
        yield Function(name, "calendar", getattr(F, name), _each((INT, LONG)))
    yield Function("unix_date", "calendar", F.unix_date, _each((DATE,)))
    yield Function("date_from_unix_date", "calendar", F.date_from_unix_date, _each((SHORT,)))
    for name in ("datediff", "date_diff"):
        yield Function(name, "calendar", getattr(F, name), ((DATE, DATE), (TIMESTAMP, DATE)))
    for name in ("date_add", "dateadd", "date_sub", "add_months"):
        yield Function(name, "calendar", getattr(F, name), ((DATE, SHORT), (TIMESTAMP, BYTE)))
    yield Function("make_date", "calendar", F.make_date, ((SHORT, BYTE, BYTE),))
    for unit in ("year", "quarter", "month", "week", "day", "hour", "minute", "second", "millisecond"):
        yield Function("date_trunc", "calendar", lambda a, u=unit: F.date_trunc(u, a), _each((TIMESTAMP,)))
        yield Function("date_trunc of timestamp_micros", "calendar",
                       lambda a, u=unit: F.date_trunc(u, F.timestamp_micros(a)), _each((LONG,)))  # fmt: skip
    for unit in ("year", "quarter", "month", "week"):
        yield Function("trunc", "calendar", lambda a, u=unit: F.trunc(a, u), _each((DATE,)))


def _texts() -> Iterator[Function]:
    for name in ("lower", "upper", "lcase", "ucase"):
        yield Function(name, "text", lambda a, n=name: getattr(F, n)(F.when(a != "é", a)), _each((STRING,)))
    yield Function("concat", "text", lambda a, b: F.concat(a, F.lit("-"), b), ((STRING, STRING),))
    yield Function("concat with a sum", "text", lambda a, b: F.concat(a, (b + 1).cast("string"), a),
                   ((STRING, LONG),))  # fmt: skip
    for part in ("a", "", "a.b", "%", "(", "\\", "é"):
        yield Function("startswith", "text", lambda a, p=part: a.startswith(p), _each((STRING,)))
        yield Function("endswith", "text", lambda a, p=part: a.endswith(p), _each((STRING,)))
        yield Function("contains", "text", lambda a, p=part: a.contains(p), _each((STRING,)))
    for part in ("a%", "%b", "a_b", "a\\_b", "%", "_", "a\\%b", "", "%.%"):
        yield Function("like", "text", lambda a, p=part: a.like(p), _each((STRING,)))


def _dot(a: Column, b: Column) -> Column:
    return F.aggregate(F.zip_with(a, b, lambda x, y: x * y), F.lit(0.0), lambda total, x: total + x)


def _arrays() -> Iterator[Function]:
    arrays = _each((DOUBLES, INTS, FLOATS))
    yield Function("[n]", "array", lambda a: a[1], arrays)
    yield Function("[n]", "array", lambda a: a[5], arrays)
    yield Function("get", "array", lambda a: F.get(a, 2), arrays)
    yield Function("get", "array", lambda a: F.get(a, 9), arrays)
    for place in (1, 3, -1, -3, 4):
        yield Function("element_at", "array", lambda a, n=place: F.element_at(a, n), arrays)
    for name in ("size", "cardinality", "array_size", "array_max", "array_min"):
        yield Function(name, "array", getattr(F, name), arrays)
    yield Function("array_contains", "array", F.array_contains, ((INTS, INT), (DOUBLES, DOUBLE)))
    yield Function("array", "array", lambda a, b: F.array(a, b, a + b)[0], ((INT, INT), (DOUBLE, DOUBLE)))
    yield Function("exists", "array", lambda a, b: F.exists(a, lambda x: x > b), ((INTS, INT), (DOUBLES, DOUBLE)))
    yield Function("forall", "array", lambda a, b: F.forall(a, lambda x: x > b), ((INTS, INT), (DOUBLES, DOUBLE)))
    yield Function("transform", "array", lambda a, b: F.transform(a, lambda x: x / b)[0], ((DOUBLES, DOUBLE),))
    yield Function("aggregate", "array", lambda a: F.aggregate(a, F.lit(0), lambda s, x: s + x, lambda s: s / 3),
                   ((INTS,),))  # fmt: skip
    yield Function("zip_with", "array", _dot, ((DOUBLES, DOUBLES), (FLOATS, DOUBLES)))
    yield Function("cosine of two arrays", "array",
                   lambda a, b: F.try_divide(_dot(a, b), F.sqrt(_dot(a, a)) * F.sqrt(_dot(b, b))),
                   ((DOUBLES, DOUBLES),))  # fmt: skip


KINDS: dict[str, Any] = {
    str(kind): kind
    for kind in (*NUMBERS, BOOLEAN, STRING, DATE, TIMESTAMP)
} | {"doubles": DOUBLES, "ints": INTS, "floats": FLOATS}  # fmt: skip
"""The types of the columns that expressions are tried on, by a word for each."""


PAGE = Path(__file__).parents[2] / "docs" / "row-functions.md"
_HEAD = """\
# Row functions

These functions of a request transform compile to a graph. The table says how close the graph comes to Apache Spark in
ANSI mode. `python -m tests.transforms.rowfunctions` writes this page from the list that the tests compare with Spark.

*Exact* means equal bits, also for -0.0, with null, NaN and errors in the same places. *n ulps* means at most n - 1
floating-point numbers between the two values. Where Spark fails for a row, such as a division by zero, the graph marks
the row as refused.

The result for a row does not depend on other rows in the batch. *Elsewhere* means the same graph in another runtime,
such as onnxruntime-web: functions made of single IEEE 754 operations are exact there, while large sines and cosines and
most powers may differ in their last bits.

*Integers* are tinyint, smallint, int and bigint; *numbers* are integers, float and double. Times are in UTC. Texts can
be compared, searched and concatenated; `lower` and `upper` refuse texts that are not ASCII. Arrays need a declared
size: `Field("embedding", Array(Float32), size=64)`.

| family | functions | on | as Spark | elsewhere |
|---|---|---|---|---|
"""
EXACT, FAR, KERNEL = "exact", "exact below 2**20", "last bits"
_KERNELS = {"Sin": FAR, "Cos": FAR, "Pow": KERNEL}
"""Operators whose results IEEE 754 does not fix, and what they leave of the promise."""


def elsewhere(*graphs: ModelProto) -> str:
    """What is promised of graphs in another runtime."""
    promises = {_KERNELS.get(node.op_type, EXACT) for graph in graphs for node in graph.graph.node}
    return max(promises, key=(EXACT, FAR, KERNEL).index)


def page() -> str:
    """The table of them all."""
    rows: dict[tuple[str, str], tuple[dict[str, None], int, list[ModelProto]]] = {}
    with traced():
        for function in functions():
            words, ulps, graphs = rows.setdefault((function.family, function.name), ({}, 0, []))
            words |= dict.fromkeys(str(kind) for kinds in function.kinds for kind in kinds)
            for kinds in function.kinds:
                columns = dict(zip("abc", kinds, strict=False))
                graphs.append(compile_columns({"z": function.written(*map(F.col, columns))}, columns).model)
            rows[function.family, function.name] = (words, max(ulps, function.ulps), graphs)
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for (family, name), (words, ulps, graphs) in rows.items():
        types = ", ".join(kind for kind in KINDS if kind in words)
        for term, group in (("numbers", NUMBERS), ("integers", WHOLE)):
            types = types.replace(", ".join(map(str, group)), term)
        promise = (family, types, f"{ulps} ulps" if ulps else EXACT, elsewhere(*graphs))
        alike.setdefault(promise, []).append(f"`{name}`".replace("|", "\\|"))
    lines = [
        f"| {family} | {', '.join(names)} | {types} | {close} | {other} |"
        for (family, types, close, other), names in alike.items()
    ]
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
