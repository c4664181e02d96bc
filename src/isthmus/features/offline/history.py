"""The history of a view: its rows in the offline table, their schema, and the DuckDB that reads them."""

from dataclasses import dataclass

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from isthmus.features.contract.contract import SEPARATOR, STATUS, ViewContract
from isthmus.features.offline.commits import Commit
from isthmus.features.values.columns import ARROW

_NO_COMMIT = Commit("", None)
"""The commit of rows that are in no table."""


@dataclass(frozen=True)
class ViewHistory:
    """The full history of one view, with the version of the table it was read from and that version's commit."""

    view: ViewContract
    data: ds.Dataset | pa.Table
    version: int
    commit: Commit = _NO_COMMIT

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rows. A table that was removed and built again counts its versions from 0 again."""
        return self.commit.fingerprint

    def table(self) -> pa.Table:
        """All rows, in memory."""
        return self.data if isinstance(self.data, pa.Table) else self.data.to_table()

    def rows(self) -> int:
        """Number of rows."""
        return len(self.data) if isinstance(self.data, pa.Table) else int(self.data.count_rows())


def status_column(view: ViewContract) -> str:
    """The column of a training set that says what the view answered."""
    return f"{view.name}{SEPARATOR}{STATUS}"


def table_schema(view: ViewContract) -> pa.Schema:
    """The columns of a view's offline table."""
    time = pa.timestamp("us", tz="UTC")
    return pa.schema(
        [pa.field(column.name, ARROW[column.dtype.name], nullable=False) for column in view.keys]
        + [pa.field("event_timestamp", time, nullable=False), pa.field("known_at", time, nullable=False)]
        + [pa.field(column.name, ARROW[column.dtype.name]) for column in view.fields]
        + [pa.field("content_hash", pa.int64(), nullable=False)]
    )


def connection(threads: int = 2) -> duckdb.DuckDBPyConnection:
    """A DuckDB of its own that neither downloads extensions nor takes more than its share."""
    return duckdb.connect(
        config={"threads": threads, "autoinstall_known_extensions": False, "autoload_known_extensions": False}
    )
