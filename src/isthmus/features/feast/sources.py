"""Feast's file sources as histories: their rows under the time rules, whatever their columns are called and typed as.

The join sees keys, times and the place of a row. The values are taken from those places, in the types that the view
declares, so what a model is trained on has the type of what it is served.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    from feast import FeatureView
    from feast.data_format import DeltaFormat
    from feast.data_source import DataSource
    from feast.feature_view import DUMMY_ENTITY_ID
    from feast.infra.offline_stores.file_source import FileSource
    from feast.repo_config import RepoConfig

from isthmus.features import clock
from isthmus.features.contract.contract import Column, ViewContract, one_of
from isthmus.features.errors import ConfigurationError, DataError, Problem
from isthmus.features.feast import files as feast_files
from isthmus.features.feast import values as feast_values
from isthmus.features.feast.views import is_registered, registered
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.join import latest, point_in_time
from isthmus.features.types import KEY_TYPES, TYPES, Bool, Bytes, DataType, Int32, Int64, String, UnixTimestamp
from isthmus.features.values.columns import ARROW, from_arrow, from_python
from isthmus.features.values.rows import RowCodec

Int64s = np.ndarray[Any, np.dtype[np.int64]]
KnownAt = Literal["created", "event"]

_NO_DATA = [".", "_SUCCESS", "_metadata", "_common_metadata", "_committed", "_started", "_temporary"]
"""Files beside the data. Feast's logs are in folders that are called `__log_date=…`, which Arrow would leave out."""

FIRST, LAST = -(1 << 63), (1 << 63) - 1
_NANOSECONDS = 2**63 // 1000 - 1
"""The last microsecond that a time in nanoseconds can hold."""


@dataclass(frozen=True, slots=True)
class Part:
    """One column of a source.

    Attributes:
        name: what Feast calls it.
        column: what the source calls it.
        dtype: its declared type; None leaves the column as it is.
    """

    name: str
    column: str
    dtype: DataType | None = None


