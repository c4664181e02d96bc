"""A training set that is kept, and its record: from which it is read again, with the tables and the spine of then."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from isthmus.features.contract.contract import ViewContract
from isthmus.features.errors import DataError, RequestError
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.spine import SpineRows, spine_rows
from isthmus.orchestration.artifacts import RECORD, SPINE, TrainingSet, records_folder
from isthmus.orchestration.project import Project

if TYPE_CHECKING:
    pass


def find(project: Project, record: str) -> TrainingSet:
    """The training set of a folder, a record or an id.

    Raises:
        RequestError: there is none.
        DataError: its record is damaged.
    """
    path = Path(record).absolute()
    folders = [path.parent if path.name == RECORD else path, *(project.state / "training").glob(f"*/{path.name}")]
    note = records_folder(project) / path.name
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


def recorded_spine(made: TrainingSet, types: Mapping[str, pa.DataType]) -> SpineRows:
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


def recorded_history(offline: OfflineStore, made: TrainingSet, name: str) -> ViewHistory:
    """The history of a view as it was when a training set was made.

    Raises:
        DataError: that version is gone.
    """
    view, version = ViewContract.from_dict(name, made.views[name]), made.tables[name]
    where, remedy = f"training set {made.id}", "make a new training set: this one cannot be made again"
    try:
        history = offline.history(view, version)
        fingerprint = history.fingerprint
    except DataError as error:
        gone = f"version {version} of the offline table of {name} is gone ({error.found})"
        raise DataError(where, gone, remedy=remedy) from error
    if fingerprint != made.tables_sha256[name]:
        # In a table that was removed, versions begin anew.
        other = f"version {version} of the offline table of {name} holds other rows: the table was made anew"
        raise DataError(where, other, expected=made.tables_sha256[name][:12], remedy=remedy)
    return history
