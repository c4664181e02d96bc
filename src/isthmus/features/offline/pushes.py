"""The log of pushes: a Delta table beside the table of a view, with every row of every push.

The table of the view holds the pushed rows, too. A build replaces its days and merges the pushed rows from this log.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import DAY
from isthmus.features.errors import DataError, first_line
from isthmus.features.offline.canonical import declared_schema, difference
from isthmus.features.offline.partitions import DAY_COLUMN, check_files, dataset, files_by_day, on
from isthmus.features.offline.storage import committed, mark, unavailable
from isthmus.features.values.arrow import micros
from isthmus.features.values.columns import Ints

FOLDER = "_pushed"
"""Never the name of a view: declared names begin with a letter."""
FILES = 16
"""Files per day beyond which the day is rewritten as one file."""

APPLICATION = "isthmus.pushed"
ACCEPTED, CONTRACT = (
    pa.field("_accepted", pa.int64(), nullable=False),
    pa.field("_contract", pa.string(), nullable=False),
)
"""Time of the push in microseconds, and hash of the view's contract. No feature has these names."""


class PushLog:
    """The log of pushes for a table, in an offline store at `root`, with `storage_options` for a URL."""

    def __init__(self, root: str | Path, table: str, storage_options: Mapping[str, str] | None = None) -> None:
        self.table = table
        self.path = f"{str(root).rstrip('/')}/{FOLDER}/{table}"
        self._options = dict(storage_options or {}) if "://" in self.path else None

    def days(self) -> list[int]:
        with self._reading():
            table = self._open()
            return [] if table is None else sorted(files_by_day(table))

    def version(self) -> int | None:
        with self._reading():
            table = self._open()
            return None if table is None else table.version()

    def rows(self, view: ViewContract, days: Sequence[int] | None = None, version: int | None = None) -> pa.Table:
        """Return the pushed rows of these days, by default all, see `formed`."""
        with self._reading():
            table = self._open(version)
            rows = None if table is None else self._read(table, days)
        return declared_schema(view).append(ACCEPTED).empty_table() if rows is None else self.formed(view, rows)

    def formed(self, view: ViewContract, rows: pa.Table) -> pa.Table:
        """Return rows of the log as a transform of the view returns them, with the time of the push.

        Missing columns are null: the push was made for an earlier definition. Rows without the view's keys are dropped.
        """
        schema = declared_schema(view).append(ACCEPTED)
        for key in view.keys:
            rows = rows.filter(pc.is_valid(rows[key.name])) if key.name in rows.column_names else rows.slice(0, 0)
        names, none = set(rows.column_names), len(rows)
        columns = [rows[field.name] if field.name in names else pa.nulls(none, field.type) for field in schema]
        try:
            return pa.table(columns, schema.names).cast(schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(
                f"pushed rows of {self.table}", f"do not fit the types of the view ({first_line(error)})",
                remedy=f"declare the view with version={view.version + 1}, which starts a new table",
            ) from error  # fmt: skip

    def last(self) -> int:
        """Return the place in the stream of the last entry in the log, or -1 if the log is empty."""
        with self._reading():
            table = self._open()
            return -1 if table is None else _last(table)

    def append(self, rows: pa.Table, places: Ints, *, intact: bool) -> int:
        """Append rows, in the form of the log, and return how many are new.

        `places`, shape (n,) int64, are the ascending places of the rows in the stream. Rows at or before the last place
        of the log are skipped. If the stream is not `intact`, because Redis was restored to an older state, places may
        have been reused; such rows are then compared with the logged rows.

        Raises:
            DataError: the table cannot be read or written, or another run has written to it meanwhile.
        """
        with self._reading():
            table = self._open()
            last = -1 if table is None else _last(table)
            seen = np.flatnonzero(places <= last)
            if intact:
                rows = rows.take(pa.array(np.flatnonzero(places > last)))
            elif len(seen):
                assert table is not None  # noqa: S101 - a place was seen, so the table exists
                again, later = rows.take(pa.array(seen)), rows.take(pa.array(np.flatnonzero(places > last)))
                names = [field.name for field in rows.schema if not field.nullable]
                logged = self._read(table, _days(again)).select(names).cast(again.select(names).schema)
                rows = pa.concat_tables([difference(again, logged), later])
        if not len(rows):
            return 0
        day = pa.array((micros(rows["event_timestamp"]) // DAY).astype(np.int32)).cast(DAY_COLUMN.type)
        self._write(table, rows.append_column(DAY_COLUMN, day), max(last, int(places[-1])))
        return len(rows)

    def _write(self, table: DeltaTable | None, rows: pa.Table, last: int) -> None:
        made = mark()
        properties = CommitProperties(
            custom_metadata=made, app_transactions=[Transaction(APPLICATION, last)], max_commit_retries=0
        )
        options: dict[str, Any] = {"schema_mode": "merge", "commit_properties": properties}
        try:
            if table is None:
                write_deltalake(
                    self.path,
                    rows,
                    partition_by=[DAY_COLUMN.name],
                    mode="append",
                    storage_options=self._options,
                    **options,
                )
                return
            files = files_by_day(table)
            full = [day for day in _days(rows) if files.get(day, 0) >= FILES]
            if full:
                # In one commit with the new rows: the transaction counts for both.
                days = _days(rows)
                before = self._read(table, days)
                stored = pa.array((micros(before["event_timestamp"]) // DAY).astype(np.int32)).cast(DAY_COLUMN.type)
                rows = pa.concat_tables([before.append_column(DAY_COLUMN, stored), rows], promote_options="default")
                write_deltalake(table, rows, mode="overwrite", predicate=on(days), **options)
            else:
                write_deltalake(table, rows, mode="append", **options)
        except (DeltaError, OSError, pa.ArrowException, ValueError, RuntimeError) as error:
            where = f"pushed rows of {self.table}"
            if committed(self.path, self._options, made):
                return
            if refusal := unavailable(where, self.path, error):
                raise refusal from error
            new = table is None and DeltaTable.is_deltatable(self.path, self._options)
            if isinstance(error, CommitFailedError) or new:
                raise DataError(where, "another process wrote to them at the same moment",
                                remedy="no rows are lost: run `isthmus pushes collect` again") from error  # fmt: skip
            raise DataError(
                where, f"{self.path} cannot be written ({first_line(error)})",
                remedy="its rows are unchanged, new rows wait in Redis: fix the cause and run `isthmus pushes collect`",
            ) from error  # fmt: skip

    def _open(self, version: int | None = None) -> DeltaTable | None:
        try:
            table = DeltaTable(self.path, version=version, storage_options=self._options)
        except TableNotFoundError:
            return None
        if "://" not in self.path:
            check_files(table, Path(self.path))
        return table

    def _read(self, table: DeltaTable, within: Sequence[int] | None) -> pa.Table:
        return dataset(table, self.path, None if within is None else set(within)).to_table()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (DeltaError, OSError, pa.ArrowException, ValueError) as error:
            if refusal := unavailable(f"pushed rows of {self.table}", self.path, error):
                raise refusal from error
            raise DataError(
                f"pushed rows of {self.table}", f"{self.path} cannot be read ({first_line(error)})",
                remedy="it is damaged: restore that folder. Without it, builds lose the rows that were only pushed",
            ) from error  # fmt: skip


def _last(table: DeltaTable) -> int:
    version: int | None = table.transaction_version(APPLICATION)
    return -1 if version is None else version


def _days(rows: pa.Table) -> list[int]:
    days: list[int] = np.unique(micros(rows["event_timestamp"]) // DAY).tolist()
    return days
