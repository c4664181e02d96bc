"""Maps that are written out: vocabularies, of which rows look up one key each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.expressions import Node, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.types import INT, LONG, STRING, VOID, SqlType, common

ML = "ai.onnx.ml"


@dataclass(frozen=True)
class MapValue(Value):
    """A map.

    Attributes:
        key: the type of its keys.
        pairs: its keys with their values.
    """

    key: SqlType = VOID
    pairs: tuple[tuple[Any, Any], ...] = ()


@rule("map", 2, 200_000)
def _map(_graph: Graph, node: Node, _values: Sequence[Value]) -> Value:
    """Nothing of it is in the graph before a key is looked up."""
    if len(node.arguments) % 2:
        raise NotCompilableError(node, "has a key without a value", "pairs")
    arguments = [_written(argument) for argument in node.arguments]
    keys, values = arguments[::2], arguments[1::2]
    key, value = (common(one.kind for one in part if one.kind is not None) for part in (keys, values))
    if key is None or value is None:
        raise NotCompilableError(node, "its keys or its values are of several types", "one type each")
    if key != STRING and not key.integral:
        raise NotCompilableError(node, f"its keys are of type {key}", "texts or whole numbers")
    if len({one.value for one in keys}) < len(keys):
        raise NotCompilableError(node, "has a key twice", "each key once")
    pairs = tuple((one.value, other.value) for one, other in zip(keys, values, strict=True))
    kind = replace(value, name=f"map<{key},{value}>", element=value)
    return MapValue(kind, "", key=key, pairs=pairs)


def lookup(graph: Graph, node: Node, of: MapValue, key: Value) -> Value:
    """The value of a key; null where the map does not have it."""
    kind = of.kind.element
    assert kind is not None  # noqa: S101 - of a map
    text = of.key == STRING
    if key.kind not in ((STRING, VOID) if text else (VOID,)) and (text or not key.kind.integral):
        raise NotCompilableError(node, f"looks up a {key.kind} in a map of {of.key}", f"a {of.key}")
    wide = casts.widened(graph, key, STRING if text else LONG)
    place = _encoded(graph, wide, [(name, place) for place, (name, _) in enumerate(of.pairs)], -1)
    nowhere = graph.add("Less", place, graph.constant(0, LONG))
    table = graph.tensor(np.array([value for _, value in of.pairs], kind.numpy), kind.tensor)
    data = graph.add("Gather", table, graph.add("Max", place, graph.constant(0, LONG)))
    found = graph.result(kind, data, [wide], null=nowhere)
    graph.lookups[found.data, found.valid] = (wide, of.pairs)
    return found


def found_or(graph: Graph, value: Value, other: str) -> str | None:
    """What a map has for a key, or a constant where it has nothing; None if a value was not found so, or is no number.

    Args:
        graph: the graph.
        value: the value.
        other: the constant.
    """
    if value.kind not in (INT, LONG) or (value.data, value.valid) not in graph.lookups or not graph.is_number(other):
        return None
    key, pairs = graph.lookups[value.data, value.valid]
    data = _encoded(graph, key, pairs, int(graph.number(other)))
    data = data if value.kind == LONG else graph.cast(data, value.kind)
    return data if key.valid is None else graph.where(key.valid, data, other, value.kind)


def _encoded(graph: Graph, key: Value, pairs: Sequence[tuple[Any, int]], other: int) -> str:
    """What a table of pairs makes of a key."""
    names = {"keys_strings" if key.kind == STRING else "keys_int64s": [name for name, _ in pairs]}
    values = [value for _, value in pairs]
    return graph.add("LabelEncoder", graph.row(key.data), domain=ML, values_int64s=values, default_int64=other, **names)


def _written(node: Node) -> Node:
    """A literal, which may be cast to a wider whole number."""
    if node.name == "cast" and node.kind is not None and node.kind.integral:
        found = _written(node.arguments[0])
        if found.kind is not None and found.kind.integral and found.kind.rank <= node.kind.rank:
            return replace(found, kind=node.kind)
    if node.name != "literal" or node.value is None:
        raise NotCompilableError(node, "stands in a map and is no literal", "values that are written out")
    return node
