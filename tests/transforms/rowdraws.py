"""Expressions and rows by chance, and those on which something goes wrong first."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus.transforms.rowwise.compiler import compile_columns
from isthmus.transforms.rowwise.core.types import BOOLEAN, DATE, DOUBLE, FLOAT, INT, LONG, STRING, TIMESTAMP, SqlType
from tests.transforms.rowfunctions import KINDS, Function, functions
from tests.transforms.rowproof import EDGES, Expression, Rows

INPUTS = {f"{letter}_{word}": kind for letter in "abc" for word, kind in KINDS.items()}
"""Three columns of every type."""
WORDS = {kind: word for word, kind in KINDS.items()}


def every() -> Iterator[Expression]:
    """Every function on all of its types."""
    for function in functions():
        for kinds in function.kinds:
            columns = [F.col(f"{letter}_{WORDS[kind]}") for letter, kind in zip("abc", kinds, strict=False)]
            label = f"{function.name} of {', '.join(WORDS[kind] for kind in kinds)}"
            yield Expression(function.written(*columns), function.ulps, label)


def edges(chance: random.Random, count: int) -> Rows:
    """Rows of edges by chance, every edge at least once."""

    def column(kind: SqlType) -> list[Any]:
        if kind.element:
            inner = EDGES[kind.element]
            return [
                [chance.choice(inner) for _ in range(kind.size)] if chance.random() < 0.9 else None
                for _ in range(count)
            ]
        edges: list[Any] = [*EDGES[kind], None]
        values = edges * (count // len(edges) + 1)
        chance.shuffle(values)
        return values[:count]

    return {name: column(kind) for name, kind in INPUTS.items()}


def whatever(chance: random.Random, kind: SqlType) -> Any:
    """A value of a type, or null, or an edge."""
    if chance.random() < 0.3:
        return None if kind.element or chance.random() < 0.3 else chance.choice(EDGES[kind])
    if kind.element:
        values = [whatever(chance, kind.element) for _ in range(kind.size)]
        return [0 if value is None else value for value in values]
    if kind.integral:
        return chance.randint(-100, 100) if chance.random() < 0.5 else chance.randint(kind.low, kind.high)
    if kind.fractional:
        value = chance.choice([chance.gauss(0, 1), chance.uniform(-1000, 1000), 10 ** chance.uniform(-300, 300)])
        return value if kind == DOUBLE else float(np.float32(np.clip(value, -3e38, 3e38)))
    if kind == BOOLEAN:
        return chance.random() < 0.5
    if kind == STRING:
        return "".join(chance.choices("abAB.%_ \n", k=chance.randint(0, 5)))
    return chance.randint(-60_000, 60_000) if kind == DATE else chance.randint(-(4 * 10**15), 8 * 10**15)


SIMPLE = {f"{letter}_{kind}": kind for letter in "abc"
           for kind in (INT, LONG, DOUBLE, FLOAT, BOOLEAN, STRING, DATE, TIMESTAMP)}  # fmt: skip
"""Three columns of every type that an expression may be made of."""
_Known = dict[SqlType, list[tuple[Function, tuple[SqlType, ...]]]]
_BY_RESULT: dict[bool, _Known] = {}


def _by_result(exact: bool) -> _Known:
    """Functions, or those that are exact, by the type of what they give."""
    if exact not in _BY_RESULT:
        found: _Known = {}
        known = set(SIMPLE.values())
        for function in functions():
            # A text that is not ASCII is refused by two of them, and not by Spark.
            if exact and (function.ulps or function.name.endswith(("case", "lower", "upper"))):
                continue
            for kinds in filter(known.issuperset, function.kinds):
                columns = [F.col(f"{letter}_{kind}") for letter, kind in zip("abc", kinds, strict=False)]
                result = compile_columns({"z": function.written(*columns)}, SIMPLE).outputs["z"]
                if result in known:
                    found.setdefault(result, []).append((function, kinds))
        _BY_RESULT[exact] = found
    return _BY_RESULT[exact]


def compound(chance: random.Random, depth: int, *, exact: bool = True) -> Column:
    """An expression of expressions, to a depth, of all functions or of those that are exact."""
    known = _by_result(exact)

    def drawn(kind: SqlType, depth: int) -> Column:
        if not depth or chance.random() < 0.1:
            return _leaf(chance, kind)
        function, kinds = chance.choice(known[kind])
        return function.written(*(drawn(inner, depth - 1) for inner in kinds))

    return drawn(chance.choice([*known]), depth)


def _leaf(chance: random.Random, kind: SqlType) -> Column:
    """A column or a literal."""
    if chance.random() < 0.8:
        return F.col(f"{chance.choice('abc')}_{kind}")
    value = chance.choice([*EDGES[kind][:4], None])
    if value is None:
        return F.lit(None).cast(kind.name)
    if kind == DATE:
        return F.date_from_unix_date(F.lit(value))
    return F.timestamp_micros(F.lit(value)) if kind == TIMESTAMP else F.lit(value).cast(kind.name)
