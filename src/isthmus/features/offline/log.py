"""The log of materializations: when each state of each view became readable online.

A single Delta table for all views, with a row per run and view, written after Redis has confirmed the rows. The log and
the versions of the offline tables determine what was served at any time.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError, TableNotFoundError

from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DataError, first_line
from isthmus.features.offline.storage import unavailable

FOLDER = "_materializations"
"""Never the name of a view: declared names begin with a letter."""


@dataclass(frozen=True, slots=True)
class Materialization:
    """A run that wrote a view to Redis. All times are microseconds since 1970 UTC.

    Attributes:
        contract: hash of the view's contract.
        version: version of the offline table.
        fingerprint: hash of the rows of that version.
        at: time whose latest rows were written.
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


class MaterializationLog:
    """The log in an offline store at `root`, with `storage_options` for a URL."""

    def __init__(self, root: str | Path, storage_options: Mapping[str, str] | None = None) -> None:
        self._path = f"{str(root).rstrip('/')}/{FOLDER}"
        self._options = dict(storage_options or {}) if "://" in self._path else None

    def append(self, entry: Materialization) -> None:
        """Append an entry; concurrent runs may append at the same time."""
        try:
            write_deltalake(self._path, pa.Table.from_pylist([asdict(entry)], _SCHEMA), mode="append",
                            storage_options=self._options)  # fmt: skip
        except (DeltaError, OSError) as error:
            if refusal := unavailable("log of materializations", self._path, error):
                raise refusal from error
            raise DataError(
                "log of materializations", f"{self._path} cannot be written ({first_line(error)})",
                remedy="its entries are unchanged: fix the cause, then run `isthmus materialize` again",
            ) from error  # fmt: skip

    def contracts(self) -> set[str]:
        """Return the contract hashes of all materialized views. Raises a DataError if the log is damaged."""
        return set(self._table().column("contract").to_pylist())

    def of(self, view: ViewContract) -> list[Materialization]:
        """Return the entries of a view under its contract, in the order in which they became readable.

        Raises:
            DataError: the log is damaged.
        """
        table = self._table()
        mine = pc.and_(pc.equal(table["view"], view.name), pc.equal(table["contract"], view.hash))
        # If the clock did not advance, later runs have later versions.
        order = [(name, "ascending") for name in ("readable", "at", "version")]
        rows = table.filter(mine).sort_by(order).to_pylist()
        return [Materialization(**row) for row in rows]

    def _table(self) -> pa.Table:
        try:
            return DeltaTable(self._path, storage_options=self._options).to_pyarrow_table()
        except TableNotFoundError:
            return _SCHEMA.empty_table()
        except (DeltaError, OSError, pa.ArrowException) as error:
            refusal = unavailable("log of materializations", self._path, error)
            raise refusal or self._damaged(error) from error

    def _damaged(self, error: Exception) -> DataError:
        return DataError(
            "log of materializations", f"{self._path} cannot be read ({first_line(error)})",
            remedy="remove that folder; the history of past materializations is lost with it",
        )  # fmt: skip
