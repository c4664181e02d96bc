"""PySpark columns as plain data, from the messages that Spark Connect would send to a server."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from isthmus.features.errors import Problem
from isthmus.transforms.rowwise.core import types
from isthmus.transforms.rowwise.core.types import SqlType

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.connect.proto import Expression as Proto
    from pyspark.sql.connect.proto import Origin

MOST = 50_000
"""Maximum expressions of a field, which take two seconds to compile. A cosine of 1,000 elements has half as many."""

_SHOWN = 400
"""Maximum characters of an expression in a message."""


@dataclass(frozen=True)
class ExpressionNode:
    """A node of an expression. `name` is Spark's function, or "column", "literal", "cast", "lambda" or "variable".

    `value` is the name of a column or variable, the value of a literal as in a tensor, the variable names of a lambda,
    or the type of a cast that graphs lack. `kind` is the type of a literal or cast, and `place` a line of the user's
    file.
    """

    name: str
    arguments: "tuple[ExpressionNode, ...]" = ()
    value: Any = None
    kind: SqlType | None = None
    place: str = ""

    def __str__(self) -> str:
        match self.name:
            case "column" | "variable":
                return str(self.value)
            case "lambda":
                return f"({', '.join(self.value)}) -> {self.arguments[0]}"
            case "literal":
                return "NULL" if self.value is None else repr(self.value)
            case "cast":
                return f"CAST({self.arguments[0]} AS {self.kind or self.value})"
            case name if not name.isidentifier() and len(self.arguments) == 2:
                return f"({self.arguments[0]} {name} {self.arguments[1]})"
        return f"{self.name}({', '.join(map(str, self.arguments))})"


class NotCompilableError(Exception):
    """An expression cannot be part of a graph. `reason` says why; `instead` is an alternative, or an empty text."""

    def __init__(self, node: ExpressionNode, reason: str, instead: str = "") -> None:
        super().__init__(reason)
        self.node, self.reason, self.instead = node, reason, instead

    def problem(self, where: str) -> Problem:
        place = f"{where} ({self.node.place})" if self.node.place else where
        text = str(self.node)
        if len(text) > _SHOWN:
            text = f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
        return Problem(place, f"{text}: {self.reason}", self.instead)


@contextmanager
def traced() -> Iterator[None]:
    """Create PySpark expressions in the block without a session, and record the line of the user's code for each.

    Error messages show these lines. Replaces a function of PySpark for all threads until the block ends. Sets the
    environment variable SPARK_CONNECT_MODE_ENABLED, if it is not set, and leaves it set.
    """
    # Create columns of Spark Connect, even without a session.
    os.environ.setdefault("SPARK_CONNECT_MODE_ENABLED", "1")
    from pyspark.sql.connect import expressions

    # PySpark records that for methods of columns only, not for functions.
    before = expressions.current_origin  # type: ignore[attr-defined]  # imported there
    expressions.current_origin = _here  # type: ignore[attr-defined, assignment]
    try:
        yield
    finally:
        expressions.current_origin = before  # type: ignore[attr-defined]


def _here() -> SimpleNamespace:
    import pyspark

    root = str(Path(pyspark.__file__).parent)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(root):
        frame = frame.f_back
    return SimpleNamespace(fragment="", call_site=f"{frame.f_code.co_filename}:{frame.f_lineno}")


def node_of(column: "Column", name: str = "column") -> ExpressionNode:
    from google.protobuf.message import DecodeError
    from pyspark.sql.connect import proto

    expression: Any = column._expr  # a column of Spark Connect
    try:
        _written_out(expression, name, {})
        message = expression.to_plan(None)
        # Engines accept messages nested to a depth of 100.
        plan = proto.Plan()
        plan.root.project.expressions.add().alias.expr.CopyFrom(message)
        proto.Plan.FromString(plan.SerializeToString())
    except (DecodeError, RecursionError):
        raise NotCompilableError(
            ExpressionNode("column", value=name), "expressions are nested too deeply: engines accept about 45 levels",
            "balanced halves: (a + b) + (c + d) for a + b + c + d",
        ) from None  # fmt: skip
    return _node(message)


def _written_out(expression: Any, name: str, known: dict[int, int]) -> int:
    """Count the expressions that an engine would receive: an expression used twice is sent twice.

    Does not serialize them, which may never end. Raises NotCompilableError above `MOST`. `known` caches counts by id.
    """
    if id(expression) not in known:
        count = 1 + sum(_written_out(child, name, known) for child in expression.children)
        if count > MOST:
            origin = expression.origin
            raise NotCompilableError(
                ExpressionNode("column", value=name, place=_site(origin) if origin is not None else ""),
                f"it has {count:,} expressions up to here: an expression used twice is sent twice",
                f"at most {MOST:,}",
            )
        known[id(expression)] = count
    return known[id(expression)]


def _node(proto: "Proto", around: str = "") -> ExpressionNode:
    # An expression without an origin inherits it from the enclosing expression.
    place = _site(proto.common.origin) or around
    kind = str(proto.WhichOneof("expr_type"))
    match kind:
        case "alias":
            return _node(proto.alias.expr, place)
        case "unresolved_attribute":
            name = proto.unresolved_attribute.unparsed_identifier
            return ExpressionNode("column", value=name.strip("`"), place=place)
        case "literal":
            return _literal(proto, place)
        case "cast":
            child = _node(proto.cast.expr, place)
            return ExpressionNode("cast", (child,), kind=_type(proto, child, place), place=place)
        case "unresolved_function":
            function = proto.unresolved_function
            arguments = tuple(_node(argument, place) for argument in function.arguments)
            node = ExpressionNode(function.function_name.lower(), arguments, place=place)
            if function.is_distinct or function.is_user_defined_function:
                raise NotCompilableError(node, "is a user-defined function")
            return node
        case "unresolved_extract_value":
            extract = proto.unresolved_extract_value
            return ExpressionNode(
                "getitem", (_node(extract.child, place), _node(extract.extraction, place)), place=place
            )
        case "lambda_function":
            function = proto.lambda_function
            names = tuple(".".join(variable.name_parts) for variable in function.arguments)
            return ExpressionNode("lambda", (_node(function.function, place),), value=names, place=place)
        case "unresolved_named_lambda_variable":
            return ExpressionNode(
                "variable", value=".".join(proto.unresolved_named_lambda_variable.name_parts), place=place
            )
        case "expression_string":
            text = ExpressionNode("column", value=f"expr({proto.expression_string.expression!r})", place=place)
            raise NotCompilableError(text, "is SQL text", "the same written with functions of pyspark.sql.functions")
    words = {"window": "reads other rows",
             "common_inline_user_defined_function": "is a Python function"}  # fmt: skip
    reason = words.get(kind, "is not a function of one row's columns")
    raise NotCompilableError(ExpressionNode(kind, place=place), reason,
                             "a transform of a view, which may read other rows"
                             if kind == "window" else "built-in functions of pyspark.sql.functions")  # fmt: skip


def _site(origin: "Origin") -> str:
    site = origin.python_origin.call_site
    # PySpark may put words before "module.py:12".
    path, _, line = site.strip().rpartition(":")
    return f"{Path(path).name}:{line}" if line.isdigit() else ""


def _literal(proto: "Proto", place: str) -> ExpressionNode:
    kind = str(proto.literal.WhichOneof("literal_type"))
    if kind == "null":
        return ExpressionNode("literal", kind=types.VOID, place=place)
    if of := types.TYPES.get(_WORDS.get(kind, kind)):
        return ExpressionNode("literal", value=getattr(proto.literal, kind), kind=of, place=place)
    shown = ExpressionNode("literal", value=f"a {kind}", place=place)
    instead = "a float" if kind == "decimal" else "a bool, int, float, str, date or datetime"
    raise NotCompilableError(shown, "is a literal that graphs do not support", instead)


_WORDS = {
    "byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint", "real": "float", "varchar": "string",
    "timestamp_ltz": "timestamp",
}  # fmt: skip


def _type(proto: "Proto", child: ExpressionNode, place: str) -> SqlType:
    cast = proto.cast
    written = cast.WhichOneof("cast_to_type") == "type_str"
    word = cast.type_str.strip().lower() if written else str(cast.type.WhichOneof("kind"))
    word = _WORDS.get(word, word)
    node = ExpressionNode("cast", (child,), value=word, place=place)
    if cast.eval_mode == cast.EVAL_MODE_TRY:
        raise NotCompilableError(node, "is a try_cast", "a cast, where values fit")
    if word not in types.TYPES:
        raise NotCompilableError(node, f"graphs have no type {word}", f"one of {', '.join(types.TYPES)}")
    return types.TYPES[word]
