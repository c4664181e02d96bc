"""Tensors of a graph, as operands of formulas."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from isthmus.transforms.rowwise.core.graph import Graph
    from isthmus.transforms.rowwise.core.types import SqlType


@dataclass(frozen=True)
class Tensor:
    """A tensor of a graph. Its operators add nodes: `a + b` adds the node Add, `a < b` the node Less, `~a` a negation.

    A Python number becomes a constant: a bool of booleans, an int of int64, a float of float64. `/` is the node Div,
    which truncates int64. `&` and `|` are the nodes And and Or, of booleans only.
    """

    graph: "Graph" = field(repr=False, compare=False)
    name: str

    def __add__(self, other: "Operand") -> "Tensor":
        return self.graph.add("Add", self, other)

    def __sub__(self, other: "Operand") -> "Tensor":
        return self.graph.add("Sub", self, other)

    def __rsub__(self, other: "Operand") -> "Tensor":
        return self.graph.add("Sub", other, self)

    def __mul__(self, other: "Operand") -> "Tensor":
        return self.graph.add("Mul", self, other)

    def __truediv__(self, other: "Operand") -> "Tensor":
        return self.graph.add("Div", self, other)

    def __rtruediv__(self, other: "Operand") -> "Tensor":
        return self.graph.add("Div", other, self)

    def __and__(self, other: "Operand") -> "Tensor":
        return self.graph.add("And", self, other)

    def __or__(self, other: "Operand") -> "Tensor":
        return self.graph.add("Or", self, other)

    def __invert__(self) -> "Tensor":
        return self.graph.negated(self)

    def __neg__(self) -> "Tensor":
        return self.graph.add("Neg", self)

    def __abs__(self) -> "Tensor":
        return self.graph.add("Abs", self)

    def __lt__(self, other: "Operand") -> "Tensor":
        return self.graph.add("Less", self, other)

    def __le__(self, other: "Operand") -> "Tensor":
        return self.graph.add("LessOrEqual", self, other)

    def __gt__(self, other: "Operand") -> "Tensor":
        return self.graph.add("Greater", self, other)

    def __ge__(self, other: "Operand") -> "Tensor":
        return self.graph.add("GreaterOrEqual", self, other)

    def cast(self, kind: "SqlType") -> "Tensor":
        return self.graph.cast(self, kind)

    def equals(self, other: "Operand") -> "Tensor":
        return self.graph.add("Equal", self, other)

    def where(self, then: "Operand", otherwise: "Operand") -> "Tensor":
        """Add the node Where, with this tensor as the condition. `Graph.where` keeps every bit, this node does not."""
        return self.graph.add("Where", self, then, otherwise)


Operand = Tensor | bool | int | float
