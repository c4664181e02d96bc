"""What each function of Spark's is in a graph, by its name."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from isthmus.transforms.rowwise.core.expressions import ExpressionNode
from isthmus.transforms.rowwise.core.graph import Graph, Value

Rule = Callable[[Graph, ExpressionNode, Sequence[Value]], Value]
"""Adds the nodes of a function to a graph, from the values of its arguments."""

RULES: dict[str, tuple[Rule, int, int]] = {}
"""By the name that Spark Connect sends: the rule, and how few and how many arguments it takes."""

_Function = TypeVar("_Function", bound=Callable[..., Value])


def rule(name: str, least: int, most: int | None = None, **options: Any) -> Callable[[_Function], _Function]:
    """Registers a function, called with these options, as the rule of a name."""

    def register(function: _Function) -> _Function:
        RULES[name] = (partial(function, **options) if options else function, least, least if most is None else most)
        return function

    return register
