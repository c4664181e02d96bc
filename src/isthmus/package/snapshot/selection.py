"""Select what a device keeps of a service: its views with the features that the service reads, for some keys."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features.clock import MICROSECOND
from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.definition.spec import FeatureService, Snapshot
from isthmus.features.values.arrow import ARROW
from isthmus.features.values.columns import Mask
from isthmus.package.manifest import DeviceManifest, KeptView

_LONGEST = (1 << 63) - 1
"""Largest signed 64-bit number, for Kotlin and Swift. No row becomes that old."""


def kept_views(contract: Contract, service: str) -> list[ViewContract]:
    names_of: dict[str, set[str]] = {}
    for view, feature in contract.stored_features(service):
        names_of.setdefault(view, set()).add(feature)
    views = [(contract.views[name], names) for name, names in names_of.items()]
    return [replace(view, fields=tuple(c for c in view.fields if c.name in names)) for view, names in views]


def rows_in_snapshot(view: ViewContract, rows: pa.Table, device: Snapshot) -> Mask:
    mask = np.ones(len(rows), bool)
    for key in view.keys:
        if key.name in device.keys:
            values = pa.array(device.keys[key.name], ARROW[key.dtype.name])
            mask &= pc.is_in(rows[key.name].cast(values.type), values).to_numpy(zero_copy_only=False)
    return mask


def exposed_features(views: Sequence[ViewContract], device: Snapshot) -> tuple[str, ...]:
    exposed = []
    for view in views:
        keys = " and ".join(_values_of(key.name, device) for key in view.keys)
        exposed += [f"{view.name}:{column.name} of {keys}" for column in view.fields]
    return tuple(exposed)


def _values_of(key: str, device: Snapshot) -> str:
    if key == device.owner:
        return f"their own {key} alone"
    return f"{key} {', '.join(map(str, device.keys[key]))}" if key in device.keys else f"every {key}"


def device_manifest(
    contract: Contract, service: FeatureService, stale: float | str | None = None
) -> DeviceManifest | None:
    """Describe the rows that a device keeps, for the manifest of an exported package.

    Returns None if the feature service has no `device`. `stale` says what a device without a recent snapshot does: a
    number is the prediction that it returns, a text is the name of the package that it uses instead, and with None it
    makes no prediction.
    """
    if service.device is None:
        return None
    views = tuple(
        KeptView(
            view.name,
            tuple((key.name, key.dtype.name) for key in sorted(view.keys, key=lambda key: key.name)),
            tuple((column.name, column.dtype.name) for column in view.fields),
            None if view.ttl is None or view.ttl > _LONGEST else view.ttl,
        )
        for view in kept_views(contract, service.name)
    )
    service_hash = contract.service(service.name).hash
    answer, instead = (None, stale) if isinstance(stale, str) else (stale, None)
    age = service.device.age // MICROSECOND
    return DeviceManifest(
        contract.project, service.name, service_hash, age, views, answer, instead, service.device.owner
    )
