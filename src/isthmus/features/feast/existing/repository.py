"""Read an existing Feast repository. The repository, its registry and its stores are never changed."""

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import feast
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from feast.data_source import DataSource
from feast.feature_view import DUMMY_ENTITY_ID, DUMMY_ENTITY_VAL
from feast.infra.offline_stores.file_source import FileSource
from feast.infra.registry.registry import REGISTRY_SCHEMA_VERSION, get_registry_store_class_from_scheme
from feast.protos.feast.core.Registry_pb2 import Registry
from feast.repo_config import RegistryConfig, RepoConfig
from feast.types import FeastType
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from isthmus.features import clock
from isthmus.features.audit.history import Cells
from isthmus.features.errors import (
    ConfigurationError,
    DataError,
    DependencyError,
    IsthmusError,
    Problem,
    first_line,
    mask_secrets,
)
from isthmus.features.feast.existing import encoding
from isthmus.features.feast.sources import FeastSource
from isthmus.features.feast.values import to_timestamps
from isthmus.features.values.arrow import micros
from isthmus.features.values.columns import Ints

FILE = "feature_store.yaml"
_SECRET = re.compile(r"pass|token|secret|key|user|connection_string|path|url|account", re.IGNORECASE)
_USED = ("project", "provider", "offline_store", "entity_key_serialization_version", "coerce_tz_aware")
_VERSIONS = "enable_online_feature_view_versioning"
_COMPUTED = ("aggregations", "feature_transformation", "source_views")
_SQL = ("feature_views", "stream_feature_views", "on_demand_feature_views", "label_views", "entities",
        "feature_services", "data_sources")  # fmt: skip
"""Tables of Feast's SQL registry, named like the parts of a registry file."""


@dataclass(frozen=True, eq=False)
class FeastTable:
    """Rows of a view's source, with their serialized entity keys, and event and created times in microseconds."""

    table: pa.Table
    keys: pa.Array
    event: Ints
    created: Ints

    def take(self, rows: Ints) -> "FeastTable":
        return FeastTable(self.table.take(rows), self.keys.take(rows), self.event[rows], self.created[rows])


