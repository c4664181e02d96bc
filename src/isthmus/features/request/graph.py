"""Computes request transforms at run time, and finds the input that caused an error in a row."""

from collections.abc import Callable, Mapping
from itertools import chain
from operator import gt
from typing import Any

import numpy as np

from isthmus.features.contract.schema import TransformContract
from isthmus.features.errors import ContractMismatch, RequestError
from isthmus.features.request.layout import MASKS, NOTES, VALID, Computed, InputRefusal, Layout, input_name, output_name
from isthmus.features.request.onnxbytes import NUMPY, UnreadableGraph, read
from isthmus.features.request.program import Operation, ProgramBuilder, Session, SlotArray, follow
from isthmus.features.types import Bool, String
from isthmus.features.values.columns import Values, from_python

# One row is computed without the runtime, whose overhead per node exceeds the computation. This follows the contract's
# graph node by node, so the transform has a single definition. The results have the runtime's bits, except that any NaN
# equals any NaN. See `program`.

_SHOWN = 40
"""Maximum characters of a text in a message."""
_ASCII = "only ASCII in the arguments of lower and upper"


_NODES_A_CALL, _NODES_A_RUN = 30, 25
"""Nodes that the runtime computes in the time of a call for one of them (15 microseconds; a node takes 0.5), and in
the time of an empty run (13 microseconds).
"""
_TRUE, _FALSE = np.array([True]), np.array([False])
"""Masks of a row, for copying. The fields of one answer share theirs."""