@dataclass(frozen=True)
class Source:
    """The columns of a file source that a view, or a query of Feast's, reads.

    Attributes:
        files: the source.
        repository: folder that relative paths start from.
        keys: join keys, in the view's order; empty if the view has no entity.
        features: all features of the view.
        event: column of the event timestamps.
        created: column of the created timestamps; empty if there is none.
        ttl: microseconds, or None.
        contract: what `isthmus apply` has registered the view as, if it did.
    """

    files: FileSource
    repository: Path | None
    keys: tuple[Part, ...]
    features: tuple[Part, ...]
    event: str
    created: str
    ttl: int | None = None
    contract: ViewContract | None = None

    @classmethod
    def of(cls, config: RepoConfig, view: FeatureView) -> "Source":
        """What a view reads.

        Raises:
            ConfigurationError: the view has no file source, or a join key of a type that cannot be one.
            ContractMismatch: Isthmus has registered the view, and it does not carry its contract.
        """
        source = feast_files.file_source(view.batch_source, f"view {view.name}")
        columns = {name: column for column, name in source.field_mapping.items()}
        keys = []
        for field in view.entity_columns:
            if field.name != DUMMY_ENTITY_ID:
                dtype = TYPES.get(str(field.dtype))
                if dtype not in KEY_TYPES:
                    problem = Problem(f"{view.name}.{field.name}", f"is a join key of type {field.dtype}",
                                      one_of(known.name for known in KEY_TYPES))  # fmt: skip
                    raise ConfigurationError("feature views", [problem])
                keys.append(Part(field.name, columns.get(field.name, field.name), dtype))
        features = [
            Part(field.name, columns.get(field.name, field.name), TYPES.get(str(field.dtype)))
            for field in view.features
        ]  # fmt: skip
        event, created = source.timestamp_field, source.created_timestamp_column
        return cls(
            source, _folder(config), tuple(keys), tuple(features), columns.get(event, event),
            columns.get(created, created), view.ttl // clock.MICROSECOND if view.ttl else None,
            registered(view.name, view.tags) if is_registered(view.tags) else None,
        )  # fmt: skip

    @classmethod
    def queried(
        cls, config: RepoConfig, source: DataSource, keys: Sequence[str], features: Sequence[str], event: str,
        created: str | None,
    ) -> "Source":  # fmt: skip
        """What a query of Feast's reads, which names the columns of the source as they are.

        Raises:
            ConfigurationError: it is not a file source.
        """
        files = feast_files.file_source(source, "the data source")
        parts = (tuple(Part(name, name) for name in keys), tuple(Part(name, name) for name in features))
        return cls(files, _folder(config), *parts, event, created or "")

    @property
    def where(self) -> str:
        """The source, for a message."""
        return f"source {self.files.name or self.files.path}"

    @property
    def path(self) -> str:
        """The absolute path or the URL."""
        return feast_files.path_of(self.files, self.repository)

    @property
    def times(self) -> list[str]:
        """The columns of times."""
        return [self.event, self.created] if self.created else [self.event]

    @cached_property
    def data(self) -> ds.Dataset:
        """The source, as it was when it was first asked for.

        Raises:
            ContractMismatch: its table was built under another contract than the view is registered with.
            DataError: there is nothing, or it cannot be read.
        """
        if self.contract is not None:
            history = OfflineStore(self.path.rstrip("/").rpartition("/")[0]).history(self.contract)
            return history.data if isinstance(history.data, ds.Dataset) else ds.dataset(history.data)
        with self.reading():
            if isinstance(self.files.file_format, DeltaFormat):
                return DeltaTable(self.path, storage_options=feast_files.options(self.files)).to_pyarrow_dataset()
            filesystem, path = feast_files.filesystem_of(self.files, self.path)
            return ds.dataset(
                path, format="parquet", filesystem=filesystem, partitioning="hive", ignore_prefixes=_NO_DATA
            )

    def columns(self, names: Sequence[str], condition: pc.Expression | None = None) -> pa.Table:
        """Some columns of the source.

        Raises:
            DataError: a column is missing, or the source cannot be read.
        """
        missing = sorted({*names} - {*self.data.schema.names})
        if missing:
            raise DataError(
                f"{self.where}, {self.path}", f"has no column {', '.join(missing)}",
                expected=one_of(self.data.schema.names),
                remedy="if the source has changed, change the feature view with it, or map the column in field_mapping",
            )  # fmt: skip
        with self.reading():
            return self.data.to_table(columns=list(dict.fromkeys(names)), filter=condition)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turns what a missing or damaged file makes of a read into one clear error."""
        try:
            yield
        except (FileNotFoundError, TableNotFoundError) as error:
            raise DataError(self.where, f"nothing at {self.path}", remedy="write it, or correct its path") from error
        except (DeltaError, OSError, pa.ArrowException, ValueError) as error:
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise DataError(self.where, f"{self.path} cannot be read ({first})",
                            expected="Parquet, or Delta where its file_format says so") from error  # fmt: skip

    def within(self, first: int | None, last: int | None) -> pc.Expression | None:
        """The condition that an event time, in microseconds, lies between two, both included.

        It saves reading what cannot matter: it may let through more than it says, where it cannot be asked exactly.
        """
        found = self.data.schema
        if self.event not in found.names or not pa.types.is_timestamp(found.field(self.event).type):
            return None
        kind = found.field(self.event).type
        bounds = [bound for bound in (first, last) if bound is not None]
        if not bounds or (kind.unit == "ns" and max(map(abs, bounds)) >= _NANOSECONDS):
            return None
        # A microsecond has a thousand nanoseconds, all of which are the same time to us.
        ends = [None if at is None else _as(at + late, kind) for at, late in ((first, 0), (last, 1))]
        field = ds.field(self.event)
        low = None if ends[0] is None else field >= ends[0]
        high = None if ends[1] is None else field <= ends[1]
        return high if low is None else low if high is None else low & high

    def rows(self, wanted: Sequence[str], known_at: KnownAt, condition: pc.Expression | None = None) -> "Rows":
        """The rows with an event timestamp and a whole key, and the named features of theirs.

        Args:
            wanted: features, by Feast's names.
            known_at: what says when a row could have been used, where the source has a created timestamp: that, or
                the event timestamp, and the created one decides between rows of one event time alone.
            condition: which rows to read.

        Raises:
            DataError: the source cannot be read, or a column has another type than the view declares.
        """
        chosen = [part for part in self.features if part.name in wanted]
        for features in (chosen, list(self.features)):
            names = [part.column for part in (*self.keys, *features)]
            table = self.columns([*names, *self.times], condition)
            places, history = self._history(table, known_at)
            tied = _tied(history)
            # What a row holds decides between those of one key and time: then all of it must be there.
            if not tied or features == list(self.features):
                break
        if len(places) < len(table):
            table = table.take(places)
        values = pa.table({part.name: self.column(table, part) for part in features})
        if tied:
            history = _decided(history, _content(values))
        keys = [_key_column(history, n) for n in range(max(len(self.keys), 1))]
        view = ViewContract("source", (), tuple(keys), (Column("place", Int64),), self.ttl, 0, (), "feast")
        return Rows(self, ViewHistory(view, history, 0), values, table)

    def column(self, table: pa.Table, part: Part) -> pa.ChunkedArray:
        """One column of rows of the source in its declared type."""
        return feast_values.typed(table[part.column], part.dtype, f"{self.where}, column {part.column}")

    def _key(self, table: pa.Table, part: Part) -> pa.ChunkedArray:
        """A key in its declared type, or in the one in which values of its kind are keys."""
        where = f"{self.where}, join key {part.column}"
        dtype = part.dtype or _key_type(table[part.column].type, where)
        return feast_values.typed(table[part.column], dtype, where)

    def _history(self, table: pa.Table, known_at: KnownAt) -> tuple[pa.Array, pa.Table]:
        """Which rows have a time and a whole key, and the keys and times of those.

        The created time stands in for the content hash where it says nothing else, and 0 where it does.
        """
        event = feast_values.moments(table[self.event], f"{self.where}, column {self.event}")
        created = event
        if self.created:
            stated = feast_values.moments(table[self.created], f"{self.where}, column {self.created}")
            created = pc.coalesce(stated, event)
        keys = {f"key_{n}": self._key(table, part) for n, part in enumerate(self.keys)}
        if not keys:
            keys = {"key_0": pa.array(np.zeros(len(table), np.int64))}
        by_event = known_at == "event"
        rows = pa.table({
            **keys,
            "event_timestamp": event,
            "known_at": event if by_event else created,
            "place": pa.array(np.arange(len(table))),
            "content_hash": created.cast(pa.int64()) if by_event else pa.array(np.zeros(len(table), np.int64)),
        })  # fmt: skip
        whole = pc.field("event_timestamp").is_valid()
        for name in keys:
            whole &= pc.field(name).is_valid()
        rows = rows.filter(whole)
        places = rows["place"]
        return places, rows.set_column(rows.column_names.index("place"), "place", pa.array(np.arange(len(rows))))


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a source.

    Attributes:
        source: where they come from.
        history: their keys (`key_0` and so on), times and places.
        values: their features by Feast's names, in declared types.
        table: the columns that were read, by the source's names.
    """

    source: Source
    history: ViewHistory
    values: pa.Table
    table: pa.Table

    def answer(self, at: pa.ChunkedArray, keys: Sequence[pa.ChunkedArray], threads: int) -> pa.ChunkedArray:
        """The place of the row that answers each of n questions; null where there is none, or it has expired.

        Args:
            at: shape (n,), the times of the questions.
            keys: the values of the source's keys, shape (n,) each.
            threads: CPU threads.
        """
        asked = list(keys) or [pa.array(np.zeros(len(at), np.int64))]
        names = [column.name for column in self.history.view.keys]
        spine = pa.table([at, *asked], ["event_timestamp", *names])
        return point_in_time(spine, [self.history], threads)[self.history.view.full_name("place")]

    def latest(self, places: Int64s) -> pa.ChunkedArray:
        """Of the rows at these places, that of the newest row of each key, in the order of the keys."""
        history = ViewHistory(self.history.view, self.history.table().take(places), 0)
        return latest(history, LAST)["place"]

    def micros(self, name: str) -> Int64s:
        """A column of times of the history, in microseconds."""
        found: Int64s = self.history.table()[name].cast(pa.int64()).to_numpy()
        return found


