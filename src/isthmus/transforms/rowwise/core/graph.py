"""ONNX nodes under fresh names, and SQL values made of them: data, where they are null, where Spark would refuse."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from isthmus.transforms.rowwise.core.types import BOOLEAN, LONG, SqlType

OPSET, ML_OPSET, IR_VERSION = 20, 2, 9
"""The first ones with text functions; and with vocabularies."""

_FRACTIONAL = (TensorProto.FLOAT, TensorProto.DOUBLE)
_SIGNLESS = frozenset({"Abs", "Exp"})
"""What gives no -0.0."""
_FOLDED: dict[str, Callable[..., "np.ndarray[Any, Any]"]] = {
    "Neg": np.negative, "Abs": np.abs, "IsNaN": np.isnan, "Equal": np.equal, "Less": np.less,
    "LessOrEqual": np.less_equal, "Greater": np.greater, "And": np.logical_and, "Or": np.logical_or,
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply,
}  # fmt: skip
"""What is computed at once, of constants, and gives the same bits everywhere."""
_DECIDED = {"And": True, "Or": False}
"""A truth that decides nothing in a function of two."""
_TOGETHER = "Together"
"""Stands for a call of a function of many arguments at once, until all are known."""

Stacked = Callable[["Graph", str, Sequence[int]], str]
"""A function of k arguments at once: from a tensor of shape (k, n), and a number for each, to one of that shape."""

Mask = str | None
"""A tensor of booleans, or None where all are as usual: every value valid, no row refused."""


@dataclass(frozen=True)
class Value:
    """The value of an expression in every row. Tensors have shape (1, n), or () where all rows have the same.

    Attributes:
        kind: its type.
        data: the tensor; where it is null, anything.
        valid: where it is not null; None if it never is.
        raises: where Spark refuses to compute it; None if it never does.
    """

    kind: SqlType
    data: str
    valid: Mask = None
    raises: Mask = None


class Graph:
    """Nodes and constants. The same node on the same inputs is there once."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._count = count()
        self._constants: list[onnx.TensorProto] = []
        self._known: dict[object, str] = {}
        self._fixed: dict[str, bool] = {}
        """What does not depend on any row, and whether it is a floating-point number."""
        self._values: dict[str, np.ndarray[Any, Any]] = {}
        """Constants other than texts."""
        self._tensors: dict[object, str] = {}
        self._positive: set[str] = set()
        """What is no -0.0."""
        self._numbers: set[str] = set()
        """What is no NaN."""
        self._negated: dict[str, str] = {}
        self._parts: dict[str, frozenset[str]] = {}
        """Of a mask that is true where several others are, those."""
        self._joint: dict[frozenset[str], str] = {}
        """The reverse."""
        self.lookups: dict[tuple[str, Mask], tuple[Value, Sequence[tuple[Any, Any]]]] = {}
        """Data and mask of what was found in a map: the key, and the map's pairs."""
        self._together: list[Stacked] = []
        self.shape = ""

    def begin(self, rows: str) -> None:
        """Says how many rows there are.

        Args:
            rows: a tensor of shape (1, n).
        """
        self.shape = self.add("Shape", rows)

    def plain(self, tensors: Iterable[str]) -> None:
        """Says of which tensors it is known that they hold neither NaN nor -0.0."""
        self._numbers.update(tensors)
        self._positive |= self._numbers

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """The output of a node, or a tensor that is there already and holds the same."""
        if (known := self._without(operator, inputs)) is not None:
            return known
        # ONNX Runtime takes x + 0.0 for x, which a -0.0 is not, and (1 / x) * y for y / x, also of whole numbers.
        if operator in ("Add", "Sub"):
            inputs = tuple(
                self.row(name) if self._fixed.get(name) and self._may_be(name, 0) else name for name in inputs
            )
        elif operator == "Div" and inputs[0] in self._fixed and self._may_be(inputs[0], 1):
            inputs = (self.row(inputs[0]), inputs[1])
        key = (operator, inputs, tuple(sorted((name, str(value)) for name, value in attributes.items())))
        if key not in self._known:
            name = f"{operator.lower()}_{next(self._count)}"
            self._nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
            self._known[key] = name
            if self._fixed.keys() >= set(inputs):
                self._fixed[name] = any(map(self._fixed.get, inputs)) or attributes.get("to") in _FRACTIONAL
            if operator in _SIGNLESS:
                self._positive.add(name)
        return self._known[key]

    def _without(self, operator: str, inputs: Sequence[str]) -> str | None:
        """What a node would give, if that can be said without it."""
        if operator in _FOLDED and self._values.keys() >= set(inputs):
            with np.errstate(all="ignore"):
                array = np.asarray(_FOLDED[operator](*(self._values[name] for name in inputs)))
            return self.tensor(array, helper.np_dtype_to_tensor_dtype(array.dtype))
        if operator in _DECIDED:
            for one, other in (inputs, inputs[::-1]):
                if self.is_number(one):
                    return other if self.number(one) == _DECIDED[operator] else one
        return None

    def split(self, data: str, count: int) -> list[str]:
        """The rows of a tensor of shape (count, n), each of shape (1, n)."""
        names = [f"{data}[{n}]" for n in range(count)]
        return self._split(data, names) if count > 1 else [data]

    def _split(self, data: str, names: list[str]) -> list[str]:
        self._nodes.append(
            helper.make_node("Split", [data], names, name=f"split_{data}", axis=0, num_outputs=len(names))
        )
        return names

    def together(self, function: Stacked, argument: str, number: int) -> str:
        """A function of many nodes, which is computed of all the arguments at once that are there by then.

        Args:
            function: the function.
            argument: the tensor that it is applied to.
            number: what the function is told of this argument.
        """
        if function not in self._together:
            self._together.append(function)
        return self.add(_TOGETHER, self.row(argument), function=self._together.index(function), number=number)

    def constant(self, value: Any, kind: SqlType) -> str:
        """A tensor of shape (), or as the value has it."""
        array = np.asarray(value, kind.numpy)
        return self.tensor(array, kind.tensor)

    def tensor(self, array: "np.ndarray[Any, Any]", element: int) -> str:
        """A constant tensor."""
        content = repr(array.tolist()).encode() if element == TensorProto.STRING else array.tobytes()
        key = (element, array.shape, content)
        if key not in self._tensors:
            name = f"constant_{next(self._count)}"
            if element == TensorProto.STRING:
                tensor = onnx.TensorProto(name=name, data_type=element, dims=array.shape)
                tensor.string_data.extend(str(text).encode() for text in array.reshape(-1).tolist())
            else:
                tensor = numpy_helper.from_array(array, name)
            self._constants.append(tensor)
            self._tensors[key] = name
            fractional = element in _FRACTIONAL
            if element != TensorProto.STRING:
                self._values[name] = array
            if not (fractional and np.any((array == 0) & np.signbit(array))):
                self._positive.add(name)
            self._fixed[name] = fractional
        return self._tensors[key]

    def cast(self, data: str, kind: SqlType) -> str:
        """The numbers of a tensor in the element type of another type."""
        if self.is_number(data) and (kind.fractional or (kind == LONG and isinstance(self.number(data), int))):
            with np.errstate(over="ignore"):
                return self.constant(self._values[data].astype(kind.numpy), kind)
        return self.add("Cast", data, to=kind.tensor)

    # --- masks

    def both(self, *masks: Mask) -> Mask:
        """Where all masks are true; None is true everywhere. What others imply is left out."""
        parts = {mask: self._parts.get(mask, frozenset((mask,))) for mask in masks if mask is not None}
        found: Mask = None
        covered: frozenset[str] = frozenset()
        for mask, part in sorted(parts.items(), key=lambda item: -len(item[1])):
            if not part <= covered:
                covered |= part
                if covered not in self._joint:
                    self._joint[covered] = mask if found is None else self.add("And", found, mask)
                found = self._joint[covered]
                self._parts[found] = covered
        return found

    def either(self, *masks: Mask) -> Mask:
        """Where any mask is true; None is false everywhere."""
        named = dict.fromkeys(mask for mask in masks if mask is not None)
        return reduce(lambda one, other: self.add("Or", one, other), named) if named else None

    def negated(self, mask: str) -> str:
        """Where a mask is false. No Not: ONNX Runtime turns Where(Not(x), a, b) around, see `where`."""
        if mask not in self._negated:
            found = self.add("Equal", mask, self.constant(False, BOOLEAN))
            self._negated |= {mask: found, found: mask}
        return self._negated[mask]

    def where(self, mask: str, one: str, other: str, kind: SqlType) -> str:
        """One tensor where a mask is true, another one elsewhere, to the last bit.

        Runtimes have no such kernel for booleans, and ONNX Runtime's gives 0.0 for a -0.0 of its first choice; of its
        second one as well, if that and the mask are the same for all rows.
        """
        if self.is_number(mask):
            return one if self.number(mask) else other
        mask = self.row(mask)
        if kind.tensor == TensorProto.BOOL:
            if self.is_number(other):
                return self.add("Or", self.negated(mask), one) if self.number(other) else self.add("And", mask, one)
            if self.is_number(one):
                return self.add("Or", mask, other) if self.number(one) else self.add("And", self.negated(mask), other)
            return self._chosen(mask, one, other, kind)
        if not kind.fractional or one in self._positive:
            return self.add("Where", mask, one, other)
        if other in self._positive:
            return self.add("Where", self.negated(mask), other, one)
        return self._chosen(mask, one, other, kind)

    def _chosen(self, mask: str, one: str, other: str, kind: SqlType) -> str:
        unlike = self.negated(mask)
        if kind.tensor == TensorProto.BOOL:
            return self.add("Or", self.add("And", mask, one), self.add("And", unlike, other))
        # Of each, the second choice keeps its bits, and so does what is multiplied by 1.
        none = self.constant(1, kind)
        return self.add("Mul", self.add("Where", mask, none, other), self.add("Where", unlike, none, one))

    def guarded(self, raises: Mask, mask: Mask) -> Mask:
        """What raises, but only where a mask (None: everywhere) is true."""
        return raises if mask is None or raises is None else self.add("And", raises, mask)

    def row(self, data: str) -> str:
        """A tensor with shape (1, n) also where all rows have the same value, for kernels that take no scalar."""
        return self.add("Expand", data, self.shape) if data in self._fixed else data

    def is_number(self, data: str) -> bool:
        """Whether a tensor is one constant, and that no NaN."""
        return (
            data in self._values and self._values[data].shape == () and bool(self._values[data] == self._values[data])
        )

    def never_nan(self, data: str) -> bool:
        """Whether it is known that no value of a tensor is NaN."""
        return data in self._numbers or self.is_number(data)

    def number(self, data: str) -> float:
        """A constant that is one number."""
        found: float = self._values[data].item()
        return found

    def _may_be(self, fixed: str, number: float) -> bool:
        """Whether what does not depend on any row may be a number: what is computed of constants may be any."""
        return fixed not in self._values or bool(np.any(self._values[fixed] == number))

    # --- values

    def literal(self, value: Any, kind: SqlType) -> Value:
        """The same value in every row; None is null."""
        if value is None:
            zero: Any = "" if kind.tensor == TensorProto.STRING else 0
            return Value(kind, self.constant(zero, kind), self.constant(False, BOOLEAN))
        return Value(kind, self.constant(value, kind))

    def strict(self, values: Sequence[Value]) -> tuple[Mask, Mask]:
        """What is valid and what raises of a function that is null where an argument is.

        Spark evaluates from left to right and stops at the first null: what comes after it raises nothing.
        """
        valid: Mask = None
        raises: Mask = None
        for value in values:
            raises = self.either(raises, self.guarded(value.raises, valid))
            valid = self.both(valid, value.valid)
        return valid, raises

    def result(
        self, kind: SqlType, data: str, values: Sequence[Value], *, null: Mask = None, wrong: Mask = None
    ) -> Value:
        """The value of a strict function.

        Args:
            kind: its type.
            data: its tensor.
            values: its arguments.
            null: where it is null although no argument is.
            wrong: where Spark refuses it.
        """
        valid, raises = self.strict(values)
        raises = self.either(raises, self.guarded(wrong, valid))
        if null is not None:
            valid = self.both(valid, self.negated(null))
        return Value(kind, data, valid, raises)

    def merged(self, mask: str, one: Value, other: Value) -> Value:
        """One value where a mask is true, another one of the same type elsewhere. Only what is taken raises."""
        unlike = self.negated(mask)
        raises = self.either(self.guarded(one.raises, mask), self.guarded(other.raises, unlike))
        if self._is_null(other):  # under which anything may stand
            return replace(one, valid=self.both(mask, one.valid), raises=raises)
        if self._is_null(one):
            return replace(other, valid=self.both(unlike, other.valid), raises=raises)
        data = one.data if one.data == other.data else self.where(mask, one.data, other.data, one.kind)
        valid = self.both(self._implies(mask, one.valid), self._implies(unlike, other.valid))
        return replace(one, data=data, valid=valid, raises=raises)

    def _is_null(self, value: Value) -> bool:
        return value.valid is not None and self.is_number(value.valid) and not self.number(value.valid)

    def _implies(self, mask: str, then: Mask) -> Mask:
        return None if then is None else self.add("Or", self.negated(mask), then)

    def packed(self, parts: Sequence[str], name: str) -> None:
        """Puts tensors of shape (1, n) under each other, into one that has a name of its own."""
        rows = [self.row(part) for part in parts]
        operator = "Concat" if len(rows) > 1 else "Identity"
        node = helper.make_node(operator, rows, [name], name=f"output_{name}")
        if len(rows) > 1:
            node.attribute.append(helper.make_attribute("axis", 0))
        self._nodes.append(node)

    def model(
        self,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
        name: str,
        notes: Mapping[str, str],
    ) -> onnx.ModelProto:
        """The whole, checked, without what no output needs."""
        wanted = [output.name for output in outputs]
        nodes = needed(self._scheduled(wanted), wanted)
        used = {name for node in nodes for name in node.input}
        constants = [constant for constant in self._constants if constant.name in used]
        model = assembled(name, nodes, inputs, outputs, constants)
        helper.set_model_props(model, dict(notes))
        return model

    def _scheduled(self, wanted: Sequence[str]) -> list[onnx.NodeProto]:
        """All nodes, each function of many arguments once for all that are there at the same time.

        That is: for all before which the same number of such functions stands in a row.
        """
        plain: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        calls: dict[tuple[int, int], list[onnx.NodeProto]] = defaultdict(list)
        depths: dict[str, int] = {}
        for node in needed(self._nodes, wanted):
            depth = max((depths.get(name, 0) for name in node.input), default=0)
            if node.op_type == _TOGETHER:
                function = next(int(part.i) for part in node.attribute if part.name == "function")
                calls[depth, function].append(node)
            else:
                plain[depth].append(node)
            depths.update(dict.fromkeys(node.output, depth + (node.op_type == _TOGETHER)))
        order: list[onnx.NodeProto] = []
        for depth in range(max(depths.values(), default=0) + 1):
            order += plain[depth]
            for function, called in enumerate(self._together):
                if nodes := calls[depth, function]:
                    order += self._called(called, nodes)
        return order

    def _called(self, function: Stacked, calls: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """The nodes of one function of several arguments."""
        # Nothing that is known already: no output may need it, and then it is not there.
        before = (self._nodes, self._known, self._negated, self._joint)
        self._nodes, self._known, self._negated, self._joint = [], {}, {}, {}
        arguments, names = [call.input[0] for call in calls], [call.output[0] for call in calls]
        numbers = [next(int(part.i) for part in call.attribute if part.name == "number") for call in calls]
        if len(calls) > 1:
            self._split(function(self, self.add("Concat", *arguments, axis=0), numbers), names)
        else:
            found = function(self, arguments[0], numbers)
            for node in self._nodes:
                node.output[:] = [names[0] if name == found else name for name in node.output]
        nodes, (self._nodes, self._known, self._negated, self._joint) = self._nodes, before
        return nodes


def assembled(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[onnx.TensorProto],
) -> onnx.ModelProto:
    """A model of these parts, checked."""
    domains = {"": OPSET} | {node.domain: ML_OPSET for node in nodes if node.domain}
    model = helper.make_model(
        helper.make_graph(nodes, name, inputs, outputs, constants),
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in domains.items()],
        ir_version=IR_VERSION, producer_name="isthmus",
    )  # fmt: skip
    onnx.checker.check_model(model, full_check=True)
    return model


def needed(nodes: Sequence[onnx.NodeProto], wanted: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes on which some tensors depend."""
    awaited, kept = set(wanted), []
    for node in reversed(nodes):
        if awaited.intersection(node.output):
            awaited.update(node.input)
            kept.append(node)
    return kept[::-1]
