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
    """Return a decorator that registers a function as the rule which compiles some Spark functions to ONNX nodes.

    `names` are the names of these Spark functions, separated by blanks. Each takes `least` to `most` arguments, and
    exactly `least` if `most` is None. The rule gets `options` as keyword arguments. Replaces an earlier rule in
    `RULES`.
    """

    def register(function: _Function) -> _Function:
        for name in names.split():
            apply = partial(function, **options) if options else function
            RULES[name] = (apply, least, least if most is None else most)
        return function

    return register
