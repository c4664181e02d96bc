"""Differences between two computations of the same rows, up to the rounding of sums."""

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.offline.canonical import identity
from isthmus.features.types import DataType
from isthmus.features.values.arrow import from_arrow
from isthmus.features.values.columns import Mask

Numbers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

# Allowed difference of sums, relative to the largest value of a feature. Rounding depends on the first row of a sum.
_ROUNDING = {"Float32": 1e-5, "Float64": 1e-9}


def sort_rows(contract: ViewContract, tables: list[pa.Table]) -> pa.Table | None:
    """Concatenate rows of a view and sort them by keys and times. Return None if there are none."""
    tables = [table for table in tables if len(table)]
    return pa.concat_tables(tables).sort_by([(name, "ascending") for name in identity(contract)]) if tables else None


def difference(contract: ViewContract, declared: pa.Table | None, doubled: pa.Table | None) -> str:
    """Describe the first difference between two results of `sort_rows`, or return "". Sums may differ by rounding."""
    counts = [0 if table is None else len(table) for table in (declared, doubled)]
    if declared is None or doubled is None or counts[0] != counts[1]:
        return f"{counts[1]} rows instead of {counts[0]}"
    keys = declared.select(identity(contract))
    if not keys.equals(doubled.select(keys.column_names).cast(keys.schema)):
        return "the rows have other keys or times"
    for column in contract.fields:
        differing = np.flatnonzero(_differing(column, declared, doubled))
        if len(differing):
            row = int(differing[0])
            where = keys.drop_columns("known_at").slice(row, 1).to_pylist()[0]
            place = ", ".join(f"{name}={value}" for name, value in where.items())
            before, after = (table[column.name][row].as_py() for table in (declared, doubled))
            first = f"first {after} instead of {before} at {place}"
            return f"{column.name} differs in {len(differing)} of {len(declared)} rows, {first}"
    return ""


def _differing(column: Column, declared: pa.Table, doubled: pa.Table) -> Mask:
    left, right = (from_arrow(table[column.name], column.dtype) for table in (declared, doubled))
    element = column.dtype.element
    if column.dtype.numpy is not None:
        return np.asarray((left.valid != right.valid) | ~_close(left.data, right.data, column.dtype))
    if element is None or element.numpy is None:
        pairs = zip(left.tolist(column.dtype), right.tolist(column.dtype), strict=True)
        return np.asarray([repr(a) != repr(b) for a, b in pairs], bool)
    lengths, right_lengths = (
        np.array([-1 if array is None else len(array) for array in side.data]) for side in (left, right)
    )
    full = (lengths == right_lengths) & (lengths > 0)
    flat, right_flat = (np.concatenate([np.empty(0, element.numpy), *side.data[full]]) for side in (left, right))
    differing = np.asarray(lengths != right_lengths)
    differing[np.repeat(np.flatnonzero(full), lengths[full])[~_close(flat, right_flat, element)]] = True
    return differing


def _close(left: Numbers, right: Numbers, dtype: DataType) -> Mask:
    if (share := _ROUNDING.get(dtype.name)) is None:
        return np.asarray(left == right)
    finite = np.abs(left[np.isfinite(left)])
    return np.isclose(left, right, rtol=share, atol=share * finite.max(initial=0), equal_nan=True)
