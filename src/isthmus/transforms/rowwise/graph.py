"""ONNX nodes under fresh names, and SQL values made of them: data, where they are null, where Spark would refuse."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from isthmus.transforms.rowwise.types import BOOLEAN, SqlType

OPSET, IR_VERSION = 20, 9
"""The first ones with text functions."""
TABLES, TABLES_OPSET = "ai.onnx.ml", 2
"""The operators that look values up."""

_FRACTIONAL = (TensorProto.FLOAT, TensorProto.DOUBLE)

Mask = str | None
"""A tensor of booleans, or None where all are as usual: every value valid, no row refused."""


@dataclass(frozen=True)
class Value:
    """The value of an expression in every row. Tensors have shape (n,), or () where all rows have the same.

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
    """Nodes and constants. The same node on the same inputs is there once.

    Args:
        rows: a tensor of shape (n,).
    """

    def __init__(self, rows: str) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._known: dict[object, str] = {}
        self._fixed: dict[str, bool] = {}
        """What does not depend on any row, and whether it is a floating-point number."""
        self._numbers: dict[str, float] = {}
        """Constants that are one number each."""
        self._positive: set[str] = set()
        """Constants that are no -0.0."""
        self.shape = self.add("Shape", rows)

    def add(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """The output of a node."""
        # ONNX Runtime takes x + 0.0 for x, which a -0.0 is not, and (1 / x) * y for y / x, also of whole numbers.
        if operator in ("Add", "Sub") and not self._fixed.keys() >= set(inputs):
            inputs = tuple(
                self.row(name) if self._fixed.get(name) and self._may_be(name, 0) else name for name in inputs
            )
        elif operator == "Div" and inputs[0] in self._fixed and self._may_be(inputs[0], 1):
            inputs = (self.row(inputs[0]), inputs[1])
        key = (operator, inputs, tuple(sorted((name, str(value)) for name, value in attributes.items())))
        if key not in self._known:
            name = f"{operator.lower()}_{len(self._known)}"
            self._nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
            self._known[key] = name
            if self._fixed.keys() >= set(inputs):
                self._fixed[name] = any(map(self._fixed.get, inputs)) or attributes.get("to") in _FRACTIONAL
        return self._known[key]

    def constant(self, value: Any, kind: SqlType) -> str:
        """A tensor of shape (), or as the value has it."""
        array = np.asarray(value, kind.numpy)
        return self.tensor(array, kind.tensor)

    def tensor(self, array: "np.ndarray[Any, Any]", element: int) -> str:
        """A constant tensor."""
        content = repr(array.tolist()).encode() if element == TensorProto.STRING else array.tobytes()
        key = (element, array.shape, content)
        if key not in self._known:
            name = f"constant_{len(self._known)}"
            if element == TensorProto.STRING:
                tensor = onnx.TensorProto(name=name, data_type=element, dims=array.shape)
                tensor.string_data.extend(str(text).encode() for text in array.reshape(-1).tolist())
            else:
                tensor = numpy_helper.from_array(array, name)
            self._constants.append(tensor)
            self._known[key] = name
            fractional = element in _FRACTIONAL
            if array.shape == () and element != TensorProto.STRING:
                self._numbers[name] = array.item()
            if not (fractional and np.any((array == 0) & np.signbit(array))):
                self._positive.add(name)
            self._fixed[name] = fractional
        return self._known[key]

    def cast(self, data: str, kind: SqlType) -> str:
        """The numbers of a tensor in the element type of another type."""
        return self.add("Cast", data, to=kind.tensor)

    # --- masks

    def both(self, *masks: Mask) -> Mask:
        """Where all masks are true; None is true everywhere."""
        return self._joined("And", masks)

    def either(self, *masks: Mask) -> Mask:
        """Where any mask is true; None is false everywhere."""
        return self._joined("Or", masks)

    def _joined(self, operator: str, masks: Sequence[Mask]) -> Mask:
        named = list(dict.fromkeys(mask for mask in masks if mask is not None))
        return reduce(lambda one, other: self.add(operator, one, other), named) if named else None

    def negated(self, mask: str) -> str:
        """Where a mask is false. No Not: ONNX Runtime turns Where(Not(x), a, b) around, see `where`."""
        return self.add("Equal", mask, self.constant(False, BOOLEAN))

    def where(self, mask: str, one: str, other: str, kind: SqlType) -> str:
        """One tensor where a mask is true, another one elsewhere, to the last bit.

        Runtimes have no such kernel for booleans, and ONNX Runtime's gives 0.0 for a -0.0 of its first choice.
        """
        if kind.tensor == TensorProto.BOOL:
            return self.add("Or", self.add("And", mask, one), self.add("And", self.negated(mask), other))
        if not kind.fractional or one in self._positive:
            return self.add("Where", mask, one, other)
        if other in self._positive:
            return self.add("Where", self.negated(mask), other, one)
        zero, plus, minus = (self.constant(number, kind) for number in (0.0, 1.0, -1.0))
        signless = self.add("Equal", one, zero)
        below = self.add("Less", self.add("Div", plus, one), zero)
        lost = self.add("And", mask, self.add("And", signless, below))
        return self.add("Mul", self.add("Where", mask, one, other), self.add("Where", lost, minus, plus))

    def guarded(self, raises: Mask, mask: Mask) -> Mask:
        """What raises, but only where a mask (None: everywhere) is true."""
        return raises if mask is None or raises is None else self.add("And", raises, mask)

    def row(self, data: str) -> str:
        """A tensor with shape (n,) also where all rows have the same value, for kernels that take no scalar."""
        return self.add("Expand", data, self.shape) if data in self._fixed else data

    def _may_be(self, fixed: str, number: float) -> bool:
        """Whether what does not depend on any row may be a number: what is computed of constants may be any."""
        return fixed not in self._numbers or self._numbers[fixed] == number

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
        data = one.data if one.data == other.data else self.where(mask, one.data, other.data, one.kind)
        unlike = self.negated(mask)
        valid = self.both(self._implies(mask, one.valid), self._implies(unlike, other.valid))
        raises = self.either(self.guarded(one.raises, mask), self.guarded(other.raises, unlike))
        return replace(one, data=data, valid=valid, raises=raises)

    def _implies(self, mask: str, then: Mask) -> Mask:
        return None if then is None else self.add("Or", self.negated(mask), then)

    def model(
        self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto], name: str
    ) -> onnx.ModelProto:
        """The whole, checked."""
        opsets = [helper.make_opsetid("", OPSET)]
        if any(node.domain == TABLES for node in self._nodes):
            opsets.append(helper.make_opsetid(TABLES, TABLES_OPSET))
        model = helper.make_model(
            helper.make_graph(self._nodes, name, inputs, outputs, self._constants),
            opset_imports=opsets, ir_version=IR_VERSION, producer_name="isthmus",
        )  # fmt: skip
        onnx.checker.check_model(model, full_check=True)
        return model

    def named(self, data: str, name: str) -> None:
        """Gives a tensor a name of its own."""
        self._nodes.append(helper.make_node("Identity", [data], [name], name=f"output_{name}"))
