"""The log of materializations: when each state of each view became readable online.

One Delta table for all views, beside theirs; one row for each run and view, written after Redis has confirmed its rows.
What a key answered at any moment follows from it and the versions of the offline table.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError, TableNotFoundError

from isthmus.features.contract.contract import ViewContract
from isthmus.features.errors import DataError

FOLDER = "_materializations"
"""No view has this name: a declared name begins with a letter."""

_SCHEMA = pa.schema(
    [
        pa.field("view", pa.string(), nullable=False),
        pa.field("contract", pa.string(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("fingerprint", pa.string(), nullable=False),
        pa.field("at", pa.int64(), nullable=False),
        pa.field("started", pa.int64(), nullable=False),
        pa.field("readable", pa.int64(), nullable=False),
        pa.field("written", pa.int64(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True)
class Materialization:
    """One view's write to Redis. All times are microseconds since 1970 UTC.

    Attributes:
        view: the view.
        contract: hash of its contract.
        version: version of the offline table that was written.
        fingerprint: of the rows of that version.
        at: the moment whose answers were written.
        started: when the first row was sent.
        readable: when the last row was confirmed.
        written: how many rows were sent and replaced what was there.
    """

    view: str
    contract: str
    version: int
    fingerprint: str
    at: int
    started: int
    readable: int
    written: int


class MaterializationLog:
    """The log of one project.

    Args:
        root: the folder or object-storage URL of the offline store.
    """

    def __init__(self, root: str | Path) -> None:
        self._path = f"{str(root).rstrip('/')}/{FOLDER}"

    def append(self, entry: Materialization) -> None:
        """Adds an entry; runs that add theirs at the same time do not disturb each other."""
        try:
            write_deltalake(self._path, pa.Table.from_pylist([asdict(entry)], _SCHEMA), mode="append")
        except (DeltaError, OSError) as error:
            raise self._damaged(error) from error

    def of(self, view: ViewContract) -> list[Materialization]:
        """The entries of a view under its contract, in the order in which they became readable.

        Raises:
            DataError: the log is damaged.
        """
        try:
            table = DeltaTable(self._path).to_pyarrow_table()
        except TableNotFoundError:
            return []
        except (DeltaError, OSError, pa.ArrowException) as error:
            raise self._damaged(error) from error
        mine = pc.and_(pc.equal(table["view"], view.name), pc.equal(table["contract"], view.hash))
        rows = table.filter(mine).sort_by([("readable", "ascending"), ("at", "ascending")]).to_pylist()
        return [Materialization(**row) for row in rows]

    def _damaged(self, error: Exception) -> DataError:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return DataError(
            "log of materializations", f"{self._path} cannot be read or written ({first})",
            remedy="remove that folder: what became readable before is then not known any more",
        )  # fmt: skip
