"""Feature values as NumPy columns: the form between Arrow, the packed row, an answer and a model."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.errors import DataError
from isthmus.features.types import SCALARS, TYPES, Array, DataType

ARROW: dict[str, pa.DataType] = {
    "Bool": pa.bool_(),
    "Int32": pa.int32(),
    "Int64": pa.int64(),
    "Float32": pa.float32(),
    "Float64": pa.float64(),
    "UnixTimestamp": pa.timestamp("us", tz="UTC"),
    "String": pa.string(),
    "Bytes": pa.binary(),
}
ARROW |= {Array(scalar).name: pa.list_(ARROW[scalar.name]) for scalar in SCALARS}
if ARROW.keys() != TYPES.keys():
    raise TypeError("every data type needs its Arrow type")


Ints = np.ndarray[Any, np.dtype[np.int64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class Values:
    """A column: shape (n,) values and the mask of those that are not null.

    Fixed-width types have their NumPy type (Bool as uint8, UnixTimestamp as int64 microseconds) and 0 where null; all
    others have dtype object and None where null. An array of fixed-width elements is a NumPy array of their type, an
    array of String or Bytes a list.
    """

    data: np.ndarray[Any, Any]
    valid: Mask

    def take(self, rows: np.ndarray[Any, Any] | slice) -> "Values":
        """The rows of an index, a mask or a slice."""
        return Values(self.data[rows], self.valid[rows])

    def tolist(self, dtype: DataType) -> list[Any]:
        """Python values with None for null; UnixTimestamp stays in microseconds."""
        data = self.data.astype(bool) if dtype.name == "Bool" else self.data
        values: list[Any] = data.tolist()
        if not self.valid.all():
            values = [value if valid else None for value, valid in zip(values, self.valid.tolist(), strict=True)]
        if dtype.element is None:
            return values
        element: Any = bool if dtype.element.name == "Bool" else dtype.element.numpy or object
        return [None if array is None else np.asarray(array, element).tolist() for array in values]


def objects(items: Iterable[Any], count: int) -> np.ndarray[Any, Any]:
    """A column of any objects, shape (count,): arrays of equal length do not become a matrix."""
    return np.fromiter(items, object, count)


def from_python(values: Sequence[Any], dtype: DataType) -> Values:
    """The NumPy form of Python values; None is null, a UnixTimestamp is in microseconds.

    Raises:
        DataError: an array holds a null.
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
    """An array as `Values` has it, from a list or a NumPy array; `where` is what an error is about.

    Raises:
        DataError: it holds a null, or has several dimensions.
    """
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


def null_elements(column: pa.ChunkedArray | pa.Array) -> int:
    """Nulls within the arrays of an Arrow column; 0 for a column of scalars."""
    return int(pc.list_flatten(column).null_count) if pa.types.is_list(column.type) else 0


def other_sizes(column: pa.ChunkedArray | pa.Array, size: int) -> list[int]:
    """The rows of an Arrow column whose arrays are not null and not of this size."""
    rows: list[int] = pc.indices_nonzero(pc.not_equal(pc.list_value_length(column), size)).to_pylist()
    return rows


def other_size(arrays: Iterable[Any], size: int) -> tuple[int, int] | None:
    """The row and the size of the first array, None where null, that is not of this size."""
    sizes = ((row, len(array)) for row, array in enumerate(arrays) if array is not None)
    return next((pair for pair in sizes if pair[1] != size), None)


def from_arrow(array: pa.ChunkedArray | pa.Array, dtype: DataType) -> Values:
    """The NumPy form of an Arrow column that has the type of `dtype`.

    Raises:
        DataError: an array holds a null.
    """
    valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
    if dtype.element is not None:
        if null_elements(array):
            raise DataError(f"a column of {dtype}", "an array holds a null", expected="values only")
        flat = from_arrow(pc.list_flatten(array), dtype.element).data
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        return Values(split(flat if dtype.element.numpy else flat.tolist(), lengths, valid.tolist()), valid)
    if dtype.numpy is None:
        return Values(np.array([*array.to_pylist(), None], dtype=object)[:-1], valid)
    if dtype.name == "Bool":
        array = pc.cast(array, pa.uint8())
    elif dtype.name == "UnixTimestamp":
        array = pc.cast(array, pa.int64())
    if not valid.all():
        array = pc.fill_null(array, pa.scalar(0, array.type))
    return Values(array.to_numpy(zero_copy_only=False).astype(dtype.numpy, copy=False), valid)


def split(flat: Any, lengths: Sequence[int] | np.ndarray[Any, Any], valid: Sequence[bool]) -> np.ndarray[Any, Any]:
    """The arrays whose elements are back to back in `flat`, shape (n,); None where not valid."""
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).tolist()
    parts = zip(pairwise(ends), valid, strict=True)
    return objects([flat[start:end] if present else None for (start, end), present in parts], len(valid))


def to_arrow(values: Values, dtype: DataType) -> pa.Array:
    """The Arrow form of a NumPy column."""
    if dtype.element is not None:
        arrays = values.data[values.valid].tolist()
        lengths = np.zeros(len(values.data) + 1, np.int32)
        lengths[1:][values.valid] = [len(array) for array in arrays]
        flat: Any = [item for array in arrays for item in array]
        if dtype.element.numpy is not None:
            flat = np.concatenate([np.empty(0, dtype.element.numpy), *arrays])
        items = Values(np.asarray(flat, dtype.element.numpy or object), np.ones(len(flat), bool))
        mask = pa.array(~values.valid)
        return pa.ListArray.from_arrays(np.cumsum(lengths, dtype=np.int32), to_arrow(items, dtype.element), mask=mask)
    if dtype.numpy is None:
        return pa.array(values.data.tolist(), ARROW[dtype.name])
    mask = None if values.valid.all() else ~values.valid
    data = values.data.astype(bool) if dtype.name == "Bool" else values.data
    if dtype.name == "UnixTimestamp":
        return pa.array(data, pa.int64(), mask=mask).cast(ARROW[dtype.name])
    return pa.array(data, ARROW[dtype.name], mask=mask)


def micros(array: pa.ChunkedArray | pa.Array) -> Ints:
    """A column of timestamps without nulls as microseconds since 1970 UTC."""
    times: Ints = pc.cast(array, pa.int64()).to_numpy(zero_copy_only=False)
    return times
