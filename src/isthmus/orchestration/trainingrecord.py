"""A training set that is kept, and its record: from which it is found again, with the tables and the spine of then."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from isthmus.features.contract import ViewContract
from isthmus.features.errors import DataError, RequestError
from isthmus.features.history import History
from isthmus.features.offline import OfflineStore
from isthmus.features.pointintime import BATCH
from isthmus.features.spines import SpineRows, spine_rows
from isthmus.orchestration.project import Project

if TYPE_CHECKING:
    from isthmus.orchestration.tensors import Tensors

DATA, RECORD, SPINE, STATISTICS = "data.parquet", "_record.json", "_spine.arrow", "statistics.json"
"""What a training set's folder holds. Readers of Parquet folders pass over names that begin with an underscore."""


@dataclass(frozen=True)
class TrainingSet:
    """A training set and what it was made from.

    Attributes:
        id: hash of all that decides its content.
        path: its folder.
        contract: hash of the contract.
        spine: name of the declared spine, path of the file, or "rows" if they were given in another form.
        spine_file: the file or folder that holds the spine's rows; None if they are kept beside the record.
        spine_sha256: hash of the spine's rows.
        views: the views, with their contracts.
        features: view to the names of the features that were asked of it.
        tables: view to the version of its table.
        tables_sha256: view to the hash of that version's rows.
        options: what else decides the content: `status`, whether it says what each view answered.
        rows_in: rows of the spine.
        rows_out: rows of the training set.
        served: of a training set as served, view to the moment at which the last rows that it saw became readable.
        lag: of a training set as served, view to feature to how it differs from the ideal join.
        computed: request transform to its hash and the fields that were computed.
    """

    id: str
    path: Path
    contract: str
    spine: str
    spine_file: str | None
    spine_sha256: str
    views: dict[str, dict[str, Any]]
    features: dict[str, list[str]]
    tables: dict[str, int]
    tables_sha256: dict[str, str]
    options: dict[str, bool]
    rows_in: int
    rows_out: int
    served: dict[str, int] | None = None
    lag: dict[str, dict[str, Any]] | None = None
    computed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable form, which is also the record beside the data."""
        return {**asdict(self), "path": str(self.path)}

    @classmethod
    def read(cls, folder: Path) -> "TrainingSet":
        """The training set of a folder. Its place is where it is found, not where it was made: a project can be moved.

        Raises:
            FileNotFoundError: there is no record.
            ValueError, TypeError: the record is damaged.
        """
        return cls(**{**json.loads((folder / RECORD).read_text()), "path": folder})

    def table(self) -> pa.Table:
        """The rows, in the order of the spine.

        Raises:
            DataError: the file is missing or damaged.
        """
        try:
            return pq.read_table(self.path / DATA)
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error

    def torch(self, *, columns: Sequence[str] | None = None, batch: int = 1024) -> "Tensors":
        """The rows as a torch `IterableDataset`: see `tensors.Tensors`."""
        from isthmus.orchestration.tensors import Tensors

        try:
            data = ds.dataset(self.path / DATA)
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error) from error
        return Tensors(
            data.schema, lambda: data.to_batches(batch_size=BATCH, batch_readahead=4), columns, batch, workers=True
        )

    def _unreadable(self, error: Exception) -> DataError:
        return DataError(f"training set {self.id}", f"{self.path / DATA} cannot be read ({error})",
                         remedy=f"remove {self.path} and run `isthmus training-set`")  # fmt: skip


def records_of(project: Project) -> Path:
    """The folder in which an id leads to its training set."""
    return project.state / "records"


def found(project: Project, record: str) -> TrainingSet:
    """The training set of a folder, a record or an id.

    Raises:
        RequestError: there is none.
        DataError: its record is damaged.
    """
    path = Path(record).absolute()
    folders = [path.parent if path.name == RECORD else path, *(project.state / "training").glob(f"*/{path.name}")]
    note = records_of(project) / path.name
    if note.is_file():
        folders.append(Path(note.read_text()))
    for folder in folders:
        try:
            return TrainingSet.read(folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"training set {folder}", f"its record cannot be read ({error})") from error
    raise RequestError(f"training set {record!r}", "there is none of this path or id",
                       expected="the folder of a training set, its record, or its id")  # fmt: skip


def rows_then(made: TrainingSet, types: Mapping[str, pa.DataType]) -> SpineRows:
    """The rows of the spine: from the file they came from, which keeps them, or from beside the record.

    Args:
        made: the training set.
        types: of the join keys.

    Raises:
        DataError: they cannot be read.
    """
    if made.spine_file:
        return spine_rows(Path(made.spine_file), types)
    kept = made.path / SPINE
    try:
        with pa.ipc.open_stream(kept) as stream:
            schema = stream.schema
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"spine {kept}", f"cannot be read ({error})") from error
    return SpineRows(schema, lambda: pa.ipc.open_stream(kept))


def history_then(offline: OfflineStore, made: TrainingSet, name: str) -> History:
    """The history of a view as it was when a training set was made.

    Raises:
        DataError: that version is gone.
    """
    view, version = ViewContract.from_dict(name, made.views[name]), made.tables[name]
    where, remedy = f"training set {made.id}", "make a new training set: this one cannot be made again"
    try:
        history = offline.history(view, version)
        found = offline.fingerprint(history)
    except DataError as error:
        gone = f"version {version} of the offline table of {name} is gone ({error.found})"
        raise DataError(where, gone, remedy=remedy) from error
    if found != made.tables_sha256[name]:
        # In a table that was removed, versions begin anew.
        other = f"version {version} of the offline table of {name} holds other rows: the table was made anew"
        raise DataError(where, other, expected=made.tables_sha256[name][:12], remedy=remedy)
    return history
