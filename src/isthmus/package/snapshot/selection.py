"""What a device keeps of a service: its views, with the features that the service reads and no others."""

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
from isthmus.package.manifest import Device, KeptView

_LONGEST = (1 << 63) - 1
"""What Kotlin and Swift have for a number of microseconds. No row becomes older than that."""


def kept_views(contract: Contract, service: str) -> list[ViewContract]:
    """The views of a service with the features that a snapshot of it has."""
    wanted: dict[str, set[str]] = {}
    for view, feature in contract.read(service):
        wanted.setdefault(view, set()).add(feature)
    views = [(contract.views[name], names) for name, names in wanted.items()]
    return [replace(view, fields=tuple(c for c in view.fields if c.name in names)) for view, names in views]


def of_kept_keys(view: ViewContract, rows: pa.Table, device: Snapshot) -> Mask:
    """Which rows, with the join keys of a view among their columns, have a key of it that devices keep, shape (n,).

    Where each device has the rows of an owner, all of these: each is kept by some device.
    """
    of_kept = np.ones(len(rows), bool)
    for key in view.keys:
        if key.name in device.keys:
            values = pa.array(device.keys[key.name], ARROW[key.dtype.name])
            of_kept &= pc.is_in(rows[key.name].cast(values.type), values).to_numpy(zero_copy_only=False)
    return of_kept


def disclosed(views: Sequence[ViewContract], device: Snapshot) -> tuple[str, ...]:
    """What whoever has a snapshot can read."""
    found = []
    for view in views:
        keys = " and ".join(_whose(key.name, device) for key in view.keys)
        found += [f"{view.name}:{column.name} of {keys}" for column in view.fields]
    return tuple(found)


def _whose(key: str, device: Snapshot) -> str:
    """Of which values of a join key a snapshot has rows."""
    if key == device.owner:
        return f"their own {key} alone"
    return f"{key} {', '.join(map(str, device.keys[key]))}" if key in device.keys else f"every {key}"


def kept(contract: Contract, service: FeatureService, stale: float | str | None = None) -> Device | None:
    """What a package says of what a device keeps; None if the service has no `device`.

    `stale` is the answer where no snapshot is young enough, or the name of the package that answers then.
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
    return Device(contract.project, service.name, service_hash, age, views, answer, instead, service.device.owner)
