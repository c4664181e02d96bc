"""The log of pushes: a Delta table with every pushed row, from which builds merge them into the table of the view."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Transaction

from isthmus.features.contract.schema import ViewContract
from isthmus.features.days import DAY
from isthmus.features.errors import DataError, first_line
from isthmus.features.offline.canonical import declared_schema, rows_not_in
from isthmus.features.offline.delta import StoredTable, TableErrors
from isthmus.features.offline.partitions import DAY_COLUMN, dataset, days_predicate, files_by_day, with_day
from isthmus.features.values.arrow import micros
from isthmus.features.values.columns import Ints

FOLDER = "_pushed"
"""Never the name of a view: declared names begin with a letter."""
FILES = 16
"""Files per day beyond which the day is rewritten as one file."""

APPLICATION = "isthmus.pushed"
_MARK = "isthmus.commit"
"""Metadata with a random value for each commit, to recognize a commit whose reply was lost."""

ACCEPTED, CONTRACT = (
    pa.field("_accepted", pa.int64(), nullable=False),
    pa.field("_contract", pa.string(), nullable=False),
)
"""Time of the push in microseconds, and hash of the view's contract. No feature has these names."""
STREAMED = pa.field("_streamed", pa.bool_())
"""True for rows that `isthmus stream` wrote online. Builds compute them from their events; only the times count."""


class PushLog:
    """The log of rows pushed to the offline table `table`: a Delta table of its own, from which builds merge the rows.

    `root` is the folder or URL of the offline store. Methods raise DataError if the log is damaged, and DependencyError
    if object storage does not answer.
    """

    def __init__(self, root: str | Path, table: str, storage_options: Mapping[str, str] | None = None) -> None:
        self.table = table
        errors = TableErrors(
            f"pushed rows of {table}",
            damaged="it is damaged: restore that folder. Without it, builds lose the rows that were only pushed",
            conflict=(
                "another process wrote to them at the same moment",
                "no rows are lost: run `isthmus pushes collect` again",
            ),
            unwritten="its rows are unchanged, new rows wait in Redis: fix the cause and run `isthmus pushes collect`",
        )
        self._stored = StoredTable(root, f"{FOLDER}/{table}", storage_options, errors, versions=True)
        self.path = self._stored.path

    def days(self) -> list[int]:
        with self._stored.reading():
            table = self._stored.open()
            return [] if table is None else sorted(files_by_day(table))

    def version(self) -> int | None:
        with self._stored.reading():
            table = self._stored.open()
            return None if table is None else table.version()

    def rows(
        self, view: ViewContract, days: Sequence[int] | None = None, version: int | None = None, *,
        streamed: bool = False,
    ) -> pa.Table:  # fmt: skip
        """Read pushed rows, for a build to merge them into the view's table.

        Return a table with the view's columns and `_accepted`, the time of the push in microseconds since 1970 UTC.
        `days` has the event days to read, as numbers of days since 1970-01-01. None reads all rows. `version` is a
        Delta version of the log, by default the newest. With `streamed`, rows that a stream wrote online are included,
        and the result has the column `STREAMED`. Without a log, the result is empty. Raise DataError if a value does
        not fit the view's type.
        """
        with self._stored.reading():
            table = self._stored.open(version)
            rows = None if table is None else self._read(table, days)
        own = (STREAMED,) if streamed else ()
        if rows is None:
            return _schema(view, *own).empty_table()
        if not streamed and STREAMED.name in rows.column_names:
            rows = rows.filter(pc.invert(pc.fill_null(rows[STREAMED.name], False)))
        return self.to_view(view, rows, *own)

    def append_streamed(self, view: ViewContract, rows: pa.Table) -> None:
        """Append rows that a stream wrote online, in the form of `canonical` with the column `ACCEPTED`."""
        flags = (CONTRACT, pa.repeat(view.hash, len(rows))), (STREAMED, pa.repeat(True, len(rows)))
        for column, values in flags:
            rows = rows.append_column(column, values)
        with self._stored.reading():
            table = self._stored.open()
        self._write(table, with_day(rows), -1 if table is None else _last(table))

    def to_view(self, view: ViewContract, rows: pa.Table, *own: pa.Field) -> pa.Table:
        """Convert rows of this log, possibly pushed under older definitions, to the columns of one definition.

        The result also has `_accepted`, the time of the push in microseconds since 1970 UTC, and the columns `own`.
        Missing columns become null. Rows without one of the view's join keys are dropped. Raise DataError if a value
        does not fit the view's type.
        """
        schema = _schema(view, *own)
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

    def last_position(self) -> int:
        with self._stored.reading():
            table = self._stored.open()
            return -1 if table is None else _last(table)

    def append(self, rows: pa.Table, places: Ints, *, intact: bool) -> int:
        """Append pushed rows to the log in one commit, and return how many of them are new.

        Create the log if necessary. `places` has the position of each row in the Redis stream, ascending int64 (see
        `Entry.place`). Rows up to the log's last position are skipped, because an earlier call has appended them. Pass
        `intact=False` if Redis was restored to an older state, so that new rows may have used positions. Then such a
        row is skipped only if the log has an equal row. A day with `FILES` or more files is rewritten as a single file.
        Raise DataError if another process writes to the log at the same time.
        """
        with self._stored.reading():
            table = self._stored.open()
            last = -1 if table is None else _last(table)
            seen = np.flatnonzero(places <= last)
            if intact:
                rows = rows.take(pa.array(np.flatnonzero(places > last)))
            elif len(seen):
                assert table is not None  # noqa: S101 - a place was seen, so the table exists
                again, later = rows.take(pa.array(seen)), rows.take(pa.array(np.flatnonzero(places > last)))
                names = [field.name for field in rows.schema if not field.nullable]
                logged = self._read(table, _days(again)).select(names).cast(again.select(names).schema)
                rows = pa.concat_tables([rows_not_in(again, logged), later])
        if not len(rows):
            return 0
        self._write(table, with_day(rows), max(last, int(places[-1])))
        return len(rows)

    def _write(self, table: DeltaTable | None, rows: pa.Table, last: int) -> None:
        options: dict[str, Any] = {"mode": "append"} if table else {"mode": "append", "partition_by": [DAY_COLUMN.name]}
        days = _days(rows)
        with self._stored.reading():
            files = files_by_day(table) if table else {}
            if table and any(files.get(day, 0) >= FILES for day in days):
                # In one commit with the new rows: the transaction counts for both.
                before = with_day(self._read(table, days))
                rows = pa.concat_tables([before, rows], promote_options="default")
                options = {"mode": "overwrite", "predicate": days_predicate(days)}
        noted = [Transaction(APPLICATION, last)]
        self._stored.commit(table, rows, {_MARK: uuid4().hex}, transactions=noted, schema_mode="merge", **options)

    def _read(self, table: DeltaTable, within: Sequence[int] | None) -> pa.Table:
        return dataset(table, self.path, None if within is None else set(within)).to_table()


def _schema(view: ViewContract, *own: pa.Field) -> pa.Schema:
    return pa.schema([*declared_schema(view), ACCEPTED, *own])


def _last(table: DeltaTable) -> int:
    version: int | None = table.transaction_version(APPLICATION)
    return -1 if version is None else version


def _days(rows: pa.Table) -> list[int]:
    days: list[int] = np.unique(micros(rows["event_timestamp"]) // DAY).tolist()
    return days
