"""Convert feature values between Arrow and NumPy columns."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.errors import DataError
from isthmus.features.types import SCALARS, TYPES, Array, DataType
from isthmus.features.values.columns import Ints, Values, split

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


def null_elements(column: pa.ChunkedArray | pa.Array) -> int:
    return int(pc.list_flatten(column).null_count) if pa.types.is_list(column.type) else 0


def wrong_size_rows(column: pa.ChunkedArray | pa.Array, size: int) -> list[int]:
    rows: list[int] = pc.indices_nonzero(pc.not_equal(pc.list_value_length(column), size)).to_pylist()
    return rows


def from_arrow(array: pa.ChunkedArray | pa.Array, dtype: DataType) -> Values:
    """Convert an Arrow column, which must have the Arrow type of `dtype`, to a NumPy column with a mask.

    The mask `valid` is True where a row is not null. Raise DataError if a value of an array type contains a null.
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


def to_arrow(values: Values, dtype: DataType) -> pa.Array:
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
    times: Ints = pc.cast(array, pa.int64()).to_numpy(zero_copy_only=False)
    return times
