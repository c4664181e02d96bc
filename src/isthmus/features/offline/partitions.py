"""The files and rows of Delta tables that are partitioned by day."""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.transaction import RemoveAction

from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import DAY, Days, day_name, union
from isthmus.features.offline.delta import files_of
from isthmus.features.offline.history import table_schema
from isthmus.features.offline.spool import DaySpool
from isthmus.features.values.arrow import micros

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    import pyarrow.fs as fs

DAY_COLUMN = pa.field("event_day", pa.date32(), nullable=False)
"""Partition column, hidden from readers."""


def require_readable(table: DeltaTable) -> None:
    if (needed := table.protocol().min_reader_version) > 1:
        raise OSError(f"another tool has upgraded it to Delta reader version {needed}; Isthmus reads version 1")


def files_by_day(table: DeltaTable) -> dict[int, int]:
    adds = pa.table(table.get_add_actions(flatten=True))
    days, counts = np.unique(adds[f"partition.{DAY_COLUMN.name}"].cast(pa.int32()).to_numpy(), return_counts=True)
    return dict(zip(days.tolist(), counts.tolist(), strict=True))


def listed_files(table: DeltaTable) -> Iterator[tuple[str, int, int]]:
    """Yield the path, the size in bytes and the day of each file."""
    adds = pa.table(table.get_add_actions(flatten=True))
    days = adds[f"partition.{DAY_COLUMN.name}"].cast(pa.int32()).to_pylist()
    yield from zip(adds["path"].to_pylist(), adds["size_bytes"].to_pylist(), days, strict=True)


def remove_days(table: DeltaTable, days: Collection[int]) -> list[RemoveAction]:
    """Return the actions that remove the files of days from a table, for the commit that replaces them."""
    now = int(time.time() * 1000)
    return [
        RemoveAction(path, data_change=True, deletion_timestamp=now, size=size,
                     partition_values={DAY_COLUMN.name: day_name(day)})
        for path, size, day in listed_files(table)
        if day in days
    ]  # fmt: skip


def dataset(table: DeltaTable, place: str, only: Collection[int] | None = None) -> "ds.Dataset":
    """Open a Delta table's Parquet files as a lazy Arrow dataset, in order of the days of their rows.

    `place` is the folder or URL of the table. `only` has the days to read, as numbers of days since 1970-01-01. None
    reads all days.
    """
    # deltalake's own dataset converts the statistics of all files to expressions: slower than reading a year.
    adds = pa.table(table.get_add_actions(flatten=True))
    part = f"partition.{DAY_COLUMN.name}"
    # Tables of early versions of Isthmus have no days.
    days = adds[part].cast(pa.int32()).to_pylist() if part in adds.schema.names else [None] * len(adds)
    files = [file for file in zip(adds["path"].to_pylist(), days, strict=True) if only is None or file[1] in only]
    schema = pa.schema([column for column in pa.schema(table.schema().to_arrow()) if column.name != DAY_COLUMN.name])
    return dataset_of(files, schema, files_of(table, place))


def dataset_of(
    files: Iterable[tuple[str, int | None]], schema: pa.Schema, filesystem: "fs.FileSystem"
) -> "ds.FileSystemDataset":
    """Open Parquet files, each with the day of its rows or None, as a lazy dataset in order of the days."""
    # A late import: it loads pandas, which takes a third of a second.
    import pyarrow.dataset as ds

    files = sorted(files, key=lambda file: (file[1] or 0, file[0]))
    form = ds.ParquetFileFormat(default_fragment_scan_options=ds.ParquetFragmentScanOptions(pre_buffer=True))
    fragments = [form.make_fragment(file, filesystem, partition_expression=_of_day(day)) for file, day in files]
    return ds.FileSystemDataset(fragments, schema, form, filesystem)


def _of_day(day: int | None) -> "ds.Expression | None":
    import pyarrow.dataset as ds

    if day is None:
        return None
    event = ds.field("event_timestamp")
    first, last = (pa.scalar(at, pa.timestamp("us", tz="UTC")) for at in (day * DAY, (day + 1) * DAY - 1))
    return (event >= first) & (event <= last)


def column_names(table: DeltaTable) -> list[str]:
    return [column.name for column in table.schema().fields if column.name != DAY_COLUMN.name]


def with_day(rows: pa.Table) -> pa.Table:
    days = pa.array((micros(rows["event_timestamp"]) // DAY).astype(np.int32)).cast(DAY_COLUMN.type)
    return rows.append_column(DAY_COLUMN, days)


def reader(view: ViewContract, rows: DaySpool) -> pa.RecordBatchReader:
    schema = table_schema(view).append(DAY_COLUMN)

    def batches() -> Iterator[pa.RecordBatch]:
        for group in rows.groups():
            yield from with_day(group).cast(schema).to_batches()

    return pa.RecordBatchReader.from_batches(schema, batches())


def days_predicate(days: Sequence[int]) -> str:
    ranges = union(Days(day, day + 1) for day in days)
    name = DAY_COLUMN.name
    return " OR ".join(
        f"({name} >= '{day_name(part.first)}' AND {name} <= '{day_name(part.end - 1)}')" for part in ranges
    )
