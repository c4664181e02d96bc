"""Maps that are written out: vocabularies, of which rows look up one key each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isthmus.transforms.rowwise import casts
from isthmus.transforms.rowwise.expressions import Node, NotCompilableError
from isthmus.transforms.rowwise.graph import Graph, Value
from isthmus.transforms.rowwise.rules import rule
from isthmus.transforms.rowwise.types import LONG, STRING, VOID, SqlType, common

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
    for argument in node.arguments:
        if argument.name != "literal" or argument.value is None:
            raise NotCompilableError(argument, "stands in a map and is no literal", "values that are written out")
    keys, values = node.arguments[::2], node.arguments[1::2]
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
    keys = [name for name, _ in of.pairs]
    known = {"keys_strings": keys} if text else {"keys_int64s": keys}
    places = list(range(len(keys)))
    place = graph.add("LabelEncoder", graph.row(wide.data), domain=ML, default_int64=-1, values_int64s=places, **known)
    nowhere = graph.add("Less", place, graph.constant(0, LONG))
    table = graph.tensor(np.array([value for _, value in of.pairs], kind.numpy), kind.tensor)
    data = graph.add("Gather", table, graph.add("Max", place, graph.constant(0, LONG)))
    return graph.result(kind, data, [wide], null=nowhere)
