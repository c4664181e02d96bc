"""The files and rows of Delta tables that are partitioned by day."""

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable

from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import DAY, Days, day_name, union
from isthmus.features.offline.delta import files_of
from isthmus.features.offline.history import table_schema
from isthmus.features.offline.spool import DaySpool
from isthmus.features.values.arrow import micros

if TYPE_CHECKING:
    import pyarrow.dataset as ds

DAY_COLUMN = pa.field("event_day", pa.date32(), nullable=False)
"""Partition column, hidden from readers."""


def require_readable(table: DeltaTable) -> None:
    if (needed := table.protocol().min_reader_version) > 1:
        raise OSError(f"another tool has upgraded it to Delta reader version {needed}; Isthmus reads version 1")


def files_by_day(table: DeltaTable) -> dict[int, int]:
    adds = pa.table(table.get_add_actions(flatten=True))
    days, counts = np.unique(adds[f"partition.{DAY_COLUMN.name}"].cast(pa.int32()).to_numpy(), return_counts=True)
    return dict(zip(days.tolist(), counts.tolist(), strict=True))


def dataset(table: DeltaTable, place: str, only: Collection[int] | None = None) -> "ds.Dataset":
    """Open a Delta table's Parquet files as a lazy Arrow dataset, in order of the days of their rows.

    `place` is the folder or URL of the table. `only` has the days to read, as numbers of days since 1970-01-01. None
    reads all days.
    """
    # A late import: it loads pandas, which takes a third of a second.
    import pyarrow.dataset as ds

    # deltalake's own dataset converts the statistics of all files to expressions: slower than reading a year.
    adds = pa.table(table.get_add_actions(flatten=True))
    part = f"partition.{DAY_COLUMN.name}"
    # Tables of early versions of Isthmus have no days.
    days = adds[part].cast(pa.int32()).to_pylist() if part in adds.schema.names else [None] * len(adds)
    files = sorted(zip(adds["path"].to_pylist(), days, strict=True), key=lambda file: (file[1] or 0, file[0]))
    if only is not None:
        files = [(file, day) for file, day in files if day in only]
    filesystem = files_of(table, place)
    form = ds.ParquetFileFormat(default_fragment_scan_options=ds.ParquetFragmentScanOptions(pre_buffer=True))
    fragments = [form.make_fragment(file, filesystem, partition_expression=_of_day(day)) for file, day in files]
    schema = pa.schema([column for column in pa.schema(table.schema().to_arrow()) if column.name != DAY_COLUMN.name])
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
