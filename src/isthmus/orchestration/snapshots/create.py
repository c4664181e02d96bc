"""`snapshot`: writes the stored features of a service that devices keep, as a signed file and differences to it."""

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
from isthmus.features.errors import DataError, RequestError, nearest, one_of
from isthmus.features.files import write_atomically
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.latest import LatestRows
from isthmus.features.progress import Progress, silent
from isthmus.features.publishing.publish import key_values
from isthmus.features.values.arrow import from_arrow, micros
from isthmus.features.values.entitykey import encode_keys
from isthmus.features.values.rows import RowCodec
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality import gate
from isthmus.package.signature import PASSWORD
from isthmus.package.snapshot.delta import difference
from isthmus.package.snapshot.file import LARGEST, Header, Rows, SnapshotFile, read_snapshot, unpacked
from isthmus.package.snapshot.owners import OwnFile, generation_of
from isthmus.package.snapshot.selection import disclosed, kept_views, of_kept_keys
from isthmus.package.snapshot.signature import Sealer, create_key
from isthmus.package.snapshot.store import Latest, Shelf

KEY = "key.pem"
"""The private key of a project that has configured none, in the folder of its snapshots."""

SHORT = 16
"""Digits of a digest in the name of a difference on a host of files."""


@dataclass(frozen=True)
class Written:
    """A snapshot that was written.

    Attributes:
        snapshot: SHA-256 of the file.
        made: the moment that it shows.
        rows: view to its number of rows.
        bytes: of the file; of the largest, where each owner has one.
        difference_bytes: of the difference from the snapshot before; None if there is none.
        discloses: the features whose values it has, and which keys.
        path: the file; that of all owners' files, where each has one.
        owners: how many have a file; None where there is one for all.
        median_bytes: of the file in the middle, likewise.
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
        """Plain data; the moment as text. What is of owners is left out where there are none."""
        data = {**asdict(self), "made": clock.moment(self.made).isoformat(), "path": str(self.path)}
        return data if self.owners is not None else {k: v for k, v in data.items() if k not in _OF_OWNERS}


_OF_OWNERS = ("owners", "median_bytes")


def snapshot(project: Project, name: str | None = None, *, progress: Progress = silent) -> Written:
    """Writes a snapshot of a service's views, as they are now, and what leads to it from those before.

    The service may be omitted if only one has `device`. What is disclosed for the first time is reported before.

    Raises:
        RequestError: there is no such service, or it has no `device`.
        DataError: a table is not there, or no row has a key that devices keep, or a file is too large for them.
        GateFailed: a table breaks an expectation of its view.
        ConfigurationError: `packages.signing_key` cannot sign.
    """
    service, device = declared(project, name)
    place, sealer = shelf(project, service.name), signer(project)
    for line in undisclosed(project, service.name):
        progress(f"devices get {line}", 0.0)
    with place.locked():
        # Before the tables are read: what has become known since is in the next one.
        made = project.now()
        # Within the lock: no snapshot of earlier tables follows one of later ones.
        contract, offline = project.applied(), project.offline_store()
        views = kept_views(contract, service.name)
        histories = {view.name: offline.history(contract.views[view.name]) for view in views}
        gate.require_online(project, offline, histories)
        rows = {}
        for n, view in enumerate(views):
            progress(f"reading {view.name}", n / len(views))
            with offline.reading(view.table):
                rows[view.name] = _rows(histories[view.name], view, device, made)
        if not any(rows.values()):
            raise DataError(f"snapshot of {service.name}", "no row has a key that devices keep",
                            expected="at least one", remedy="look at `keys` of its Snapshot")  # fmt: skip
        before, discloses = place.before(), disclosed(views, device)
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
    """What a snapshot has beside its rows, and where it goes."""

    place: Shelf
    sealer: Sealer
    device: Declared
    discloses: tuple[str, ...]
    tables: Mapping[str, str]


def _write_whole(parts: _Parts, file: SnapshotFile, views: list[ViewContract]) -> Written:
    """A file for all devices."""
    place, before, sealed = parts.place, parts.place.before(), parts.sealer.seal(file)
    header = sealed.header
    _require_small(header.service, len(sealed.data), "name the `keys` of its Snapshot, or read fewer features")
    latest = place.add(sealed, views, parts.device.keep, discloses=parts.discloses, tables=parts.tables)
    nearest_delta = len(place.delta(before.snapshot, latest)) if before and before.snapshot in latest.earlier else None
    return Written(sealed.digest, header.made, dict(header.views), len(sealed.data), nearest_delta, parts.discloses,
                   place.path(sealed.digest))  # fmt: skip


def _write_owners(
    parts: _Parts, header: Header, owner: Column, views: list[ViewContract], rows: Mapping[str, Rows],
    progress: Progress,
) -> Written:  # fmt: skip
    """A file for each owner."""
    place, before, sizes = parts.place, parts.place.before(), list[int]()
    generation, own = generation_of(header, owner, views, rows)
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
    # From one that is damaged there is no difference.
    with suppress(DataError):
        if before and before.snapshot in latest.earlier and (had := place.own(largest, before)):
            since = had[0]
    way = place.own(largest, latest, since) if since else None
    return Written(
        latest.snapshot, header.made, dict(header.views), max(sizes), None if way is None else len(way[1]),
        parts.discloses, place.owners(latest.snapshot), len(sizes), int(statistics.median(sizes)),
    )  # fmt: skip


def _require_small(service: str, size: int, remedy: str) -> None:
    if size > LARGEST:
        raise DataError(f"snapshot of {service}", f"has {size:,} bytes",
                        expected=f"at most {LARGEST:,}, which is all that a device takes", remedy=remedy)  # fmt: skip


def undisclosed(project: Project, name: str | None = None) -> tuple[str, ...]:
    """What the next snapshot of a service discloses and the last one did not, a line for a view's features.

    Raises:
        RequestError: there is no such service, or it has no `device`.
    """
    service, device = declared(project, name)
    before = shelf(project, service.name).before()
    known = () if before is None else before.discloses
    lines = [line for line in disclosed(kept_views(project.applied(), service.name), device) if line not in known]
    parts = [(view, *feature.split(" of ", 1)) for view, feature in (line.split(":", 1) for line in lines)]
    return tuple(
        f"{view}: {', '.join(feature for _, feature, _ in features)} of {keys}"
        for (view, keys), features in groupby(parts, itemgetter(0, 2))
    )


def declared(project: Project, name: str | None) -> tuple[FeatureService, Declared]:
    """The service of this name, or the only one, and what devices keep of it.

    Raises:
        RequestError: there is no such service, or no device keeps its rows.
    """
    services = project.definitions.services
    kept = {service.name: service.device for service in services.values() if service.device is not None}
    if name is None and len(kept) == 1:
        name = next(iter(kept))
    if name is None or name not in kept:
        what = "none is named" if name is None else f"{name!r} has no `device`"
        if name is not None and name not in services:
            what = f"{name!r} is not declared{nearest(name, services)}"
        remedy = "" if kept else "declare `device=Snapshot(age=…, every=…)` in a FeatureService"
        raise RequestError("service", what, expected=one_of(kept) if kept else "", remedy=remedy)
    return services[name], kept[name]


def shelf(project: Project, service: str) -> Shelf:
    """Where the snapshots of a service are."""
    return Shelf(project.snapshots / service)


def signer(project: Project) -> Sealer:
    """Signs with the configured key, or with one of the project's own, which is made when it is first needed."""
    configured = project.settings.packages.signing_key
    if configured is not None:
        return Sealer.of(project.root / configured, os.environ.get(PASSWORD))
    file = project.snapshots / KEY
    if not file.exists():
        create_key(file)
    return Sealer.of(file)


