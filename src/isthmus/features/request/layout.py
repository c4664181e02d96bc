"""Which column of a request transform is in which row of which tensor, and what such a graph answers.

A call of a runtime costs as much per tensor as several nodes, so columns of a kind come and go as the rows of one. A
graph takes `given_<element>` of shape (columns, n) for each of bool, int32, int64, float, double and string that is
needed, with anything under a null, and `given_valid`, booleans of shape (all columns, n). It gives `found_<element>`
the same way, with anything where a field is null or refused, and `found_masks` of shape (2 fields, n): where each field
is valid, as long as it is not refused, and then where Spark would refuse to compute it. An array comes in as a tensor
of its own, `given_array_<column>` of shape (size, n), and its mask with all others. Its metadata tell which row of
which tensor is whose.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from isthmus.features.errors import DataError
from isthmus.features.types import DataType
from isthmus.features.values.columns import Values, other_size

VALID, MASKS, NOTES = "valid", "found_masks", "rows"
"""What masks are called, come out as, and where the metadata tell of the rows."""


ELEMENTS = {
    "Bool": "bool", "Int32": "int32", "Int64": "int64", "UnixTimestamp": "int64", "Float32": "float",
    "Float64": "double", "String": "string",
}  # fmt: skip
"""What a graph holds the values of each type as."""


_NUMPY: dict[str, Any] = {
    "bool": np.bool_, "int32": np.int32, "int64": np.int64, "float": np.float32, "double": np.float64, "string": object,
}  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that Spark would refuse to compute a field of.

    Attributes:
        field: the field, or the request field that is not as expected.
        row: its number.
        shown: what stands there: in that request field, or in what the transform takes, as far as it is to blame.
        expected: what would be computed.
        rule: whether it is a request field that is not as expected.
    """

    field: str
    row: int
    shown: str
    expected: str
    rule: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Which column of a graph is in which row of which tensor.

    Attributes:
        given: element to the columns that come in as it.
        masks: all columns that come in.
        found: element to the fields that come out as it.
        fields: all fields that come out.
        arrays: of each column of arrays its element and its size.
    """

    given: Mapping[str, Sequence[str]]
    masks: Sequence[str]
    found: Mapping[str, Sequence[str]]
    fields: Sequence[str]
    arrays: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: Mapping[str, DataType]) -> "Layout":
        """The layout of a graph that takes some columns, as far as they come in."""
        elements = dict.fromkeys(ELEMENTS[dtype.name] for dtype in columns.values())
        rows = {
            element: [name for name, dtype in columns.items() if ELEMENTS[dtype.name] == element]
            for element in elements
        }
        return cls(rows, list(columns), {}, [])

    def dumps(self) -> str:
        """As JSON."""
        told = asdict(self)
        # Only where there are any: a graph that was made before them keeps its bytes.
        return json.dumps({name: part for name, part in told.items() if name != "arrays" or part}, sort_keys=True)

    @classmethod
    def loads(cls, text: str) -> "Layout":
        """The inverse of `dumps`."""
        return cls(**json.loads(text))

    def feeds(self, columns: Mapping[str, Values]) -> dict[str, np.ndarray[Any, Any]]:
        """The tensors of columns.

        Raises:
            DataError: an array has another size than the graph takes.
        """
        masks = _rows([columns[name].valid for name in self.masks])
        feeds = {given(VALID): masks}
        for element, names in self.given.items():
            data = [columns[name].data for name in names]
            if element == "string" and np.count_nonzero(masks) != masks.size:
                data = [np.where(columns[name].valid, part, "") for name, part in zip(names, data, strict=True)]
            rows = _rows(data)
            feeds[given(element)] = rows.view(np.bool_) if element == "bool" else rows
        for name, (element, size) in self.arrays.items():
            feeds[given_array(name)] = _elements(name, columns[name], element, size)
        return feeds


def given(element: str) -> str:
    """The tensor of all columns of an element that come in."""
    return f"given_{element}"


def given_array(name: str) -> str:
    """The tensor of a column of arrays that comes in."""
    return given(f"array_{name}")


def found(element: str) -> str:
    """The tensor of all fields of an element that come out."""
    return f"found_{element}"


def _rows(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Arrays of n values under each other."""
    return parts[0][None] if len(parts) == 1 else np.concatenate(parts).reshape(len(parts), -1)


def _elements(name: str, values: Values, element: str, size: int) -> np.ndarray[Any, Any]:
    """Arrays of one size as a tensor of shape (size, n); anything where one is null."""
    if other := other_size(values.data, size):
        raise DataError(f"column {name}", f"an array of {other[1]} elements in row {other[0]}", expected=f"{size}")
    dtype = _NUMPY[element]
    rows = np.full((len(values.data), size), "" if element == "string" else 0, dtype)
    if there := values.data[values.valid].tolist():
        rows[values.valid] = np.concatenate(there).reshape(-1, size) if element != "string" else there
    return np.ascontiguousarray(rows.T)
