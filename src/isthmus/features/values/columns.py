"""Feature values as NumPy columns. Servers load it without Arrow, which would take a third of their memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from isthmus.features.errors import DataError
from isthmus.features.types import DataType

Ints = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Values:
    """A column: values of shape (n,) and the mask of non-null values.

    Fixed-width types have their NumPy type (Bool as uint8, UnixTimestamp as int64 microseconds), with 0 for null. Other
    types have dtype object, with None for null: arrays are NumPy arrays, or lists of String or Bytes.
    """

    data: np.ndarray[Any, Any]
    valid: Mask

    def take(self, rows: np.ndarray[Any, Any] | slice) -> "Values":
        return Values(self.data[rows], self.valid[rows])

    def tolist(self, dtype: DataType) -> list[Any]:
        data = self.data.astype(bool) if dtype.name == "Bool" else self.data
        values: list[Any] = data.tolist()
        if not self.valid.all():
            values = [value if valid else None for value, valid in zip(values, self.valid.tolist(), strict=True)]
        if dtype.element is None:
            return values
        element: Any = bool if dtype.element.name == "Bool" else dtype.element.numpy or object
        return [None if array is None else np.asarray(array, element).tolist() for array in values]


def objects(items: Iterable[Any], count: int) -> np.ndarray[Any, Any]:
    # np.array would turn arrays of equal length into a matrix.
    return np.fromiter(items, object, count)


def from_python(values: Sequence[Any], dtype: DataType) -> Values:
    """Convert Python values to a column of the type `dtype`, for example as input of `Head.feeds`.

    Use None for null, and an integer of microseconds since 1970 UTC for UnixTimestamp. Raise DataError if a value of an
    array type contains None.
    """
    valid = np.fromiter((value is not None for value in values), bool, len(values))
    if dtype.element is not None:
        element = dtype.element
        arrays = (None if value is None else array_of(value, element) for value in values)
        return Values(objects(arrays, len(values)), valid)
    if dtype.numpy is None:
        return Values(objects(values, len(values)), valid)
    filled = values if valid.all() else [0 if value is None else value for value in values]
    return Values(np.array(filled).astype(dtype.numpy), valid)


def array_of(value: Any, element: DataType, where: str = "") -> Any:
    where = where or f"an array of {element}"
    if isinstance(value, np.ndarray) and element.numpy is not None and value.dtype.kind in "biuf":
        array = value.astype(element.numpy, copy=False)
    elif any(item is None for item in value):
        raise DataError(where, "an array holds a null", expected=f"values of {element}")
    else:
        array = np.array(value, element.numpy or object)
    if array.ndim != 1:
        raise DataError(where, f"an array has {array.ndim} dimensions", expected=f"a list of {element}")
    return array if element.numpy is not None else array.tolist()


def first_wrong_size(arrays: Iterable[Any], size: int) -> tuple[int, int] | None:
    sizes = ((row, len(array)) for row, array in enumerate(arrays) if array is not None)
    return next((pair for pair in sizes if pair[1] != size), None)


def concatenated(parts: Sequence[Mapping[str, Values]]) -> Mapping[str, Values]:
    if len(parts) < 2:
        return parts[0] if parts else {}
    return {
        name: Values(
            np.concatenate([part[name].data for part in parts]), np.concatenate([part[name].valid for part in parts])
        )
        for name in parts[0]
    }


def split(flat: Any, lengths: Sequence[int] | np.ndarray[Any, Any], valid: Sequence[bool]) -> np.ndarray[Any, Any]:
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
    parts = zip(pairwise(ends), valid, strict=True)
    return objects([flat[start:end] if present else None for (start, end), present in parts], len(valid))
