"""ONNX nodes with unique names, and SQL values built from them: data, validity mask, and mask of refused rows."""

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
"""First opset with text functions, and first with vocabularies."""

_FRACTIONAL = (TensorProto.FLOAT, TensorProto.DOUBLE)
_SIGNLESS = frozenset({"Abs"})
"""Operators that never return -0.0."""
_FOLDED: dict[str, Callable[..., "np.ndarray[Any, Any]"]] = {
    "Neg": np.negative, "Abs": np.abs, "IsNaN": np.isnan, "Equal": np.equal, "Less": np.less,
    "LessOrEqual": np.less_equal, "Greater": np.greater, "And": np.logical_and, "Or": np.logical_or,
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply,
}  # fmt: skip
"""Operators that are folded if all inputs are constants: their results have the same bits everywhere."""
_DECIDED = {"And": True, "Or": False}
"""Neutral constant of each operator."""
_TOGETHER = "Together"
"""Placeholder for a call of a stacked function, until all its arguments are known."""

Stacked = Callable[["Graph", str, Sequence[int]], str]
"""A function of k arguments at once. Takes a tensor of shape (k, n) and k numbers; returns a tensor of that shape."""

Nodes = Sequence[onnx.NodeProto]
Described = Sequence[onnx.ValueInfoProto]
"""Inputs or outputs of a graph."""

Mask = str | None
"""A tensor of booleans, or None for the default: every value valid, no row refused."""


@dataclass(frozen=True)
class Value:
    """The value of an expression in every row. Tensors have shape (1, n), or () if all rows are equal.

    Attributes:
        data: the tensor; arbitrary where the value is null.
        valid: mask of rows that are not null; None if there are no nulls.
        raises: mask of rows that Spark refuses to compute; None if it refuses none.
    """

    kind: SqlType
    data: str
    valid: Mask = None
    raises: Mask = None


