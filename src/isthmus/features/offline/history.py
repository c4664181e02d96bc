"""The history of a view: all rows of its offline table. Also the schema of that table, and connections to DuckDB."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from isthmus.features.contract.schema import SEPARATOR, STATUS, ViewContract
from isthmus.features.offline.commits import Commit
from isthmus.features.values.arrow import ARROW

if TYPE_CHECKING:
    import duckdb
    import pyarrow.dataset as ds

_NO_COMMIT = Commit("", None)


@dataclass(frozen=True)
class ViewHistory:
    view: ViewContract
    data: "ds.Dataset | pa.Table"
    version: int
    commit: Commit = _NO_COMMIT

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rows, to notice that a table changed; empty if unknown.

        Use it instead of `version`, which restarts at 0 when a table is built anew.
        """
        return self.commit.fingerprint

    def table(self, columns: list[str] | None = None) -> pa.Table:
        if isinstance(self.data, pa.Table):
            return self.data if columns is None else self.data.select(columns)
        return self.data.to_table(columns=columns)

    def rows(self) -> int:
        return len(self.data) if isinstance(self.data, pa.Table) else int(self.data.count_rows())


def status_column(view: ViewContract) -> str:
    return f"{view.name}{SEPARATOR}{STATUS}"


def table_schema(view: ViewContract) -> pa.Schema:
    time = pa.timestamp("us", tz="UTC")
    return pa.schema(
        [pa.field(column.name, ARROW[column.dtype.name], nullable=False) for column in view.keys]
        + [pa.field("event_timestamp", time, nullable=False), pa.field("known_at", time, nullable=False)]
        + [pa.field(column.name, ARROW[column.dtype.name]) for column in view.fields]
        + [pa.field("content_hash", pa.int64(), nullable=False)]
    )


def connection(threads: int = 2) -> "duckdb.DuckDBPyConnection":
    import duckdb

    return duckdb.connect(
        config={"threads": threads, "autoinstall_known_extensions": False, "autoload_known_extensions": False}
    )
