"""The compiler from PySpark columns to one ONNX graph."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx
from onnx import helper

from isthmus.features.request.layout import MASKS, NOTES, VALID, Layout, array_input_name, input_name, output_name
from isthmus.transforms.rowwise.core.casts import cast
from isthmus.transforms.rowwise.core.expressions import ExpressionNode, NotCompilableError, node_of
from isthmus.transforms.rowwise.core.graph import Graph, Value
from isthmus.transforms.rowwise.core.rules import RULES
from isthmus.transforms.rowwise.core.tensors import Tensor
from isthmus.transforms.rowwise.core.types import BOOLEAN, DOUBLE, FLOAT, INT, LONG, STRING, VOID, SqlType, element_of
from isthmus.transforms.rowwise.functions import (  # noqa: F401 - most are imported for the rules that they register
    arithmetic,
    arrays,
    calendar,
    logic,
    mathematics,
    rounding,
    text,
)

if TYPE_CHECKING:
    from pyspark.sql import Column


@dataclass(frozen=True)
class Compiled:
    """A compiled ONNX graph and the types of its columns. Its metadata is described in `features.request.layout`."""

    model: onnx.ModelProto
    inputs: Mapping[str, SqlType]
    outputs: Mapping[str, SqlType]


def compile_columns(
    columns: "Mapping[str, Column]", inputs: Mapping[str, SqlType], plain: Collection[str] = ()
) -> Compiled:
    """Compile PySpark columns to one ONNX graph that computes them without Spark, row by row.

    `columns` has the column of each output, created in a `traced` block, and `inputs` the type of each input column.
    The caller promises that the inputs named in `plain` are never null, NaN or -0.0. Raises NotCompilableError for an
    expression that graphs do not support.
    """
    nodes = {name: node_of(column, f"field {name}") for name, column in columns.items()}
    compiler = _Compiler(inputs, plain)
    values = {name: compiler.value(node) for name, node in nodes.items()}
    return compiler.finish(nodes, values)


class _Compiler:
    def __init__(self, inputs: Mapping[str, SqlType], plain: Collection[str]) -> None:
        self._inputs = inputs
        self._graph = Graph()
        self._scalars = _by_element(inputs)
        rows = {name: Tensor(self._graph, array_input_name(name)) for name, kind in inputs.items() if kind.element}
        for element, names in self._scalars.items():
            rows |= dict(zip(names, self._graph.input(input_name(element), len(names)), strict=True))
        masks = self._graph.input(input_name(VALID), len(inputs))
        self._graph.begin(masks[0])
        self._graph.plain(rows[name] for name in plain)
        self._columns = {
            name: Value(kind, rows[name], None if name in plain else mask)
            for (name, kind), mask in zip(inputs.items(), masks, strict=True)
        }
        self._numbers: dict[int, int] = {}
        self._distinct: dict[tuple[object, ...], int] = {}
        self._known: dict[int, Value] = {}
        self._arrays: dict[str, Value] = {}
        self._bound: dict[str, Value] = {}

    def value(self, node: ExpressionNode) -> Value:
        if self._bound:
            return self._computed(node)
        number = self._number(node)
        if number not in self._known:
            self._known[number] = self._computed(node)
        return self._known[number]

    def _number(self, node: ExpressionNode) -> int:
        """Return a number that equal expressions share. It avoids hashing an expression again for each parent."""
        if id(node) not in self._numbers:
            # Python considers 0.0 and -0.0 equal.
            value = repr(node.value) if node.name == "literal" else node.value
            key = (node.name, value, node.kind, *map(self._number, node.arguments))
            self._numbers[id(node)] = self._distinct.setdefault(key, len(self._distinct))
        return self._numbers[id(node)]

    def _computed(self, node: ExpressionNode) -> Value:
        graph = self._graph
        match node.name:
            case "literal":
                assert node.kind is not None  # noqa: S101 - of a literal
                return graph.literal(node.value, node.kind)
            case "column":
                name = str(node.value)
                if name not in self._inputs:
                    known = ", ".join(sorted(self._inputs))
                    raise NotCompilableError(node, "is not an input", f"one of {known}")
                value = self._columns[name]
                return self._array(name, value) if value.kind.element else value
            case "variable":
                return self._bound[str(node.value)]
            case "cast":
                return cast(graph, node, [self.value(argument) for argument in node.arguments])
            case "transform" | "zip_with" | "aggregate" | "reduce" | "exists" | "forall":
                return self._higher(node)
        if node.name not in RULES:
            raise NotCompilableError(node, f"graphs have no {node.name}", _nearest(node.name))
        apply, least, most = RULES[node.name]
        if not least <= len(node.arguments) <= most:
            raise NotCompilableError(node, f"has {len(node.arguments)} arguments", f"{least} to {most}")
        return apply(graph, node, [self.value(argument) for argument in node.arguments])

    def _array(self, name: str, value: Value) -> Value:
        if name not in self._arrays:
            self._arrays[name] = arrays.from_input(self._graph, value)
        return self._arrays[name]

    def _higher(self, node: ExpressionNode) -> Value:
        graph = self._graph
        plain = [self.value(part) for part in node.arguments if part.name != "lambda"]
        bodies = [self._body(node, part) for part in node.arguments if part.name == "lambda"]
        of = arrays.array(node, plain[0])
        match node.name:
            case "transform":
                return arrays.transform(of, bodies[0])
            case "zip_with":
                return arrays.zip_with(graph, node, of, arrays.array(node, plain[1]), bodies[0])
            case "exists" | "forall":
                return arrays.quantified(graph, of, bodies[0], every=node.name == "forall")
        return arrays.aggregate(graph, node, of, plain[1], *bodies)

    def _body(self, node: ExpressionNode, function: ExpressionNode) -> arrays.Body:
        def body(*arguments: Value) -> Value:
            if len(arguments) != len(function.value):
                takes = f"its function takes {len(function.value)} arguments"
                raise NotCompilableError(node, takes, str(len(arguments)))
            before = self._bound
            self._bound = before | dict(zip(function.value, arguments, strict=True))
            try:
                return self.value(function.arguments[0])
            finally:
                self._bound = before

        return body

    def finish(self, nodes: Mapping[str, ExpressionNode], values: Mapping[str, Value]) -> Compiled:
        graph = self._graph
        for name, value in values.items():
            if value.kind.element is not None or value.kind == VOID:
                raise NotCompilableError(nodes[name], f"returns {value.kind}", "a value of a plain Isthmus type")
        kinds = {name: value.kind for name, value in values.items()}
        results = _by_element(kinds)
        inputs = [
            _described(input_name(element), _TENSORS[element], len(names)) for element, names in self._scalars.items()
        ]
        sized = {name: kind for name, kind in self._inputs.items() if kind.element}
        inputs += [_described(array_input_name(name), kind.tensor, kind.size) for name, kind in sized.items()]
        inputs.append(_described(input_name(VALID), BOOLEAN.tensor, len(self._inputs)))
        outputs = [
            _described(output_name(element), _TENSORS[element], len(names)) for element, names in results.items()
        ]
        outputs.append(_described(MASKS, BOOLEAN.tensor, 2 * len(values)))
        for element, names in results.items():
            graph.packed([values[name].data for name in names], output_name(element))
        valid = [value.valid or graph.number(True) for value in values.values()]
        raises = [value.raises or graph.number(False) for value in values.values()]
        graph.packed([*valid, *raises], MASKS)
        sizes = {name: (element_of(kind), kind.size) for name, kind in sized.items()}
        layout = Layout(self._scalars, tuple(self._inputs), results, tuple(values), sizes)
        model = graph.model(inputs, outputs, "rowwise", {NOTES: layout.dumps()})
        return Compiled(model, dict(self._inputs), kinds)


_TENSORS = {element_of(kind): kind.tensor for kind in (BOOLEAN, INT, LONG, FLOAT, DOUBLE, STRING)}


def _by_element(kinds: Mapping[str, SqlType]) -> dict[str, tuple[str, ...]]:
    elements = dict.fromkeys(element_of(kind) for kind in kinds.values() if not kind.element)
    return {element: tuple(name for name, kind in kinds.items() if not kind.element and element_of(kind) == element)
            for element in elements}  # fmt: skip


def _described(name: str, tensor: int, rows: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, tensor, [rows, "N"])


_NEAREST = {
    "texts": ("startswith, endswith, contains, like, ==, isin, or a lookup in create_map",
              ("length", "char_length", "character_length", "octet_length", "substring", "substr", "left", "right",
               "trim", "ltrim", "rtrim", "split", "initcap", "instr", "locate", "replace", "translate", "rlike",
               "regexp", "regexp_like", "regexp_extract", "regexp_replace", "levenshtein", "soundex", "ilike")),
    "numbers of texts": ("Hashed among the steps of a student's preparation, or pmod of a whole number",
                         ("hash", "xxhash64", "crc32", "md5", "sha1", "sha2")),
    "now": ("a request field with the current time",
            ("current_date", "current_timestamp", "now", "localtimestamp", "curdate")),
    "zones": ("a request field with the local time, or hours added to unix_seconds",
              ("from_utc_timestamp", "to_utc_timestamp", "convert_timezone")),
    "parts of times": ("year, month, day, dayofweek, hour, minute, second",
                       ("date_format", "to_char", "date_part", "datepart", "extract", "monthname", "dayname")),
    "seconds": ("unix_seconds", ("unix_timestamp",)),
    "times": ("timestamp_seconds, timestamp_millis, timestamp_micros of a number, or a field of type UnixTimestamp",
              ("to_timestamp", "from_unixtime", "make_timestamp")),
    "buckets": ("least(greatest(floor((x - low) / width) + 1, 0), n + 1), or when", ("width_bucket",)),
    "other rows": ("a transform of a view, which may look at many rows",
                   ("avg", "mean", "sum", "count", "min", "max", "first", "last", "stddev", "variance", "median",
                    "collect_list", "collect_set", "percentile_approx")),
    "chance": ("a request field", ("rand", "randn", "uuid", "uniform")),
}  # fmt: skip
"""Alternatives for functions that graphs lack and whose names do not suggest one."""


def _nearest(name: str) -> str:
    import difflib

    for instead, names in _NEAREST.values():
        if name in names:
            return instead
    close = difflib.get_close_matches(name, RULES, 3, 0.6)
    example = f", for example {', '.join(close)}" if close else ""
    return f"one of the functions of docs/row-functions.md{example}"
