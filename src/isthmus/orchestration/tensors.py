"""Training data as tensors. Importing this module imports torch."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.utils.data import IterableDataset, get_worker_info

from isthmus.features.errors import RequestError, one_of
from isthmus.features.offline.scan import rebatch

Item = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


class Tensors(IterableDataset[Item]):
    """Batches of rows. Each batch is two dictionaries by column name: values, and masks of the non-null values.

    Floats and integers keep their width. Booleans are bool, times are int64 microseconds since 1970 UTC, and a status
    is its index in `clock.Status` as int8. Nulls are NaN in float columns and 0 or False elsewhere. Strings, bytes and
    arrays are left out; encode them first. A named column that is missing or not numeric raises a RequestError.

    Pass it to a `DataLoader` with `batch_size=None`. With n workers, each worker yields every n-th batch. Workers need
    a training set on disk (`workers` is True), because a forked process cannot read the offline tables.
    """

    def __init__(
        self,
        schema: pa.Schema,
        read: Callable[[], Iterable[pa.RecordBatch]],
        columns: Sequence[str] | None,
        batch: int,
        *,
        workers: bool,
    ) -> None:
        numeric = [field.name for field in schema if _is_numeric(field.type)]
        for name in columns or ():
            if name not in numeric:
                problem = f"has type {schema.field(name).type}" if name in schema.names else "does not exist"
                raise RequestError(f"column {name}", problem, expected=one_of(numeric))
        self._columns = numeric if columns is None else list(columns)
        self._read, self._batch, self._workers = read, batch, workers
        self._types = Counter(_number_type(schema.field(name).type) for name in self._columns)

    def __repr__(self) -> str:
        types = ", ".join(f"{count} {name}" for name, count in self._types.items())
        return f"<Tensors: batches of {self._batch:,} rows on the CPU, {len(self._columns)} columns ({types})>"

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        if worker and not self._workers:
            raise RequestError("training data", f"cannot be read in {worker.num_workers} DataLoader workers",
                               remedy="read a training set on disk, or set num_workers=0")  # fmt: skip
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for n, rows in enumerate(rebatch(self._read(), self._batch)):
            if n % step == first:
                values, valid = {}, {}
                for name in self._columns:
                    column = rows[name].combine_chunks()
                    values[name] = torch.from_numpy(_numbers(column))
                    valid[name] = torch.from_numpy(column.is_valid().to_numpy(zero_copy_only=False).copy())
                yield values, valid


def _is_numeric(kind: pa.DataType) -> bool:
    status = pa.types.is_dictionary(kind) and kind.index_type == pa.int8()
    known = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_timestamp)
    return bool(status or any(check(kind) for check in known))


def _number_type(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        kind = kind.index_type
    return "int64" if pa.types.is_timestamp(kind) else np.dtype(kind.to_pandas_dtype()).name


def _numbers(column: pa.Array) -> np.ndarray[Any, Any]:
    if pa.types.is_dictionary(column.type):
        column = column.indices
    elif pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    missing = np.nan if pa.types.is_floating(column.type) else False if pa.types.is_boolean(column.type) else 0
    filled = pc.fill_null(column, pa.scalar(missing, column.type)) if column.null_count else column
    numbers: np.ndarray[Any, Any] = filled.to_numpy(zero_copy_only=False).copy()
    return numbers
