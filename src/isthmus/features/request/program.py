"""Turns an ONNX graph into Python steps on single values (`Operation`, `SlotArray`), to compute a single row fast."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, takewhile
from math import prod
from operator import add, getitem
from typing import Any, NamedTuple

import numpy as np

from isthmus.features.request.kernels import Function, function
from isthmus.features.request.onnxbytes import ELEMENTS, NUMPY, OnnxNode, OnnxTensor, UnreadableGraph, one_node_model

# When a graph is loaded, its tensors become arrays of slots, one slot per element. NumPy then performs every operation
# that only moves elements, and constants are computed. A row fills the input slots, and the steps fill the remaining
# ones.
#
# The runtime computes functions that no standard defines to the last bit, such as logarithms, in a graph of that node
# alone with tensors of the same shapes. It also computes patterns for which Python is slower. Steps needed by only one
# side of a choice run only for that side.

INEXACT = frozenset({"Exp", "Log", "Pow", "Sin", "Cos"})
"""Functions that no standard defines to the last bit."""
_PREDICATES = frozenset(
    {"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf", "RegexFullMatch"}
)
_SAME = frozenset({("float", "double"), ("int32", "int64")})
"""Casts between types that Python represents the same way."""
_DEEPEST = 20
"""Maximum depth of nested choices."""

Slots = list[Any]
Program = Sequence[tuple[Any, ...]]
"""Steps in order, each a tuple of four:

