"""The contracts of Feast's views, and the encoding of their features in rows and protos (`ViewLayout`)."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import itemgetter

from feast import FeatureView
from feast.protos.feast.types.EntityKey_pb2 import EntityKey
from feast.repo_config import RepoConfig
from feast.types import FeastType

from isthmus.features import clock
from isthmus.features.contract.schema import Column, Contract, ViewContract, sha256
from isthmus.features.errors import ConfigurationError, ContractMismatch, Problem, one_of
from isthmus.features.feast import values as feast_values
from isthmus.features.feast.values import FORMS, ValueForm, encoding_of
from isthmus.features.types import KEY_TYPES
from isthmus.features.values.entitykey import KeyValue

_Types = tuple[tuple[str, str], ...]
"""Pairs of a name and Feast's name of its type."""

_REGISTER = "run `isthmus apply` to register it again"


@dataclass(frozen=True, eq=False)
class ViewLayout:
    """The contract of a Feast view (its schema, with a hash), and the encoding of each feature in rows and protos."""

    view: ViewContract
    forms: Mapping[str, ValueForm]

    def keys(self, keys: Sequence[EntityKey]) -> dict[str, list[KeyValue]]:
        return feast_values.key_columns(keys, self.view.keys, f"view {self.view.name}")


@dataclass(frozen=True)
class _FeastView(ViewContract):
    """A view that only Feast knows. Its ttl affects reads and not stored rows, so it is not part of the hash."""

    @cached_property
    def hash(self) -> str:
        return sha256({**self.as_dict(), "ttl": None})


def project_of(config: RepoConfig) -> str:
    return str(config.online_store.project or config.project)


def contract_of(project: str, views: Iterable[ViewContract]) -> Contract:
    return Contract(project, {view.name: view for view in views}, {}, {}, {})


def is_registered(tags: Mapping[str, str]) -> bool:
    return "isthmus.contract" in tags


def tagged_contract(name: str, tags: Mapping[str, str]) -> ViewContract:
    where, hashed = _registration(name), tags["isthmus.contract"]
    try:
        view = ViewContract.from_dict(name, json.loads(tags.get("isthmus.view", "null")))
        view = replace(view, slot=tags.get("isthmus.slot", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise ContractMismatch(where, "has no readable contract in its tags", remedy=_REGISTER) from error
    if view.hash != hashed:
        raise ContractMismatch(
            where, f"has contract {view.hash[:12]} in its tags", expected=hashed[:12], remedy=_REGISTER
        )
    return view


def online_name(config: RepoConfig, table: FeatureView) -> str:
    """Return the name of a Feast view's rows in Redis.

    If `isthmus apply` has registered the view, the name is the view's name and the suffix in its tag `isthmus.slot`.
    For all other views, it is the view's name, with the version if Feast's online versioning is on.
    """
    if is_registered(table.tags):
        return table.name + table.tags.get("isthmus.slot", "")
    version = None
    if config.registry.enable_online_feature_view_versioning:
        # The version in the request takes precedence over the current one.
        version = table.projection.version_tag
        version = table.current_version_number if version is None else version
    # Feast does not allow "@" in names, so this name is unique.
    return f"{table.name}@v{version}" if version else table.name


def key_problems(view: str, keys: _Types) -> list[Problem]:
    allowed = [dtype.name for dtype in KEY_TYPES]
    wrong = [(key, dtype) for key, dtype in keys if dtype not in allowed]
    return [Problem(f"{view}.{key}", f"is a join key of type {dtype}", one_of(allowed)) for key, dtype in wrong]


def layout_of(
    config: RepoConfig, table: FeatureView, keys: Sequence[EntityKey] = (), inferred: Iterable[tuple[str, str]] = ()
) -> ViewLayout:
    """Return the contract of a Feast view, and the encoding of each feature, to read or write its rows in Redis.

    `keys` are the entity keys of a request. A join key without a declared type gets the type of its value in the first
    of `keys`. A caller without `keys` passes `inferred`: pairs of such a join key and Feast's name of its type.

    Raises:
        ConfigurationError: a key or feature has a type that Isthmus does not store.
        ContractMismatch: a registered view has changed or belongs to another project.
    """
    key_types = tuple((field.name, str(field.dtype)) for field in table.entity_columns)
    if keys and (not key_types or len(key_types) < len(table.entities)):
        first_key = zip(keys[0].join_keys, keys[0].entity_values, strict=True)
        inferred = [(name, feast_values.key_type(value)) for name, value in first_key]
    key_types += tuple((name, dtype) for name, dtype in inferred if name not in dict(key_types))
    if is_registered(table.tags):
        types = tuple((field.name, str(field.dtype)) for field in table.features)
        return _registered(project_of(config), table.name, key_types, types, tuple(sorted(table.tags.items())))
    ttl = None if config.online_store.serve_expired else getattr(table, "ttl", None)
    fields = tuple((field.name, field.dtype) for field in table.features)
    written = config.online_store.types == "written"
    return _derive(online_name(config, table), key_types, fields, ttl // clock.MICROSECOND if ttl else None, written)


@lru_cache(maxsize=1024)
def _derive(
    name: str, keys: _Types, fields: tuple[tuple[str, FeastType], ...], ttl: int | None, written: bool
) -> ViewLayout:
    forms: dict[str, ValueForm] = {}
    problems: list[Problem] = []
    # Sorted by name: Feast ignores the order of fields.
    for field, dtype in sorted(fields, key=itemgetter(0)):
        if form := encoding_of(dtype, written=written):
            forms[field] = form
        else:
            problems.append(Problem(f"{name}.{field}", f"has type {dtype}", "a type with values"))
    problems += key_problems(name, keys)
    if problems:
        raise ConfigurationError("feature views", problems)
    columns = tuple(Column(field, form.dtype) for field, form in forms.items())
    key_columns = tuple(Column(key, FORMS[dtype].dtype) for key, dtype in sorted(keys))
    # Serialized protos all have type Bytes, so the contract also records the kind of the proto.
    code = " ".join(["feast", *(f"{field}:{form.kind}" for field, form in forms.items() if form.serialized)])
    return ViewLayout(_FeastView(name, (), key_columns, columns, ttl, 0, (), code), forms)


@lru_cache(maxsize=1024)
def _registered(project: str, name: str, keys: _Types, fields: _Types, tags: tuple[tuple[str, str], ...]) -> ViewLayout:
    where, view, owner = (
        _registration(name),
        tagged_contract(name, dict(tags)),
        dict(tags).get("isthmus.project", ""),
    )
    if owner != project:
        raise ContractMismatch(
            where, f"belongs to project {owner}, but the online store reads project {project}",
            remedy=f"set online_store.project to {owner} in feature_store.yaml to read its rows",
        )  # fmt: skip
    field_types = [(column.name, column.dtype.name) for column in view.fields]
    key_types = [(column.name, column.dtype.name) for column in view.keys]
    if sorted(fields) != sorted(field_types) or sorted(keys) != sorted(key_types):
        raise ContractMismatch(where, "has different fields than its contract", remedy=_REGISTER)
    return ViewLayout(view, {field: FORMS[dtype] for field, dtype in field_types})


def _registration(name: str) -> str:
    return f"view {name} in Feast's registry"
