"""Bitwise equality of columns."""

from typing import Any

import numpy as np

from isthmus.features.types import DataType
from isthmus.features.values.columns import Mask, Values


def equal_values(left: Values, right: Values, dtype: DataType) -> Mask:
    """Compare two columns of the type `dtype` row by row. The mask, shape (n,), is True where the rows are equal.

    Equal means equal bits, so 0.0 and -0.0 differ. Two nulls are equal, and so are any two NaNs.
    """
    same: Mask
    if dtype.numpy is not None:
        same = identical(left.data, right.data)
    elif dtype.element is not None and dtype.element.numpy is not None:
        pairs = zip(left.data, right.data, strict=True)
        same = np.array([a is not None and b is not None and _same_array(a, b) for a, b in pairs], bool)
    else:
        same = np.array([a == b for a, b in zip(left.data, right.data, strict=True)], bool)
    equal: Mask = (left.valid == right.valid) & (same | ~left.valid)
    return equal


def identical(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> Mask:
    bits = f"<u{left.dtype.itemsize}"
    same: Mask = np.ascontiguousarray(left).view(bits) == np.ascontiguousarray(right).view(bits)
    return same | np.isnan(left) & np.isnan(right) if left.dtype.kind == "f" else same


def _same_array(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    return len(left) == len(right) and (left.tobytes() == right.tobytes() or bool(identical(left, right).all()))