class Graph:
    """Nodes and constants. A node with the same operator, inputs and attributes exists once."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._count = count()
        self._constants: list[onnx.TensorProto] = []
        self._known: dict[object, str] = {}
        self._fixed: dict[str, bool] = {}
        """Tensors that do not depend on any row; True if they hold floating-point numbers."""
        self._values: dict[str, np.ndarray[Any, Any]] = {}
        """Constants other than texts."""
        self._tensors: dict[object, str] = {}
        self._positive: set[str] = set()
        """Tensors without -0.0."""
        self._numbers: set[str] = set()
        """Tensors without NaN."""
        self._negated: dict[str, str] = {}
        self._parts: dict[str, frozenset[str]] = {}
        """Parts of each conjunction of masks."""
        self._joint: dict[frozenset[str], str] = {}
        """Conjunction by its parts."""
        self.lookups: dict[tuple[str, Mask], tuple[Value, Sequence[tuple[Any, Any]]]] = {}
        """Key and pairs of a map lookup, by the data and mask of the lookup."""
        self._together: list[Stacked] = []
        self.shape = ""

    def begin(self, rows: str) -> None:
        self.shape = self.add("Shape", rows)

    def plain(self, tensors: Iterable[str]) -> None:
        """Declare tensors that hold neither NaN nor -0.0."""
        self._numbers.update(tensors)
        self._positive |= self._numbers

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Return the output of a node: a new node, or a tensor that already holds the same."""
        if (known := self._without(operator, inputs)) is not None:
            return known
        # ONNX Runtime replaces x + 0.0 by x, wrong for -0.0, and (1 / x) * y by y / x, even for whole numbers.
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
        """Return a tensor that equals the node's result without adding the node, or None."""
        if operator in _FOLDED and self._values.keys() >= set(inputs):
            with np.errstate(all="ignore"):
                array = np.asarray(_FOLDED[operator](*(self._values[name] for name in inputs)))
            return self.tensor(array, helper.np_dtype_to_tensor_dtype(array.dtype))
        if operator in _DECIDED:
            for constant, mask in (inputs, inputs[::-1]):
                if self.is_number(constant):
                    return mask if self.number(constant) == _DECIDED[operator] else constant
        return None

    def split(self, data: str, count: int) -> list[str]:
        """Return the rows of a tensor of shape (count, n), each of shape (1, n)."""
        names = [f"{data}[{n}]" for n in range(count)]
        return self._split(data, names) if count > 1 else [data]

    def _split(self, data: str, names: list[str]) -> list[str]:
        self._nodes.append(
            helper.make_node("Split", [data], names, name=f"split_{data}", axis=0, num_outputs=len(names))
        )
        return names

    def together(self, function: Stacked, argument: str, number: int = 0, *, signless: bool = False) -> str:
        """Call a function of many nodes, computed together with all calls at the same depth.

        `number` is a parameter for this argument. Pass `signless` if the function never returns -0.0.
        """
        if function not in self._together:
            self._together.append(function)
        name = self.add(_TOGETHER, self.row(argument), function=self._together.index(function), number=number)
        if signless:
            self._positive.add(name)
        return name

    def constant(self, value: Any, kind: SqlType) -> str:
        return self.tensor(np.asarray(value, kind.numpy), kind.tensor)

    def tensor(self, array: "np.ndarray[Any, Any]", element: int) -> str:
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
        if self.is_number(data) and (kind.fractional or (kind == LONG and isinstance(self.number(data), int))):
            with np.errstate(over="ignore"):
                return self.constant(self._values[data].astype(kind.numpy), kind)
        return self.add("Cast", data, to=kind.tensor)

    # --- masks

    def both(self, *masks: Mask) -> Mask:
        """Return the conjunction of masks; None is true everywhere. A mask that another implies is left out."""
        parts = {mask: self._parts.get(mask, frozenset((mask,))) for mask in masks if mask is not None}
        joint: Mask = None
        covered: frozenset[str] = frozenset()
        for mask, part in sorted(parts.items(), key=lambda item: -len(item[1])):
            if not part <= covered:
                covered |= part
                if covered not in self._joint:
                    self._joint[covered] = mask if joint is None else self.add("And", joint, mask)
                joint = self._joint[covered]
                self._parts[joint] = covered
        return joint

    def either(self, *masks: Mask) -> Mask:
        """Return the disjunction of masks; None is false everywhere."""
        named = dict.fromkeys(mask for mask in masks if mask is not None)
        return reduce(lambda left, right: self.add("Or", left, right), named) if named else None

    def negated(self, mask: str) -> str:
        """Negate a mask. No Not: ONNX Runtime would swap the branches of Where(Not(x), a, b), see `where`."""
        if mask not in self._negated:
            negated = self.add("Equal", mask, self.constant(False, BOOLEAN))
            self._negated |= {mask: negated, negated: mask}
        return self._negated[mask]

    def where(self, mask: str, then: str, otherwise: str, kind: SqlType) -> str:
        """Return `then` where a mask is true, and `otherwise` elsewhere, to the last bit.

        Runtimes have no such kernel for booleans. ONNX Runtime's kernel turns -0.0 of its first choice into 0.0; also
        of its second choice, if that choice and the mask are the same for all rows.
        """
        if self.is_number(mask):
            return then if self.number(mask) else otherwise
        mask = self.row(mask)
        if kind.tensor == TensorProto.BOOL:
            if self.is_number(otherwise):
                truth = self.number(otherwise)
                return self.add("Or", self.negated(mask), then) if truth else self.add("And", mask, then)
            if self.is_number(then):
                truth = self.number(then)
                return self.add("Or", mask, otherwise) if truth else self.add("And", self.negated(mask), otherwise)
            return self._select(mask, then, otherwise, kind)
        if not kind.fractional or then in self._positive:
            return self.add("Where", mask, then, otherwise)
        if otherwise in self._positive:
            return self.add("Where", self.negated(mask), otherwise, then)
        return self._select(mask, then, otherwise, kind)

    def _select(self, mask: str, then: str, otherwise: str, kind: SqlType) -> str:
        unlike = self.negated(mask)
        if kind.tensor == TensorProto.BOOL:
            return self.add("Or", self.add("And", mask, then), self.add("And", unlike, otherwise))
        # The second choice of each `Where` keeps its bits, and a product with 1 does, too.
        unit = self.constant(1, kind)
        return self.add("Mul", self.add("Where", mask, unit, otherwise), self.add("Where", unlike, unit, then))

    def guarded(self, raises: Mask, mask: Mask) -> Mask:
        """Restrict `raises` to rows where a mask is true (None: all rows)."""
        return raises if mask is None or raises is None else self.add("And", raises, mask)

    def row(self, data: str) -> str:
        """Expand a tensor to shape (1, n), for kernels that take no scalar."""
        return self.add("Expand", data, self.shape) if data in self._fixed else data

    def is_number(self, data: str) -> bool:
        """Return whether a tensor is a scalar constant other than NaN."""
        value = self._values.get(data)
        return value is not None and value.shape == () and bool(value == value)

    def never_nan(self, data: str) -> bool:
        return data in self._numbers or self.is_number(data)

    def number(self, data: str) -> float:
        number: float = self._values[data].item()
        return number

    def _may_be(self, fixed: str, number: float) -> bool:
        """Return whether a fixed tensor may equal a number; assume so for computed tensors."""
        return fixed not in self._values or bool(np.any(self._values[fixed] == number))

    # --- values

    def literal(self, value: Any, kind: SqlType) -> Value:
        """Return the same value in every row; None is null."""
        if value is None:
            zero: Any = "" if kind.tensor == TensorProto.STRING else 0
            return Value(kind, self.constant(zero, kind), self.constant(False, BOOLEAN))
        return Value(kind, self.constant(value, kind))

    def strict(self, values: Sequence[Value]) -> tuple[Mask, Mask]:
        """Return the masks of a function that is null if an argument is null.

        Spark evaluates from left to right and stops at the first null: later arguments do not raise.
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
        """Return the value of a strict function. It is also null where `null`, and Spark refuses it where `wrong`."""
        valid, raises = self.strict(values)
        raises = self.either(raises, self.guarded(wrong, valid))
        if null is not None:
            valid = self.both(valid, self.negated(null))
        return Value(kind, data, valid, raises)

    def merged(self, mask: str, then: Value, otherwise: Value) -> Value:
        """Return `then` where a mask is true, and `otherwise`, of the same type, elsewhere. Only used rows raise."""
        unlike = self.negated(mask)
        raises = self.either(self.guarded(then.raises, mask), self.guarded(otherwise.raises, unlike))
        if self._is_null(otherwise):  # the data below a null may be anything
            return replace(then, valid=self.both(mask, then.valid), raises=raises)
        if self._is_null(then):
            return replace(otherwise, valid=self.both(unlike, otherwise.valid), raises=raises)
        same = then.data == otherwise.data
        data = then.data if same else self.where(mask, then.data, otherwise.data, then.kind)
        valid = self.both(self._implies(mask, then.valid), self._implies(unlike, otherwise.valid))
        return replace(then, data=data, valid=valid, raises=raises)

    def _is_null(self, value: Value) -> bool:
        return value.valid is not None and self.is_number(value.valid) and not self.number(value.valid)

    def _implies(self, mask: str, then: Mask) -> Mask:
        return None if then is None else self.add("Or", self.negated(mask), then)

    def packed(self, parts: Sequence[str], name: str) -> None:
        rows = [self.row(part) for part in parts]
        operator = "Concat" if len(rows) > 1 else "Identity"
        options: dict[str, Any] = {"axis": 0} if len(rows) > 1 else {}
        self._nodes.append(helper.make_node(operator, rows, [name], name=f"output_{name}", **options))

    def model(self, inputs: Described, outputs: Described, name: str, notes: Mapping[str, str]) -> onnx.ModelProto:
        """Return the checked model, without nodes and constants that no output needs."""
        wanted = [output.name for output in outputs]
        nodes = needed(self._scheduled(wanted), wanted)
        used = {tensor for node in nodes for tensor in node.input}
        constants = [constant for constant in self._constants if constant.name in used]
        model = assembled(name, nodes, inputs, outputs, constants)
        helper.set_model_props(model, dict(notes))
        return model

    def _scheduled(self, wanted: Sequence[str]) -> list[onnx.NodeProto]:
        """Return all nodes, with the calls of a stacked function at the same depth merged into a single call.

        The depth of a call is the length of the longest chain of stacked calls before it.
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
        # Ignore known tensors: one that no output needs would be missing from the model.
        before = (self._nodes, self._known, self._negated, self._joint)
        self._nodes, self._known, self._negated, self._joint = [], {}, {}, {}
        arguments, names = [call.input[0] for call in calls], [call.output[0] for call in calls]
        numbers = [next(int(part.i) for part in call.attribute if part.name == "number") for call in calls]
        if len(calls) > 1:
            self._split(function(self, self.add("Concat", *arguments, axis=0), numbers), names)
        else:
            result = function(self, arguments[0], numbers)
            for node in self._nodes:
                node.output[:] = [names[0] if name == result else name for name in node.output]
        nodes, (self._nodes, self._known, self._negated, self._joint) = self._nodes, before
        return nodes


def assembled(
    name: str, nodes: Nodes, inputs: Described, outputs: Described, constants: Sequence[onnx.TensorProto]
) -> onnx.ModelProto:
    domains = {"": OPSET} | {node.domain: ML_OPSET for node in nodes if node.domain}
    model = helper.make_model(
        helper.make_graph(nodes, name, inputs, outputs, constants),
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in domains.items()],
        ir_version=IR_VERSION, producer_name="isthmus",
    )  # fmt: skip
    onnx.checker.check_model(model, full_check=True)
    return model


def needed(nodes: Nodes, wanted: Sequence[str]) -> list[onnx.NodeProto]:
    awaited, backwards = set(wanted), []
    for node in reversed(nodes):
        if awaited.intersection(node.output):
            awaited.update(node.input)
            backwards.append(node)
    return backwards[::-1]
