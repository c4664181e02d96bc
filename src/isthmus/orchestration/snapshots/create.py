"""`isthmus features snapshot`: write a service's stored features for devices, as a signed file and deltas to it."""

import os
import statistics
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.features import clock
from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.definition.spec import FeatureService
from isthmus.features.definition.spec import Snapshot as Declared
from isthmus.features.errors import DataError, RequestError, did_you_mean, one_of
from isthmus.features.files import write_atomically
from isthmus.features.offline.history import LatestRows, ViewHistory
from isthmus.features.progress import Progress, silent
from isthmus.features.publishing.changes import key_values
from isthmus.features.values.arrow import from_arrow, micros
from isthmus.features.values.entitykey import encode_keys
from isthmus.features.values.rows import RowCodec
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality import gate
from isthmus.package.signature import PASSWORD
from isthmus.package.snapshot.delta import difference
from isthmus.package.snapshot.file import LARGEST, Header, Rows, SnapshotFile, read_snapshot, to_snapshot_row
from isthmus.package.snapshot.owners import OwnFile, split_by_owner
from isthmus.package.snapshot.selection import exposed_features, kept_views, rows_in_snapshot
from isthmus.package.snapshot.signature import SnapshotSigner, create_key
from isthmus.package.snapshot.store import Latest, SnapshotFolder

KEY = "key.pem"  # generated private key, in the folder of snapshots, for projects without a configured key
SHORT = 16  # digits of a digest in the file name of a delta on a file host


@dataclass(frozen=True)
class SnapshotReport:
    """Report of a new snapshot: a signed file with stored features for devices, or one such file per owner.

    `snapshot` and `path` are SHA-256 and path of the file for all devices, or of all owners' files together.

    Attributes:
        made: time of the data, microseconds since 1970 UTC.
        bytes: size of the file, or of the largest owner's file.
        difference_bytes: size of the delta from the previous snapshot to that file; None if there is no delta.
        median_bytes: median size of an owner's file; None, like `owners`, if all devices share one.
    """

    snapshot: str
    made: int
    rows: dict[str, int]
    bytes: int
    difference_bytes: int | None
    discloses: tuple[str, ...]
    path: Path
    owners: int | None = None
    median_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        data = {**asdict(self), "made": clock.moment(self.made).isoformat(), "path": str(self.path)}
        return data if self.owners is not None else {k: v for k, v in data.items() if k not in _OF_OWNERS}


_OF_OWNERS = ("owners", "median_bytes")


def snapshot(project: Project, name: str | None = None, *, progress: Progress = silent) -> SnapshotReport:
    """Write the latest rows of a service's tables as a signed file for devices, with deltas from earlier files.

    `name` is a feature service. It is optional if only one service declares a `device`. If the `device` has an `owner`,
    writes a signed file for each owner and no deltas. Keeps as many earlier snapshots as the `device` sets, and deletes
    older ones. Creates a signing key if none exists. First reports to `progress` the features that devices did not get
    before. Waits while another process writes or copies snapshots of the service.

    Raises ContractMismatch if the definitions are not applied, and GateFailed if a table breaks an expectation. Raises
    DataError if no row has a key that devices keep, or a file is too large for devices.
    """
    service, device = device_service(project, name)
    place, sealer = snapshot_folder(project, service.name), signer(project)
    for line in newly_disclosed_features(project, service.name):
        progress(f"devices get {line}", 0.0)
    with place.locked():
        # Take the time before reading the tables, so that rows that become known meanwhile are in the next snapshot.
        made = project.now()
        # Read the tables under the lock, so that a snapshot of older tables cannot follow one of newer tables.
        contract, offline = project.applied(), project.offline_store()
        views = kept_views(contract, service.name)
        histories = {view.name: offline.history(contract.views[view.name]) for view in views}
        gate.require_online(project, offline, histories, f"snapshot of {service.name}")
        rows = {}
        for n, view in enumerate(views):
            progress(f"reading {view.name}", n / len(views))
            with offline.reading(view.table):
                rows[view.name] = _rows(histories[view.name], view, device, made)
        if not any(rows.values()):
            raise DataError(f"snapshot of {service.name}", "no row has a key that devices keep",
                            expected="at least one", remedy="look at `keys` of its Snapshot")  # fmt: skip
        before, discloses = place.latest_or_none(), exposed_features(views, device)
        number = max(clock.now(), before.number + 1 if before else 0)
        counts = tuple((view.name, len(rows[view.name])) for view in views)
        header = Header(
            contract.project, service.name, contract.service(service.name).hash, contract.hash, made, number, counts
        )
        tables = {name: history.fingerprint for name, history in histories.items()}
        parts = _Parts(place, sealer, device, discloses, tables)
        if device.owner is None:
            written = _write_whole(parts, SnapshotFile(header, rows), views)
        else:
            owner = next(key for view in views for key in view.keys if key.name == device.owner)
            written = _write_owners(parts, header, owner, views, rows, progress)
    progress("the snapshot is written", 1.0)
    return written


