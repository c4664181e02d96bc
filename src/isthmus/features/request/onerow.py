"""One row through a graph without the runtime, which takes longer to go from node to node than for what they compute.

No second definition: the graph of the contract is followed node by node, and what comes out has the runtime's bits, any
NaN for a NaN. See `steps` for how.
"""

from collections.abc import Mapping
from operator import gt
from typing import Any

import numpy as np

from isthmus.features.request.layout import MASKS, VALID, Computed, Layout, found, given
from isthmus.features.request.onnxbytes import NUMPY, UnreadableError, read
from isthmus.features.request.program import Part, Session, Steps, follow
from isthmus.features.values.columns import Values

_NODES_A_CALL, _NODES_A_RUN = 30, 25
"""How many nodes the runtime computes in the time that a call of it for one of them takes, or a run of nothing: 15
microseconds against half of one, and 13."""
_THERE, _MISSING = np.array([True]), np.array([False])
"""Masks of a row, to be copied. The fields of one answer share theirs."""


class OneRow:
    """A graph, ready to compute one row at a time. Threads may share it.

    Args:
        graph: the graph.
        layout: what is where in it.
        session: makes a session of a graph, for the nodes that are left to the runtime.

    Attributes:
        pays: whether so few nodes are left to the runtime that it would take longer for the whole.

    Raises:
        UnreadableError: it takes arrays, or has an operator that is not known here.
    """

    def __init__(self, graph: bytes, layout: Layout, session: Session) -> None:
        if layout.arrays:
            raise UnreadableError("arrays")
        steps = Steps(session)
        parts = {given(element): steps.open(element, len(names)) for element, names in layout.given.items()}
        parts[given(VALID)] = steps.open("bool", len(layout.masks))
        nodes, constants = read(graph)
        parts |= {name: steps.constant(tensor) for name, tensor in constants.items()}
        for node in nodes:
            if not node.inputs or not parts.keys() >= {*node.inputs}:
                raise UnreadableError(f"what {node.operator} takes")
            parts |= zip(node.outputs, steps.node(node, [parts[name] for name in node.inputs]), strict=True)
        self.pays = steps.calls * _NODES_A_CALL <= len(nodes) + _NODES_A_RUN
        count = len(layout.fields)
        valid, raises = (Part("bool", masks) for masks in np.split(parts[MASKS].slots, [count]))
        kept = steps.mapped("bool", gt, valid, raises)
        results = {element: parts[found(element)] for element in layout.found}
        wanted = [kept, raises, *results.values()]
        self._program, self._slots, left = steps.program([slot for part in wanted for slot in part.listed()])

        def placed(part: Part) -> list[int]:
            return [left[slot] for slot in part.listed()]

        there = dict(zip(layout.masks, placed(parts[given(VALID)]), strict=True))
        self._taken = [
            (name, _dtype(element), slot, there[name])
            for element, names in layout.given.items()
            for name, slot in zip(names, placed(parts[given(element)]), strict=True)
        ]
        self._texts = [(slot, mask) for _, dtype, slot, mask in self._taken if dtype.hasobject]
        self._truths = [slot for _, dtype, slot, _ in self._taken if dtype.itemsize == 1]
        keeps = dict(zip(layout.fields, placed(kept), strict=True))
        self._found = [
            (_dtype(element), None if element == "string" else 0,
             [(slot, keeps[name]) for name, slot in zip(names, placed(results[element]), strict=True)])
            for element, names in layout.found.items()
        ]  # fmt: skip
        places = {name: (number, slice(place, place + 1))
                  for number, names in enumerate(layout.found.values())
                  for place, name in enumerate(names)}  # fmt: skip
        self._fields = [(name, *places[name], keeps[name]) for name in layout.fields]
        self._raises = [(name, slot) for name, slot in zip(layout.fields, placed(raises), strict=True)
                        if self._slots[slot] is not False]  # fmt: skip

    def run(self, columns: Mapping[str, Values]) -> Computed | None:
        """Computes a row; None where there is not one, or where a column has another NumPy type than its own.

        Args:
            columns: as for `RowGraph.run`.
        """
        slots = self._slots.copy()
        for name, dtype, slot, mask in self._taken:
            column = columns[name]
            value = column.data
            if value.dtype is not dtype or len(value) != 1:
                return None
            slots[slot], slots[mask] = value.item(), column.valid.item()
        for slot, mask in self._texts:
            if not slots[mask]:
                slots[slot] = ""
        for slot in self._truths:
            slots[slot] = bool(slots[slot])
        follow(self._program, slots)
        data = [np.array([slots[slot] if slots[keep] else nothing for slot, keep in fields], dtype)
                for dtype, nothing, fields in self._found]  # fmt: skip
        there, missing = _THERE.copy(), _MISSING.copy()
        values = {name: Values(data[number][place], there if slots[keep] else missing)
                  for name, number, place, keep in self._fields}  # fmt: skip
        return Computed(values, {name: _THERE.copy() for name, slot in self._raises if slots[slot]})


def _dtype(element: str) -> np.dtype[Any]:
    """The NumPy type of a column whose values a graph holds as an element."""
    return np.dtype(np.uint8 if element == "bool" else NUMPY[element])