@dataclass(frozen=True, eq=False)
class Repository:
    """A Feast repository.

    Attributes:
        settings: content of `feature_store.yaml`.
        scratch: temporary folder, with a copy of the registry that Feast's classes may write to.
        notes: sentences for the report.
    """

    folder: Path
    settings: Mapping[str, Any]
    scratch: Path
    registry: Registry = field(default_factory=Registry)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path, scratch: Path) -> "Repository":
        """Read the settings and the registry.

        Raises:
            ConfigurationError: there are no settings, they are wrong, or the registry is of another version.
            DependencyError: the registry cannot be read or reached.
        """
        file = folder.resolve() / FILE
        try:
            settings = yaml.safe_load(os.path.expandvars(file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise _wrong(file, "is missing", "the folder of a Feast repository") from None
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            # The message itself quotes the file, which may have a password.
            raise _wrong(file, f"cannot be read ({type(error).__name__})", "YAML") from None
        if not isinstance(settings, dict) or "project" not in settings:
            raise _wrong(file, "has no `project`", "the settings of a Feast repository")
        if (version := settings.get("entity_key_serialization_version", 3)) != 3:
            raise _wrong(file, f"has entity_key_serialization_version {version}", "3")
        opened = cls(folder.resolve(), settings, scratch)
        try:
            opened.registry.ParseFromString(content := opened._content())
        except DecodeError:
            raise DependencyError("registry", "is damaged, or not a registry of Feast",
                                  remedy="restore it, or run `feast apply`") from None  # fmt: skip
        schema = opened.registry.registry_schema_version or REGISTRY_SCHEMA_VERSION
        if schema != REGISTRY_SCHEMA_VERSION:
            known = f"{REGISTRY_SCHEMA_VERSION}, which Feast {feast.__version__} reads"
            raise _wrong("registry", f"has schema {schema}", known)
        if _has_unknown(opened.registry):
            opened.notes.append("A newer Feast wrote the registry: it has parts that this Feast does not know.")
        (scratch / "registry.pb").write_bytes(content)
        return opened

    @property
    def project(self) -> str:
        return str(self.settings["project"])

    def section(self, name: str, default: str) -> dict[str, Any]:
        """Return a section of the settings as a dict with a `type`. The file may have only the type, or nothing."""
        section = self.settings.get(name) or default
        return {"type": default, **section} if isinstance(section, dict) else {"type": section}

    def _content(self) -> bytes:
        section = self.settings.get("registry", "data/registry.db")
        with self.reaching("registry"):
            config = RegistryConfig(**section) if isinstance(section, dict) else RegistryConfig(path=str(section))
            if config.registry_type == "sql":
                return self._from_sql(config.path)
            if config.registry_type != "file" or config.path.startswith(("http:", "https:")):
                raise _wrong("registry", "is of a kind that Isthmus does not read", "a file, s3://, gs:// or SQL")
            if "://" not in config.path:
                return (self.folder / config.path).read_bytes()
            store = get_registry_store_class_from_scheme(config.path)(config, self.folder)
            content: bytes = store.get_registry_proto().SerializeToString()
            return content

    def _from_sql(self, address: str) -> bytes:
        """Read the tables of an SQL registry without Feast's own class, which would create or alter them."""
        import sqlalchemy

        url = sqlalchemy.make_url(address)
        if url.get_backend_name() == "sqlite":
            file = (self.folder / (url.database or "")).resolve()
            url = url.set(database=file.as_uri(), query={"mode": "ro", "immutable": "1", "uri": "true"})
        engine, registry = sqlalchemy.create_engine(url), Registry()
        with engine.connect() as connection:
            for name in sorted({*_SQL} & {*sqlalchemy.inspect(connection).get_table_names()}):
                kind = "feature_view" if name.endswith("_views") else name.removesuffix("s").replace("ie", "y")
                column = f"{'entity' if name == 'entities' else kind}_proto"
                rows = sqlalchemy.text(f"SELECT {column} FROM {name} WHERE project_id = :project")  # noqa: S608 - known
                for (proto,) in connection.execute(rows, {"project": self.project}):
                    getattr(registry, name).add().ParseFromString(bytes(proto))
        engine.dispose()
        return bytes(registry.SerializeToString())

    @contextmanager
    def reaching(self, where: str) -> Iterator[None]:
        """Translate any error in the block to a DependencyError without secrets; `where` names what the block reads."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except IsthmusError:
            raise
        except Exception as error:  # noqa: BLE001 - stores raise errors of many libraries
            found = self._hide(f"{type(error).__name__}: {first_line(error)}")
            remedy = "check feature_store.yaml, the libraries that it needs, and the connection"
            raise DependencyError(where, f"cannot be read ({found})", remedy=remedy) from None

    def _hide(self, text: str) -> str:
        """Mask the values of settings that may be secrets."""
        pending: list[Any] = [(name, self.settings.get(name)) for name in ("online_store", "offline_store", "registry")]
        while pending:
            name, value = pending.pop()
            if isinstance(value, dict):
                pending += value.items()
            elif _SECRET.search(str(name)) and not str(value).endswith((".db", ".pb")):
                for part in {str(value), *re.findall(r"=([^,]+)", str(value))}:
                    text = text.replace(part, "***") if len(part) > 3 else text
        return mask_secrets(text)

    def config(self, online: Mapping[str, Any]) -> RepoConfig:
        """Return the settings for Feast's classes, with the copy of the registry and `online` as their online store."""
        registry: dict[str, Any] = {"registry_type": "file", "path": str(self.scratch / "registry.pb")}
        registry[_VERSIONS] = bool(self.section("registry", "file").get(_VERSIONS))
        settings = {name: self.settings[name] for name in _USED if name in self.settings}
        config = RepoConfig(**settings, registry=registry, online_store=dict(online))
        config.repo_path = self.folder
        return config

    @cached_property
    def store(self) -> feast.FeatureStore:
        """Feast's `FeatureStore` for this repository's offline store. Its online store is an empty one in `scratch`."""
        with self.reaching(FILE):
            config = self.config({"type": "sqlite", "path": str(self.scratch / "unused.db")})
            store = feast.FeatureStore(config=config)
        store.repo_path = self.folder
        return store

    @cached_property
    def views(self) -> "dict[str, View | IsthmusError]":
        """The views that Feast can materialize, by name; an error for a view that cannot be read."""
        views: dict[str, View | IsthmusError] = {}
        kinds: list[tuple[Any, Any]] = [(feast.FeatureView, proto) for proto in self.registry.feature_views]
        kinds += [(feast.StreamFeatureView, proto) for proto in self.registry.stream_feature_views]
        for kind, proto in kinds:
            if proto.spec.project in (self.project, ""):
                try:
                    with self.reaching(f"view {proto.spec.name}"):
                        views[proto.spec.name] = View(self, kind.from_proto(proto))
                except IsthmusError as error:
                    views[proto.spec.name] = error
        return views


@dataclass(frozen=True, eq=False)
class View:
    """A view of a repository. Reads and encodes the rows of its source."""

    repository: Repository
    feast: feast.FeatureView

    @property
    def name(self) -> str:
        return str(self.feast.name)

    @property
    def where(self) -> str:
        return f"view {self.name}"

    @cached_property
    def types(self) -> dict[str, FeastType]:
        return {field.name: field.dtype for field in self.feast.features}

    @property
    def keys(self) -> list[str]:
        return [column.name for column in self.feast.entity_columns if column.name != DUMMY_ENTITY_ID]

    @property
    def ttl(self) -> int | None:
        return self.feast.ttl // clock.MICROSECOND if self.feast.ttl else None

    def column(self, name: str) -> str:
        """Return the column of the source for a key, feature or time column of the view."""
        mapping = (self.feast.batch_source and self.feast.batch_source.field_mapping) or {}
        return next((column for column, mapped in mapping.items() if mapped == name), name)

    def read(self) -> FeastTable:
        """Read all rows with a key and an event time: files directly, other sources through Feast's offline store.

        Raise ConfigurationError for a view without a readable source, DependencyError if reading fails, and DataError
        if a key or time has the wrong type.
        """
        source = self.feast.batch_source
        if source is None or not self.feast.entity_columns:
            found = "has no source" if source is None else "has join keys without types"
            raise _wrong(self.where, found, "a view as `feast apply` registers it")
        if any(getattr(self.feast, part, None) for part in _COMPUTED):
            raise _wrong(self.where, "is computed by Feast", "a view whose rows are those of its source")
        event, created = source.timestamp_field, source.created_timestamp_column
        columns = {name: self.column(name) for name in (*self.keys, *self.types, event, created) if name}
        with self.repository.reaching(f"{self.where}, source {source.name}"):
            if isinstance(source, FileSource):
                files = FeastSource(source, self.repository.folder, (), (), "", "")
                table = files.columns([*dict.fromkeys(columns.values())])
            else:
                table = self._pull(source, columns, event, created)
        table = table.select([*columns.values()]).rename_columns([*columns])
        alone = pa.chunked_array([pa.array([DUMMY_ENTITY_VAL] * len(table), pa.string())])
        keys = {column.name: (alone if column.name == DUMMY_ENTITY_ID else table[column.name], column.dtype)
                for column in self.feast.entity_columns}  # fmt: skip
        encoded = encoding.entity_keys(keys, self.where)
        times = [to_timestamps(table[name], f"{self.where}, column {name}") for name in (event, created) if name]
        usable = np.flatnonzero(pc.and_(encoded.is_valid(), times[0].combine_chunks().is_valid()))
        loaded = pc.coalesce(times[-1], times[0])
        whole = FeastTable(table, encoded, *(micros(pc.fill_null(t.cast(pa.int64()), 0)) for t in (times[0], loaded)))
        return whole if len(usable) == len(table) else whole.take(usable)

    def _pull(self, source: DataSource, columns: Mapping[str, str], event: str, created: str) -> pa.Table:
        store = self.repository.store
        kind = str(self.repository.section("offline_store", "dask")["type"])
        if kind in ("dask", "file", "duckdb"):
            name = type(source).__name__
            raise _wrong(self.where, f"has a {name}, which the offline store {kind} does not read", "a FileSource")
        keys, names = ([columns[name] for name in part] for part in (self.keys, self.types))
        job = store._get_provider().offline_store.pull_all_from_table_or_query(
            store.config, source, keys, names, columns[event], columns.get(created), clock.moment(0),
            clock.moment(clock.now()),
        )  # fmt: skip
        return job.to_arrow()

    def cells(self, source: FeastTable) -> tuple[Cells, list[DataError]]:
        """Encode the features of rows. Return an error for each feature whose values do not fit its declared type."""
        cells, errors = dict[str, pa.Array](), list[DataError]()
        for name, dtype in self.types.items():
            try:
                cells[name] = encoding.encode(source.table[name], dtype, f"{self.where}, feature {name}")
            except DataError as error:
                errors.append(error)
        return cells, errors

    def rounded(self, source: FeastTable, name: str, rows: Ints) -> pa.Array:
        """Return encoded values of a feature after rounding, null if its type is never rounded."""
        return encoding.rounded(source.table[name].take(rows), self.types[name])


def _wrong(where: Path | str, found: str, expected: str) -> ConfigurationError:
    return ConfigurationError("Feast repository", [Problem(str(where), found, expected)])


def _has_unknown(registry: Registry) -> bool:
    parts: list[Any] = [registry, *(item for name in _SQL for item in getattr(registry, name))]
    parts += [part.spec for part in parts if hasattr(part, "spec")]
    return any(len(UnknownFieldSet(part)) for part in parts)
