"""Functions of texts. ONNX runtimes cannot order texts or count letters, and differ on letters beyond ASCII."""

from collections.abc import Callable, Sequence
from functools import reduce

from isthmus.transforms.rowwise.core import casts
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError
from isthmus.transforms.rowwise.core.graph import Graph, Value
from isthmus.transforms.rowwise.core.rules import rule
from isthmus.transforms.rowwise.core.types import BOOLEAN, LONG, STRING, VOID

_SPECIAL = frozenset(r"\.+*?()|[]{}^$")
_ASCII = r"[\x00-\x7f]*"


def _texts(node: ExpressionNode, values: Sequence[Value]) -> list[Value]:
    for value in values:
        if value.kind not in (STRING, VOID):
            raise NotCompilableError(node, f"takes texts, not {value.kind}", "a cast of a whole number to string")
    return [casts.widened(value, STRING) for value in values]


@rule("lower lcase", 1, action="LOWER")
@rule("upper ucase", 1, action="UPPER")
def _case(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, action: str) -> Value:
    """Change the case of ASCII letters. A row with other characters is an error: runtimes differ on them."""
    (value,) = _texts(node, values)
    # In the locale C, which every system has, only ASCII letters have a case.
    # The kernel rejects empty tensors, so a text is appended.
    more = graph.add("Concat", graph.row(value.data), graph.constant([[""]], STRING), axis=1)
    converted = graph.add("StringNormalizer", more, case_change_action=action, locale="C")
    data = graph.add("Slice", converted, graph.constant([0, 0], LONG), graph.shape)
    plain = graph.add("RegexFullMatch", value.data, pattern=_ASCII)
    return graph.result(STRING, data, [value], wrong=~plain)


@rule("concat", 1, 100)
def _concat(graph: Graph, node: ExpressionNode, values: Sequence[Value]) -> Value:
    texts = _texts(node, values)
    data = reduce(lambda left, right: graph.add("StringConcat", left, right), [text.data for text in texts])
    # Spark computes all parts first, so parts after a null are refused, too.
    return Value(STRING, data, graph.both(*(text.valid for text in texts)),
                 graph.either(*(text.raises for text in texts)))  # fmt: skip


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in _SPECIAL else letter for letter in text)


def _like(pattern: str) -> str:
    parts, letters = [], iter(pattern)
    for letter in letters:
        if letter == "\\":
            letter = next(letters, "\\")
            parts.append(_escaped(letter))
        else:
            parts.append({"_": ".", "%": ".*"}.get(letter) or _escaped(letter))
    return "".join(parts)


@rule("startswith", 2, pattern=lambda text: f"{_escaped(text)}.*")
@rule("endswith", 2, pattern=lambda text: f".*{_escaped(text)}")
@rule("contains", 2, pattern=lambda text: f".*{_escaped(text)}.*")
@rule("like", 2, pattern=_like)
def _matching(graph: Graph, node: ExpressionNode, values: Sequence[Value], *, pattern: Callable[[str], str]) -> Value:
    texts = _texts(node, values)
    argument = node.arguments[1]
    if argument.name != "literal" or not isinstance(argument.value, str):
        raise NotCompilableError(node, "its search text is not a literal", "a literal text")
    data = graph.add("RegexFullMatch", texts[0].data, pattern=f"(?s){pattern(argument.value)}")
    return graph.result(BOOLEAN, data, texts)