@dataclass(frozen=True)
class _Parts:
    place: SnapshotFolder
    sealer: SnapshotSigner
    device: Declared
    discloses: tuple[str, ...]
    tables: Mapping[str, str]


def _write_whole(parts: _Parts, file: SnapshotFile, views: list[ViewContract]) -> SnapshotReport:
    place, before, sealed = parts.place, parts.place.latest_or_none(), parts.sealer.seal(file)
    header = sealed.header
    _require_small(header.service, len(sealed.data), "name the `keys` of its Snapshot, or read fewer features")
    latest = place.add(sealed, views, parts.device.keep, discloses=parts.discloses, tables=parts.tables)
    delta = len(place.delta(before.snapshot, latest)) if before and before.snapshot in latest.earlier else None
    return SnapshotReport(
        sealed.digest, header.made, dict(header.views), len(sealed.data), delta, parts.discloses,
        place.path(sealed.digest),
    )  # fmt: skip


def _write_owners(
    parts: _Parts, header: Header, owner: Column, views: list[ViewContract], rows: Mapping[str, Rows],
    progress: Progress,
) -> SnapshotReport:  # fmt: skip
    place, before, sizes = parts.place, parts.place.latest_or_none(), list[int]()
    generation, own = split_by_owner(header, owner, views, rows)
    largest, of_largest = b"", 0
    if not own:
        raise DataError(f"snapshot of {header.service}", f"no row has a {owner.name} whose device keeps it",
                        expected="at least one", remedy="look at `owner` and `keys` of its Snapshot")  # fmt: skip

    def signed(key: bytes, file: OwnFile) -> None:
        nonlocal largest, of_largest
        size = len(file.data)
        _require_small(header.service, size, "read fewer features, or name the `keys` of its Snapshot")
        if size > of_largest:
            largest, of_largest = key, size
        if len(sizes) % 10_000 == 0:
            progress(f"signing the files of {len(own):,} owners", len(sizes) / len(own))
        sizes.append(size)

    latest = place.add_owners(
        generation, own, parts.sealer.sign, parts.device.keep,
        discloses=parts.discloses, tables=parts.tables, signed=signed,
    )  # fmt: skip
    since = None
    # A damaged previous snapshot has no delta.
    with suppress(DataError):
        if before and before.snapshot in latest.earlier and (previous := place.owner_snapshot(largest, before)):
            since = previous[0]
    delta = place.owner_snapshot(largest, latest, since) if since else None
    return SnapshotReport(
        latest.snapshot, header.made, dict(header.views), max(sizes), None if delta is None else len(delta[1]),
        parts.discloses, place.owners(latest.snapshot), len(sizes), int(statistics.median(sizes)),
    )  # fmt: skip


def _require_small(service: str, size: int, remedy: str) -> None:
    if size > LARGEST:
        raise DataError(f"snapshot of {service}", f"has {size:,} bytes",
                        expected=f"at most {LARGEST:,}, the limit of devices", remedy=remedy)  # fmt: skip


def newly_disclosed_features(project: Project, name: str | None = None) -> tuple[str, ...]:
    """List the features that devices would get for the first time with the next snapshot of a service.

    Users see the list before the snapshot is written. Each text names a view, its new features and its keys. `name` is
    the service; None means the only service that declares a `device`. Raises RequestError if there is no such service.
    """
    service, device = device_service(project, name)
    before = snapshot_folder(project, service.name).latest_or_none()
    known = () if before is None else before.discloses
    lines = [
        line for line in exposed_features(kept_views(project.applied(), service.name), device) if line not in known
    ]
    parts = [(view, *feature.split(" of ", 1)) for view, feature in (line.split(":", 1) for line in lines)]
    return tuple(
        f"{view}: {', '.join(feature for _, feature, _ in features)} of {keys}"
        for (view, keys), features in groupby(parts, itemgetter(0, 2))
    )


