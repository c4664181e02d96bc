"""Runs a request transform, and finds the input that caused an error in a row."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from isthmus.features.contract import TransformContract
from isthmus.features.errors import ContractMismatch, RequestError
from isthmus.features.request.layout import MASKS, NOTES, Computed, InputRefusal, Layout, output_name
from isthmus.features.request.onerow import OneRow
from isthmus.features.request.onnxbytes import UnreadableGraph
from isthmus.features.types import Bool, String
from isthmus.features.values.columns import Values, from_python

_SHOWN = 40
"""Maximum characters of a text in a message."""
_ASCII = "only ASCII in the arguments of lower and upper"


class RowGraph:
    """A request transform, ready to compute on a single CPU thread. Threads may share it.

    Raises:
        ContractMismatch: the runtime rejects the graph.
    """

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
        """Compute n rows from the values of every input of the transform, by its name in a training set."""
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
        """Compute n rows; raise an error if a row cannot be computed.

        Args:
            columns: values by input name, as for `run`.
            graphs: returns the graph of a request source, for its rules.
            place: returns the place of a request field in the request, for the message.

        Raises:
            RequestError: Spark would refuse a row. The message names the first such row, with the request field that
                breaks its rule or with all inputs.
        """
        computed = self.run(columns)
        if (first := self.first_refused(columns, computed, graphs)) is None:
            return computed.values
        if first.rule:
            raise RequestError(place(first.field), f"{first.shown} in row {first.row}", expected=first.expected)
        where = f"request transform {self.transform.name}, field {first.field}"
        reason = f"cannot be computed in row {first.row}, where {first.shown}"
        raise RequestError(where, reason, expected=first.expected)

    def first_refused(
        self, columns: Mapping[str, Values], computed: Computed, graphs: "Callable[[str], RowGraph]"
    ) -> InputRefusal | None:
        """Return the first row that Spark would refuse, or None. Takes the result of `run`."""
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
        """Return the inputs for which a field is refused only because they are not ASCII."""
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
