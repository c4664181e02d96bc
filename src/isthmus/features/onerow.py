"""One row through a graph without the runtime, which takes longer to go from node to node than for what they compute.

No second definition: what is taken here is the graph of the contract, node by node, and what comes out has the runtime's
bits, any NaN for a NaN. When a graph is loaded, its tensors become arrays of slots, one for each of their elements: so
whatever only moves elements is done then, by NumPy, and constants are computed. What is left are steps from single
values to single values. A row fills the slots that it gives, and the steps the others.

What no standard fixes to the last bit, logarithms and their like, is still computed by the runtime, in a graph of that
node alone with tensors of the same shapes. Where only one side of a choice needs something, only that side computes it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from math import prod
from operator import add, itemgetter
from typing import Any

import numpy as np

from isthmus.features.columns import Values
from isthmus.features.onnxfile import ELEMENTS, NUMPY, Node, Tensor, UnreadableError, read, single
from isthmus.features.rowgraph import MASKS, VALID, Computed, Layout, found, given
from isthmus.features.scalars import function

_RUNTIMES = frozenset({"Exp", "Log", "Pow", "Sin", "Cos"})
_DEEPEST, _SHORT = 20, 2
"""How many choices stand within each other at most; how many steps are taken without a look at whether they are needed."""

Slots = list[Any]
Session = Callable[[bytes], Any]
"""Makes a session of a model."""
_Path = tuple[tuple[int, int], ...]
"""Sides of choices within each other: where the choice goes, and which side of it."""


@dataclass(frozen=True)
class _Part:
    """A tensor: its element type, and a slot for each of its elements."""

    element: str
    slots: np.ndarray[Any, np.dtype[np.intp]]


@dataclass(frozen=True)
class _Step:
    """How a slot is filled.

    Attributes:
        out: the slot.
        takes: the slots that are needed; of a choice its condition, what is taken where that holds, and otherwise.
        apply: a function of two values; None for a choice.
        kernel: a function of all slots, instead of that.
    """

    out: int
    takes: tuple[int, ...]
    apply: Callable[[Any, Any], Any] | None = None
    kernel: Callable[[Slots], Any] | None = None


class OneRow:
    """A graph, ready to compute one row at a time. Threads may share it.

    Args:
        graph: the graph.
        layout: what is where in it.
        session: makes a session of a graph.

    Raises:
        UnreadableError: it has arrays, or what is not known here. The runtime computes such a graph.
    """

    def __init__(self, graph: bytes, layout: Layout, session: Session) -> None:
        if layout.arrays:
            raise UnreadableError("arrays")
        steps = _Steps(session)
        nodes, constants = read(graph)
        inputs = {given(element): (element, len(names)) for element, names in layout.given.items()}
        inputs[given(VALID)] = "bool", len(layout.masks)
        parts = {name: steps.open(*one) for name, one in inputs.items()} | {
            name: steps.constant(tensor) for name, tensor in constants.items()
        }
        for node in nodes:
            outputs = steps.node(node, [parts[name] for name in node.inputs])
            parts |= zip(node.outputs, outputs, strict=True)
        masks = dict(zip(layout.masks, parts[given(VALID)].slots[:, 0].tolist(), strict=True))
        self._taken = [(name, np.dtype(_COLUMN.get(element, NUMPY[element])), slot, masks[name])
                       for element, names in layout.given.items()
                       for name, slot in zip(names, parts[given(element)].slots[:, 0].tolist(), strict=True)]  # fmt: skip
        self._texts = [(slot, mask) for _, dtype, slot, mask in self._taken if dtype == object]
        self._truths = [slot for _, dtype, slot, _ in self._taken if dtype == np.uint8]
        results = {element: parts[found(element)].slots[:, 0].tolist() for element in layout.found}
        said = parts[MASKS].slots[:, 0].tolist()
        valid, raises = (dict(zip(layout.fields, half, strict=True))
                         for half in (said[: len(layout.fields)], said[len(layout.fields) :]))  # fmt: skip
        self._results = [
            (np.dtype(_COLUMN.get(element, NUMPY[element])),
             [(name, slot, valid[name], raises[name]) for name, slot in zip(names, results[element], strict=True)])
            for element, names in layout.found.items()
        ]  # fmt: skip
        self._program = steps.program([*said, *(slot for slots in results.values() for slot in slots)])
        self._slots = steps.slots

    def run(self, columns: Mapping[str, Values]) -> Computed | None:
        """Computes a row; None where there is not one, or a column has another NumPy type than its own.

        Args:
            columns: as for `RowGraph.run`.
        """
        slots = self._slots.copy()
        for name, dtype, slot, mask in self._taken:
            column = columns[name]
            data = column.data
            if data.dtype is not dtype or len(data) != 1:
                return None
            slots[slot], slots[mask] = data.item(), column.valid.item()
        for slot, mask in self._texts:
            if not slots[mask]:
                slots[slot] = ""
        for slot in self._truths:
            slots[slot] = bool(slots[slot])
        _follow(self._program, slots)
        there, missing = _THERE.copy(), _MISSING.copy()
        values, refused = {}, {}
        for dtype, fields in self._results:
            nothing = None if dtype == object else 0
            kept = [slots[valid] and not slots[raises] for _, _, valid, raises in fields]
            data = np.array([slots[slot] if keep else nothing for (_, slot, _, _), keep in zip(fields, kept)], dtype)
            for place, (name, _, _, raises) in enumerate(fields):
                values[name] = Values(data[place : place + 1], there if kept[place] else missing)
                if slots[raises]:
                    refused[name] = _THERE.copy()
        return Computed(values, refused)


_COLUMN: Mapping[str, Any] = {"bool": np.uint8}
"""Where a column has another type than the tensor."""
_THERE, _MISSING = np.array([True]), np.array([False])


def _follow(program: Sequence[tuple[Any, ...]], slots: Slots) -> None:
    """Takes steps, in the form in which `_Steps.program` gives them."""
    for apply, out, first, second in program:
        if apply is not None:
            slots[out] = apply(slots[first], slots[second])
        elif first is None:
            slots[out] = second(slots)
        else:
            before, chosen = second[slots[first]]
            if before:
                _follow(before, slots)
            slots[out] = slots[chosen]


class _Steps:
    """The steps of a graph, node by node."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.slots: Slots = []
        self._steps: list[_Step] = []
        self._open: set[int] = set()
        """Slots that are not the same for every row."""

    def open(self, element: str, rows: int) -> _Part:
        """A tensor that a row gives."""
        start = len(self.slots)
        self.slots += [None] * rows
        self._open.update(range(start, start + rows))
        return _Part(element, np.arange(start, start + rows).reshape(rows, 1))

    def constant(self, tensor: Tensor) -> _Part:
        """A tensor that is the same for every row."""
        start = len(self.slots)
        self.slots += tensor.data.reshape(-1).tolist()
        return _Part(tensor.element, np.arange(start, len(self.slots)).reshape(tensor.data.shape))

    def _value(self, part: _Part) -> Any:
        """What is in a constant tensor."""
        if not self._open.isdisjoint(part.slots.reshape(-1).tolist()):
            raise UnreadableError("a shape that depends on values")
        return np.array([self.slots[slot] for slot in part.slots.reshape(-1)]).reshape(part.slots.shape)

    def node(self, node: Node, inputs: Sequence[_Part]) -> list[_Part]:
        """What a node gives."""
        first, slots = inputs[0], inputs[0].slots
        match node.operator:
            case "Identity":
                return [first]
            case "Split":
                return [_Part(first.element, part) for part in np.split(slots, len(node.outputs), node.attributes["axis"])]
            case "Concat":
                return [_Part(first.element, np.concatenate([part.slots for part in inputs], node.attributes["axis"]))]
            case "Shape":
                return [self.constant(Tensor("int64", np.array(slots.shape)))]
            case "Expand":
                shape = np.broadcast_shapes(slots.shape, tuple(self._value(inputs[1]).tolist()))
                return [_Part(first.element, np.broadcast_to(slots, shape))]
            case "Slice":
                start, end = (self._value(part).tolist() for part in inputs[1:])
                return [_Part(first.element, slots[tuple(map(slice, start, end))])]
            case "Gather":
                return [self._gathered(first, inputs[1], node.attributes.get("axis", 0))]
            case "Where":
                return [self._chosen(*inputs)]
            case name if name in _RUNTIMES:
                return [self._computed(node, inputs)]
        return [self._each(node, inputs)]

    def _gathered(self, table: _Part, places: _Part, axis: int) -> _Part:
        if self._open.isdisjoint(places.slots.reshape(-1).tolist()):
            return _Part(table.element, np.take(table.slots, self._value(places), axis))
        values = self._value(table).tolist()
        if table.slots.ndim != 1:
            raise UnreadableError("a table of tables")
        # A table of Python's takes places from the end, too, as that of a graph.
        return self._mapped(table.element, lambda place, _: values[place], places)

    def _chosen(self, condition: _Part, one: _Part, other: _Part) -> _Part:
        if one.element in ("double", "float"):
            # The runtime makes 0.0 of a -0.0 that is its first choice.
            one = self._mapped(one.element, add, one, self.constant(Tensor(one.element, np.array(0.0))))
        asked, yes, no = np.broadcast_arrays(condition.slots, one.slots, other.slots)
        out = [self._choice(*three) for three in zip(asked.flat, yes.flat, no.flat, strict=True)]
        return _Part(one.element, np.array(out, np.intp).reshape(asked.shape))

    def _choice(self, condition: int, yes: int, no: int) -> int:
        if condition in self._open:
            return self._added((int(condition), int(yes), int(no)), None)
        return int(yes if self.slots[condition] else no)

    def _each(self, node: Node, inputs: Sequence[_Part]) -> _Part:
        """A function of one or two values, for each of them."""
        attributes = dict(node.attributes)
        if node.operator == "Cast":
            attributes["to"] = ELEMENTS.get(attributes["to"], "")
        apply = function(node.operator, inputs[0].element, attributes)
        if apply is None or len(inputs) > 2:
            raise UnreadableError(f"{node.operator} of {inputs[0].element}")
        element = "bool" if node.operator in _ASKING else _GIVEN.get(node.operator, inputs[0].element)
        return self._mapped(attributes["to"] if node.operator == "Cast" else element, apply, *inputs)

    def _mapped(self, element: str, apply: Callable[[Any, Any], Any], *inputs: _Part) -> _Part:
        sides = np.broadcast_arrays(inputs[0].slots, inputs[-1].slots)
        out = [self._added((int(one), int(other)), apply) for one, other in zip(*(side.flat for side in sides))]
        return _Part(element, np.array(out, np.intp).reshape(sides[0].shape))

    def _added(
        self,
        takes: tuple[int, ...],
        apply: Callable[[Any, Any], Any] | None,
        kernel: Callable[[Slots], Any] | None = None,
    ) -> int:
        """The slot of a new step, or of a constant that it would give."""
        out = len(self.slots)
        if self._open.isdisjoint(takes):
            self.slots.append(kernel(self.slots) if kernel else apply(self.slots[takes[0]], self.slots[takes[1]]))
        else:
            self.slots.append(None)
            self._open.add(out)
            self._steps.append(_Step(out, takes, apply, kernel))
        return out

    def _computed(self, node: Node, inputs: Sequence[_Part]) -> _Part:
        """A node that the runtime computes. Each element asks for all: which of them are needed is not known before."""
        shape = np.broadcast_shapes(*(part.slots.shape for part in inputs))
        element = inputs[0].element
        run = self._session(single(node, [(part.element, part.slots.shape) for part in inputs], element, shape)).run
        feeds = [(str(place), _taken(part.slots.reshape(-1).tolist()), NUMPY[part.element], part.slots.shape)
                 for place, part in enumerate(inputs)]  # fmt: skip
        takes = tuple(slot for part in inputs for slot in part.slots.reshape(-1).tolist())

        def kernel(slots: Slots, place: int) -> Any:
            tensors = {name: np.array(taken(slots), dtype).reshape(shape) for name, taken, dtype, shape in feeds}
            return run(["y"], tensors)[0].item(place)

        out = [self._added(takes, None, partial(kernel, place=place)) for place in range(prod(shape))]
        return _Part(element, np.array(out, np.intp).reshape(shape))

    def program(self, wanted: Sequence[int]) -> list[tuple[Any, ...]]:
        """The steps that some slots need, as tuples of four.

        A function of two values, where its result goes, and where they are; None, where to, None, and a function of all
        slots; or None, where to, where the condition of a choice is, and for false and for true the steps that only this
        side needs and the slot that is taken.
        """
        paths: dict[int, _Path] = dict.fromkeys(wanted, ())

        def need(slot: int, path: _Path) -> None:
            paths[slot] = _common(paths[slot], path) if slot in paths else path

        for step in reversed(self._steps):
            if (path := paths.get(step.out)) is None:
                continue
            choice = step.apply is step.kernel is None and len(path) < _DEEPEST
            for side, slot in enumerate(step.takes):
                need(slot, (*path, (step.out, side)) if choice and side else path)
        blocks: defaultdict[_Path, list[tuple[Any, ...]]] = defaultdict(list)
        for step in self._steps:
            if (path := paths.get(step.out)) is None:
                continue
            if step.apply is not None:
                blocks[path].append((step.apply, step.out, *step.takes))
            elif step.kernel is not None:
                blocks[path].append((None, step.out, None, step.kernel))
            else:
                sides = []
                for side in (2, 1):
                    before = blocks.pop((*path, (step.out, side)), [])
                    if len(before) <= _SHORT and all(part[0] is not None for part in before):
                        blocks[path] += before
                        before = []
                    sides.append((before, step.takes[side]))
                blocks[path].append((None, step.out, step.takes[0], tuple(sides)))
        return blocks[()]


_ASKING = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf", "RegexFullMatch"})
_GIVEN = {"LabelEncoder": "int64"}


def _taken(slots: Sequence[int]) -> Callable[[Slots], Any]:
    """What is in some slots, in any form that NumPy makes an array of."""
    return itemgetter(*slots)


def _common(one: _Path, other: _Path) -> _Path:
    """As far as both go the same way."""
    return tuple(side for side, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