def device_service(project: Project, name: str | None) -> tuple[FeatureService, Declared]:
    services = project.definitions.services
    devices = {service.name: service.device for service in services.values() if service.device is not None}
    if name is None and len(devices) == 1:
        name = next(iter(devices))
    if name is None or name not in devices:
        problem = "no name was given" if name is None else f"{name!r} has no `device`"
        if name is not None and name not in services:
            problem = f"{name!r} is not declared{did_you_mean(name, services)}"
        remedy = "" if devices else "declare `device=Snapshot(age=…, every=…)` in a FeatureService"
        raise RequestError("service", problem, expected=one_of(devices) if devices else "", remedy=remedy)
    return services[name], devices[name]


def snapshot_folder(project: Project, service: str) -> SnapshotFolder:
    return SnapshotFolder(project.snapshots / service)


def signer(project: Project) -> SnapshotSigner:
    """Return a signer of snapshots. It uses the configured private key or, without one, the key in `snapshots/key.pem`.

    Creates that file if it is missing. Raises ConfigurationError if the key is unusable, and DependencyError if the
    extra `devices` is not installed.
    """
    configured = project.settings.packages.signing_key
    if configured is not None:
        return SnapshotSigner.of(project.root / configured, os.environ.get(PASSWORD))
    file = project.snapshots / KEY
    if not file.exists():
        create_key(file)
    return SnapshotSigner.of(file)


def copy(project: Project, name: str | None, out: Path) -> Latest:
    """Copy the newest snapshot of a service and its deltas to the folder `out`, to publish them on a static file host.

    `name` is the service; None means the only service that declares a `device`. Returns the description of the
    snapshot. The file `SERVICE` is the snapshot. The file `SERVICE.DIGEST` is the delta from the snapshot whose SHA-256
    begins with these 16 digits. Deletes older deltas of the service in `out`, and no other file. Waits while another
    process writes a snapshot. Raises RequestError if each owner has a snapshot, DataError if there is no snapshot or it
    is damaged, and ContractMismatch if the definitions are not applied.
    """
    service = require_hostable(project, name)
    place = snapshot_folder(project, service.name)
    with place.locked():
        latest = place.latest()
        if latest is None:
            raise DataError(f"snapshot of {service.name}", "does not exist", remedy="run `isthmus features snapshot`")
        newest = place.snapshot(latest.snapshot)
        deltas = {f"{service.name}.{digest[:SHORT]}": place.delta(digest, latest) for digest in latest.earlier}
        # Devices that are up to date also request a delta, so write an empty one.
        same = read_snapshot(newest, kept_views(project.applied(), service.name))
        deltas[f"{service.name}.{latest.snapshot[:SHORT]}"] = difference(same, same)
        # Write the snapshot after its deltas.
        for target, data in {**deltas, service.name: newest}.items():
            write_atomically(out / target, data)
        # Remove old deltas only; other files in the folder are not ours.
        for file in out.glob(f"{service.name}.{'[0-9a-f]' * SHORT}"):
            if file.name not in deltas:
                file.unlink()
    return latest


def require_hostable(project: Project, name: str | None) -> FeatureService:
    service, device = device_service(project, name)
    if device.owner is not None:
        raise RequestError(
            f"snapshot of {service.name}",
            f"has a file for each {device.owner}, and on a file host anyone who guesses the name could read it",
            expected="a Snapshot without `owner`",
            remedy=f"serve it with the API, GET /snapshots/{service.name}/{device.owner.upper()}, behind your login",
        )  # fmt: skip
    return service


def _rows(history: ViewHistory, view: ViewContract, device: Declared, at: int) -> dict[bytes, bytes]:
    state = LatestRows.of(history, at)
    codec, packed_rows = RowCodec(view), dict[bytes, bytes]()
    for rows in state.rows(np.flatnonzero(rows_in_snapshot(view, state.keys, device))):
        columns = {column.name: from_arrow(rows[column.name], column.dtype) for column in view.fields}
        event, known = micros(rows["event_timestamp"]), micros(rows["known_at"])
        packed = codec.encode(event, known, columns)
        times = zip(packed, event.tolist(), known.tolist(), strict=True)
        packed_rows.update(
            zip(encode_keys(view.keys, key_values(view, rows)), (to_snapshot_row(*row) for row in times), strict=True)
        )
    return packed_rows
