"""Reproduce a training set from its record, with the recorded versions of tables and spine."""

import glob
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DataError, RequestError, first_line
from isthmus.features.files import is_url
from isthmus.features.offline.delta import storage_files
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.spine import HashedSpine, SpineRows, spine_rows
from isthmus.features.types import TYPES
from isthmus.features.values.arrow import ARROW
from isthmus.orchestration.artifacts import RECORD, SPINE, TrainingSet, records_folder
from isthmus.orchestration.project import Project
from isthmus.orchestration.training.data import TrainingOrigin, column_types, prepare_join
from isthmus.orchestration.training.requestcolumns import RequestColumns, request_columns
from isthmus.transforms.views import executorset


def reproduce(project: Project, record: str, out: Path | str | None = None, *, join: str = "embedded") -> TrainingSet:
    """Write a training set again from the same table versions. The bytes are the same, even if the tables changed.

    `record` is the folder or URL of the training set, its record file or its id. Replaces the files in that folder, or
    writes to the folder or URL `out`. `join` is "embedded" to join in this process, or "engine" for the project's
    engine. Raises RequestError if the training set does not exist. Raises DataError and writes nothing if a table
    version, the spine or a request transform is gone or has changed.
    """
    past = _find(project, record)
    if out is None and is_url(record):
        out = record.removesuffix(f"/{RECORD}")
    where = f"training set {past.id}"
    offline = project.offline_store()
    histories = [history_of(offline, past, name) for name in past.features]
    try:
        spine = _spine(project, past, histories)
        hashed = HashedSpine(spine)
        sha256 = hashed.read()
    except DataError as error:
        raise DataError(where, f"the rows of its spine cannot be read ({error})", remedy="restore them") from error
    if sha256 != past.spine_sha256:
        raise DataError(where, f"its spine {past.spine_file or SPINE} now has {hashed.rows} different rows",
                        expected=f"the {past.rows_in} rows with hash {past.spine_sha256[:12]}",
                        remedy="restore the rows, or make a new training set")  # fmt: skip
    origin = TrainingOrigin(
        past.contract, past.spine, histories, past.features, past.options["status"], _request_columns(project, past)
    )
    data = prepare_join(project, spine, origin, join=join, served=past.served or False)
    return data.write(out or past.place or past.path, like=past)


def _find(project: Project, record: str) -> TrainingSet:
    if is_url(record):
        record = _recorded_id(record, project.storage_options)
    path = Path(record).absolute()
    folders = [
        path.parent if path.name == RECORD else path,
        *(project.state / "training").glob(f"*/{glob.escape(path.name)}"),
    ]
    pointer = records_folder(project) / path.name
    if pointer.is_file():
        folders.append(Path(pointer.read_text()))
    for folder in folders:
        try:
            return TrainingSet.read(folder)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"training set {folder}", f"its record cannot be read ({error})") from error
    raise RequestError(f"training set {record!r}", "no training set has this path or id",
                       expected="the folder of a training set, its record, or its id")  # fmt: skip


def _recorded_id(url: str, options: Mapping[str, str]) -> str:
    where = f"training set {url}"
    try:
        with storage_files(url.removesuffix(f"/{RECORD}"), options).open_input_file(RECORD) as file:
            return str(json.loads(file.read())["id"])
    except (OSError, ValueError, KeyError) as error:
        raise DataError(where, f"its record cannot be read ({first_line(error)})") from error


def _spine(project: Project, past: TrainingSet, histories: list[ViewHistory]) -> SpineRows:
    if past.spine_file:
        types = column_types(project.definitions.contract, histories)
        # A column of a CSV file keeps its recorded type, even if the declaration has changed.
        with suppress(OSError, pa.ArrowException):
            then = past.dataset().schema
            types |= {field.name: TYPES[name] for field in then for name in TYPES if ARROW[name] == field.type}
        return spine_rows(Path(past.spine_file), types)
    if past.store is not None:
        return executorset.stored_spine(past.store)
    file = past.path / SPINE
    try:
        with pa.ipc.open_stream(file) as stream:
            schema = stream.schema
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"spine {file}", f"cannot be read ({error})") from error
    return SpineRows(schema, lambda: pa.ipc.open_stream(file))


def history_of(offline: OfflineStore, past: TrainingSet, name: str) -> ViewHistory:
    view, version = ViewContract.from_dict(name, past.views[name]), past.tables[name]
    where, remedy = f"training set {past.id}", "make a new training set: this one cannot be reproduced"
    try:
        history = offline.history(view, version)
        fingerprint = history.fingerprint
    except DataError as error:
        gone = f"version {version} of the offline table of {name} is gone ({error.found})"
        raise DataError(where, gone, remedy=remedy) from error
    if fingerprint != past.tables_sha256[name]:
        # Versions of a table that was removed and built again start from 0.
        rebuilt = f"version {version} of the offline table of {name} has different rows: the table was rebuilt"
        raise DataError(where, rebuilt, expected=past.tables_sha256[name][:12], remedy=remedy)
    return history


def _request_columns(project: Project, past: TrainingSet) -> RequestColumns | None:
    contract = project.definitions.contract
    for name, then in past.computed.items():
        now = contract.transforms.get(name)
        if now is None or now.hash != then["hash"]:
            change = "is gone" if now is None else "has changed"
            raise DataError(f"training set {past.id}", f"request transform {name} {change}",
                            remedy="restore it, or make a new training set")  # fmt: skip
    return request_columns(project, contract, {name: then["fields"] for name, then in past.computed.items()})
