"""Functions of arrays. An array has the same size in every row; in a graph, each element is a separate value."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.tensors import Tensor
from isthmus.transforms.rowwise.core.types import INT, VOID, array_of, common
from isthmus.transforms.rowwise.functions import logic, maps

Body = Callable[..., Value]
"""A lambda function, from its arguments to its value."""


@dataclass(frozen=True)
class ArrayValue(Value):
    """An array. Nulls and errors of its elements count only where the array is not null."""

    elements: tuple[Value, ...] = ()


def from_input(graph: Graph, value: Value) -> ArrayValue:
    kind = value.kind
    assert kind.element is not None  # noqa: S101 - of an array
    places = graph.input(value.data.name, kind.size)
    return ArrayValue(kind, Tensor(graph, ""), value.valid, None, tuple(Value(kind.element, place) for place in places))


def array(node: ExpressionNode, value: Value) -> ArrayValue:
    if not isinstance(value, ArrayValue):
        raise NotCompilableError(node, f"takes an array, not {value.kind}", "a feature that is an array")
    return value


def _of(elements: Sequence[Value], array: Value) -> ArrayValue:
    kind = elements[0].kind
    # Spark computes all elements, whether they are used or not.
    return ArrayValue(array_of(kind, len(elements)), array.data, array.valid, array.raises, tuple(elements))


def _element_of(graph: Graph, of: ArrayValue, element: Value) -> Value:
    """Return an element of the array `of`: null where the array is null. Spark computes all elements first."""
    computed = graph.either(*(part.raises for part in of.elements), element.raises)
    raises = graph.either(of.raises, graph.guarded(computed, of.valid))
    return replace(element, valid=graph.both(of.valid, element.valid), raises=raises)


def _literal_index(node: ExpressionNode, argument: ExpressionNode) -> int:
    if argument.name == "negative" and argument.arguments[0].name == "literal":
        return -_literal_index(node, argument.arguments[0])
    if argument.name != "literal" or not isinstance(argument.value, int):
        raise NotCompilableError(node, "its index is not a literal", "a literal number")
    return argument.value


def _element(graph: Graph, of: ArrayValue, place: int, *, null: bool) -> Value:
    if 0 <= place < len(of.elements):
        return _element_of(graph, of, of.elements[place])
    nothing = graph.literal(None, of.elements[0].kind)
    if null:
        return _element_of(graph, of, nothing)
    always = graph.number(True)
    return graph.result(
        nothing.kind, nothing.data, [_element_of(graph, of, replace(nothing, valid=None))], wrong=always
    )


@rule("getitem", 2, null=False)
@rule("get", 2, null=True)
def _getitem(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, null: bool) -> Value:
    if isinstance(values[0], maps.MapValue) and not null:
        return maps.lookup(graph, node, values[0], values[1])
    return _element(graph, array(node, values[0]), _literal_index(node, node.arguments[1]), null=null)


@rule("element_at", 2)
def _element_at(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    if isinstance(values[0], maps.MapValue):
        return maps.lookup(graph, node, values[0], values[1])
    of, place = array(node, values[0]), _literal_index(node, node.arguments[1])
    if place == 0:
        raise NotCompilableError(node, "has index 0", "1 for the first element, -1 for the last")
    return _element(graph, of, place - 1 if place > 0 else len(of.elements) + place, null=False)


@rule("size cardinality array_size", 1)
def _size(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    of = array(node, values[0])
    return _element_of(graph, of, graph.literal(len(of.elements), INT))


@rule("array", 1, 1000)
def _array(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    elements = logic.alike(node, values)
    return ArrayValue(array_of(elements[0].kind, len(elements)), Tensor(graph, ""), None, None, tuple(elements))


def transform(of: ArrayValue, body: Body) -> Value:
    return _of([body(element) for element in of.elements], of)


def zip_with(graph: Graph, node: ExpressionNode, left: ArrayValue, right: ArrayValue, body: Body) -> Value:
    if left.kind.size != right.kind.size:
        sizes = f"arrays of {left.kind.size} and {right.kind.size} elements"
        raise NotCompilableError(node, sizes, "the same size")
    valid, raises = graph.strict([left, right])
    both = ArrayValue(left.kind, left.data, valid, raises, ())
    return _of([body(*pair) for pair in zip(left.elements, right.elements, strict=True)], both)


def aggregate(
    graph: Graph, node: ExpressionNode, of: ArrayValue, zero: Value, merge: Body, finish: Body | None = None
) -> Value:
    total = zero
    for element in of.elements:
        merged = merge(total, element)
        if merged.kind != total.kind:
            kinds = f"starts with type {total.kind} and merges to type {merged.kind}"
            raise NotCompilableError(node, kinds, "a cast of the initial value")
        total = merged
    return _element_of(graph, of, finish(total) if finish else total)


def quantified(graph: Graph, of: ArrayValue, body: Body, *, every: bool) -> Value:
    node = ExpressionNode("forall" if every else "exists")
    truths = [body(element) for element in of.elements]
    return _element_of(graph, of, logic.joined(graph, node, truths, operator="And" if every else "Or"))


@rule("array_max", 1, greatest=True)
@rule("array_min", 1, greatest=False)
def _extreme(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, greatest: bool) -> Value:
    of = array(node, values[0])
    return _element_of(graph, of, logic.extreme(graph, node, of.elements, greatest=greatest))


@rule("array_contains", 2)
def _contains(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    of, item = array(node, values[0]), values[1]
    kind = common([of.elements[0].kind, item.kind])
    if kind is None or kind == VOID:
        raise NotCompilableError(node, f"{of.kind} cannot contain {item.kind}", "a cast")
    key, *elements = (casts.widened(value, kind) for value in (item, *of.elements))
    contained = _element_of(graph, of, logic.any_equal(graph, node, key, elements))
    return replace(contained, valid=graph.both(contained.valid, item.valid))
