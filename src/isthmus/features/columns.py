"""Feature values as NumPy columns: the one form between Arrow, the packed row, an answer and a model."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.types import TYPES, DataType

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
if ARROW.keys() != TYPES.keys():
    raise TypeError("every data type needs its Arrow type")


@dataclass(frozen=True, slots=True)
class Values:
    """One column: shape (n,) values and the mask of those that are not null.

    Fixed-width types have their NumPy type (Bool as uint8, UnixTimestamp as int64 microseconds) and 0 under a null;
    String and Bytes have dtype object and None under a null.
    """

    data: np.ndarray[Any, Any]
    valid: np.ndarray[Any, np.dtype[np.bool_]]

    def tolist(self, dtype: DataType) -> list[Any]:
        """Python values with None for null; UnixTimestamp stays in microseconds."""
        data = self.data.astype(bool) if dtype.name == "Bool" else self.data
        if self.valid.all():
            plain: list[Any] = data.tolist()
            return plain
        return [value if valid else None for value, valid in zip(data.tolist(), self.valid.tolist(), strict=True)]


def from_arrow(array: pa.ChunkedArray | pa.Array, dtype: DataType) -> Values:
    """The NumPy form of an Arrow column that has the type of `dtype`."""
    valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
    if dtype.numpy is None:
        return Values(np.array(array.to_pylist(), dtype=object), valid)
    if dtype.name == "Bool":
        array = pc.cast(array, pa.uint8())
    elif dtype.name == "UnixTimestamp":
        array = pc.cast(array, pa.int64())
    if not valid.all():
        array = pc.fill_null(array, pa.scalar(0, array.type))
    return Values(array.to_numpy(zero_copy_only=False).astype(dtype.numpy, copy=False), valid)


def to_arrow(values: Values, dtype: DataType) -> pa.Array:
    """The Arrow form of a NumPy column."""
    if dtype.numpy is None:
        return pa.array(values.data.tolist(), ARROW[dtype.name])
    mask = None if values.valid.all() else ~values.valid
    data = values.data.astype(bool) if dtype.name == "Bool" else values.data
    if dtype.name == "UnixTimestamp":
        return pa.array(data, pa.int64(), mask=mask).cast(ARROW[dtype.name])
    return pa.array(data, ARROW[dtype.name], mask=mask)


def micros(array: pa.ChunkedArray | pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A column of timestamps without nulls as microseconds since 1970 UTC."""
    times: np.ndarray[Any, np.dtype[np.int64]] = pc.cast(array, pa.int64()).to_numpy(zero_copy_only=False)
    return times
