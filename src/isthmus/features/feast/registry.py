"""Write the project to Feast's own registry, for Feast's SDK, CLI and UI. Feast never runs our transforms."""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import feast
import feast.types as ft
import yaml
from feast.data_format import DeltaFormat
from feast.repo_config import RepoConfig
from google.protobuf.message import DecodeError

from isthmus.features.contract.schema import Contract
from isthmus.features.definition.spec import FeatureProjection, FeatureService, FeatureView
from isthmus.features.errors import DependencyError
from isthmus.features.feast.files import OFFLINE, endpoint
from isthmus.features.feast.pushes import COLUMNS, columns_of
from isthmus.features.files import write_atomically
from isthmus.features.offline.store import OfflineStore
from isthmus.features.types import SCALARS, Array, DataType

_TYPES: dict[str, ft.FeastType] = {scalar.name: getattr(ft, scalar.name) for scalar in SCALARS}
_TYPES |= {Array(scalar).name: ft.Array(_TYPES[scalar.name]) for scalar in SCALARS}


def register(
    contract: Contract,
    views: Mapping[str, FeatureView],
    services: Mapping[str, FeatureService],
    *,
    folder: Path,
    offline: OfflineStore,
    lookup_url: str,
) -> list[str]:
    """Register a project's views and services with Feast, for users who read them with Feast's SDK.

    Write `feature_store.yaml` in `folder`, and replace the registry `registry.pb` beside it. Also write
    `client/feature_store.yaml`, for lookups by a client that has only Feast.

    `offline` is the store with the tables of the views. `lookup_url` is the URL of the lookup API, which clients call.

    Returns:
        The kind and name of each registered object, such as "FeatureView flights".

    Raises:
        DependencyError: the registry is damaged.
    """
    config = {
        "project": contract.project.replace("-", "_"),
        "provider": "local",
        # Only the path of a file registry is relative to the folder, so that a copied project has its own.
        "registry": {"registry_type": "file", "path": "registry.pb"},
        "offline_store": {"type": "isthmus.feast.IsthmusOfflineStore", "known_at": "created"},
        "online_store": {"type": "remote", "path": lookup_url},
        "entity_key_serialization_version": 3,
        "telemetry": False,
    }
    shared = {"registry_type": "file", "path": "../registry.pb"}
    client = config | {"registry": shared, "offline_store": {"type": "file"}}
    (folder / "client").mkdir(parents=True, exist_ok=True)
    for place, content in ((folder, config), (folder / "client", client)):
        write_atomically(place / "feature_store.yaml", yaml.safe_dump(content, sort_keys=False).encode())
    with warnings.catch_warnings(), _draft(folder / "registry.pb") as draft:
        warnings.simplefilter("ignore")
        config["registry"] = {"registry_type": "file", "path": str(draft)}
        store = feast.FeatureStore(config=RepoConfig(repo_path=folder, **config))
        # Feast allows a single join key per entity, so each key of our entity becomes a Feast entity.
        keys = {
            key: feast.Entity(
                name=key, join_keys=[key], value_type=_TYPES[dtype.name].to_value_type(), description=entity.description
            )
            for view in views.values()
            for entity in view.entities
            for key, dtype in entity.join_keys.items()
        }
        tables = {name: _view(view, contract, keys, offline) for name, view in views.items()}
        if "://" not in offline.root:
            for table in tables.values():
                table.tags[OFFLINE] = os.path.relpath(offline.root, folder)
        objects: list[Any] = [*keys.values(), *tables.values(), *(_service(s, tables) for s in services.values())]
        declared = {(type(item).__name__, item.name) for item in objects}
        registered: list[Any] = [*store.list_entities(), *store.list_feature_views(), *store.list_feature_services()]
        gone = [item for item in registered if (type(item).__name__, item.name) not in declared]
        store.apply(objects, objects_to_delete=gone, partial=False)
    return [f"{type(item).__name__} {item.name}" for item in objects]


@contextmanager
def _draft(registry: Path) -> Iterator[Path]:
    with TemporaryDirectory(prefix=".registry-", dir=registry.parent) as folder:
        draft = Path(folder) / registry.name
        if registry.exists():
            shutil.copyfile(registry, draft)
        try:
            yield draft
        except DecodeError as error:
            raise DependencyError(
                "apply", f"Feast's registry in {registry.parent} is damaged ({error})",
                remedy=f"delete {registry.parent} and run `isthmus apply` to write it again",
            ) from error  # fmt: skip
        write_atomically(registry, draft.read_bytes())
    # The file of earlier versions.
    registry.with_suffix(".db").unlink(missing_ok=True)


def _view(
    view: FeatureView, contract: Contract, keys: Mapping[str, feast.Entity], offline: OfflineStore
) -> feast.FeatureView:
    names = [key for entity in view.entities for key in entity.join_keys]
    return feast.FeatureView(
        name=view.name,
        entities=[keys[name] for name in names],
        schema=[_field(name, contract.views[view.name].keys[n].dtype) for n, name in enumerate(names)]
        + [_field(field.name, field.dtype, field.description) for field in view.schema],
        ttl=view.ttl or timedelta(0),
        source=feast.PushSource(
            # A push to the server names the view.
            name=view.name,
            batch_source=feast.FileSource(
                name=_table_name(view.name, contract),
                path=offline.path(contract.views[view.name].table),
                s3_endpoint_override=endpoint(offline.storage_options),
                file_format=DeltaFormat(),
                timestamp_field="event_timestamp",
                created_timestamp_column="known_at",
                tags={COLUMNS: json.dumps(columns_of(contract.views[view.name]))},
            ),
        ),
        description=view.description,
        owner=view.owner,
        tags={
            "isthmus.contract": contract.views[view.name].hash,
            "isthmus.project": contract.project,
            "isthmus.view": json.dumps(contract.views[view.name].as_dict(), sort_keys=True),
            "isthmus.slot": contract.views[view.name].slot,
        },
    )


def _table_name(view: str, contract: Contract) -> str:
    """Return the name of a view's table as a source. Feast requires names that differ in more than case."""
    views, name = {name.lower() for name in contract.views}, f"{view}_table"
    while name.lower() in views:
        name += "_"
    return name


def _service(service: FeatureService, tables: Mapping[str, feast.FeatureView]) -> feast.FeatureService:
    """Convert a service, without request fields and request transforms: these are never stored."""
    parts = []
    for part in service.features:
        if isinstance(part, FeatureProjection) and isinstance(part.view, FeatureView):
            parts.append(tables[part.view.name][list(part.features)])
        elif isinstance(part, FeatureView):
            parts.append(tables[part.name])
    return feast.FeatureService(name=service.name, features=parts, description=service.description)


def _field(name: str, dtype: DataType, description: str = "") -> feast.Field:
    return feast.Field(name=name, dtype=_TYPES[dtype.name], description=description)