def copy(project: Project, name: str | None, out: Path) -> Latest:
    """Writes the newest snapshot of a service and the differences to it to a folder, for any host of files.

    The snapshot is `SERVICE`, a difference `SERVICE.DIGEST` by the first 16 digits of what it begins with.

    Raises:
        RequestError: there is no such service, it has no `device`, or each owner has a file.
        DataError: there is no snapshot.
    """
    service = require_hostable(project, name)
    place = shelf(project, service.name)
    with place.locked():
        latest = place.latest()
        if latest is None:
            raise DataError(f"snapshot of {service.name}", "there is none", remedy="run `isthmus snapshot`")
        newest = place.snapshot(latest.snapshot)
        deltas = {f"{service.name}.{digest[:SHORT]}": place.delta(digest, latest) for digest in latest.earlier}
        # A device that has the newest asks for the difference from that: here is none, in some bytes.
        same = read_snapshot(newest, kept_views(project.applied(), service.name))
        deltas[f"{service.name}.{latest.snapshot[:SHORT]}"] = difference(same, same)
        # First the differences: none may lead to what is not there yet.
        for target, data in {**deltas, service.name: newest}.items():
            write_atomically(out / target, data)
        # Only what has the name of a difference: the rest of the folder is somebody else's.
        for file in out.glob(f"{service.name}.{'[0-9a-f]' * SHORT}"):
            if file.name not in deltas:
                file.unlink()
    return latest


def require_hostable(project: Project, name: str | None) -> FeatureService:
    """The service, if a host of files may offer its snapshots.

    Raises:
        RequestError: each owner has a file, or as `declared`.
    """
    service, device = declared(project, name)
    if device.owner is not None:
        raise RequestError(
            f"snapshot of {service.name}",
            f"has a file for each {device.owner}: a host of files gives it to whoever guesses its name",
            expected="a Snapshot without `owner`",
            remedy=f"let the API serve it, GET /snapshots/{service.name}/{device.owner.upper()}, behind your own login",
        )  # fmt: skip
    return service


def _rows(history: ViewHistory, view: ViewContract, device: Declared, at: int) -> dict[bytes, bytes]:
    """Keys to the latest rows at a moment, in the form of a snapshot."""
    state = LatestRows.of(history, at)
    codec, found = RowCodec(view), dict[bytes, bytes]()
    for rows in state.rows(np.flatnonzero(of_kept_keys(view, state.keys, device))):
        columns = {column.name: from_arrow(rows[column.name], column.dtype) for column in view.fields}
        event, known = micros(rows["event_timestamp"]), micros(rows["known_at"])
        packed = codec.encode(event, known, columns)
        times = zip(packed, event.tolist(), known.tolist(), strict=True)
        found.update(
            zip(encode_keys(view.keys, key_values(view, rows)), (unpacked(*row) for row in times), strict=True)
        )
    return found
