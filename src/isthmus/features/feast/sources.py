"""Read Feast's file sources, with any column names and types, as histories for the point-in-time join."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError
from feast import FeatureView
from feast.data_format import DeltaFormat
from feast.data_source import DataSource
from feast.errors import FeastJoinKeysDuringMaterialization
from feast.feature_view import DUMMY_ENTITY_ID
from feast.infra.offline_stores.file_source import FileSource
from feast.infra.registry.base_registry import BaseRegistry
from feast.repo_config import RepoConfig

from isthmus.features import clock
from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.errors import ConfigurationError, DataError, first_line, one_of
from isthmus.features.feast import files as feast_files
from isthmus.features.feast import values as feast_values
from isthmus.features.feast.views import is_registered, key_problems, tagged_contract
from isthmus.features.offline.delta import files_of
from isthmus.features.offline.history import LatestRows, ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.join import point_in_time
from isthmus.features.types import TYPES, DataType, Int64, String
from isthmus.features.values import arrow
from isthmus.features.values.arrow import ARROW, from_arrow
from isthmus.features.values.columns import Ints, from_python
from isthmus.features.values.rows import RowCodec

KnownAt = Literal["created", "event"]
ValueTypes = Literal["source", "declared"]

_NO_DATA = [".", "_SUCCESS", "_metadata", "_common_metadata", "_committed", "_started", "_temporary"]
"""Prefixes of files without data. Arrow's default also ignores `__log_date=…`, the folders of Feast's logs."""

FIRST, LAST = -(1 << 63), (1 << 63) - 1
_NANOSECONDS = 2**63 // 1000 - 1
"""The last microsecond that a time in nanoseconds can represent."""


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column: its names in Feast and in the source, and its declared type. None keeps the source's type."""

    name: str
    column: str
    dtype: DataType | None = None


