"""Rows of Delta tables, read with deltalake. A version of a table never changes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pyarrow as pa

from isthmus.features.definition.spec import Source
from isthmus.features.errors import DataError, extra
from isthmus.transforms.tables.table import REPAIR, SourceTable, Within, condition, reading

_TIME = "arrow_cast({}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
"""A plain literal would have nanoseconds, which end in 2262."""


class _DeltaTable:
    def __init__(self, source: Source, place: str, options: Mapping[str, str]) -> None:
        from deltalake import DeltaTable

        self.place, self._source = place, source.name
        self._table = DeltaTable(place, storage_options=dict(options) or None)
        # A table that was removed and rewritten restarts at version 0, with another id.
        self.version: str | None = f"{self._table.metadata().id} {self._table.version()}"
        self.schema = pa.schema(self._table.schema().to_arrow())

    def batches(self, column: str | None, within: Within) -> Iterator[pa.RecordBatch]:
        from deltalake.exceptions import DeltaError

        predicate = condition(column, within, _TIME) if column and within else None
        with reading(self._source, self.place, DeltaError):
            yield from pa.RecordBatchReader.from_stream(self._table.scan(predicate=predicate))


@contextmanager
def open_table(source: Source, place: str, options: Mapping[str, str]) -> Iterator[SourceTable]:
    """Open the newest version of a Delta table, so that its rows can be copied for a build.

    `place` is the path or URL of the table, and `options` are the storage options for a URL. Raises DataError if the
    table is missing or damaged, and DependencyError if the storage does not answer or deltalake is not installed.
    """
    with extra("offline"):
        from deltalake.exceptions import DeltaError, TableNotFoundError
    try:
        with reading(source.name, place, DeltaError):
            table = _DeltaTable(source, place, options)
    except DataError as error:
        if isinstance(error.__cause__, TableNotFoundError):
            problem = f"no Delta table at {place}"
            raise DataError(error.where, problem, remedy="correct delta= of the source, or create the table") from error
        raise DataError(error.where, error.found, remedy=REPAIR) from error
    yield table
