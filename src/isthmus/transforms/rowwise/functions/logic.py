"""Comparisons, logic with nulls, and conditionals. As in Spark, NaN equals NaN and is greater than any number."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from onnx import TensorProto

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Mask, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.tensors import Tensor
from isthmus.transforms.rowwise.core.types import BOOLEAN, DOUBLE, FLOAT, LONG, STRING, VOID, SqlType, common
from isthmus.transforms.rowwise.functions import maps


def alike(node: ExpressionNode, values: Sequence[Value]) -> list[Value]:
    kind = common(value.kind for value in values)
    if kind is None:
        shown = ", ".join(dict.fromkeys(str(value.kind) for value in values))
        raise NotCompilableError(node, f"{shown} have no common type", "a cast to the intended type")
    return [casts.widened(value, BOOLEAN if kind == VOID else kind) for value in values]


def _require_scalars(node: ExpressionNode, kind: SqlType) -> None:
    if kind.element:
        raise NotCompilableError(node, "graphs do not compare whole arrays", "a comparison of their elements")


def equal(node: ExpressionNode, kind: SqlType, left: Tensor, right: Tensor) -> Tensor:
    _require_scalars(node, kind)
    graph, same = left.graph, left.equals(right)
    if not kind.fractional or graph.never_nan(left) or graph.never_nan(right):
        return same
    return same | (graph.add("IsNaN", left) & graph.add("IsNaN", right))


def less(node: ExpressionNode, kind: SqlType, left: Tensor, right: Tensor) -> Tensor:
    _require_scalars(node, kind)
    graph = left.graph
    if kind.tensor == TensorProto.STRING:
        raise NotCompilableError(node, "graphs do not order texts", "== or isin")
    if kind == BOOLEAN:
        return ~left & right
    below = left < right
    if not kind.fractional or graph.never_nan(right):
        return below
    if graph.never_nan(left):
        return ~(right <= left)
    return below | (~graph.add("IsNaN", left) & graph.add("IsNaN", right))


@rule("==", 2)
def _equal(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    left, right = alike(node, values)
    return graph.result(BOOLEAN, equal(node, left.kind, left.data, right.data), [left, right])


@rule("<=> equal_null", 2)
def _same(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    left, right = alike(node, values)
    here, there = _there(graph, left), _there(graph, right)
    both, neither = here & there, ~(here | there)
    equals = both & equal(node, left.kind, left.data, right.data)
    return Value(BOOLEAN, equals | neither, None, graph.either(left.raises, right.raises))


@rule("<", 2, swapped=False, negated=False)
@rule(">", 2, swapped=True, negated=False)
@rule("<=", 2, swapped=True, negated=True)
@rule(">=", 2, swapped=False, negated=True)
def _ordered(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, swapped: bool, negated: bool) -> Value:
    sides = alike(node, values)
    left, right = (side.data for side in (reversed(sides) if swapped else sides))
    below = less(node, sides[0].kind, left, right)
    return graph.result(BOOLEAN, ~below if negated else below, sides)


@rule("in", 2, 10_000)
def _in(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    first, *options = alike(node, values)
    literals = [part.value for part in node.arguments[1:] if part.name == "literal" and part.value is not None]
    if len(literals) == len(options) and (first.kind == STRING or first.kind.integral):
        return _listed(graph, first, literals)
    result = any_equal(graph, node, first, options)
    return Value(BOOLEAN, result.data, result.valid, graph.either(*(value.raises for value in (first, *options))))


def any_equal(graph: Graph, node: ExpressionNode, value: Value, options: Sequence[Value]) -> Value:
    pairs = [graph.result(BOOLEAN, equal(node, value.kind, value.data, item.data), [value, item]) for item in options]
    return joined(graph, node, pairs, operator="Or")


def _listed(graph: Graph, value: Value, literals: Sequence[str | int]) -> Value:
    text = value.kind == STRING
    keys = sorted(set(literals), key=str)
    attributes: dict[str, object] = {
        "keys_strings" if text else "keys_int64s": keys, "values_int64s": [1] * len(keys), "default_int64": 0,
    }  # fmt: skip
    data = graph.row(value.data if text else value.data.cast(LONG))
    code = graph.add("LabelEncoder", data, domain="ai.onnx.ml", **attributes)
    return graph.result(BOOLEAN, code.equals(1), [value])


# --- three-valued logic


def _truth(node: ExpressionNode, values: Sequence[Value]) -> list[Value]:
    for value in values:
        if value.kind not in (BOOLEAN, VOID):
            raise NotCompilableError(node, f"takes booleans, not {value.kind}", "a comparison")
    return [casts.widened(value, BOOLEAN) for value in values]


def _surely(value: Value) -> Tensor:
    return value.data if value.valid is None else value.data & value.valid


def _surely_not(value: Value) -> Tensor:
    return ~value.data if value.valid is None else ~value.data & value.valid


@rule("and", 2, operator="And")
@rule("or", 2, operator="Or")
def joined(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, operator: str) -> Value:
    return reduce(lambda left, right: _joined(graph, left, right, operator), _truth(node, values))


def _joined(graph: Graph, left: Value, right: Value, operator: str) -> Value:
    if left.valid == right.valid and left.raises is right.raises is None:
        return Value(BOOLEAN, graph.add(operator, left.data, right.data), left.valid)
    opposite, decides = ("Or", _surely_not) if operator == "And" else ("And", _surely)
    data = graph.add(operator, _surely(left), _surely(right))
    false = graph.add(opposite, _surely_not(left), _surely_not(right))
    valid = None if left.valid is right.valid is None else data | false
    reached = ~decides(left)
    return Value(BOOLEAN, data, valid, graph.either(left.raises, graph.guarded(right.raises, reached)))


@rule("not", 1)
def _not(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    (value,) = _truth(node, values)
    return graph.result(BOOLEAN, ~value.data, [value])


# --- null


def _there(graph: Graph, value: Value) -> Tensor:
    return graph.number(True) if value.valid is None else value.valid


@rule("isnull", 1, negated=True)
@rule("isnotnull", 1, negated=False)
def _isnotnull(graph: Graph, _node: ExpressionNode, values: Sequence[Value], *, negated: bool) -> Value:
    (value,) = values
    there = _there(graph, value)
    return Value(BOOLEAN, ~there if negated else there, None, value.raises)


@rule("isnan", 1)
def _isnan(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    value = _fraction(node, values[0])
    nan = Value(BOOLEAN, graph.add("IsNaN", value.data), value.valid)
    return Value(BOOLEAN, _surely(nan), None, value.raises)


def _fraction(node: ExpressionNode, value: Value) -> Value:
    if not (value.kind.numeric or value.kind == VOID):
        raise NotCompilableError(node, f"takes numbers, not {value.kind}", "a cast to double")
    return value if value.kind == FLOAT else casts.widened(value, DOUBLE)


@rule("coalesce", 1, 100)
@rule("ifnull nvl", 2)
def _coalesce(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    *candidates, last = alike(node, values)
    return reduce(lambda fallback, value: _first(graph, value, fallback), reversed(candidates), last)


def _first(graph: Graph, value: Value, fallback: Value) -> Value:
    """Return the value where it is not null, else the fallback. An error does not count as null."""
    if value.valid is None:
        return value
    if fallback.valid is None and (data := maps.lookup_or(graph, value, fallback.data)):
        return Value(value.kind, data, None, value.raises)
    merged = graph.merged(value.valid, Value(value.kind, value.data), fallback)
    return Value(value.kind, merged.data, merged.valid, graph.either(value.raises, merged.raises))


@rule("nullif", 2)
def _nullif(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    value = values[0]
    same = _equal(graph, node, values)
    differs = ~_surely(same)
    raises = graph.either(value.raises, same.raises)
    return Value(value.kind, value.data, graph.both(value.valid, differs), raises)


@rule("nvl2", 3)
def _nvl2(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    tested = values[0]
    then, otherwise = alike(node, values[1:])
    merged = graph.merged(_there(graph, tested), then, otherwise)
    return Value(merged.kind, merged.data, merged.valid, graph.either(tested.raises, merged.raises))


@rule("nanvl", 2)
def _nanvl(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    value, fallback = alike(node, [_fraction(node, value) for value in values])
    nan = _surely(Value(BOOLEAN, graph.add("IsNaN", value.data), value.valid))
    merged = graph.merged(nan, fallback, Value(value.kind, value.data, value.valid))
    return Value(merged.kind, merged.data, merged.valid, graph.either(value.raises, merged.raises))


# --- choice


@rule("when", 2, 1000)
@rule("if", 3)
def when(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    conditions = _truth(node, values[0 : len(values) - len(values) % 2 : 2])
    results = [*values[1::2], *(values[-1:] if len(values) % 2 else [graph.literal(None, VOID)])]
    *branches, rest = alike(node, results)
    for condition, value in zip(reversed(conditions), reversed(branches), strict=True):
        merged = graph.merged(_surely(condition), value, rest)
        # Nothing after a refused condition matters.
        rest = Value(merged.kind, merged.data, merged.valid, graph.either(condition.raises, merged.raises))
    return rest


@rule("raise_error", 1)
def _raise_error(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    if values[0].kind not in (STRING, VOID):
        raise NotCompilableError(node, f"takes a text, not {values[0].kind}", "a message")
    return replace(graph.literal(None, VOID), raises=graph.number(True))


@rule("greatest", 2, 100, greatest=True)
@rule("least", 2, 100, greatest=False)
def extreme(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, greatest: bool) -> Value:
    sides = alike(node, values)
    result = reduce(lambda left, right: _better(graph, node, left, right, greatest=greatest), sides)
    return Value(result.kind, result.data, result.valid, graph.either(*(side.raises for side in sides)))


def _better(graph: Graph, node: ExpressionNode, left: Value, right: Value, *, greatest: bool) -> Value:
    sides = (left.data, right.data) if greatest else (right.data, left.data)
    take = less(node, left.kind, *sides)
    if right.valid is not None:
        take = take & right.valid
    valid: Mask = None
    if left.valid is not None:
        take = take | (~left.valid if right.valid is None else ~left.valid & right.valid)
        valid = None if right.valid is None else left.valid | right.valid
    return Value(left.kind, graph.where(take, right.data, left.data, left.kind), valid)
