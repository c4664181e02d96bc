"""Devices in the verdict: check the rows of the newest snapshot, and prepare questions to a device that has it."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.distill.declaration import Distillation
from isthmus.distill.tabular.tensors import columns
from isthmus.distill.types import Index, evenly_spaced
from isthmus.features.clock import MICROSECOND, Status
from isthmus.features.contract.schema import STATUS, Column, Contract, ViewContract
from isthmus.features.definition.spec import Snapshot
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from isthmus.features.offline.history import LatestRows, ViewHistory
from isthmus.features.online.plan import ViewAnswer, answer
from isthmus.features.pointintime.join import point_in_time
from isthmus.features.publishing.changes import key_values
from isthmus.features.types import String, UnixTimestamp
from isthmus.features.values.arrow import from_arrow
from isthmus.features.values.columns import Values
from isthmus.features.values.entitykey import decode_values, encode_keys, key_part
from isthmus.features.values.rows import RowCodec
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.project import Project
from isthmus.orchestration.runtimes.nodeclient import DeviceQuestions
from isthmus.orchestration.snapshots.create import signer, snapshot_folder
from isthmus.orchestration.verification.sides import ComparedRows, questions_at, sample_with_keys
from isthmus.orchestration.verification.views import EVENT, KNOWN, offline_values
from isthmus.package.manifest import Package
from isthmus.package.snapshot.file import Header, SnapshotFile, read_header, read_rows, read_snapshot, to_online_row
from isthmus.package.snapshot.owners import Lines, Owners, encode_key_text, open_owners
from isthmus.package.snapshot.selection import kept_views, rows_in_snapshot
from isthmus.package.snapshot.signature import require_sealed, signature_checker
from isthmus.package.snapshot.store import Latest, SnapshotFolder
from isthmus.package.verdict import EXAMPLES, FeatureVerdict, ValueDifference

# Rows of the training set that a device answers at most.
ROWS = 500

# Name of the snapshot in a verdict.
SNAPSHOT = "snapshot"

# Owners whose files the reference client gets.
OWNER_FILES = 10

_ALTERED = "was altered since it was written"


@dataclass(frozen=True)
class ComparedSnapshot:
    """Comparison of a snapshot (stored features on devices) with the tables, by view and feature.

    `skipped` is the reason if no snapshot was compared, else empty. `file` has the rows of the snapshot, of all owners;
    None if no rows were compared. `owners` is the path of the owners' files; None if all devices share one. `key` is
    the PEM public key; empty if no rows were compared.
    """

    views: Mapping[str, Mapping[str, FeatureVerdict]] = field(default_factory=dict)
    skipped: str = ""
    file: SnapshotFile | None = None
    owners: Path | None = None
    key: str = ""


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Questions to a device, their names in a verdict, and the package's inputs for them.

    `of` is the number of questions before sampling. `offline` has the inputs from the tables as of the time of the
    snapshot. `stored` has the same inputs, but with the stored features in the snapshot.
    """

    questions: DeviceQuestions
    rows: ComparedRows
    of: int
    offline: Mapping[str, Values]
    stored: Mapping[str, Values]


