"""Literal maps in which each row looks up a key: the map itself (`MapValue`), and the nodes of a lookup."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.tensors import Tensor
from isthmus.transforms.rowwise.core.types import INT, LONG, STRING, VOID, SqlType, common

ML = "ai.onnx.ml"


@dataclass(frozen=True)
class MapValue(Value):
    """A map of literals: the type of its keys, and its pairs of key and value. It has no tensor in the graph."""

    key: SqlType = VOID
    pairs: tuple[tuple[Any, Any], ...] = ()


@rule("map", 2, 200_000)
def _map(graph: Graph, node: ExpressionNode, _values: Sequence[Value]) -> Value:
    if len(node.arguments) % 2:
        raise NotCompilableError(node, "has a key without a value", "pairs")
    arguments = [_written(argument) for argument in node.arguments]
    keys, values = arguments[::2], arguments[1::2]
    key, value = (common(item.kind for item in part if item.kind is not None) for part in (keys, values))
    if key is None or value is None:
        instead = "a single type for all keys, and for all values"
        raise NotCompilableError(node, "its keys or its values have several types", instead)
    if key != STRING and not key.integral:
        raise NotCompilableError(node, f"its keys have type {key}", "texts or whole numbers")
    if len({item.value for item in keys}) < len(keys):
        raise NotCompilableError(node, "has a key twice", "each key once")
    pairs = tuple((item.value, value.value) for item, value in zip(keys, values, strict=True))
    kind = replace(value, name=f"map<{key},{value}>", element=value)
    return MapValue(kind, Tensor(graph, ""), key=key, pairs=pairs)


def lookup(graph: Graph, node: ExpressionNode, of: MapValue, key: Value) -> Value:
    kind = of.kind.element
    assert kind is not None  # noqa: S101 - of a map
    text = of.key == STRING
    if key.kind not in ((STRING, VOID) if text else (VOID,)) and (text or not key.kind.integral):
        raise NotCompilableError(node, f"looks up a {key.kind} in a map of {of.key}", f"a {of.key}")
    wide = casts.widened(key, STRING if text else LONG)
    place = _encoded(graph, wide, [(name, place) for place, (name, _) in enumerate(of.pairs)], -1)
    nowhere = place < 0
    table = graph.constant([value for _, value in of.pairs], kind)
    data = graph.add("Gather", table, graph.add("Max", place, 0))
    result = graph.result(kind, data, [wide], null=nowhere)
    graph.lookups[result.data, result.valid] = (wide, of.pairs)
    return result


def lookup_or(graph: Graph, value: Value, default: Tensor) -> Tensor | None:
    if value.kind not in (INT, LONG) or (value.data, value.valid) not in graph.lookups or not graph.is_number(default):
        return None
    key, pairs = graph.lookups[value.data, value.valid]
    data = _encoded(graph, key, pairs, int(graph.number_of(default)))
    data = data if value.kind == LONG else data.cast(value.kind)
    return data if key.valid is None else graph.where(key.valid, data, default, value.kind)


def _encoded(graph: Graph, key: Value, pairs: Sequence[tuple[Any, int]], default: int) -> Tensor:
    names = {"keys_strings" if key.kind == STRING else "keys_int64s": [name for name, _ in pairs]}
    values = [value for _, value in pairs]
    return graph.add(
        "LabelEncoder", graph.row(key.data), domain=ML, values_int64s=values, default_int64=default, **names
    )


def _written(node: ExpressionNode) -> ExpressionNode:
    if node.name == "cast" and node.kind is not None and node.kind.integral:
        literal = _written(node.arguments[0])
        if literal.kind is not None and literal.kind.integral and literal.kind.rank <= node.kind.rank:
            return replace(literal, kind=node.kind)
    if node.name != "literal" or node.value is None:
        raise NotCompilableError(node, "is in a map but is not a literal", "literal keys and values")
    return node