@dataclass(frozen=True)
class FeastSource:
    """The columns of a file source that a view or a query reads. `created` is "" if there is no created timestamp.

    `ttl` is in microseconds. `contract` is None unless `isthmus apply` has registered the view. Reading raises
    DataError if the source or a column is missing, damaged or of another type.
    """

    files: FileSource
    repository: Path | str | None
    keys: tuple[SourceColumn, ...]
    features: tuple[SourceColumn, ...]
    event: str
    created: str
    ttl: int | None = None
    contract: ViewContract | None = None

    @classmethod
    def of(cls, config: RepoConfig, view: FeatureView, untyped: Sequence[str] = ()) -> "FeastSource":
        """Return a view's source, with the columns to read. `untyped` are its join keys without a declared type.

        Raise ConfigurationError if the source is not a file, or if a key has a type that keys cannot have.
        """
        source = feast_files.own_source(config, view)
        columns = {name: column for column, name in source.field_mapping.items()}
        key_fields = [field for field in view.entity_columns if field.name != DUMMY_ENTITY_ID]
        problems = key_problems(view.name, tuple((field.name, str(field.dtype)) for field in key_fields))
        if problems:
            raise ConfigurationError("feature views", problems)
        keys, features = (
            tuple(SourceColumn(f.name, columns.get(f.name, f.name), TYPES.get(str(f.dtype))) for f in fields)
            for fields in (key_fields, view.features)
        )
        keys = (*keys, *(SourceColumn(name, columns.get(name, name)) for name in untyped))
        event, created = source.timestamp_field, source.created_timestamp_column
        return cls(
            source, config.repo_path, keys, features, columns.get(event, event),
            columns.get(created, created), view.ttl // clock.MICROSECOND if view.ttl else None,
            tagged_contract(view.name, view.tags) if is_registered(view.tags) else None,
        )  # fmt: skip

    @classmethod
    def for_query(
        cls, config: RepoConfig, source: DataSource, keys: Sequence[str], features: Sequence[str], event: str,
        created: str | None,
    ) -> "FeastSource":  # fmt: skip
        files = feast_files.file_source(source, "the data source")
        key_columns, feature_columns = (tuple(SourceColumn(name, name) for name in names) for names in (keys, features))
        queried = cls(files, config.repo_path, key_columns, feature_columns, event, created or "")
        queried.require_keys()
        return queried

    def require_keys(self) -> None:
        names, keys = {*self.data.schema.names}, {key.column for key in self.keys}
        if not keys <= names:
            raise FeastJoinKeysDuringMaterialization(self.path, keys, names)

    @property
    def where(self) -> str:
        return f"source {self.files.name or self.files.path}"

    @property
    def path(self) -> str:
        return feast_files.path_of(self.files, self.repository)

    def names(self, features: Iterable[SourceColumn]) -> list[str]:
        times = [self.event, self.created] if self.created else [self.event]
        return list(dict.fromkeys([*(column.column for column in (*self.keys, *features)), *times]))

    @cached_property
    def data(self) -> ds.Dataset:
        if self.contract is not None:
            root, options = self.path.rstrip("/").rpartition("/")[0], feast_files.storage_options(self.files)
            history = OfflineStore(root, options).history(self.contract)
            return history.data if isinstance(history.data, ds.Dataset) else ds.dataset(history.data)
        with self.reading():
            if isinstance(self.files.file_format, DeltaFormat):
                options = feast_files.storage_options(self.files)
                table = DeltaTable(self.path, storage_options=options)
                return table.to_pyarrow_dataset(filesystem=files_of(table, self.path))
            filesystem, path = feast_files.filesystem_of(self.files, self.path)
            return ds.dataset(
                path, format="parquet", filesystem=filesystem, ignore_prefixes=_NO_DATA,
                # For a single file, Arrow would turn parent folders with "=" in their names into columns.
                partitioning=None if filesystem is None and Path(path).is_file() else "hive",
            )  # fmt: skip

    def columns(self, names: Sequence[str], condition: pc.Expression | None = None) -> pa.Table:
        missing = sorted({*names} - {*self.data.schema.names})
        if missing:
            raise DataError(
                f"{self.where}, {self.path}", f"has no column {', '.join(missing)}",
                expected=one_of(self.data.schema.names),
                remedy="if the source has changed, update the feature view, or map the column in field_mapping",
            )  # fmt: skip
        with self.reading():
            return self.data.to_table(columns=list(names), filter=condition)

    @contextmanager
    def reading(self) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, TableNotFoundError) as error:
            raise DataError(self.where, f"nothing at {self.path}", remedy="create it, or correct its path") from error
        except (DeltaError, OSError, pa.ArrowException, ValueError) as error:
            raise DataError(self.where, f"{self.path} cannot be read ({first_line(error)})",
                            expected="Parquet, or Delta if its file_format is Delta") from error  # fmt: skip

    def time_filter(self, first: int | None, last: int | None, column: str = "") -> pc.Expression | None:
        """Return a filter that lets Arrow skip rows outside a time range, or None if it cannot skip any.

        The filter may let rows outside the range pass, so the caller must filter again. It is None if both bounds are
        None, or if Arrow cannot compare the column exactly.

        Args:
            first: start of the range, inclusive, in microseconds since 1970 UTC; None for no start.
            last: end of the range, inclusive, in microseconds since 1970 UTC; None for no end.
            column: name of a time column; "" for the event time.
        """
        schema, name = self.data.schema, column or self.event
        if name not in schema.names or not pa.types.is_timestamp(schema.field(name).type):
            return None
        kind = schema.field(name).type
        bounds = [bound for bound in (first, last) if bound is not None]
        if not bounds or (kind.unit == "ns" and max(map(abs, bounds)) >= _NANOSECONDS):
            return None
        # Our times have microseconds: include all nanoseconds of the last one.
        field = ds.field(name)
        low = None if first is None else field >= _as(first, kind)
        high = None if last is None else field <= _as(min(last, LAST - 1) + 1, kind)
        return high if low is None else low if high is None else low & high

    def rows(self, names: Sequence[str], known_at: KnownAt, condition: pc.Expression | None = None) -> "SourceRows":
        """Read the rows of the source for a join. Rows without an event time or with a null in the key are left out.

        Args:
            names: features to read.
            known_at: time from which a row is visible: "event" for its event time, "created" for its created time. With
                "event", the created time only decides between rows with the same event time.
            condition: filter to skip rows while reading, from `time_filter`; None reads all rows.
        """
        for features in ([column for column in self.features if column.name in names], list(self.features)):
            table = self.columns(self.names(features), condition)
            history = self._history(table, known_at)
            identity = [name for name in history.column_names if name != "place"]
            tied = len(history.group_by(identity, use_threads=False).aggregate([])) < len(history)
            # The content of rows breaks ties, which needs all features.
            if not tied or features == list(self.features):
                break
        if len(history) < len(table):
            table = table.take(history["place"])
            history = history.set_column(
                history.column_names.index("place"), "place", pa.array(np.arange(len(history)))
            )
        created = arrow.micros(history["content_hash" if known_at == "event" else "known_at"])
        if tied:
            history = _break_ties(history, self._content(table))
        names = [f"key_{n}" for n in range(max(len(self.keys), 1))]
        keys = tuple(Column(name, feast_values.arrow_key_type(history.schema.field(name).type, name)) for name in names)
        view = ViewContract("source", (), keys, (Column("place", Int64),), self.ttl, 0, (), "feast")
        return SourceRows(self, ViewHistory(view, history, 0), created, table)

    def values(self, table: pa.Table, name: str, types: ValueTypes) -> pa.ChunkedArray:
        feature = next(feature for feature in self.features if feature.name == name)
        column = table[feature.column]
        if types == "source":
            return column
        return feast_values.cast_to(column, feature.dtype, f"{self.where}, column {feature.column}")

    def key_type(self, key: SourceColumn) -> DataType:
        where = f"{self.where}, join key {key.column}"
        if key.column not in self.data.schema.names:
            return key.dtype or String  # reading then reports the missing column
        kind = self.data.schema.field(key.column).type
        if key.dtype is None or (key.dtype == String and not feast_values.is_text(kind)):
            return feast_values.arrow_key_type(kind, where)
        return key.dtype

    def _content(self, table: pa.Table) -> Ints:
        """Return the content hashes of rows with all columns, equal to those of online rows with the same values."""
        columns, by_name = [], {}
        for name in sorted(feature.name for feature in self.features):
            try:
                column = self.values(table, name, "declared")
            except DataError:
                column = self.values(table, name, "source")  # a value that online rows cannot hold
            dtype = next((dtype for dtype in TYPES.values() if ARROW[dtype.name] == column.type), None)
            if dtype is None:
                dtype, texts = String, [None if value is None else repr(value) for value in column.to_pylist()]
                by_name[name] = from_python(texts, String)
            else:
                by_name[name] = from_arrow(column, dtype)
            columns.append(Column(name, dtype))
        view = ViewContract("source", (), (), tuple(columns), None, 0, (), "feast")
        return RowCodec(view).content(by_name, len(table))

    def _history(self, table: pa.Table, known_at: KnownAt) -> pa.Table:
        """Return keys, times and positions of the rows that have a time and a complete key.

        `content_hash` is the created time if `known_at` is "event", else 0.
        """
        event = feast_values.to_timestamps(table[self.event], f"{self.where}, column {self.event}")
        created = event
        if self.created:
            created = feast_values.to_timestamps(table[self.created], f"{self.where}, column {self.created}")
            created = pc.coalesce(created, event)
        keys = {}
        for n, key in enumerate(self.keys):
            column, where = table[key.column], f"{self.where}, join key {key.column}"
            keys[f"key_{n}"] = feast_values.cast_to(column, self.key_type(key), where)
        if not keys:
            keys["key_0"] = pa.array(np.zeros(len(table), np.int64))
        by_event = known_at == "event"
        # Only keys and times can be null, and all times of a row with an event time are set.
        return pa.table({
            **keys,
            "event_timestamp": event,
            "known_at": event if by_event else created,
            "place": pa.array(np.arange(len(table))),
            "content_hash": created.cast(pa.int64()) if by_event else pa.array(np.zeros(len(table), np.int64)),
        }).drop_null()  # fmt: skip


