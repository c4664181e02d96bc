"""Devices in the verdict: the rows of the newest snapshot, and questions to a device that has it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import Distillation
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.types import Index, spread
from isthmus.features.clock import MICROSECOND, Status
from isthmus.features.contract.schema import STATUS, Column, Contract, ViewContract
from isthmus.features.definition.spec import Snapshot
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.latest import LatestRows
from isthmus.features.online.plan import ViewAnswer, answer
from isthmus.features.pointintime.join import point_in_time
from isthmus.features.publishing.publish import key_values
from isthmus.features.types import String, UnixTimestamp
from isthmus.features.values.arrow import from_arrow
from isthmus.features.values.columns import Values
from isthmus.features.values.entitykey import decode_values, encode_keys
from isthmus.features.values.rows import RowCodec
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.nodeclient import DeviceQuestions
from isthmus.orchestration.snapshots.create import shelf, signer
from isthmus.orchestration.verification.owners import files_of, read_owners
from isthmus.orchestration.verification.sides import ComparedRows, questions_at, sample_with_keys
from isthmus.orchestration.verification.views import EVENT, KNOWN, offline_values
from isthmus.package.manifest import Package
from isthmus.package.snapshot.file import Header, SnapshotFile, packed, read_header, read_snapshot
from isthmus.package.snapshot.owners import open_owners
from isthmus.package.snapshot.selection import kept_views, of_kept_keys
from isthmus.package.snapshot.signature import require_sealed
from isthmus.package.snapshot.store import Latest, Shelf
from isthmus.package.verdict import FeatureVerdict, ValueDifference

ROWS = 500
"""Rows of the training set whose questions a device answers, unless a sample is enough."""

SNAPSHOT = "snapshot"
"""The name of the snapshot in a verdict."""

_ALTERED = "was altered since it was written"


@dataclass(frozen=True)
class ComparedSnapshot:
    """A snapshot beside the tables.

    Attributes:
        views: view to feature to its comparison.
        skipped: why there is none; empty if there is one, or if no device keeps anything.
        file: the snapshot; with the rows of all owners, where each has a file.
        owners: the file of all owners' files; None where there is one for all.
        key: whose owner has signed it, in PEM.
    """

    views: Mapping[str, Mapping[str, FeatureVerdict]] = field(default_factory=dict)
    skipped: str = ""
    file: SnapshotFile | None = None
    owners: Path | None = None
    key: str = ""


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Questions to a device, and the inputs of the package for them.

    Attributes:
        questions: join keys and request fields, with the snapshot.
        rows: their names.
        of: how many questions there are, of which these are a sample.
        offline: each input of the package by name, from the tables at the moment of the snapshot.
        stored: the same, with the stored features from the snapshot.
    """

    questions: DeviceQuestions
    rows: ComparedRows
    of: int
    offline: Mapping[str, Values]
    stored: Mapping[str, Values]


