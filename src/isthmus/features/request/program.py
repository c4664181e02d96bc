"""A graph as steps from single values to single values: what is left of it when there is one row.

When a graph is loaded, its tensors become arrays of slots, one for each of their elements: so whatever only moves
elements is done then, by NumPy, and constants are computed. A row fills the slots that it gives, and the steps the
others.

What no standard fixes to the last bit, logarithms and their like, is computed by the runtime, in a graph of that node
alone with tensors of the same shapes; so are patterns for which Python takes longer. Where only one side of a choice
needs something, only that side computes it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, takewhile
from math import prod
from operator import add, getitem, mul
from typing import Any

import numpy as np

from isthmus.features.request.kernels import Function, function
from isthmus.features.request.onnxbytes import ELEMENTS, NUMPY, Node, Tensor, UnreadableError, single

_RUNTIMES = frozenset({"Exp", "Log", "Pow", "Sin", "Cos"})
_ASKING = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf", "RegexFullMatch"})
_SAME = frozenset({("float", "double"), ("int32", "int64")})
"""Casts of what is held in the same way."""
_DEEPEST, _SHORT = 20, 2
"""How many choices stand within each other at most; how many steps are taken without a look whether they are needed."""

Slots = list[Any]
Program = Sequence[tuple[Any, ...]]
"""Steps in their order, see `Steps.program`."""
Session = Callable[[bytes], Any]
"""Makes a session of a model."""
_Path = tuple[tuple[int, int], ...]
"""Sides of choices within each other: where each choice goes, and which of what it takes is meant."""


def follow(program: Program, slots: Slots) -> None:
    """Takes steps."""
    for apply, out, first, second in program:
        if apply is not None:
            slots[out] = apply(slots[first], slots[second])
        elif first is None:
            takes, kernel, kept, place = second
            if slots[kept] is None:
                slots[kept] = kernel([slots[slot] for slot in takes])
            slots[out] = slots[kept][place]
        else:
            before, chosen = second[slots[first]]
            if before:
                follow(before, slots)
            slots[out] = slots[chosen]


@dataclass(frozen=True)
class Part:
    """A tensor: its element type, and a slot for each of its elements."""

    element: str
    slots: np.ndarray[Any, np.dtype[np.intp]]

    def listed(self) -> list[int]:
        """The slots in a row."""
        found: list[int] = self.slots.reshape(-1).tolist()
        return found


@dataclass(frozen=True)
class _Step:
    """How a slot is filled.

    Attributes:
        out: the slot.
        takes: the slots that are needed; of a choice its condition, what is taken where that holds, and otherwise.
        apply: a function of two values; None for a choice.
        kernel: a function of all that is in these slots, instead of that, to a list of which this is one.
        kept: where that list is kept for the others.
        place: which of the list it is.
    """

    out: int
    takes: tuple[int, ...]
    apply: Function | None = None
    kernel: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    kept: int = -1
    place: int = 0


class Steps:
    """The steps of a graph, node by node.

    Args:
        session: makes a session of a graph.
    """

    def __init__(self, session: Session) -> None:
        self._session = cache(session)
        self._slots: Slots = []
        """Constants, and None where each row has its own value."""
        self._steps: list[_Step] = []
        self._given: set[int] = set()
        self._open: set[int] = set()
        """The slots of which each row has its own value."""

    @property
    def calls(self) -> int:
        """How often the runtime is called for a row, if all is needed."""
        return len({step.kept for step in self._steps if step.kernel is not None})

    def open(self, element: str, rows: int) -> Part:
        """A tensor that a row gives, of shape (rows, 1)."""
        slots = np.arange(rows) + len(self._slots)
        self._slots += [None] * rows
        self._open.update(slots.tolist())
        self._given.update(slots.tolist())
        return Part(element, slots[:, None])

    def constant(self, tensor: Tensor) -> Part:
        """A tensor that is the same for every row."""
        slots = np.arange(tensor.data.size) + len(self._slots)
        self._slots += tensor.data.reshape(-1).tolist()
        return Part(tensor.element, slots.reshape(tensor.data.shape))

    def _fixed(self, part: Part) -> bool:
        return self._open.isdisjoint(part.listed())

    def _value(self, part: Part) -> Any:
        """What is in a tensor that no row changes, as lists."""
        if not self._fixed(part):
            raise UnreadableError("a shape or a table that depends on a row")
        return np.array([self._slots[slot] for slot in part.listed()]).reshape(part.slots.shape).tolist()

    def node(self, node: Node, inputs: Sequence[Part]) -> list[Part]:
        """What a node gives.

        Raises:
            UnreadableError: its operator is not known here, or not in this form.
        """
        first, slots, attributes = inputs[0], inputs[0].slots, node.attributes
        match node.operator:
            case "Identity":
                return [first]
            case "Split" if len(inputs) == 1:
                rows = np.split(slots, len(node.outputs), attributes.get("axis", 0))
                return [Part(first.element, part) for part in rows]
            case "Concat":
                return [Part(first.element, np.concatenate([part.slots for part in inputs], attributes["axis"]))]
            case "Shape":
                return [self.constant(Tensor("int64", np.array(slots.shape)))]
            case "Expand":
                shape = np.broadcast_shapes(slots.shape, tuple(self._value(inputs[1])))
                return [Part(first.element, np.broadcast_to(slots, shape))]
            case "Slice" if len(inputs) == 3:
                start, end = map(self._value, inputs[1:])
                return [Part(first.element, slots[tuple(map(slice, start, end))])]
            case "Gather":
                return [self._gathered(first, inputs[1], attributes.get("axis", 0))]
            case "Where":
                return [self._chosen(*inputs)]
            case name if name in _RUNTIMES:
                return [self._computed(node, inputs, first.element)]
        return [self._each(node, inputs)]

    def _gathered(self, table: Part, places: Part, axis: int) -> Part:
        if self._fixed(places):
            return Part(table.element, np.take(table.slots, self._value(places), axis))
        if table.slots.ndim != 1:
            raise UnreadableError("a table of tables")
        # Python's, too, count from the end where the number is negative.
        return self.mapped(table.element, getitem, self._single(table.element, self._value(table)), places)

    def _single(self, element: str, value: Any) -> Part:
        """One value that no row changes."""
        self._slots.append(value)
        return Part(element, np.array(len(self._slots) - 1))

    def _chosen(self, condition: Part, one: Part, other: Part) -> Part:
        if one.element in ("double", "float"):
            # The runtime makes 0.0 of a -0.0 that is its first choice; or its second one, if only the first is many.
            zero = self._single(one.element, 0.0)
            if condition.slots.size == other.slots.size == 1 < one.slots.size:
                other = self.mapped(one.element, add, other, zero)
            else:
                one = self.mapped(one.element, add, one, zero)
        asked, yes, no = np.broadcast_arrays(condition.slots, one.slots, other.slots)
        out = [self._choice(*three) for three in zip(asked.flat, yes.flat, no.flat, strict=True)]
        return Part(one.element, np.array(out, np.intp).reshape(asked.shape))

    def _choice(self, condition: int, yes: int, no: int) -> int:
        if condition in self._open:
            return self._added(_Step(len(self._slots), (int(condition), int(yes), int(no))))
        return yes if self._slots[condition] else no

    def _each(self, node: Node, inputs: Sequence[Part]) -> Part:
        name, element = node.operator, inputs[0].element
        if name == "Cast":
            given = ELEMENTS.get(node.attributes["to"], "")
            if given == element or (element, given) in _SAME:
                return Part(given, inputs[0].slots)
        else:
            given = "bool" if name in _ASKING else "int64" if name == "LabelEncoder" else element
        known = function(name, element, {**node.attributes, "to": given})
        if known is None and name == "RegexFullMatch":
            return self._computed(node, inputs, given)
        if known is None or len(inputs) > 2:
            raise UnreadableError(f"{name} of {element}")
        apply, second = known
        return self.mapped(given, apply, *inputs, *([] if second is None else [self._single(given, second)]))

    def mapped(self, element: str, apply: Function, *inputs: Part) -> Part:
        """A function of one tensor or two, of each of their elements."""
        one, other = np.broadcast_arrays(inputs[0].slots, inputs[-1].slots)
        pairs = zip(one.reshape(-1).tolist(), other.reshape(-1).tolist(), strict=True)
        out = [self._added(_Step(len(self._slots), pair, apply)) for pair in pairs]
        return Part(element, np.array(out, np.intp).reshape(one.shape))

    def _added(self, step: _Step) -> int:
        """The slot of a step; it is taken at once if no row changes what comes out."""
        self._slots.append(None)
        if not self._open.isdisjoint(step.takes):
            self._open.add(step.out)
            self._steps.append(step)
            return step.out
        values = [self._slots[slot] for slot in step.takes]
        if step.apply is not None:
            self._slots[step.out] = step.apply(*values)
        elif step.kernel is not None:
            self._slots[step.out] = step.kernel(values)[step.place]
        return step.out

    def _computed(self, node: Node, inputs: Sequence[Part], element: str) -> Part:
        """A node that the runtime computes: as a whole, once, when the first of its elements is needed."""
        shape = np.broadcast_shapes(*(part.slots.shape for part in inputs))
        takes = [(part.element, part.slots.shape) for part in inputs]
        run = self._session(single(node, takes, element, shape)).run
        ends = [*accumulate(part.slots.size for part in inputs)]
        feeds = [(str(place), slice(end - part.slots.size, end), NUMPY[part.element], part.slots.shape)
                 for place, (part, end) in enumerate(zip(inputs, ends, strict=True))]  # fmt: skip

        def kernel(values: Sequence[Any]) -> Sequence[Any]:
            tensors = {name: np.array(values[part], dtype).reshape(shape) for name, part, dtype, shape in feeds}
            found: list[Any] = run(["y"], tensors)[0].reshape(-1).tolist()
            return found

        needed, kept = tuple(slot for part in inputs for slot in part.listed()), len(self._slots)
        self._slots.append(None)
        out = [self._added(_Step(len(self._slots), needed, None, kernel, kept, place)) for place in range(prod(shape))]
        return Part(element, np.array(out, np.intp).reshape(shape))

    def program(self, wanted: Sequence[int]) -> tuple[Program, Slots, dict[int, int]]:
        """The steps that some slots need, what is in all slots before, and the new numbers of those that are left.

        A step is a tuple of four: a function of two values, where its result goes, and where they are; None, where to,
        None, and the slots that a function takes, it, where its list is kept, and which of that is meant; or None,
        where to, where the condition of a choice is, and for false and for true the steps that only this side needs
        and the slot that is taken.
        """
        steps = self._with_polynomials()
        paths: dict[int, _Path] = dict.fromkeys(wanted, ())
        for step in reversed(steps):
            if (path := paths.get(step.out)) is not None:
                if step.kernel is not None:
                    paths[step.kept] = ()
                choice = step.apply is None and step.kernel is None and len(path) < _DEEPEST
                for side, slot in enumerate(step.takes):
                    there = (*path, (step.out, side)) if choice and side else path
                    paths[slot] = _common(paths[slot], there) if slot in paths else there
        places = {slot: place for place, slot in enumerate(sorted(paths.keys() | self._given))}
        blocks: defaultdict[_Path, list[tuple[Any, ...]]] = defaultdict(list)
        for step in steps:
            if (path := paths.get(step.out)) is None:
                continue
            out, takes = places[step.out], [places[slot] for slot in step.takes]
            if step.apply is not None:
                blocks[path].append((step.apply, out, *takes))
            elif step.kernel is not None:
                blocks[path].append((None, out, None, (takes, step.kernel, places[step.kept], step.place)))
            else:
                before = [blocks.pop((*path, (step.out, side)), []) for side in (2, 1)]
                for part in before:
                    if len(part) <= _SHORT and all(apply for apply, *_ in part):
                        blocks[path] += part
                        part.clear()
                blocks[path].append((None, out, takes[0], tuple(zip(before, takes[:0:-1], strict=True))))
        return blocks[()], [self._slots[slot] for slot in places], places

    def _with_polynomials(self) -> list[_Step]:
        """The steps, where sums and products of Horner's rule are one. What they replace is needed no more."""
        products: dict[int, tuple[int, ...]] = {}
        chains: dict[int, tuple[int, int, tuple[float, ...]]] = {}
        steps = []
        for step in self._steps:
            if step.apply is mul and step.takes[1] in self._open:
                products[step.out] = step.takes
            elif step.apply is add and step.takes[0] in products and step.takes[1] not in self._open:
                begin, x = products[step.takes[0]]
                before: tuple[float, ...] = ()
                if begin in chains and chains[begin][1] == x:
                    begin, _, before = chains[begin]
                chains[step.out] = begin, x, (*before, self._slots[step.takes[1]])
                if before:
                    step = _Step(step.out, (begin, x), _polynomial(chains[step.out][2]))
            steps.append(step)
        return steps


def _polynomial(coefficients: Sequence[float]) -> Function:
    def apply(found: float, x: float) -> float:
        for coefficient in coefficients:
            found = found * x + coefficient
        return found

    return apply


def _common(one: _Path, other: _Path) -> _Path:
    """As far as both go the same way."""
    return tuple(side for side, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