@dataclass(frozen=True, eq=False)
class SourceRows:
    """Rows read from a source: `history` has the keys, times and positions, and `table` the columns that were read.

    `created` has the created times, or event times without a created timestamp, in microseconds.
    """

    source: FeastSource
    history: ViewHistory
    created: Ints
    table: pa.Table

    def positions_at(self, at: pa.ChunkedArray, keys: Sequence[pa.ChunkedArray], threads: int) -> pa.ChunkedArray:
        """Return, for each time and key, the position in `self.table` of the valid row; null if missing or expired.

        `at` has the times, and `keys` has a column per join key. All have the same length.
        """
        columns = list(keys) or [pa.array(np.zeros(len(at), np.int64))]
        names = [column.name for column in self.history.view.keys]
        spine = pa.table([at, *columns], ["event_timestamp", *names])
        return point_in_time(spine, [self.history], threads)[self.history.view.full_name("place")]

    def newest(self, places: Ints) -> Ints:
        history = ViewHistory(self.history.view, self.history.table().take(places), 0)
        return places[LatestRows.of(history, LAST).place]


def untyped_keys(registry: BaseRegistry, project: str, view: FeatureView) -> list[str]:
    typed = {field.name for field in view.entity_columns}
    if len(typed) >= len(view.entities):
        return []
    keys = [registry.get_entity(name, project, allow_cache=True).join_key for name in view.entities]
    return [key for key in keys if key not in typed]


def micros(time: datetime) -> int:
    return int(feast_values.micros([time], "time")[0])


def _as(at: int, kind: pa.DataType) -> pa.Scalar:
    return pa.scalar(at, pa.int64()).cast(pa.timestamp("us")).cast(kind, safe=False)


def _break_ties(history: pa.Table, content: Ints) -> pa.Table:
    """Return the rows with a `content_hash` that breaks ties: the content hash, or the rank by (created, content)."""
    created = history["content_hash"].to_numpy()
    if created.any():
        order = np.lexsort((content, created))
        content = np.empty(len(order), np.int64)
        content[order] = np.arange(len(order))
    return history.set_column(history.column_names.index("content_hash"), "content_hash", pa.array(content))
