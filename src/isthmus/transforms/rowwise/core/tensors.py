"""Tensors of an ONNX graph under construction, for use in Python formulas."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.transforms.rowwise.core.graph import Graph
    from isthmus.transforms.rowwise.core.types import SqlType


def _node(operator: str) -> "Callable[[Tensor, Operand], Tensor]":
    def add(left: "Tensor", right: "Operand") -> "Tensor":
        return left.graph.add(operator, left, right)

    return add


@dataclass(frozen=True)
class Tensor:
    """A tensor of a graph under construction. Each Python operator on it adds a node, and returns the node's output.

    `~` negates booleans, and `/` of int64 truncates toward zero. A Python bool, int or float becomes a constant:
    boolean, int64 or float64. `==` compares the names of tensors; `equals` adds a node.
    """

    graph: "Graph" = field(repr=False, compare=False)
    name: str

    __add__ = _node("Add")
    __sub__ = _node("Sub")
    __mul__ = _node("Mul")
    __truediv__ = _node("Div")
    __and__ = _node("And")
    __or__ = _node("Or")
    __lt__ = _node("Less")
    __le__ = _node("LessOrEqual")
    __gt__ = _node("Greater")
    __ge__ = _node("GreaterOrEqual")
    equals = _node("Equal")

    def __rsub__(self, other: "Operand") -> "Tensor":
        return self.graph.add("Sub", other, self)

    def __rtruediv__(self, other: "Operand") -> "Tensor":
        return self.graph.add("Div", other, self)

    def __invert__(self) -> "Tensor":
        return self.graph.negated(self)

    def __neg__(self) -> "Tensor":
        return self.graph.add("Neg", self)

    def __abs__(self) -> "Tensor":
        return self.graph.add("Abs", self)

    def cast(self, kind: "SqlType") -> "Tensor":
        return self.graph.cast(self, kind)

    def where(self, then: "Operand", otherwise: "Operand") -> "Tensor":
        """Add ONNX's Where with this tensor as the condition. It may turn -0.0 into 0.0, which `Graph.where` avoids."""
        return self.graph.add("Where", self, then, otherwise)


Operand = Tensor | bool | int | float
