"""Slices of the test rows, by feature values, in which a student loses most against its teacher."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.types import Array, Index
from isthmus.features.errors import DataError

Measure = Callable[[Index], Mapping[str, float]]
"""Returns the metric of "teacher", "student" and optionally "control" on these rows; NaN where it is not defined."""

_QUARTERS = 4


@dataclass(frozen=True, slots=True)
class Slice:
    """The test rows with one value of a feature (None: missing) and each model's metric (None: undefined)."""

    column: str
    value: str | None
    rows: int
    teacher: float
    student: float
    control: float | None


def worst_slices(
    table: pa.Table, measure: Measure, *, least: int, count: int = 10, higher_is_better: bool = True
) -> list[Slice]:
    """Find the groups of test rows (slices) in which the student is worst compared to the teacher, largest loss first.

    A text or boolean column has a slice per value. A number column has a slice per quarter of the rows, or fewer slices
    if many rows have the same value. Missing values and NaN form a slice, too. Leaves out a slice if it has all rows,
    the same rows as an earlier slice, or a metric of teacher or student that is not finite. The result may include
    slices in which the student is better than the teacher.

    Args:
        table: test rows, with the columns to slice by.
        measure: called with the ascending row numbers of a slice; returns the metric of "teacher" and "student", and
            optionally of "control".
        least: minimum number of rows in a slice.
        count: maximum number of slices in the result.
        higher_is_better: True for metrics like AUC, False for losses.

    Raises:
        DataError: a column is neither text, boolean nor number.
    """
    slices, seen = [], set()
    for name in table.column_names:
        for value, rows in column_slices(name, table[name], least):
            if (digest := hashlib.sha256(rows.tobytes()).digest()) in seen:
                continue
            seen.add(digest)
            measured = measure(rows)
            teacher, student = float(measured["teacher"]), float(measured["student"])
            control = float(measured.get("control", math.nan))
            if math.isfinite(teacher) and math.isfinite(student):
                known = control if math.isfinite(control) else None
                slices.append(Slice(name, value, len(rows), teacher, student, known))
    sign = 1 if higher_is_better else -1
    # The sort is stable: equal losses keep the order of columns and values.
    return sorted(slices, key=lambda item: sign * (item.student - item.teacher))[:count]


def column_slices(name: str, column: pa.ChunkedArray, least: int) -> Iterator[tuple[str | None, Index]]:
    """Split a column into slices of rows with equal values, to measure each slice; yield its value and its row numbers.

    The value is a text, or None for missing values and NaN. A number column has a slice per quarter of the rows. Leaves
    out slices with fewer than `least` rows or with all rows. `name` names the column in error messages. Raises a
    DataError if the column is neither text, boolean nor number.
    """
    values, codes = encode_column(name, column)
    order = np.argsort(codes, kind="stable")
    ends = np.searchsorted(codes[order], np.arange(len(values) + 1), side="left")
    for value, start, end in zip(values, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        if max(least, 1) <= end - start < len(codes):
            yield value, order[start:end].astype(np.int64)


def encode_column(name: str, column: pa.ChunkedArray) -> tuple[list[str | None], Index]:
    """Encode a column as categories; return the category names, and the index of each row's category, int64 (n,).

    A category is a value of the column, or a quarter of the rows for numbers. The last name is always None, for missing
    values and NaN. `name` names the column in error messages. Raises a DataError if the column is neither text, boolean
    nor number.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = kind.value_type
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_nan(column), None, column)
    missing = pc.is_null(column).to_numpy()
    words: list[str]
    if pa.types.is_boolean(kind):
        words, places = ["false", "true"], column.drop_null().to_numpy().astype(np.int64)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        texts = column.drop_null().cast(pa.large_string())
        values = pc.unique(texts).sort()
        words, places = values.to_pylist(), pc.index_in(texts, value_set=values).to_numpy().astype(np.int64)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        words, places = _quarters(column.drop_null().to_numpy())
    else:
        raise DataError(f"slices by {name}", f"a column of type {kind}", expected="text, booleans or numbers")
    codes = np.full(len(column), len(words), np.int64)
    codes[~missing] = places
    return [*words, None], codes


def _quarters(numbers: Array) -> tuple[list[str], Index]:
    if not len(numbers):
        return [], np.empty(0, np.int64)
    ordered = np.sort(numbers)
    ends = np.unique(ordered[[(len(ordered) * part - 1) // _QUARTERS for part in range(1, _QUARTERS + 1)]])
    edges = [ordered[0], *ends]
    texts = [f"{edge:.6g}" for edge in edges]
    # Use all digits for integers, or where six digits do not tell the edges apart.
    if ends.dtype.kind in "iu" or len(set(texts)) < len(set(edges)):
        texts = [str(edge) for edge in edges]
    first = texts[1] if ordered[0] == ends[0] else f"{texts[0]} to {texts[1]}"
    words = [first, *(f"over {low} to {high}" for low, high in pairwise(texts[1:]))]
    return words, np.searchsorted(ends, numbers, side="left").astype(np.int64)
