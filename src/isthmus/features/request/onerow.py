"""Computes one row of a graph without the runtime, whose overhead per node exceeds the computation.

It follows the contract's graph node by node, so the transform has a single definition. The results have the runtime's
bits, except that any NaN equals any NaN. See `program`.
"""

from collections.abc import Mapping
from operator import gt
from typing import Any

import numpy as np

from isthmus.features.request.layout import MASKS, VALID, Computed, Layout, input_name, output_name
from isthmus.features.request.onnxbytes import NUMPY, UnreadableGraph, read
from isthmus.features.request.program import Operation, ProgramBuilder, Session, SlotArray, follow
from isthmus.features.values.columns import Values

_NODES_A_CALL, _NODES_A_RUN = 30, 25
"""Nodes that the runtime computes in the time of a call for one of them (15 microseconds; a node takes 0.5), and in
the time of an empty run (13 microseconds).
"""
_TRUE, _FALSE = np.array([True]), np.array([False])
"""Masks of a row, for copying. The fields of one answer share theirs."""


class OneRow:
    """A graph, ready to compute one row at a time. Threads may share it.

    The session runs the nodes that need the runtime. `pays` is True if this is faster than the runtime alone.

    Raises:
        UnreadableGraph: the graph takes arrays, or has an unknown operator.
    """

    def __init__(self, graph: bytes, layout: Layout, session: Session) -> None:
        if layout.arrays:
            raise UnreadableGraph("arrays")
        steps = ProgramBuilder(session)
        parts = {input_name(element): steps.open(element, len(names)) for element, names in layout.inputs.items()}
        parts[input_name(VALID)] = steps.open("bool", len(layout.masks))
        nodes, constants = read(graph)
        parts = steps.add(nodes, constants, parts)
        self.pays = steps.calls * _NODES_A_CALL <= len(nodes) + _NODES_A_RUN
        valid, raises = (SlotArray("bool", masks) for masks in np.split(parts[MASKS].slots, [len(layout.fields)]))
        present = steps.mapped(Operation("Greater", "bool"), gt, valid, raises)
        results = {element: parts[output_name(element)] for element in layout.outputs}
        goals = [slot for part in (present, raises, *results.values()) for slot in part.listed()]
        self._program, self._slots, places = steps.program(goals)

        def placed(part: SlotArray) -> list[int]:
            return [places[slot] for slot in part.listed()]

        masks = dict(zip(layout.masks, placed(parts[input_name(VALID)]), strict=True))
        self._inputs = [
            (name, _dtype(element), slot, masks[name])
            for element, names in layout.inputs.items()
            for name, slot in zip(names, placed(parts[input_name(element)]), strict=True)
        ]
        self._texts = [(slot, mask) for _, dtype, slot, mask in self._inputs if dtype.hasobject]
        self._booleans = [slot for _, dtype, slot, _ in self._inputs if dtype.itemsize == 1]
        keeps = dict(zip(layout.fields, placed(present), strict=True))
        self._outputs = [
            (_dtype(element), None if element == "string" else 0,
             [(slot, keeps[name]) for name, slot in zip(names, placed(results[element]), strict=True)])
            for element, names in layout.outputs.items()
        ]  # fmt: skip
        rows = {name: (number, slice(row, row + 1))
                for number, names in enumerate(layout.outputs.values())
                for row, name in enumerate(names)}  # fmt: skip
        self._fields = [(name, *rows[name], keeps[name]) for name in layout.fields]
        self._raises = [(name, slot) for name, slot in zip(layout.fields, placed(raises), strict=True)
                        if self._slots[slot] is not False]  # fmt: skip

    def run(self, columns: Mapping[str, Values]) -> Computed | None:
        """Compute a row. Return None unless there is one row, and each column has its own NumPy type.

        Args:
            columns: values by input name, as for `RowGraph.run`.
        """
        slots = self._slots.copy()
        for name, dtype, slot, mask in self._inputs:
            column = columns[name]
            value = column.data
            if value.dtype is not dtype or len(value) != 1:
                return None
            slots[slot], slots[mask] = value.item(), column.valid.item()
        for slot, mask in self._texts:
            if not slots[mask]:
                slots[slot] = ""
        for slot in self._booleans:
            slots[slot] = bool(slots[slot])
        follow(self._program, slots)
        data = [np.array([slots[slot] if slots[keep] else null for slot, keep in fields], dtype)
                for dtype, null, fields in self._outputs]  # fmt: skip
        present, missing = _TRUE.copy(), _FALSE.copy()
        values = {name: Values(data[number][row], present if slots[keep] else missing)
                  for name, number, row, keep in self._fields}  # fmt: skip
        return Computed(values, {name: _TRUE.copy() for name, slot in self._raises if slots[slot]})


def _dtype(element: str) -> np.dtype[Any]:
    return np.dtype(np.uint8 if element == "bool" else NUMPY[element])