* function of two values, slot of the result, slot of each value;
* None, slot of the result, None, (input slots, kernel, slot of the kernel's result, index in that result);
* None, slot of the result, slot of a choice's condition, (for false, for true): each side has its own steps and the
  slot of its value.
"""
Session = Callable[[bytes], Any]
"""Creates a session of a model."""
_Path = tuple[tuple[int, int], ...]
"""Sides of nested choices: the slot of each choice, and the number of its input."""


def follow(program: Program, slots: Slots) -> None:
    for apply, out, first, second in program:
        if apply is not None:
            slots[out] = apply(slots[first], slots[second])
        elif first is None:
            inputs, kernel, results, place = second
            if slots[results] is None:
                slots[results] = kernel([slots[slot] for slot in inputs])
            slots[out] = slots[results][place]
        else:
            before, side = second[slots[first]]
            if before:
                follow(before, slots)
            slots[out] = slots[side]


@dataclass(frozen=True)
class SlotArray:
    """A tensor whose elements are slots: indices in the list of values of one row."""

    element: str
    slots: np.ndarray[Any, np.dtype[np.intp]]

    def listed(self) -> list[int]:
        slots: list[int] = self.slots.reshape(-1).tolist()
        return slots


@dataclass(frozen=True)
class Operation:
    """An ONNX operator on operands of an element type. For a Where, `element` is the type of both sides.

    In `attributes`, "to" of a cast is an element type, and "table" of a Gather holds the elements.
    """

    name: str
    element: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> str:
        if self.name in _PREDICATES:
            return "bool"
        output: str = {"Cast": self.attributes.get("to", ""), "LabelEncoder": "int64"}.get(self.name, self.element)
        return output


class Listed(NamedTuple):
    """A step: its operation, the slots of its operands, and the slot of the result."""

    operation: Operation
    operands: tuple[int, ...]
    out: int


@dataclass(frozen=True)
class _Step:
    """A step that fills the slot `out` with the result of `operation` on the slots `operands`.

    Attributes:
        inputs: slots that it reads; for a choice, the condition and the slots for true and for false.
        apply: function of two values; None for a choice.
        kernel: replaces `apply`; takes the values of all inputs and returns the values of several slots.
        results: slot of the kernel's result, which those slots share.
        place: index of the value in that result.
    """

    out: int
    operation: Operation
    operands: tuple[int, ...]
    inputs: tuple[int, ...]
    apply: Function | None = None
    kernel: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    results: int = -1
    place: int = 0


class ProgramBuilder:
    """Converts an ONNX graph to a program: call `open` for each input tensor, then `add`, then `program`."""

    def __init__(self, session: Session) -> None:
        self._session = cache(session)
        self._slots: Slots = []
        self._steps: list[_Step] = []
        self._inputs: set[int] = set()
        self._open: set[int] = set()
        """The slots whose values differ from row to row."""

    @property
    def calls(self) -> int:
        return len({step.results for step in self._steps if step.kernel is not None})

    def open(self, element: str, rows: int, columns: int = 1) -> SlotArray:
        slots = np.arange(rows * columns) + len(self._slots)
        self._slots += [None] * slots.size
        self._open.update(slots.tolist())
        self._inputs.update(slots.tolist())
        return SlotArray(element, slots.reshape(rows, columns))

    def constant(self, tensor: OnnxTensor) -> SlotArray:
        slots = np.arange(tensor.data.size) + len(self._slots)
        self._slots += tensor.data.reshape(-1).tolist()
        return SlotArray(tensor.element, slots.reshape(tensor.data.shape))

    def _fixed(self, part: SlotArray) -> bool:
        return self._open.isdisjoint(part.listed())

    def _value(self, part: SlotArray) -> Any:
        if not self._fixed(part):
            raise UnreadableGraph("a shape or a table that depends on a row")
        return np.array([self._slots[slot] for slot in part.listed()]).reshape(part.slots.shape).tolist()

    def add(
        self, nodes: Sequence[OnnxNode], constants: Mapping[str, OnnxTensor], inputs: Mapping[str, SlotArray]
    ) -> dict[str, SlotArray]:
        parts = {**inputs, **{name: self.constant(tensor) for name, tensor in constants.items()}}
        for node in nodes:
            if not node.inputs or not parts.keys() >= {*node.inputs}:
                raise UnreadableGraph(f"the inputs of {node.operator}")
            parts |= zip(node.outputs, self._node(node, [parts[name] for name in node.inputs]), strict=True)
        return parts

    def _node(self, node: OnnxNode, inputs: Sequence[SlotArray]) -> list[SlotArray]:
        first, slots, attributes = inputs[0], inputs[0].slots, node.attributes
        match node.operator:
            case "Identity":
                return [first]
            case "Split" if len(inputs) == 1:
                rows = np.split(slots, len(node.outputs), attributes.get("axis", 0))
                return [SlotArray(first.element, part) for part in rows]
            case "Concat":
                return [SlotArray(first.element, np.concatenate([part.slots for part in inputs], attributes["axis"]))]
            case "Transpose":
                return [SlotArray(first.element, slots.transpose(attributes.get("perm")))]
            case "Squeeze" if len(inputs) == 2:
                return [SlotArray(first.element, np.squeeze(slots, tuple(self._value(inputs[1]))))]
            case "Unsqueeze":
                return [SlotArray(first.element, np.expand_dims(slots, tuple(self._value(inputs[1]))))]
            case "Shape":
                return [self.constant(OnnxTensor("int64", np.array(slots.shape)))]
            case "Expand":
                shape = np.broadcast_shapes(slots.shape, tuple(self._value(inputs[1])))
                return [SlotArray(first.element, np.broadcast_to(slots, shape))]
            case "Slice" if len(inputs) == 3:
                start, end = map(self._value, inputs[1:])
                return [SlotArray(first.element, slots[tuple(map(slice, start, end))])]
            case "Gather":
                return [self._gathered(first, inputs[1], attributes.get("axis", 0))]
            case "Where":
                return [self._where(*inputs)]
            case name if name in INEXACT:
                return [self._by_runtime(node, Operation(name, first.element, attributes), inputs)]
        return [self._elementwise(node, inputs)]

    def _gathered(self, table: SlotArray, places: SlotArray, axis: int) -> SlotArray:
        if self._fixed(places):
            return SlotArray(table.element, np.take(table.slots, self._value(places), axis))
        if table.slots.ndim != 1:
            raise UnreadableGraph("a table of tables")
        # Negative numbers count from the end, as in Python.
        values = self._value(table)
        operation = Operation("Gather", table.element, {"table": values})
        return self._mapped(operation, getitem, self._single(table.element, values), places, operands=slice(1, 2))

    def _single(self, element: str, value: Any) -> SlotArray:
        self._slots.append(value)
        return SlotArray(element, np.array(len(self._slots) - 1))

    def _where(self, condition: SlotArray, yes: SlotArray, no: SlotArray) -> SlotArray:
        if yes.element in ("double", "float"):
            # The runtime turns -0.0 of the first choice into 0.0; for the second, if only the first has many elements.
            zero = self._single(yes.element, 0.0)
            if condition.slots.size == no.slots.size == 1 < yes.slots.size:
                no = self.elementwise(Operation("Add", yes.element), add, no, zero)
            else:
                yes = self.elementwise(Operation("Add", yes.element), add, yes, zero)
        operation = Operation("Where", yes.element)
        slots = np.broadcast_arrays(condition.slots, yes.slots, no.slots)
        out = [self._choice(operation, triple) for triple in zip(*(part.flat for part in slots), strict=True)]
        return SlotArray(yes.element, np.array(out, np.intp).reshape(slots[0].shape))

    def _choice(self, operation: Operation, slots: tuple[int, ...]) -> int:
        condition, yes, no = map(int, slots)
        if condition in self._open:
            inputs = condition, yes, no
            return self._added(_Step(len(self._slots), operation, inputs, inputs))
        return yes if self._slots[condition] else no

    def _elementwise(self, node: OnnxNode, inputs: Sequence[SlotArray]) -> SlotArray:
        name, element, attributes = node.operator, inputs[0].element, node.attributes
        if name == "Cast":
            output = ELEMENTS.get(attributes["to"], "")
            if output == element or (element, output) in _SAME:
                return SlotArray(output, inputs[0].slots)
            attributes = {"to": output}
        operation = Operation(name, element, attributes)
        known = function(name, element, attributes)
        if known is None and name == "RegexFullMatch":
            return self._by_runtime(node, operation, inputs)
        if known is None or len(inputs) > 2:
            raise UnreadableGraph(f"{name} of {element}")
        apply, second = known
        constant = [] if second is None else [self._single(operation.output, second)]
        return self._mapped(operation, apply, *inputs, *constant, operands=slice(len(inputs)))

    def elementwise(self, operation: Operation, apply: Function, left: SlotArray, right: SlotArray) -> SlotArray:
        return self._mapped(operation, apply, left, right, operands=slice(2))

    def _mapped(self, operation: Operation, apply: Function, *inputs: SlotArray, operands: slice) -> SlotArray:
        left, right = np.broadcast_arrays(inputs[0].slots, inputs[-1].slots)
        pairs = zip(left.reshape(-1).tolist(), right.reshape(-1).tolist(), strict=True)
        out = [self._added(_Step(len(self._slots), operation, pair[operands], pair, apply)) for pair in pairs]
        return SlotArray(operation.output, np.array(out, np.intp).reshape(left.shape))

    def _added(self, step: _Step) -> int:
        self._slots.append(None)
        # A value that is the same for every row is computed at once, without a step.
        if not self._open.isdisjoint(step.inputs):
            self._open.add(step.out)
            self._steps.append(step)
            return step.out
        values = [self._slots[slot] for slot in step.inputs]
        if step.apply is not None:
            self._slots[step.out] = step.apply(*values)
        elif step.kernel is not None:
            self._slots[step.out] = step.kernel(values)[step.place]
        return step.out

    def _by_runtime(self, node: OnnxNode, operation: Operation, inputs: Sequence[SlotArray]) -> SlotArray:
        """Let ONNX Runtime compute a node: all elements in one call, when the first element is needed."""
        element, shape = operation.output, np.broadcast_shapes(*(part.slots.shape for part in inputs))
        tensors = [(part.element, part.slots.shape) for part in inputs]
        run = self._session(one_node_model(node, tensors, element, shape)).run
        ends = [*accumulate(part.slots.size for part in inputs)]
        feeds = [(str(place), slice(end - part.slots.size, end), NUMPY[part.element], part.slots.shape)
                 for place, (part, end) in enumerate(zip(inputs, ends, strict=True))]  # fmt: skip

        def kernel(values: Sequence[Any]) -> Sequence[Any]:
            fed = {name: np.array(values[part], dtype).reshape(shape) for name, part, dtype, shape in feeds}
            result: list[Any] = run(["y"], fed)[0].reshape(-1).tolist()
            return result

        slots, results = tuple(slot for part in inputs for slot in part.listed()), len(self._slots)
        self._slots.append(None)
        operands = [*zip(*(np.broadcast_to(part.slots, shape).reshape(-1).tolist() for part in inputs), strict=True)]
        out = [self._added(_Step(len(self._slots), operation, operands[place], slots, None, kernel, results, place))
               for place in range(prod(shape))]  # fmt: skip
        return SlotArray(element, np.array(out, np.intp).reshape(shape))

    def steps_for(self, goals: Sequence[int]) -> list[Listed]:
        needed, steps = {*goals}, []
        for step in reversed(self._steps):
            if step.out in needed:
                needed.update(step.operands)
                steps.append(Listed(step.operation, step.operands, step.out))
        return steps[::-1]

    def fixed_value(self, slot: int) -> Any:
        return self._slots[slot]

    def program(self, goals: Sequence[int]) -> tuple[Program, Slots, dict[int, int]]:
        """Return a program for `follow` that computes only the slots `goals` and the steps that they need.

        The second result has the initial values. Copy it for each row, since `follow` writes results into it. The third
        result maps each slot of this builder (an index in the list of a row's values) to its index in that shorter
        list.
        """
        paths: dict[int, _Path] = dict.fromkeys(goals, ())
        for step in reversed(self._steps):
            if (path := paths.get(step.out)) is not None:
                if step.kernel is not None:
                    paths[step.results] = ()
                choice = step.apply is None and step.kernel is None and len(path) < _DEEPEST
                for side, slot in enumerate(step.inputs):
                    branch = (*path, (step.out, side)) if choice and side else path
                    paths[slot] = _common(paths[slot], branch) if slot in paths else branch
        places = {slot: place for place, slot in enumerate(sorted(paths.keys() | self._inputs))}
        blocks: defaultdict[_Path, list[tuple[Any, ...]]] = defaultdict(list)
        for step in self._steps:
            if (path := paths.get(step.out)) is None:
                continue
            out, inputs = places[step.out], [places[slot] for slot in step.inputs]
            if step.apply is not None:
                blocks[path].append((step.apply, out, *inputs))
            elif step.kernel is not None:
                blocks[path].append((None, out, None, (inputs, step.kernel, places[step.results], step.place)))
            else:
                before = [blocks.pop((*path, (step.out, side)), []) for side in (2, 1)]
                blocks[path].append((None, out, inputs[0], tuple(zip(before, inputs[:0:-1], strict=True))))
        return blocks[()], [self._slots[slot] for slot in places], places


def _common(left: _Path, right: _Path) -> _Path:
    return tuple(side for side, _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))
