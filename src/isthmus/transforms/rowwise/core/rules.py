"""The registry of rules: for each Spark function that graphs support, the code that adds its nodes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from isthmus.transforms.rowwise.core.expressions import ExpressionNode
from isthmus.transforms.rowwise.core.graph import Graph, Value

Rule = Callable[[Graph, ExpressionNode, Sequence[Value]], Value]
"""Adds the nodes of a function to a graph, from the values of its arguments."""

RULES: dict[str, tuple[Rule, int, int]] = {}
"""Rule, minimum and maximum number of arguments, by the name that Spark Connect sends."""

_Function = TypeVar("_Function", bound=Callable[..., Value])


def rule(names: str, least: int, most: int | None = None, **options: Any) -> Callable[[_Function], _Function]:
    """Return a decorator that registers a function in `RULES` as the rule of the Spark functions `names`.

    `names` are separated by blanks; earlier rules of the same name are replaced. Each Spark function takes `least` to
    `most` arguments, by default exactly `least`. The rule gets `options` as keywords.
    """

    def register(function: _Function) -> _Function:
        for name in names.split():
            apply = partial(function, **options) if options else function
            RULES[name] = (apply, least, least if most is None else most)
        return function

    return register
