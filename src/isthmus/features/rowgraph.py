"""The graph of a request transform in a runtime: the values of a row's columns in, computed fields out.

A graph takes each column as two tensors of shape (n,): `name`, with anything under a null, and `name__valid`. It gives
each field the same way, by the name of `TransformContract.output`, with zero or the empty text under a null;
`field__raises`, where Spark would refuse to compute it; and `__refused`, where it would refuse any of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.features.columns import Values, from_python
from isthmus.features.contract import TransformContract
from isthmus.features.errors import ContractMismatch, RequestError
from isthmus.features.types import Bool, DataType, String

VALID, RAISES = "__valid", "__raises"
"""What stands behind the name of a column in the names of its masks."""
REFUSED = "__refused"
"""The mask of rows in which any output is refused."""

_SHOWN = 40
"""Characters of a text that a message shows."""

Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Computed:
    """What a request transform gives for n rows.

    Attributes:
        values: field name to its values; what is refused is null.
        refused: field name to the mask of rows in which Spark would refuse to compute it; empty if there are none.
    """

    values: Mapping[str, Values]
    refused: Mapping[str, Mask]


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

        self.transform = transform
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        try:
            self._session = onnxruntime.InferenceSession(transform.graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions have no base class of their own
            raise ContractMismatch(f"request transform {transform.name}", f"onnxruntime refuses its graph ({error})",
                                   remedy="run `isthmus apply` with this release of Isthmus") from error  # fmt: skip
        self._names = [field.name for field in transform.fields]
        outputs = [transform.output(name) for name in self._names]
        self._outputs = [REFUSED, *outputs, *(name + VALID for name in outputs)]
        self._masks = [name + RAISES for name in outputs]

    def run(self, columns: Mapping[str, Values]) -> Computed:
        """Computes n rows.

        Args:
            columns: a column of n values for everything that the transform takes, by its name in a training set.
        """
        feeds = row_feeds(columns)
        refused, *found = self._session.run(self._outputs, feeds)
        count = len(self._names)
        values = {
            field.name: _values(field.dtype, data, valid)
            for field, data, valid in zip(self.transform.fields, found[:count], found[count:], strict=True)
        }
        if not np.count_nonzero(refused):
            return Computed(values, {})
        masks = self._session.run(self._masks, feeds)
        return Computed(values, {name: mask for name, mask in zip(self._names, masks, strict=True) if mask.any()})

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
        for name, mask in computed.refused.items():
            row = int(np.flatnonzero(mask)[0])
            self._require_fields({taken: _one(values, row) for taken, values in columns.items()}, row, graphs, place)
            shown = ", ".join(f"{taken} {_shown(values, row)}" for taken, values in columns.items())
            raise RequestError(f"request transform {self.transform.name}, field {name}",
                               f"cannot be computed in row {row}, where {shown}",
                               expected="values for which it is defined") from None  # fmt: skip
        return computed.values

    def _require_fields(
        self,
        given: Mapping[str, Values],
        row: int,
        graphs: "Callable[[str], RowGraph]",
        place: Callable[[str], str],
    ) -> None:
        """Refuses a row if one of its request fields is not as expected."""
        for source in dict.fromkeys(rule.source for rule in self.transform.rules.values()):
            graph = graphs(source)
            absent = {column.name: from_python([None], column.dtype) for column in graph.transform.request}
            refused = graph.run({name: given.get(name, nothing) for name, nothing in absent.items()}).refused
            for name, rule in self.transform.rules.items():
                if rule.source == source and name in refused:
                    found = f"{_shown(given[name], 0)} in row {row}"
                    raise RequestError(place(name), found, expected=rule.expected)


def row_feeds(columns: Mapping[str, Values]) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of columns: each with its mask."""
    feeds = {}
    for name, values in columns.items():
        data = values.data
        if data.dtype == object:
            if not values.valid.all():
                data = np.where(values.valid, data, "")
        elif data.dtype == np.uint8:
            data = data.view(np.bool_)
        feeds[name], feeds[name + VALID] = data, values.valid
    return feeds


def _values(dtype: DataType, data: np.ndarray[Any, Any], valid: Mask) -> Values:
    """An output in the form that columns have."""
    if dtype == String and not valid.all():
        data = data.copy()
        data[~valid] = None
    return Values(data.view(np.uint8) if dtype == Bool else data, valid)


def _one(values: Values, row: int) -> Values:
    return Values(values.data[row : row + 1], values.valid[row : row + 1])


def _shown(values: Values, row: int) -> str:
    """What stands in a row, at a length that a message bears."""
    if not values.valid[row]:
        return "is null"
    value = values.data[row]
    if not isinstance(value, str):
        # Not formatted: a 32-bit number would be written as the 64-bit one that it is.
        return "is " + str(bool(value) if values.data.dtype == np.uint8 else value)
    return f"is {value!r}" if len(value) <= _SHOWN else f"is {value[:_SHOWN]!r} and {len(value) - _SHOWN:,} more"
