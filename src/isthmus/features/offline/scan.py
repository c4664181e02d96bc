"""`Scan` reads the row groups of a table that may hold matching rows, in blocks, as often as needed."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

BLOCK = 1 << 19
"""Approximate rows per block. One block is in memory at a time."""

_AHEAD = 4
"""Record batches to read ahead. Arrow's default, 16 in each of 4 files, takes half a gigabyte."""


class Scan:
    """A scan of a table that skips Parquet row groups whose statistics rule out `condition`.

    Rows of the remaining groups are not filtered. A row's number is the count of rows before it in the scan. Columns in
    `texts` are read as dictionaries, which is faster. Data in another format than Parquet is read into memory as a
    whole.
    """

    def __init__(
        self, data: ds.Dataset | pa.Table, texts: Sequence[str], condition: ds.Expression, threads: int
    ) -> None:
        self._schema = data.schema
        self._options = {"batch_readahead": _AHEAD, "fragment_readahead": 2, "use_threads": threads > 1}
        self._groups: list[Any]
        if isinstance(data, ds.FileSystemDataset) and isinstance(data.format, ds.ParquetFileFormat):
            form = ds.ParquetFileFormat(dictionary_columns=list(texts))
            groups = [
                (form.make_fragment(file.path, file.filesystem, file.partition_expression, [group.id]), group.num_rows)
                for file in data.get_fragments(condition)
                for group in file.subset(condition, schema=data.schema).row_groups
            ]
            self._groups, counts = [group for group, _ in groups], [rows for _, rows in groups]
        else:
            self._groups = (data if isinstance(data, pa.Table) else data.to_table()).to_batches(BLOCK)
            counts = list(map(len, self._groups))
        self._ends = np.cumsum(counts, dtype=np.int64)

    def blocks(self, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        first, waiting = 0, []
        for batch in self._batches(self._groups, columns):
            waiting.append(batch)
            if (rows := sum(map(len, waiting))) >= BLOCK:
                yield first, pa.Table.from_batches(waiting)
                first, waiting = first + rows, []
        if waiting:
            yield first, pa.Table.from_batches(waiting)

    def rows(self, places: np.ndarray[Any, np.dtype[np.int64]], columns: Sequence[str]) -> pa.Table:
        """Read columns of single rows, such as those that a join has found, without reading other row groups.

        `places` has the ascending numbers of the rows, counted from 0 in this scan and not in the table.
        """
        group = np.searchsorted(self._ends, places, side="right")
        needed, inverse = np.unique(group, return_inverse=True)
        lengths = np.diff(self._ends, prepend=0)[needed]
        # Convert places among all rows to places among the rows of the needed groups.
        places = places - self._ends[group] + np.cumsum(lengths)[inverse]
        first, parts = 0, []
        for batch in self._batches([self._groups[n] for n in needed], columns):
            low, high = np.searchsorted(places, [first, first + len(batch)])
            if high > low:
                parts.append(batch.take(pa.array(places[low:high] - first)))
            first += len(batch)
        return pa.Table.from_batches(parts, pa.schema([self._schema.field(name) for name in columns]))

    def _batches(self, groups: list[Any], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        if not groups or isinstance(groups[0], pa.RecordBatch):
            return (group.select(list(columns)) for group in groups)
        data = ds.FileSystemDataset(groups, self._schema, groups[0].format, groups[0].filesystem)
        batches: Iterator[pa.RecordBatch] = data.to_batches(columns=list(columns), **self._options)
        return batches


def rebatch(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        while count + len(batch) >= rows:
            waiting.append(batch.slice(0, rows - count))
            yield pa.Table.from_batches(waiting)
            batch = batch.slice(rows - count)
            waiting, count = [], 0
        if len(batch):
            waiting.append(batch)
            count += len(batch)
    if waiting:
        yield pa.Table.from_batches(waiting)