def compare_snapshot(
    project: Project, contract: Contract, declared: Distillation, histories: Sequence[ViewHistory], at: int
) -> ComparedSnapshot:
    """Compares each row of the newest snapshot of the student's service with the tables, at its moment.

    One that no device uses any more at the moment `at` is not compared. One that no device takes, because it is not
    what was signed, differs: the example says how. Where each owner has a file, every one of them is checked.
    """
    service, device = declared.student.name, declared.student.device
    if device is None:
        return ComparedSnapshot()
    place = shelf(project, service)
    latest = place.latest()
    if latest is None:
        return ComparedSnapshot(skipped="none is written: run `isthmus snapshot`")
    fingerprints = {history.view.name: history.fingerprint for history in histories}
    if any(fingerprints.get(view) != fingerprint for view, fingerprint in latest.tables.items()):
        return ComparedSnapshot(skipped="it is of earlier tables: run `isthmus snapshot`")
    if device.owner != (latest.owner and latest.owner[0]):
        return ComparedSnapshot(skipped="its `owner` was another: run `isthmus snapshot`")
    views, compared = kept_views(contract, service), dict[str, Mapping[str, FeatureVerdict]]()
    try:
        key = signer(project).public_key
        if latest.owner is None:
            file = _read(place, latest, contract, views, key)
        else:
            file, taken = _read_owners(place, latest, contract, views, key)
            compared[f"{SNAPSHOT} {service}"] = {"files": taken}
    except _OtherContract as error:
        return ComparedSnapshot(skipped=str(error))
    except DataError as error:
        return _refused(service, f"it {error.found}")
    except (ConfigurationError, DependencyError) as error:
        return ComparedSnapshot(skipped=f"its signature cannot be checked here ({error})")
    except FileNotFoundError:
        if place.latest() == latest:
            return _refused(service, "its file is gone")
        return ComparedSnapshot(skipped="a newer one has just taken its place: verify again")
    if (old := at - file.header.made) > (allowed := device.age // MICROSECOND):
        minutes = f"{old / 60e6:,.0f} minutes old, and devices use one of at most {allowed / 60e6:,.0f}"
        return ComparedSnapshot(skipped=f"it is {minutes}: run `isthmus snapshot`")
    by_name = {history.view.name: history for history in histories}
    offline = project.offline_store()
    for view in views:
        with offline.reading(view.table):
            compared[f"{SNAPSHOT} {view.name}"] = _compare(view, by_name[view.name], device, file)
    owners = None if latest.owner is None else place.owners(latest.snapshot)
    return ComparedSnapshot(compared, file=file, owners=owners, key=key)


class _OtherContract(Exception):
    """Why a snapshot is not compared: it is of another contract."""


def _read(place: Shelf, latest: Latest, contract: Contract, views: Sequence[ViewContract], key: str) -> SnapshotFile:
    """The newest snapshot, as a device takes it."""
    data = place.snapshot(latest.snapshot)
    if hashlib.sha256(data).hexdigest() != latest.snapshot:
        raise DataError(SNAPSHOT, _ALTERED)
    _require_current(read_header(data, SNAPSHOT)[0], contract)
    file = read_snapshot(data, views)
    require_sealed(file, key)
    return file


def _read_owners(
    place: Shelf, latest: Latest, contract: Contract, views: Sequence[ViewContract], key: str
) -> tuple[SnapshotFile, FeatureVerdict]:
    """The rows of all owners of the newest snapshot, and which of their files no device takes."""
    path = place.owners(latest.snapshot)
    with path.open("rb") as written, open_owners(path) as owners:
        whole = hashlib.file_digest(written, "sha256").hexdigest() == latest.snapshot
        if whole:
            # Of one that was altered, nothing says of which contract it was.
            _require_current(owners.generation.header, contract)
        file, taken = read_owners(owners, views, key)
    if not whole and not taken.differing:
        raise DataError(SNAPSHOT, _ALTERED)
    return file, taken


def _require_current(header: Header, contract: Contract) -> None:
    if header.hash != (current := contract.service(header.service).hash):
        of = f"it is of contract {header.hash[:12]}, and {header.service} has {current[:12]}"
        raise _OtherContract(f"{of}: run `isthmus snapshot`")


def device_rows(
    project: Project, declared: Distillation, package: Package, histories: Sequence[ViewHistory],
    snapshot: ComparedSnapshot, count: int | None,
) -> DeviceRows | None:  # fmt: skip
    """Rows of the training set as questions to a device that has the snapshot: `count` of all, or all if it is None.

    Rows whose keys it does not keep are left out; None if nothing is left, or if there is no snapshot or no device.
    """
    manifest, contract, device, file = package.manifest, project.applied(), declared.student.device, snapshot.file
    if device is None or file is None or manifest.device is None:
        return None
    views, at = kept_views(contract, manifest.service), file.header.made
    types = {column.name: column.dtype for view in views for column in view.keys}
    keys = [key for key, _ in contract.spines[declared.spine.name]["keys"]]
    request = [column for column in contract.raw_inputs(manifest.service) if column.available == "request"]
    types |= {column.name: column.dtype for column in request}
    examples = Artifacts(project, declared).training_set(manifest.training_set).table()
    complete = sample_with_keys(examples, keys, ROWS).select(list(dict.fromkeys((*keys, *types))))
    kept = np.logical_and.reduce([of_kept_keys(view, complete, device) for view in views])
    for column in (column for view in views for column in view.keys):
        if column.dtype == String:
            # No device asks about an empty text.
            kept &= pc.fill_null(pc.not_equal(complete[column.name], ""), False).to_numpy(zero_copy_only=False)
    places = np.flatnonzero(kept)
    files: Mapping[object, bytes] = {None: file.data} if snapshot.owners is None else {}
    every = len(places)
    if snapshot.owners is not None:
        owner = next(column for view in views for column in view.keys if column.name == device.owner)
        places, files = _of_owners(snapshot.owners, owner, complete, places)
    if not len(places):
        return None
    questions = complete.take(places[spread(len(places), len(places) if count is None else count)])
    read = {view.name for view in views}
    joined = point_in_time(questions_at(questions, at), [each for each in histories if each.view.name in read])
    offline = columns(joined, manifest.model_inputs)
    stored = dict(offline)
    for view in views:
        rows = [file.rows[view.name].get(key) for key in encode_keys(view.keys, key_values(view, questions))]
        answered = _answered(view, rows, at).columns
        stored |= {view.full_name(c.name): answered[c.name] for c in view.fields if view.full_name(c.name) in offline}
    asked = {name: (dtype, from_arrow(questions[name], dtype)) for name, dtype in types.items()}
    named = ComparedRows.of(questions, keys, [at] * len(questions))
    put = DeviceQuestions(files, device.owner, snapshot.key, at, asked)
    return DeviceRows(put, named, every, offline, stored)


def _of_owners(path: Path, owner: Column, rows: pa.Table, places: Index) -> tuple[Index, Mapping[object, bytes]]:
    """The places of the rows that some owners ask, and their files by their values."""
    values = from_arrow(rows[owner.name], owner.dtype).tolist(owner.dtype)
    keys = encode_keys([owner], {owner.name: [values[place] for place in places]})
    try:
        files = files_of(path, keys)
    except (FileNotFoundError, DataError):  # a newer one has just taken its place, or it is known what is wrong
        files = {}
    asking = np.array([key in files for key in keys], bool)
    return places[asking], {decode_values(key)[0]: data for key, data in files.items()}


def _refused(service: str, problem: str) -> ComparedSnapshot:
    """The comparison of a snapshot that no device takes."""
    example = ValueDifference("the newest", "a snapshot that devices take", problem)
    return ComparedSnapshot({f"{SNAPSHOT} {service}": {"file": FeatureVerdict(1, 1, np.inf, [example])}})


def _compare(
    view: ViewContract, history: ViewHistory, device: Snapshot, file: SnapshotFile
) -> dict[str, FeatureVerdict]:
    """Each feature, the times and the status of all keys that either side has."""
    names, made = [key.name for key in view.keys], file.header.made
    keys = LatestRows.of(history, made).keys
    keys = keys.filter(pa.array(of_kept_keys(view, keys, device)))
    asked = encode_keys(view.keys, key_values(view, keys))
    rows = [file.rows[view.name].get(key) for key in asked]
    on_device = _answered(view, rows, made)
    valid = np.isin(on_device.status, (Status.PRESENT, Status.NULL))
    times = {EVENT: on_device.event, KNOWN: on_device.known}
    device_side = {column.name: on_device.columns[column.name] for column in view.fields}
    device_side |= {name: Values(np.where(valid, moments, 0), valid) for name, moments in times.items()}
    # A row is null where the features that devices keep are, whatever the others of its view say.
    offline = offline_values(questions_at(keys, made), replace(history, view=view))
    types = {column.name: column.dtype for column in view.fields} | dict.fromkeys(times, UnixTimestamp)
    compared_rows = ComparedRows.of(keys, names, [made] * len(keys))
    found = {name: compared_rows.compare(offline[name], device_side[name], dtype) for name, dtype in types.items()}
    labels = np.array([Status(code).label for code in on_device.status.tolist()], object)
    every = np.ones(len(labels), bool)
    status = offline[STATUS]
    if others := set(file.rows[view.name]) - set(asked):
        # A row of the snapshot whose key no table has.
        labels, every = np.append(labels, ["present"] * len(others)), np.ones(len(labels) + len(others), bool)
        status = Values(np.append(status.data, [None] * len(others)), np.append(status.valid, [False] * len(others)))
        extra = ComparedRows(np.append(compared_rows.keys, [key.hex() for key in others]),
                             np.append(compared_rows.times, [None] * len(others)))  # fmt: skip
        return found | {STATUS: extra.compare(status, Values(labels, every), String)}
    return found | {STATUS: compared_rows.compare(status, Values(labels, every), String)}


def _answered(view: ViewContract, rows: Sequence[bytes | None], at: int) -> ViewAnswer:
    """What a device answers from its rows at a moment."""
    codec = RowCodec(view)
    block = codec.decode([None if row is None else packed(row, view) for row in rows])
    return answer(view, block, None, at, None, False)