def compare_snapshot(
    project: Project, contract: Contract, declared: Distillation, histories: Sequence[ViewHistory], at: int
) -> ComparedSnapshot:
    """Compare each row of the newest snapshot of the student's service with the tables as of the snapshot's time.

    `histories` are the offline tables. The result is empty if the student has no `device`. Only `skipped`, a reason, is
    set if there is no snapshot, if the snapshot is older than the tables or definitions, if it is too old for devices
    at `at` (microseconds since 1970 UTC), or if its signature cannot be checked here. A snapshot that was altered, is
    missing, or has an invalid signature counts as a difference. If each owner has a file, compares every file. Creates
    a signing key if there is none. Raises DataError if the description of the newest snapshot is damaged.
    """
    service, device = declared.student.name, declared.student.device
    if device is None:
        return ComparedSnapshot()
    place = snapshot_folder(project, service)
    latest = place.latest()
    if latest is None:
        return ComparedSnapshot(skipped="none was written: run `isthmus features snapshot`")
    fingerprints = {history.view.name: history.fingerprint for history in histories}
    if any(fingerprints.get(view) != fingerprint for view, fingerprint in latest.tables.items()):
        return ComparedSnapshot(skipped="it is older than the tables: run `isthmus features snapshot`")
    if device.owner != (latest.owner and latest.owner[0]):
        return ComparedSnapshot(skipped="its `owner` has changed: run `isthmus features snapshot`")
    views, compared = kept_views(contract, service), dict[str, Mapping[str, FeatureVerdict]]()
    try:
        key = signer(project).public_key
        if latest.owner is None:
            file = _read(place, latest, contract, views, key)
        else:
            file, accepted = _read_owners(place, latest, contract, views, key)
            compared[f"{SNAPSHOT} {service}"] = {"files": accepted}
    except _OtherContract as error:
        return ComparedSnapshot(skipped=str(error))
    except DataError as error:
        return _refused(service, f"it {error.found}")
    except (ConfigurationError, DependencyError) as error:
        return ComparedSnapshot(skipped=f"its signature cannot be checked here ({error})")
    except FileNotFoundError:
        if place.latest() == latest:
            return _refused(service, "its file is gone")
        return ComparedSnapshot(skipped="a newer one has just replaced it: verify again")
    if (old := at - file.header.made) > (allowed := device.age // MICROSECOND):
        minutes = f"{old / 60e6:,.0f} minutes old, and devices accept at most {allowed / 60e6:,.0f}"
        return ComparedSnapshot(skipped=f"it is {minutes}: run `isthmus features snapshot`")
    by_name = {history.view.name: history for history in histories}
    offline = project.offline_store()
    for view in views:
        with offline.reading(view.table):
            compared[f"{SNAPSHOT} {view.name}"] = _compare(view, by_name[view.name], device, file)
    owners = None if latest.owner is None else place.owners(latest.snapshot)
    return ComparedSnapshot(compared, file=file, owners=owners, key=key)


class _OtherContract(Exception):
    """Raised if a snapshot belongs to another contract; its text is the reason to skip it."""


def _read(
    place: SnapshotFolder, latest: Latest, contract: Contract, views: Sequence[ViewContract], key: str
) -> SnapshotFile:
    data = place.snapshot(latest.snapshot)
    if hashlib.sha256(data).hexdigest() != latest.snapshot:
        raise DataError(SNAPSHOT, _ALTERED)
    _require_current(read_header(data, SNAPSHOT)[0], contract)
    file = read_snapshot(data, views)
    require_sealed(file, key)
    return file


def _read_owners(
    place: SnapshotFolder, latest: Latest, contract: Contract, views: Sequence[ViewContract], key: str
) -> tuple[SnapshotFile, FeatureVerdict]:
    path = place.owners(latest.snapshot)
    with path.open("rb") as written, open_owners(path) as owners:
        whole = hashlib.file_digest(written, "sha256").hexdigest() == latest.snapshot
        if whole:
            # The contract of an altered file is not known.
            _require_current(owners.generation.header, contract)
        file, accepted = _rows_of_owners(owners, views, key)
    if not whole and not accepted.differing:
        raise DataError(SNAPSHOT, _ALTERED)
    return file, accepted


def _require_current(header: Header, contract: Contract) -> None:
    if header.hash != (current := contract.service(header.service).hash):
        problem = f"it has contract {header.hash[:12]}, and {header.service} has {current[:12]}"
        raise _OtherContract(f"{problem}: run `isthmus features snapshot`")


def device_rows(
    project: Project, declared: Distillation, package: Package, histories: Sequence[ViewHistory],
    snapshot: ComparedSnapshot, count: int | None,
) -> DeviceRows | None:  # fmt: skip
    """Select up to 500 rows of the package's training set, or `count` if fewer, to verify a device's outputs.

    `snapshot` has the stored features of the device. Skips rows whose keys the device does not keep. If each owner has
    a file, uses only rows of up to ten owners. Also returns two versions of their inputs: from the tables as of the
    snapshot's time, and with the snapshot's features; `histories` are the tables to join. Returns None if no row is
    left, if `snapshot` was not compared, or if the student or package is not for devices.
    """
    manifest, contract, device, file = package.manifest, project.applied(), declared.student.device, snapshot.file
    if device is None or file is None or manifest.device is None:
        return None
    views, at = kept_views(contract, manifest.service), file.header.made
    types = {column.name: column.dtype for view in views for column in view.keys}
    keys = contract.spines[declared.spine.name].key_names
    request = [column for column in contract.raw_inputs(manifest.service) if column.available == "request"]
    types |= {column.name: column.dtype for column in request}
    examples = Artifacts(project, declared).training_set(manifest.training_set).table()
    complete = sample_with_keys(examples, keys, ROWS).select(list(dict.fromkeys((*keys, *types))))
    kept = np.logical_and.reduce([rows_in_snapshot(view, complete, device) for view in views])
    for column in (column for view in views for column in view.keys):
        if column.dtype == String:
            # Devices never ask about an empty text.
            kept &= pc.fill_null(pc.not_equal(complete[column.name], ""), False).to_numpy(zero_copy_only=False)
    places = np.flatnonzero(kept)
    files: Mapping[object, bytes] = {None: file.data} if snapshot.owners is None else {}
    every = len(places)
    if snapshot.owners is not None:
        owner = next(column for view in views for column in view.keys if column.name == device.owner)
        places, files = _of_owners(snapshot.owners, owner, complete, places)
    if not len(places):
        return None
    questions = complete.take(places[evenly_spaced(len(places), len(places) if count is None else count)])
    read = {view.name for view in views}
    joined = point_in_time(questions_at(questions, at), [each for each in histories if each.view.name in read])
    offline = columns(joined, manifest.model_inputs)
    stored = dict(offline)
    for view in views:
        rows = [file.rows[view.name].get(key) for key in encode_keys(view.keys, key_values(view, questions))]
        answered = _device_answer(view, rows, at).columns
        stored |= {view.full_name(c.name): answered[c.name] for c in view.fields if view.full_name(c.name) in offline}
    asked = {name: (dtype, from_arrow(questions[name], dtype)) for name, dtype in types.items()}
    named = ComparedRows.of(questions, keys, [at] * len(questions))
    device_questions = DeviceQuestions(files, device.owner, snapshot.key, at, asked)
    return DeviceRows(device_questions, named, every, offline, stored)


def _of_owners(path: Path, owner: Column, rows: pa.Table, places: Index) -> tuple[Index, Mapping[object, bytes]]:
    values = from_arrow(rows[owner.name], owner.dtype).tolist(owner.dtype)
    keys = encode_keys([owner], {owner.name: [values[place] for place in places]})
    try:
        files = _files_of(path, keys)
    except (FileNotFoundError, DataError):  # just replaced by a newer one, or already reported as damaged
        files = {}
    asking = np.array([key in files for key in keys], bool)
    return places[asking], {decode_values(key)[0]: data for key, data in files.items()}


def _rows_of_owners(
    owners: Owners, views: Sequence[ViewContract], public_key: str
) -> tuple[SnapshotFile, FeatureVerdict]:
    """Merge the files of all owners into one snapshot, and count files that devices reject; DataError if unreadable."""
    generation, signed = owners.generation, signature_checker(public_key)
    rows: dict[str, dict[bytes, bytes]] = {view.name: {} for view in views}
    of, per_owner = [name for name, _ in generation.header.views], [shared is None for shared in generation.shared]
    if of != [*rows] or per_owner != [generation.column in view.keys for view in views]:
        raise DataError("snapshot", "has other views or another owner")
    own = []
    for view, shared in zip(views, generation.shared, strict=True):
        if shared is None:
            own.append(view)
        else:
            rows[view.name] = _rows(view, shared)
    compared, refused = 0, list[ValueDifference]()
    for key, lines, file in owners:
        compared += 1
        problem = "" if signed(file.data) else "is not signed with the project's key, or was altered"
        for view, part in zip(own, lines, strict=True):
            try:
                found = _rows(view, part)
            except DataError as error:
                problem = problem or error.found
                continue
            if any(key_part(view.keys, generation.owner[0], row) != key for row in found):
                problem = problem or f"has rows of another {generation.owner[0]}"
            rows[view.name] |= found
        if problem:
            owner = encode_key_text(decode_values(key)[0])
            refused.append(ValueDifference(owner, "a file that devices accept", f"it {problem}"))
    differing = len(refused)
    verdict = FeatureVerdict(compared, differing, np.inf if differing else 0.0, refused[:EXAMPLES])
    return SnapshotFile(generation.header, rows), verdict


def _files_of(file: Path, keys: Iterable[bytes]) -> dict[bytes, bytes]:
    with open_owners(file) as owners:
        found = {key: own.data for key in sorted({*keys}) if (own := owners.file(key)) is not None}
    present = [*found]
    return (
        {present[place]: found[present[place]] for place in evenly_spaced(len(present), OWNER_FILES)} if present else {}
    )


def _rows(view: ViewContract, lines: Lines) -> dict[bytes, bytes]:
    data = b"".join(lines)
    rows, place = read_rows(view, len(lines), data)
    if place != len(data):
        raise DataError("snapshot", f"has {len(data) - place} more bytes than its header says")
    return rows


def _refused(service: str, problem: str) -> ComparedSnapshot:
    example = ValueDifference("the newest", "a snapshot that devices accept", problem)
    return ComparedSnapshot({f"{SNAPSHOT} {service}": {"file": FeatureVerdict(1, 1, np.inf, [example])}})


def _compare(
    view: ViewContract, history: ViewHistory, device: Snapshot, file: SnapshotFile
) -> dict[str, FeatureVerdict]:
    names, made = [key.name for key in view.keys], file.header.made
    keys = LatestRows.of(history, made).keys
    keys = keys.filter(pa.array(rows_in_snapshot(view, keys, device)))
    asked = encode_keys(view.keys, key_values(view, keys))
    rows = [file.rows[view.name].get(key) for key in asked]
    on_device = _device_answer(view, rows, made)
    valid = np.isin(on_device.status, (Status.PRESENT, Status.NULL))
    times = {EVENT: on_device.event, KNOWN: on_device.known}
    device_side = {column.name: on_device.columns[column.name] for column in view.fields}
    device_side |= {name: Values(np.where(valid, moments, 0), valid) for name, moments in times.items()}
    # A row counts as null if all features that devices keep are null.
    offline = offline_values(questions_at(keys, made), replace(history, view=view))
    types = {column.name: column.dtype for column in view.fields} | dict.fromkeys(times, UnixTimestamp)
    compared_rows = ComparedRows.of(keys, names, [made] * len(keys))
    found = {name: compared_rows.compare(offline[name], device_side[name], dtype) for name, dtype in types.items()}
    labels = np.array([Status(code).label for code in on_device.status.tolist()], object)
    every = np.ones(len(labels), bool)
    status = offline[STATUS]
    if others := set(file.rows[view.name]) - set(asked):
        # Rows of the snapshot whose key the table lacks.
        labels, every = np.append(labels, ["present"] * len(others)), np.ones(len(labels) + len(others), bool)
        status = Values(np.append(status.data, [None] * len(others)), np.append(status.valid, [False] * len(others)))
        extra = ComparedRows(np.append(compared_rows.keys, [key.hex() for key in others]),
                             np.append(compared_rows.times, [None] * len(others)))  # fmt: skip
        return found | {STATUS: extra.compare(status, Values(labels, every), String)}
    return found | {STATUS: compared_rows.compare(status, Values(labels, every), String)}


def _device_answer(view: ViewContract, rows: Sequence[bytes | None], at: int) -> ViewAnswer:
    codec = RowCodec(view)
    block = codec.decode([None if row is None else to_online_row(row, view) for row in rows])
    return answer(view, block, None, at, None, False)
