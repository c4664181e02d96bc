"""Devices in the verdict: the rows of the newest snapshot, and what the reference client feeds the package of them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from isthmus.distill.declaration import Distillation
from isthmus.features.clock import Status
from isthmus.features.contract.contract import Contract, ViewContract
from isthmus.features.definition.spec import Snapshot
from isthmus.features.errors import ConfigurationError, DataError, DependencyError
from isthmus.features.offline.history import ViewHistory, status_column
from isthmus.features.offline.latest import LatestRows
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.plan import ViewAnswer, answer
from isthmus.features.pointintime.join import point_in_time
from isthmus.features.publishing.publish import key_values
from isthmus.features.snapshot.file import SnapshotFile, packed, read_snapshot
from isthmus.features.snapshot.kept import kept_views, of_kept_keys
from isthmus.features.snapshot.seal import require_sealed
from isthmus.features.types import String
from isthmus.features.values.columns import Values, from_arrow
from isthmus.features.values.entitykey import encode_keys
from isthmus.features.values.rows import RowCodec
from isthmus.features.verdict import FeatureVerdict
from isthmus.orchestration.device.snapshot import shelf, signer
from isthmus.orchestration.project import Project
from isthmus.orchestration.verification.sides import ComparedRows, questions_at

SNAPSHOT = "snapshot"
"""The name of the snapshot in a verdict."""


class ComparedSnapshot(NamedTuple):
    """View to feature to its comparison with the tables, or why there is none."""

    views: Mapping[str, Mapping[str, FeatureVerdict]]
    skipped: str = ""


def compare_snapshot(
    project: Project, contract: Contract, declared: Distillation, histories: Sequence[ViewHistory]
) -> ComparedSnapshot:
    """Compares each row of the newest snapshot of the student's service with the tables, at its moment."""
    service, device = declared.student.name, declared.student.device
    if device is None:
        return ComparedSnapshot({})
    latest = shelf(project, service).latest()
    if latest is None:
        return ComparedSnapshot({}, "none is written: run `isthmus snapshot`")
    fingerprints = {history.view.name: history.fingerprint for history in histories}
    if any(fingerprints.get(view) != fingerprint for view, fingerprint in latest.tables.items()):
        return ComparedSnapshot({}, "it is of earlier tables: run `isthmus snapshot`")
    views = kept_views(contract, service)
    try:
        file = read_snapshot(shelf(project, service).snapshot(latest.snapshot), views)
        require_sealed(file, signer(project).public_key)
    except DataError as error:
        return ComparedSnapshot({}, f"it {error.found}: run `isthmus snapshot`")
    except (ConfigurationError, DependencyError) as error:
        return ComparedSnapshot({}, f"its signature cannot be checked here ({error})")
    except FileNotFoundError:
        return ComparedSnapshot({}, "a newer one has just taken its place: verify again")
    by_name = {history.view.name: history for history in histories}
    offline = OfflineStore(project.offline)
    compared = {}
    for view in views:
        with offline.reading(view.table):
            compared[f"{SNAPSHOT} {view.name}"] = _compare(view, by_name[view.name], device, file)
    return ComparedSnapshot(compared)


def _compare(
    view: ViewContract, history: ViewHistory, device: Snapshot, file: SnapshotFile
) -> dict[str, FeatureVerdict]:
    """Each feature and the status of all keys that either side has."""
    names, made = [key.name for key in view.keys], file.header.made
    keys = LatestRows.of(history, made).keys
    keys = keys.filter(pa.array(of_kept_keys(view, keys, device)))
    asked = encode_keys(view.keys, key_values(view, keys))
    rows = [file.rows[view.name].get(key) for key in asked]
    on_device = _answered(view, rows, made)
    joined = point_in_time(questions_at(keys, made), [history])
    compared_rows = ComparedRows.of(keys, names, [made] * len(keys))
    found = {
        column.name: compared_rows.compare(
            from_arrow(joined[view.full_name(column.name)], column.dtype), on_device.columns[column.name], column.dtype
        )
        for column in view.fields
    }
    labels = np.array([Status(code).label for code in on_device.status.tolist()], object)
    every = np.ones(len(labels), bool)
    status = from_arrow(joined[status_column(view)].cast(pa.string()), String)
    if others := set(file.rows[view.name]) - set(asked):
        # A row of the snapshot whose key no table has.
        labels, every = np.append(labels, ["present"] * len(others)), np.ones(len(labels) + len(others), bool)
        status = Values(np.append(status.data, [None] * len(others)), np.append(status.valid, [False] * len(others)))
        extra = ComparedRows(np.append(compared_rows.keys, [key.hex() for key in others]),
                             np.append(compared_rows.times, [None] * len(others)))  # fmt: skip
        return found | {"status": extra.compare(status, Values(labels, every), String)}
    return found | {"status": compared_rows.compare(status, Values(labels, every), String)}


def _answered(view: ViewContract, rows: Sequence[bytes | None], at: int) -> ViewAnswer:
    """What a device answers from its rows at a moment."""
    codec = RowCodec(view)
    block = codec.decode([None if row is None else packed(row, view) for row in rows])
    return answer(view, block, None, at, None, False)
