"""ONNX nodes with unique names, and SQL values built from them: data, a mask of valid rows, and a mask of errors."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import count
from operator import or_
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from isthmus.transforms.rowwise.core.tensors import Operand, Tensor
from isthmus.transforms.rowwise.core.types import BOOLEAN, DOUBLE, LONG, SqlType

OPSET, ML_OPSET, IR_VERSION = 20, 2, 9
"""ONNX versions: the first opset with text functions, the first ML opset with LabelEncoder, and the format."""

_FRACTIONAL = (TensorProto.FLOAT, TensorProto.DOUBLE)
_SIGNLESS = frozenset({"Abs"})
"""Operators that never return -0.0."""
_FOLDED: dict[str, Callable[..., "np.ndarray[Any, Any]"]] = {
    "Neg": np.negative, "Abs": np.abs, "IsNaN": np.isnan, "Equal": np.equal, "Less": np.less,
    "LessOrEqual": np.less_equal, "Greater": np.greater, "And": np.logical_and, "Or": np.logical_or,
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply,
}  # fmt: skip
"""Operators that are folded if all inputs are constants: their results have the same bits everywhere."""
_KINDS = {bool: BOOLEAN, int: LONG, float: DOUBLE}
_DECIDED = {"And": True, "Or": False}
"""Neutral constant of each operator."""
_TOGETHER = "Together"
"""Placeholder for a call of a stacked function, until all its arguments are known."""

Stacked = Callable[[Tensor, Sequence[int]], Tensor]
"""A function of k arguments at once. Takes a tensor of shape (k, n) and k numbers; returns a tensor of that shape."""

Nodes = Sequence[onnx.NodeProto]
Described = Sequence[onnx.ValueInfoProto]
"""Inputs or outputs of a graph."""

Mask = Tensor | None
"""A tensor of booleans, or None for the default: every value valid, no row refused."""


@dataclass(frozen=True)
class Value:
    """The value of an expression in every row. Tensors have shape (1, n), or () if all rows are equal.

    `data` is arbitrary where the value is null. The mask `valid` is true where it is not null (None: everywhere), and
    the mask `raises` where Spark refuses to compute it (None: nowhere).
    """

    kind: SqlType
    data: Tensor
    valid: Mask = None
    raises: Mask = None


class Graph:
    """An ONNX graph under construction; equal nodes exist once. Call `begin` with (1, n) rows after adding inputs."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._count = count()
        self._constants: list[onnx.TensorProto] = []
        self._known: dict[object, Tensor] = {}
        self._fixed: dict[Tensor, bool] = {}
        """Tensors that do not depend on any row; True if they hold floating-point numbers."""
        self._values: dict[Tensor, np.ndarray[Any, Any]] = {}
        """Constants other than texts."""
        self._tensors: dict[object, Tensor] = {}
        self._positive: set[Tensor] = set()
        """Tensors without -0.0."""
        self._numbers: set[Tensor] = set()
        """Tensors without NaN."""
        self._negated: dict[Tensor, Tensor] = {}
        self._parts: dict[Tensor, frozenset[Tensor]] = {}
        """Parts of each conjunction of masks."""
        self._joint: dict[frozenset[Tensor], Tensor] = {}
        """Conjunction by its parts."""
        self.lookups: dict[tuple[Tensor, Mask], tuple[Value, Sequence[tuple[Any, Any]]]] = {}
        """Key and pairs of a map lookup, by the data and mask of the lookup."""
        self._together: list[Stacked] = []
        self.shape = Tensor(self, "")

    def begin(self, rows: Tensor) -> None:
        self.shape = self.add("Shape", rows)

    def plain(self, tensors: Iterable[Tensor]) -> None:
        """Promise that tensors never contain NaN or -0.0, so that simpler nodes suffice for them. Not checked."""
        self._numbers.update(tensors)
        self._positive |= self._numbers

    def add(self, operator: str, *operands: Operand, **attributes: Any) -> Tensor:
        inputs = tuple(part if isinstance(part, Tensor) else self.number(part) for part in operands)
        if (known := self._without(operator, inputs)) is not None:
            return known
        # ONNX Runtime replaces x + 0.0 by x, wrong for -0.0, and (1 / x) * y by y / x, even for whole numbers.
        if operator in ("Add", "Sub"):
            inputs = tuple(
                self.row(part) if self._fixed.get(part) and self._may_be(part, 0) else part for part in inputs
            )
        elif operator == "Div" and inputs[0] in self._fixed and self._may_be(inputs[0], 1):
            inputs = (self.row(inputs[0]), inputs[1])
        key = (operator, inputs, tuple(sorted((name, str(value)) for name, value in attributes.items())))
        if key not in self._known:
            name = f"{operator.lower()}_{next(self._count)}"
            named = [part.name for part in inputs]
            self._nodes.append(helper.make_node(operator, named, [name], name=name, **attributes))
            self._known[key] = tensor = Tensor(self, name)
            if self._fixed.keys() >= set(inputs):
                self._fixed[tensor] = any(map(self._fixed.get, inputs)) or attributes.get("to") in _FRACTIONAL
            if operator in _SIGNLESS:
                self._positive.add(tensor)
        return self._known[key]

    def _without(self, operator: str, inputs: Sequence[Tensor]) -> Tensor | None:
        if operator in _FOLDED and self._values.keys() >= set(inputs):
            with np.errstate(all="ignore"):
                array = np.asarray(_FOLDED[operator](*(self._values[part] for part in inputs)))
            return self.tensor(array, helper.np_dtype_to_tensor_dtype(array.dtype))
        if operator in _DECIDED:
            for constant, mask in (inputs, inputs[::-1]):
                if self.is_number(constant):
                    return mask if self.number_of(constant) == _DECIDED[operator] else constant
        return None

    def input(self, name: str, count: int) -> list[Tensor]:
        names = [f"{name}[{n}]" for n in range(count)]
        if count > 1:
            self._split(name, names)
        return [Tensor(self, part) for part in (names if count > 1 else [name])]

    def _split(self, data: str, names: list[str]) -> None:
        self._nodes.append(
            helper.make_node("Split", [data], names, name=f"split_{data}", axis=0, num_outputs=len(names))
        )

    def stacked(
        self, function: Stacked, argument: Tensor, number: int = 0, *, never_minus_zero: bool = False
    ) -> Tensor:
        """Apply an elementwise `function` to `argument`. Independent calls of the same function are merged into one.

        Merged calls need fewer nodes. The nodes are added only by `model`. It calls `function` with k stacked arguments
        of shape (k, n) and the list of their `number`s, which can select a coefficient per call. With
        `never_minus_zero`, the caller promises that the result is never -0.0.
        """
        if function not in self._together:
            self._together.append(function)
        result = self.add(_TOGETHER, self.row(argument), function=self._together.index(function), number=number)
        if never_minus_zero:
            self._positive.add(result)
        return result

    def number(self, value: float) -> Tensor:
        return self.constant(value, _KINDS[type(value)])

    def constant(self, value: Any, kind: SqlType) -> Tensor:
        return self.tensor(np.asarray(value, kind.numpy), kind.tensor)

    def tensor(self, array: "np.ndarray[Any, Any]", element: int) -> Tensor:
        content = repr(array.tolist()).encode() if element == TensorProto.STRING else array.tobytes()
        key = (element, array.shape, content)
        if key not in self._tensors:
            name = f"constant_{next(self._count)}"
            if element == TensorProto.STRING:
                constant = onnx.TensorProto(name=name, data_type=element, dims=array.shape)
                constant.string_data.extend(str(text).encode() for text in array.reshape(-1).tolist())
            else:
                constant = numpy_helper.from_array(array, name)
            self._constants.append(constant)
            self._tensors[key] = tensor = Tensor(self, name)
            fractional = element in _FRACTIONAL
            if element != TensorProto.STRING:
                self._values[tensor] = array
            if not (fractional and np.any((array == 0) & np.signbit(array))):
                self._positive.add(tensor)
            self._fixed[tensor] = fractional
        return self._tensors[key]

    def cast(self, data: Tensor, kind: SqlType) -> Tensor:
        if self.is_number(data) and (kind.fractional or (kind == LONG and isinstance(self.number_of(data), int))):
            with np.errstate(over="ignore"):
                return self.constant(self._values[data].astype(kind.numpy), kind)
        return self.add("Cast", data, to=kind.tensor)

    # --- masks

    def both(self, *masks: Mask) -> Mask:
        parts = {mask: self._parts.get(mask, frozenset((mask,))) for mask in masks if mask is not None}
        joint: Mask = None
        covered: frozenset[Tensor] = frozenset()
        for mask, part in sorted(parts.items(), key=lambda item: -len(item[1])):
            if not part <= covered:
                covered |= part
                if covered not in self._joint:
                    self._joint[covered] = mask if joint is None else joint & mask
                joint = self._joint[covered]
                self._parts[joint] = covered
        return joint

    def either(self, *masks: Mask) -> Mask:
        named = dict.fromkeys(mask for mask in masks if mask is not None)
        return reduce(or_, named) if named else None

    def negated(self, mask: Tensor) -> Tensor:
        # Without Not: ONNX Runtime would swap the branches of Where(Not(x), a, b).
        if mask not in self._negated:
            negated = mask.equals(False)
            self._negated |= {mask: negated, negated: mask}
        return self._negated[mask]

    def where(self, mask: Tensor, then: Tensor, otherwise: Tensor, kind: SqlType) -> Tensor:
        """Select `then` where a mask is true and `otherwise` elsewhere, without changing a bit of the values.

        Both are of type `kind`. Use it in place of ONNX's Where, which may turn -0.0 into 0.0 in ONNX Runtime, and does
        not take booleans in some runtimes.
        """
        if self.is_number(mask):
            return then if self.number_of(mask) else otherwise
        mask = self.row(mask)
        if kind.tensor == TensorProto.BOOL:
            if self.is_number(otherwise):
                return ~mask | then if self.number_of(otherwise) else mask & then
            if self.is_number(then):
                return mask | otherwise if self.number_of(then) else ~mask & otherwise
            return self._select(mask, then, otherwise, kind)
        if not kind.fractional or then in self._positive:
            return mask.where(then, otherwise)
        if otherwise in self._positive:
            return (~mask).where(otherwise, then)
        return self._select(mask, then, otherwise, kind)

    def _select(self, mask: Tensor, then: Tensor, otherwise: Tensor, kind: SqlType) -> Tensor:
        unlike = ~mask
        if kind.tensor == TensorProto.BOOL:
            return (mask & then) | (unlike & otherwise)
        # The second choice of each `Where` keeps its bits, and a product with 1 does, too.
        unit = self.constant(1, kind)
        return mask.where(unit, otherwise) * unlike.where(unit, then)

    def guarded(self, raises: Mask, mask: Mask) -> Mask:
        return raises if mask is None or raises is None else raises & mask

    def row(self, data: Tensor) -> Tensor:
        return self.add("Expand", data, self.shape) if data in self._fixed else data

    def is_number(self, data: Tensor) -> bool:
        value = self._values.get(data)
        return value is not None and value.shape == () and bool(value == value)

    def never_nan(self, data: Tensor) -> bool:
        return data in self._numbers or self.is_number(data)

    def number_of(self, data: Tensor) -> float:
        number: float = self._values[data].item()
        return number

    def _may_be(self, fixed: Tensor, number: float) -> bool:
        return fixed not in self._values or bool(np.any(self._values[fixed] == number))

    # --- values

    def literal(self, value: Any, kind: SqlType) -> Value:
        if value is None:
            zero: Any = "" if kind.tensor == TensorProto.STRING else 0
            return Value(kind, self.constant(zero, kind), self.number(False))
        return Value(kind, self.constant(value, kind))

    def strict(self, values: Sequence[Value]) -> tuple[Mask, Mask]:
        """Return the masks `valid` and `raises` of a function that is null if one of its arguments `values` is null.

        `valid` is true where no argument is null, and `raises` where an argument is an error. Like Spark, evaluates the
        arguments from left to right up to the first null, so errors of later arguments do not count.
        """
        valid: Mask = None
        raises: Mask = None
        for value in values:
            raises = self.either(raises, self.guarded(value.raises, valid))
            valid = self.both(valid, value.valid)
        return valid, raises

    def result(
        self, kind: SqlType, data: Tensor, values: Sequence[Value], *, null: Mask = None, wrong: Mask = None
    ) -> Value:
        """Wrap the tensor `data`, which a rule has computed from the arguments `values`, as a Value of type `kind`.

        A row is null where an argument is null or the mask `null` is true. A row is an error where an argument before
        the first null is an error, or where the mask `wrong` is true and no argument is null.
        """
        valid, raises = self.strict(values)
        raises = self.either(raises, self.guarded(wrong, valid))
        if null is not None:
            valid = self.both(valid, ~null)
        return Value(kind, data, valid, raises)

    def merged(self, mask: Tensor, then: Value, otherwise: Value) -> Value:
        unlike = ~mask
        raises = self.either(self.guarded(then.raises, mask), self.guarded(otherwise.raises, unlike))
        if self._is_null(otherwise):  # the data below a null may be anything
            return replace(then, valid=self.both(mask, then.valid), raises=raises)
        if self._is_null(then):
            return replace(otherwise, valid=self.both(unlike, otherwise.valid), raises=raises)
        same = then.data == otherwise.data
        data = then.data if same else self.where(mask, then.data, otherwise.data, then.kind)
        valid = self.both(then.valid and unlike | then.valid, otherwise.valid and mask | otherwise.valid)
        return replace(then, data=data, valid=valid, raises=raises)

    def _is_null(self, value: Value) -> bool:
        return value.valid is not None and self.is_number(value.valid) and not self.number_of(value.valid)

    def packed(self, parts: Sequence[Tensor], name: str) -> None:
        rows = [self.row(part).name for part in parts]
        operator = "Concat" if len(rows) > 1 else "Identity"
        options: dict[str, Any] = {"axis": 0} if len(rows) > 1 else {}
        self._nodes.append(helper.make_node(operator, rows, [name], name=f"output_{name}", **options))

    def model(self, inputs: Described, outputs: Described, name: str, notes: Mapping[str, str]) -> onnx.ModelProto:
        wanted = [output.name for output in outputs]
        nodes = needed(self._scheduled(wanted), wanted)
        used = {tensor for node in nodes for tensor in node.input}
        constants = [constant for constant in self._constants if constant.name in used]
        model = assembled(name, nodes, inputs, outputs, constants)
        helper.set_model_props(model, dict(notes))
        return model

    def _scheduled(self, wanted: Sequence[str]) -> list[onnx.NodeProto]:
        """Return the needed nodes in order. Independent calls of a stacked function are merged into one call.

        Calls are merged if equally many stacked calls come before them.
        """
        plain: dict[int, list[onnx.NodeProto]] = defaultdict(list)
        calls: dict[tuple[int, int], list[onnx.NodeProto]] = defaultdict(list)
        depths: dict[str, int] = {}
        # Stacked functions may need the shape, even if no other node does.
        for node in needed(self._nodes, [*wanted, self.shape.name]):
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
        arguments = [Tensor(self, call.input[0]) for call in calls]
        names = [call.output[0] for call in calls]
        numbers = [next(int(part.i) for part in call.attribute if part.name == "number") for call in calls]
        if len(calls) > 1:
            self._split(function(self.add("Concat", *arguments, axis=0), numbers).name, names)
        else:
            result = function(arguments[0], numbers)
            for node in self._nodes:
                node.output[:] = [names[0] if name == result.name else name for name in node.output]
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
