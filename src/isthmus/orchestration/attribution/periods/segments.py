"""Assign the rows of two periods to segments."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.evaluation.slices import coded
from isthmus.features.errors import RequestError, one_of
from isthmus.features.values.columns import Ints


class Segments(NamedTuple):
    """Segments of rows: the segment index of each row, shape (n,), and the column values of each segment."""

    places: Ints
    values: list[dict[str, str | None]]


def segments(table: pa.Table, columns: Sequence[str], exact: Sequence[str]) -> Segments:
    """Split rows into segments by columns: by value, or by quartile for numeric columns not in `exact`.

    Raises:
        RequestError: a column does not exist, or none is named.
        DataError: a column is not text, boolean or numeric.
    """
    if missing := [name for name in columns if name not in table.column_names]:
        raise RequestError(f"--by {missing[0]}", "is not a column of the rows", expected=one_of(table.column_names))
    if not columns:
        raise RequestError("segments", "the rows have none of the join keys of the spine",
                           expected="--by with a column of the rows")  # fmt: skip
    words: list[list[str | None]] = []
    codes = np.empty((len(table), len(columns)), np.int64)
    for place, name in enumerate(columns):
        if name in exact:
            column = table[name].combine_chunks().dictionary_encode(null_encoding="encode")
            own = [None if value is None else str(value) for value in column.dictionary.to_pylist()]
            codes[:, place] = pc.fill_null(column.indices, 0).to_numpy(zero_copy_only=False)
        else:
            own, codes[:, place] = coded(name, table[name])
        words.append(own)
    distinct, places = np.unique(codes, axis=0, return_inverse=True)
    values = [
        {name: own[code] for name, own, code in zip(columns, words, row, strict=True)} for row in distinct.tolist()
    ]
    return Segments(places.reshape(-1).astype(np.int64), values)
