"""The log of materializations: a Delta table that records when each state of each view became readable in Redis."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.contract.schema import ViewContract
from isthmus.features.offline.delta import StoredTable, TableErrors

FOLDER = "_materializations"
"""Never the name of a view: declared names begin with a letter."""


@dataclass(frozen=True, slots=True)
class Materialization:
    """A log entry: a run that wrote a view's rows to Redis. All times are microseconds since 1970 UTC.

    Attributes:
        version: version of the offline table.
        fingerprint: hash of the rows of that version.
        at: time as of which the latest row of each key was selected.
        started: time at which the first row was sent.
        readable: time at which the last row was confirmed.
        written: number of rows that were new or replaced a stored row.
    """

    view: str
    contract: str
    version: int
    fingerprint: str
    at: int
    started: int
    readable: int
    written: int


_SCHEMA = pa.schema(
    [(field.name, pa.string() if field.type is str else pa.int64(), False) for field in fields(Materialization)]
)


_REMEDY = "its entries are unchanged: fix the cause, then run `isthmus materialize` again"
_ERRORS = TableErrors(
    "log of materializations",
    damaged="remove that folder; the history of past materializations is lost with it",
    conflict=("another process wrote to it at the same moment", _REMEDY),
    unwritten=_REMEDY,
)


class MaterializationLog:
    """The log of runs that wrote views to Redis. `root` is the offline store: a folder or a URL."""

    def __init__(self, root: str | Path, storage_options: Mapping[str, str] | None = None) -> None:
        self._stored = StoredTable(root, FOLDER, storage_options, _ERRORS)

    def append(self, entry: Materialization) -> None:
        self._stored.append(pa.Table.from_pylist([asdict(entry)], _SCHEMA))

    def contracts(self) -> set[str]:
        return set(self._table().column("contract").to_pylist())

    def runs(self, view: ViewContract) -> list[Materialization]:
        table = self._table()
        mine = pc.and_(pc.equal(table["view"], view.name), pc.equal(table["contract"], view.hash))
        # If the clock did not advance, later runs have later versions.
        order = [(name, "ascending") for name in ("readable", "at", "version")]
        rows = table.filter(mine).sort_by(order).to_pylist()
        return [Materialization(**row) for row in rows]

    def _table(self) -> pa.Table:
        with self._stored.reading():
            table = self._stored.open()
            return _SCHEMA.empty_table() if table is None else table.to_pyarrow_table()
