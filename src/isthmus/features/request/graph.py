"""The graph of a request transform in a runtime: the values of a row's columns in, computed fields out.

A call of a runtime costs as much per tensor as several nodes, so columns of a kind come and go as the rows of one. A
graph takes `given_<element>` of shape (columns, n) for each of bool, int32, int64, float, double and string that is
needed, with anything under a null, and `given_valid`, booleans of shape (all columns, n). It gives `found_<element>`
the same way, with anything where a field is null or refused, and `found_masks` of shape (2 fields, n): where each field
is valid, as long as it is not refused, and then where Spark would refuse to compute it. An array comes in as a tensor
of its own, `given_array_<column>` of shape (size, n), and its mask with all others. Its metadata tell which row of
which tensor is whose.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from isthmus.features.contract.contract import TransformContract
from isthmus.features.errors import ContractMismatch, RequestError
from isthmus.features.request.layout import MASKS, NOTES, Computed, Layout, Refused, found
from isthmus.features.types import Bool, String
from isthmus.features.values.columns import Values, from_python

_SHOWN = 40
"""Characters of a text that a message shows."""
_ASCII = "ASCII alone in what lower or upper takes"


class RowGraph:
    """A request transform, ready to compute. Threads may share it.

    Args:
        transform: the transform.
        threads: CPU threads of one computation.

    Raises:
        ContractMismatch: the runtime does not take the graph.
    """

    def __init__(self, transform: TransformContract, threads: int = 1) -> None:
        import onnxruntime  # not needed by those who only feed a graph

        from isthmus.features.request.onerow import OneRow
        from isthmus.features.request.onnxbytes import UnreadableError

        self.transform = transform
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        # Of a few rows, to keep account of memory takes longer than to ask for it.
        options.enable_cpu_mem_arena = options.enable_mem_reuse = False

        def session(graph: bytes) -> Any:
            return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])

        try:
            self._session = session(transform.graph)
            self._layout = Layout.loads(self._session.get_modelmeta().custom_metadata_map[NOTES])
        except Exception as error:  # onnxruntime's exceptions have no base class of their own
            raise ContractMismatch(f"request transform {transform.name}", f"onnxruntime refuses its graph ({error})",
                                   remedy="run `isthmus apply` with this release of Isthmus") from error  # fmt: skip
        self._outputs = [*map(found, self._layout.found), MASKS]
        rows = {name: row for row, name in enumerate(chain(*self._layout.found.values()))}
        kinds = {field.name: field.dtype for field in transform.fields}
        self._fields = [(name, rows[name], kinds[name] == Bool, None if kinds[name] == String else 0)
                        for name in self._layout.fields]  # fmt: skip
        try:
            one_row = OneRow(transform.graph, self._layout, session)
        except UnreadableError:
            self._one_row = None
        else:
            self._one_row = one_row if one_row.pays else None

    def run(self, columns: Mapping[str, Values]) -> Computed:
        """Computes n rows.

        Args:
            columns: a column of n values for everything that the transform takes, by its name in a training set.
        """
        if self._one_row is not None and (found := self._one_row.run(columns)) is not None:
            return found
        *tensors, masks = self._session.run(self._outputs, self._layout.feeds(columns))
        rows, count = [*chain(*tensors)], len(self._fields)
        valid, raises, refused = masks[:count], masks[count:], {}
        if np.count_nonzero(raises):
            refused = {name: mask for name, mask in zip(self._layout.fields, raises, strict=True) if mask.any()}
            valid &= ~raises
        whole = np.count_nonzero(valid) == valid.size
        values = {}
        for (name, row, boolean, nothing), there in zip(self._fields, valid, strict=True):
            data = rows[row]
            if not whole:
                data[~there] = nothing
            values[name] = Values(data.view(np.uint8) if boolean else data, there)
        return Computed(values, refused)

    def require(
        self, columns: Mapping[str, Values], graphs: "Callable[[str], RowGraph]", place: Callable[[str], str]
    ) -> Mapping[str, Values]:
        """Computes n rows, all of which must be computable.

        Args:
            columns: as for `run`.
            graphs: the request sources that the transform's rules name, ready to compute.
            place: where in the request a field stands.

        Raises:
            RequestError: Spark would refuse one; the first such row is named, with the request field that is not as
                expected, or with all that it holds.
        """
        computed = self.run(columns)
        if (one := self.first_refused(columns, computed, graphs)) is None:
            return computed.values
        if one.rule:
            raise RequestError(place(one.field), f"{one.shown} in row {one.row}", expected=one.expected)
        found = f"cannot be computed in row {one.row}, where {one.shown}"
        raise RequestError(f"request transform {self.transform.name}, field {one.field}", found, expected=one.expected)

    def first_refused(
        self, columns: Mapping[str, Values], computed: Computed, graphs: "Callable[[str], RowGraph]"
    ) -> Refused | None:
        """The first row of what was computed that Spark would refuse; None if there is none.

        Args:
            columns: as for `run`.
            computed: what it gave for them.
            graphs: as for `require`.
        """
        for name, mask in computed.refused.items():
            row = int(np.flatnonzero(mask)[0])
            given = {taken: values.take(slice(row, row + 1)) for taken, values in columns.items()}
            if broken := self._broken(given, row, graphs):
                return broken
            foreign = self._foreign(given, name)
            shown = ", ".join(f"{taken} {_shown(given[taken], 0)}" for taken in foreign or given)
            return Refused(name, row, shown, _ASCII if foreign else "values for which it is defined")
        return None

    def _broken(self, given: Mapping[str, Values], row: int, graphs: "Callable[[str], RowGraph]") -> Refused | None:
        """The request field of a row that is not as expected, if there is one."""
        for source in dict.fromkeys(rule.source for rule in self.transform.rules.values()):
            graph = graphs(source)
            absent = {column.name: from_python([None], column.dtype) for column in graph.transform.request}
            refused = graph.run({name: given.get(name, nothing) for name, nothing in absent.items()}).refused
            for name, rule in self.transform.rules.items():
                if rule.source == source and name in refused:
                    return Refused(name, row, _shown(given[name], 0), rule.expected, rule=True)
        return None

    def _foreign(self, given: Mapping[str, Values], field: str) -> list[str]:
        """The texts of a row that a field is refused for because they are not ASCII: with ASCII in place it is not."""
        texts = {name: values.data[0] for name, values in given.items() if isinstance(values.data[0], str)}
        plain = {name: from_python(["".join(letter if letter.isascii() else "?" for letter in text)], String)
                 for name, text in texts.items() if not text.isascii()}  # fmt: skip
        if not plain or field in self.run({**given, **plain}).refused:
            return []
        return [name for name in plain if field in self.run({**given, **plain, name: given[name]}).refused]


def _shown(values: Values, row: int) -> str:
    """What stands in a row, at a length that a message bears."""
    if not values.valid[row]:
        return "is null"
    value = values.data[row]
    if isinstance(value, list | np.ndarray):
        text = ", ".join(map(str, value[:_SHOWN]))
        return f"is [{text}]" if len(text) <= _SHOWN else f"is an array of {len(value)} elements"
    if not isinstance(value, str):
        # Not formatted: a 32-bit number would be written as the 64-bit one that it is.
        return "is " + str(bool(value) if values.data.dtype == np.uint8 else value)
    return f"is {value!r}" if len(value) <= _SHOWN else f"is {value[:_SHOWN]!r} and {len(value) - _SHOWN:,} more"