class OneRow:
    """A request transform's ONNX graph, converted to Python steps that compute one row at a time. Threads may share it.

    `session` creates a session of ONNX Runtime, for nodes that only the runtime can compute. `pays` is True if the
    steps should be faster than the runtime alone. Raises UnreadableGraph if the graph takes arrays or has an unknown
    operator.
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
        present = steps.elementwise(Operation("Greater", "bool"), gt, valid, raises)
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


class RowGraph:
    """A request transform, ready to compute. Threads may share it. Raises ContractMismatch if it cannot be loaded."""

    def __init__(self, transform: TransformContract) -> None:
        import onnxruntime  # not needed to feed a graph

        self.transform = transform
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        # For a few rows, an arena takes longer than plain allocation.
        options.enable_cpu_mem_arena = options.enable_mem_reuse = False

        def session(graph: bytes) -> Any:
            return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

        try:
            self._session = session(transform.graph)
            self._layout = Layout.loads(self._session.get_modelmeta().custom_metadata_map[NOTES])
        except Exception as error:  # onnxruntime's exceptions have no base class of their own
            raise ContractMismatch(f"request transform {transform.name}", f"onnxruntime rejects its graph ({error})",
                                   remedy="run `isthmus apply` with this release of Isthmus") from error  # fmt: skip
        outputs = self._layout.outputs
        self._outputs = [*map(output_name, outputs), MASKS]
        rows = {name: row for row, name in enumerate(chain(*outputs.values()))}
        types = {field.name: field.dtype for field in transform.fields}
        self._fields = [(name, rows[name], types[name] == Bool, None if types[name] == String else 0)
                        for name in self._layout.fields]  # fmt: skip
        self._one_row: OneRow | None = None
        try:
            interpreter = OneRow(transform.graph, self._layout, session)
        except UnreadableGraph:
            return
        if interpreter.pays:
            self._one_row = interpreter

    def run(self, columns: Mapping[str, Values]) -> Computed:
        """Compute the fields of a request transform for n rows. `columns` has the transform's inputs by name.

        A field becomes null where Spark would refuse to compute it with an error. `Computed.refused` marks these rows.
        """
        if self._one_row is not None and (computed := self._one_row.run(columns)) is not None:
            return computed
        *tensors, masks = self._session.run(self._outputs, self._layout.feeds(columns))
        rows, count = [*chain(*tensors)], len(self._fields)
        valid, raises, refused = masks[:count], masks[count:], {}
        if np.count_nonzero(raises):
            refused = {name: mask for name, mask in zip(self._layout.fields, raises, strict=True) if mask.any()}
            valid &= ~raises
        complete = np.count_nonzero(valid) == valid.size
        values = {}
        for (name, row, boolean, null), mask in zip(self._fields, valid, strict=True):
            data = rows[row]
            if not complete:
                data[~mask] = null
            values[name] = Values(data.view(np.uint8) if boolean else data, mask)
        return Computed(values, refused)

    def require(
        self, columns: Mapping[str, Values], graphs: "Callable[[str], RowGraph]", place: Callable[[str], str]
    ) -> Mapping[str, Values]:
        """Compute the fields of a request transform for n rows of a request. Return them by field name.

        `columns` has the transform's inputs by name. Raise RequestError about the first row that Spark would refuse to
        compute with an error. If the row breaks an expectation on a request field, the message names that field.
        Otherwise it names the transform's field and the values of its inputs. `graphs` returns the graph of a request
        source by name, to check its expectations. `place` converts the name of a request field to its place in the
        request, for the message.
        """
        computed = self.run(columns)
        if (first := self.first_refusal(columns, computed, graphs)) is None:
            return computed.values
        if first.rule:
            raise RequestError(place(first.field), f"{first.shown} in row {first.row}", expected=first.expected)
        where = f"request transform {self.transform.name}, field {first.field}"
        reason = f"cannot be computed in row {first.row}, where {first.shown}"
        raise RequestError(where, reason, expected=first.expected)

    def first_refusal(
        self, columns: Mapping[str, Values], computed: Computed, graphs: "Callable[[str], RowGraph]"
    ) -> InputRefusal | None:
        """Explain why a row cannot be computed, for an error message. Return None if all rows could be computed.

        `columns` has the inputs of the request transform by name, and `computed` is the result of `run` for them.
        `graphs` returns the graph of a request source by name, to find out if the row breaks an expectation on a
        request field.
        """
        for name, mask in computed.refused.items():
            row = int(np.flatnonzero(mask)[0])
            inputs = {column: values.take(slice(row, row + 1)) for column, values in columns.items()}
            if broken := self._broken(inputs, row, graphs):
                return broken
            foreign = self._foreign(inputs, name)
            shown = ", ".join(f"{column} {_shown(inputs[column])}" for column in foreign or inputs)
            return InputRefusal(name, row, shown, _ASCII if foreign else "values for which it is defined")
        return None

    def _broken(
        self, inputs: Mapping[str, Values], row: int, graphs: "Callable[[str], RowGraph]"
    ) -> InputRefusal | None:
        for source in dict.fromkeys(rule.source for rule in self.transform.rules.values()):
            graph = graphs(source)
            absent = {column.name: from_python([None], column.dtype) for column in graph.transform.request}
            refused = graph.run({name: inputs.get(name, null) for name, null in absent.items()}).refused
            for name, rule in self.transform.rules.items():
                if rule.source == source and name in refused:
                    return InputRefusal(name, row, _shown(inputs[name]), rule.expected, rule=True)
        return None

    def _foreign(self, inputs: Mapping[str, Values], field: str) -> list[str]:
        """Return the text inputs that make Spark refuse `field` only because they are not ASCII."""
        texts = {name: values.data[0] for name, values in inputs.items() if isinstance(values.data[0], str)}
        plain = {name: from_python(["".join(letter if letter.isascii() else "?" for letter in text)], String)
                 for name, text in texts.items() if not text.isascii()}  # fmt: skip
        if not plain or field in self.run({**inputs, **plain}).refused:
            return []
        return [name for name in plain if field in self.run({**inputs, **plain, name: inputs[name]}).refused]


def _shown(values: Values) -> str:
    if not values.valid[0]:
        return "is null"
    value = values.data[0]
    if isinstance(value, list | np.ndarray):
        text = ", ".join(map(str, value[:_SHOWN]))
        return f"is [{text}]" if len(text) <= _SHOWN else f"is an array of {len(value)} elements"
    if not isinstance(value, str):
        # No format: it would print a 32-bit number with 64-bit digits.
        return "is " + str(bool(value) if values.data.dtype == np.uint8 else value)
    return f"is {value!r}" if len(value) <= _SHOWN else f"is {value[:_SHOWN]!r} and {len(value) - _SHOWN:,} more"