def micros(time: datetime) -> int:
    """Microseconds since 1970 of a time; without a time zone it is UTC, as everywhere in Feast."""
    return int(feast_values.micros([time], "time")[0])


def _as(at: int, kind: pa.DataType) -> pa.Scalar:
    return pa.scalar(at, pa.int64()).cast(pa.timestamp("us")).cast(kind, safe=False)


def _folder(config: RepoConfig) -> Path | None:
    return Path(config.repo_path) if config.repo_path is not None else None


def _key_type(found: pa.DataType, where: str) -> DataType:
    if pa.types.is_dictionary(found):
        found = found.value_type
    for fits, dtype in (
        (pa.types.is_boolean(found), Bool),
        (pa.types.is_int32(found), Int32),
        (pa.types.is_integer(found), Int64),
        (pa.types.is_timestamp(found), UnixTimestamp),
        (pa.types.is_string(found) or pa.types.is_large_string(found), String),
        (pa.types.is_binary(found) or pa.types.is_large_binary(found), Bytes),
    ):
        if fits:
            return dtype
    raise DataError(where, f"has type {found}", expected=one_of(dtype.name for dtype in KEY_TYPES))


def _key_column(history: pa.Table, n: int) -> Column:
    return Column(f"key_{n}", _key_type(history.schema.field(f"key_{n}").type, f"key {n}"))


def _tied(history: pa.Table) -> bool:
    """Whether two rows have the same key and times, so that something else must decide between them."""
    identity = [name for name in history.column_names if name != "place"]
    return len(history.group_by(identity, use_threads=False).aggregate([])) < len(history)


def _decided(history: pa.Table, content: Int64s) -> pa.Table:
    """The rows with the rank by (created, content), or the content hash, in place of what could not decide."""
    before = history["content_hash"].to_numpy()
    if before.any():
        order = np.lexsort((content, before))
        content = np.empty(len(order), np.int64)
        content[order] = np.arange(len(order))
    return history.set_column(history.column_names.index("content_hash"), "content_hash", pa.array(content))


def _content(values: pa.Table) -> Int64s:
    """The content hash of each row, which an online row of the same values has, too."""
    columns, found = [], {}
    for name in sorted(values.column_names):
        column = values[name]
        dtype = next((dtype for dtype in TYPES.values() if ARROW[dtype.name] == column.type), None)
        if dtype is None:
            dtype, held = String, from_python([None if v is None else repr(v) for v in column.to_pylist()], String)
        else:
            held = from_arrow(column, dtype)
        columns.append(Column(name, dtype))
        found[name] = held
    view = ViewContract("source", (), (), tuple(columns), None, 0, (), "feast")
    return RowCodec(view).content(found, len(values))
