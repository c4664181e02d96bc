"""Feast's offline store with our rules of time: what `offline_store` in a `feature_store.yaml` names.

    offline_store:
      type: isthmus.features.feast_offline.IsthmusOfflineStore

It reads Feast's file sources, Parquet and Delta, and the tables of views that `isthmus apply` has registered. One row
comes out for each row of the entity dataframe, in its order, duplicates included. A row of a source that has a created
timestamp answers no question from before it was created. Times without a time zone are UTC, as everywhere in Feast.
"""

import fcntl
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import write_deltalake

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    from feast import FeatureView, OnDemandFeatureView
    from feast.data_format import DeltaFormat
    from feast.data_source import DataSource
    from feast.errors import (
        EntityTimestampInferenceException,
        FeastEntityDFMissingColumnsError,
        FeastJoinKeysDuringMaterialization,
        FeatureNameCollisionError,
        SavedDatasetLocationAlreadyExists,
    )
    from feast.feature_logging import LoggingConfig, LoggingSource
    from feast.feature_view import DUMMY_ENTITY_ID, DUMMY_ENTITY_VAL
    from feast.infra.offline_stores.file_source import FileLoggingDestination
    from feast.infra.offline_stores.offline_store import OfflineStore, RetrievalJob, RetrievalMetadata
    from feast.infra.registry.base_registry import BaseRegistry
    from feast.repo_config import FeastConfigBaseModel, RepoConfig
    from feast.saved_dataset import SavedDatasetStorage
    from feast.utils import (
        _get_requested_feature_views_to_features_dict,
        _get_requested_on_demand_feature_views,
        compute_non_entity_date_range,
    )

from isthmus.features import _feast_sources as feast_sources
from isthmus.features import _feast_values as feast_values
from isthmus.features import clock, columns
from isthmus.features._feast_sources import LAST, KnownAt, Rows, Source, micros
from isthmus.features._feast_values import moments, typed
from isthmus.features._feast_views import is_registered
from isthmus.features.contract import one_of
from isthmus.features.errors import DataError, RequestError
from isthmus.features.files import publish, write_atomically
from isthmus.features.pointintime import connection

TIMESTAMP = "event_timestamp"
_FIRST = -(2**63)


class IsthmusOfflineStoreConfig(FeastConfigBaseModel):
    """The `offline_store` section of a `feature_store.yaml`.

    Attributes:
        known_at: what says when a row could have been used, where its source has a created timestamp: `created`, so
            that no row answers a question from before it was there; or `event`, as Feast's own stores have it, for
            sources whose created timestamp is the time of a backfill. Then it decides between rows of one event time,
            and `filter_by_created_timestamp` is a choice of each call.
    """

    type: Literal["isthmus.features.feast_offline.IsthmusOfflineStore"] = (
        "isthmus.features.feast_offline.IsthmusOfflineStore"
    )
    known_at: KnownAt = "created"


class IsthmusRetrievalJob(RetrievalJob):
    """A table that is computed when it is asked for.

    Args:
        compute: makes the table.
        repository: folder that relative paths start from.
        full_feature_names: whether columns carry the names of their views.
        on_demand: the views to compute from the table.
        metadata: what was asked.
    """

    def __init__(
        self,
        compute: Callable[[], pa.Table],
        repository: Path | str | None,
        full_feature_names: bool = False,
        on_demand: Sequence[OnDemandFeatureView] = (),
        metadata: RetrievalMetadata | None = None,
    ) -> None:
        self._compute = compute
        self._repository = repository
        self._full_feature_names = full_feature_names
        self._on_demand = list(on_demand)
        self._metadata = metadata

    @property
    def full_feature_names(self) -> bool:
        """Whether columns carry the names of their views."""
        return self._full_feature_names

    @property
    def on_demand_feature_views(self) -> list[OnDemandFeatureView]:
        """The views that Feast computes from the table."""
        return self._on_demand

    @property
    def metadata(self) -> RetrievalMetadata | None:
        """What was asked; None of a job that only reads a source."""
        return self._metadata

    def _to_arrow_internal(self, timeout: int | None = None) -> pa.Table:  # noqa: ARG002 - Feast's interface
        return self._compute()

    def _to_df_internal(self, timeout: int | None = None) -> pd.DataFrame:
        return self._to_arrow_internal(timeout).to_pandas()

    def persist(self, storage: SavedDatasetStorage, allow_overwrite: bool = False, timeout: int | None = None) -> None:
        """Writes the table to a Parquet file, a folder of one, or a Delta table: whole, or not at all.

        Raises:
            SavedDatasetLocationAlreadyExists: something is there, and must not be overwritten.
        """
        target = feast_sources.file_source(storage.to_data_source(), "the saved dataset")
        path = feast_sources.path_of(target, self._repository)
        filesystem, inside = feast_sources.filesystem_of(target, path)
        there = Path(inside).exists() if filesystem is None else bool(filesystem.get_file_info(inside).type.value)
        if there and not allow_overwrite:
            raise SavedDatasetLocationAlreadyExists(location=path)
        table = self.to_arrow(timeout=timeout)
        if isinstance(target.file_format, DeltaFormat):
            write_deltalake(
                path, table, mode="overwrite", schema_mode="overwrite", storage_options=feast_sources.options(target)
            )
        elif filesystem is not None:
            pq.write_table(
                table, inside if inside.endswith(".parquet") else f"{inside}/0.parquet", filesystem=filesystem
            )
        elif inside.endswith(".parquet"):
            write_atomically(Path(inside), _parquet(table))
        else:
            publish(Path(inside), lambda folder: pq.write_table(table, folder / "0.parquet"))


class IsthmusOfflineStore(OfflineStore):
    """Our point-in-time join behind Feast's interface."""

    supports_filter_by_created_timestamp = True

    @staticmethod
    def get_historical_features(
        config: RepoConfig,
        feature_views: list[FeatureView],
        feature_refs: list[str],
        entity_df: pd.DataFrame | pa.Table | str | None,
        registry: BaseRegistry,
        project: str,
        full_feature_names: bool = False,
        filter_by_created_timestamp: bool = False,
        start_date: datetime | None = None,
        end_date: datetime | None = None,
    ) -> IsthmusRetrievalJob:
        """What each view answered at each row's own time.

        Args:
            config: the project's configuration.
            feature_views: the views that are asked.
            feature_refs: the features that are asked, `view:feature`.
            entity_df: a table with the join keys and a time; or a query in DuckDB's SQL that gives one, whose relative
                paths start from the repository; or None, for every key and moment of the views between two dates.
            registry: Feast's registry.
            project: Feast's project.
            full_feature_names: whether columns carry the names of their views.
            filter_by_created_timestamp: whether rows answer no question from before they were created; without it,
                too, unless `known_at` in the configuration is `event`.
            start_date: the first moment, without an `entity_df`.
            end_date: the last one.

        Raises:
            EntityTimestampInferenceException: `entity_df` has no column `event_timestamp` and not just one of times.
            FeastEntityDFMissingColumnsError: it lacks a join key.
            DataError: it cannot be read, or has a time or a key that is none.
            RequestError: a feature is none of its view.
            ConfigurationError: a view has another source than a file.
        """
        known_at: KnownAt = "created" if filter_by_created_timestamp else config.offline_store.known_at
        on_demand = _get_requested_on_demand_feature_views(feature_refs, project, registry)
        wanted, _ = _get_requested_feature_views_to_features_dict(feature_refs, feature_views, on_demand)
        parts = [_Part.of(config, view, features, full_feature_names) for view, features in wanted.items()]
        if entity_df is None:
            spine = _moments(parts, known_at, *compute_non_entity_date_range(feature_views, start_date, end_date))
        else:
            spine = _spine(entity_df, config)
        time = _time_column(spine)
        at = moments(spine[time], f"entity_df, {time}")
        if at.null_count:
            raise DataError(f"entity_df, {time}", f"{at.null_count} nulls", expected="a time in every row")
        _check_columns(spine, parts)
        first, last = pc.min_max(at).values() if len(at) else (None, None)

        def compute() -> pa.Table:
            result = spine
            for part in parts:
                result = part.joined(result, at, known_at)
            return result

        metadata = RetrievalMetadata(
            features=feature_refs,
            keys=[name for name in spine.column_names if name != time],
            min_event_timestamp=first and first.as_py(),
            max_event_timestamp=last and last.as_py(),
        )
        requested = OnDemandFeatureView.get_requested_odfvs(feature_refs, project, registry)
        return IsthmusRetrievalJob(compute, config.repo_path, full_feature_names, requested, metadata)

    @staticmethod
    def pull_latest_from_table_or_query(
        config: RepoConfig,
        data_source: DataSource,
        join_key_columns: list[str],
        feature_name_columns: list[str],
        timestamp_field: str,
        created_timestamp_column: str | None,
        start_date: datetime | None,
        end_date: datetime | None,
    ) -> IsthmusRetrievalJob:
        """The newest row of each key, of those that became true between two times, or were created then.

        A row that was created late is older than what has been materialised, and would else never be.

        Raises:
            FeastJoinKeysDuringMaterialization: the source lacks a join key.
        """
        source = Source.queried(
            config, data_source, join_key_columns, feature_name_columns, timestamp_field, created_timestamp_column
        )
        _check_join_keys(source, join_key_columns)
        names = [*join_key_columns, *feature_name_columns, *source.times]

        def compute() -> pa.Table:
            rows, places = newest(source, config.offline_store.known_at, start_date, end_date)
            return _with_entity(rows.table.select(_distinct(names)).take(places), join_key_columns)

        return IsthmusRetrievalJob(compute, config.repo_path)

    @staticmethod
    def pull_all_from_table_or_query(
        config: RepoConfig,
        data_source: DataSource,
        join_key_columns: list[str],
        feature_name_columns: list[str],
        timestamp_field: str,
        created_timestamp_column: str | None = None,
        start_date: datetime | None = None,
        end_date: datetime | None = None,
    ) -> IsthmusRetrievalJob:
        """All rows whose event time lies between two times, both included; without features, all columns of them.

        Raises:
            FeastJoinKeysDuringMaterialization: the source lacks a join key.
        """
        source = Source.queried(
            config, data_source, join_key_columns, feature_name_columns, timestamp_field, created_timestamp_column
        )
        _check_join_keys(source, join_key_columns)
        names = [*join_key_columns, *feature_name_columns, *source.times]

        def compute() -> pa.Table:
            first, last = _bounds(start_date, end_date)
            columns = _distinct(names) if feature_name_columns else source.data.schema.names
            table = source.columns(columns, source.within(first, last))
            event = moments(table[timestamp_field], f"{source.where}, column {timestamp_field}").cast(pa.int64())
            inside = pc.and_(pc.greater_equal(event, first), pc.less_equal(event, last))
            return _with_entity(table.filter(inside), join_key_columns)

        return IsthmusRetrievalJob(compute, config.repo_path)

    @staticmethod
    def offline_write_batch(
        config: RepoConfig, feature_view: FeatureView, table: pa.Table, progress: Callable[[int], Any] | None
    ) -> None:
        """Appends rows to the source of a view. A reader, or a crash, meets all of them or none.

        Raises:
            ValueError: the rows have other columns than the source.
            DataError: a column has another type than the source's, or the source cannot be read.
            RequestError: `isthmus apply` has registered the view: its rows are those of its transform.
        """
        if is_registered(feature_view.tags):
            raise RequestError(
                f"view {feature_view.name}", "its rows are computed by its transform",
                remedy="add to what the transform reads and run `isthmus build`, or push to the online store alone",
            )  # fmt: skip
        source = Source.of(config, feature_view)
        with _alone(source):
            wanted = source.data.schema
            # pandas gives its index along.
            names = [name for name in table.column_names if not name.startswith("__index_level_")]
            if names != wanted.names:
                raise ValueError(
                    f"The input pyarrow table has the incorrect columns {names}. The columns are "
                    f"expected to be {wanted.names}, in this order."
                )
            rows = _like(table, wanted, source)
            filesystem, path = feast_sources.filesystem_of(source.files, source.path)
            if isinstance(source.files.file_format, DeltaFormat):
                write_deltalake(path, rows, mode="append", storage_options=feast_sources.options(source.files))
            elif path.endswith(".parquet") or Path(path).is_file():
                with source.reading():
                    content = _parquet(pa.concat_tables([source.data.to_table(), rows]))
                if filesystem is None:
                    write_atomically(Path(path), content)
                else:
                    with filesystem.open_output_stream(path) as stream:
                        stream.write(content)
            elif filesystem is None:
                write_atomically(Path(path) / f"{uuid.uuid4().hex}.parquet", _parquet(rows))
            else:
                pq.write_table(rows, f"{path}/{uuid.uuid4().hex}.parquet", filesystem=filesystem)
        if progress:
            progress(len(rows))

    @staticmethod
    def write_logged_features(
        config: RepoConfig,
        data: pa.Table | Path,
        source: LoggingSource,  # noqa: ARG004 - Feast's interface
        logging_config: LoggingConfig,
        registry: BaseRegistry,  # noqa: ARG004
    ) -> None:
        """Adds logged features to the folder that a feature service logs to."""
        destination = logging_config.destination
        if not isinstance(destination, FileLoggingDestination):
            raise RequestError("logging_config", f"logs to a {type(destination).__name__}",
                               expected="FileLoggingDestination")  # fmt: skip
        target = feast_sources.file_source(destination.to_data_source(), "the log")
        filesystem, path = feast_sources.filesystem_of(target, feast_sources.path_of(target, config.repo_path))
        ds.write_dataset(
            data if isinstance(data, pa.Table) else pq.read_table(data),
            base_dir=path,
            basename_template=f"{uuid.uuid4().hex}-{{i}}.parquet",
            partitioning=destination.partition_by,
            # The names of the folders say what the column was: it can be read again.
            partitioning_flavor="hive" if destination.partition_by else None,
            filesystem=filesystem,
            format="parquet",
            existing_data_behavior="overwrite_or_ignore",
        )


@dataclass(frozen=True, eq=False)
class _Part:
    """One view of a retrieval.

    Attributes:
        name: the view, or its alias.
        source: what it reads.
        keys: the columns of the spine that hold its keys.
        columns: name of a feature to the name of its column in the result.
    """

    name: str
    source: Source
    keys: tuple[str, ...]
    columns: Mapping[str, str]

    @classmethod
    def of(cls, config: RepoConfig, view: FeatureView, features: Sequence[str], full_names: bool) -> "_Part":
        source, name = Source.of(config, view), view.projection.name_alias or view.name
        known = [part.name for part in source.features]
        for feature in features:
            if feature not in known:
                raise RequestError(f"view {view.name}", f"no feature {feature!r}", expected=one_of(known))
        renamed = view.projection.join_key_map
        keys = tuple(renamed.get(key.name, key.name) for key in source.keys)
        return cls(name, source, keys, {f: f"{name}__{f}" if full_names else f for f in features})

    def joined(self, spine: pa.Table, at: pa.ChunkedArray, known_at: KnownAt) -> pa.Table:
        """The spine with the columns of this view."""
        keys = [
            typed(spine[name], key.dtype, f"entity_df, join key {name}")
            for name, key in zip(self.keys, self.source.keys, strict=True)
        ]
        # Nothing from after the last question answers, and nothing that has expired before the first.
        condition = None
        if len(at):
            first, last = (int(bound.value) for bound in pc.min_max(at).values())
            ttl = self.source.ttl
            condition = self.source.within(None if ttl is None else max(first - ttl, _FIRST), last)
        rows = self.source.rows(list(self.columns), known_at, condition)
        places = rows.answer(at, keys, os.cpu_count() or 1)
        for feature, column in self.columns.items():
            spine = spine.append_column(column, rows.values[feature].take(places))
        return spine


def newest(source: Source, known_at: KnownAt, start: datetime | None, end: datetime | None) -> tuple[Rows, pa.Array]:
    """The rows of a source, and the places of those to materialise for a time: one for each key, in their order.

    A row belongs to a time in which it became true, or became known if it is true by its end: materialising one time
    after the other leaves out nothing that was created late. A row that is created in the future comes when it is.

    Args:
        source: the source.
        known_at: what says when a row could have been used.
        start: the first moment; None for the first there is.
        end: the last one; None for now.
    """
    first, last = _bounds(start, end)
    late = known_at == "created" and bool(source.created)
    condition = source.within(None if late else first, last)
    rows = source.rows([part.name for part in source.features], known_at, condition)
    event, known = rows.micros("event_timestamp"), rows.micros("known_at")
    inside = event >= first
    if late:
        inside |= (known >= first) & (known <= last)
        inside &= known <= clock.now()
    places = np.flatnonzero(inside & (event <= last))
    return rows, rows.latest(places)


def _bounds(start: datetime | None, end: datetime | None) -> tuple[int, int]:
    return _FIRST if start is None else micros(start), LAST if end is None else micros(end)


def _spine(entity_df: pd.DataFrame | pa.Table | str, config: RepoConfig) -> pa.Table:
    """The entity dataframe as a table."""
    where = "entity_df"
    if isinstance(entity_df, str):
        with connection(os.cpu_count() or 1) as db:
            try:
                db.execute("SET TimeZone = 'UTC'")
                if config.repo_path is not None:
                    db.execute("SET file_search_path = ?", [str(config.repo_path)])
                return db.sql(entity_df).to_arrow_table()
            except duckdb.Error as error:
                first = next(iter(str(error).strip().splitlines()), "it gives no rows")
                raise DataError(where, f"the query fails ({first})", expected="a SELECT in DuckDB's SQL") from error
    if isinstance(entity_df, pa.Table):
        return entity_df
    if not isinstance(entity_df, pd.DataFrame):
        raise DataError(where, f"is a {type(entity_df).__name__}", expected="a pandas.DataFrame, or SQL")
    try:
        return pa.Table.from_pandas(entity_df, preserve_index=False)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(where, f"has columns that are no table ({error})",
                        expected="columns of one type each, each name once") from error  # fmt: skip


def _time_column(spine: pa.Table) -> str:
    """The column of the times: `event_timestamp`, or the only one there is."""
    if TIMESTAMP in spine.column_names:
        return TIMESTAMP
    times = [field.name for field in spine.schema if pa.types.is_timestamp(field.type)]
    if len(times) != 1:
        raise EntityTimestampInferenceException(TIMESTAMP)
    return str(times[0])


def _check_columns(spine: pa.Table, parts: Sequence[_Part]) -> None:
    """Refuses a spine that lacks a join key, and two columns of one name."""
    missing = {key for part in parts for key in part.keys} - {*spine.column_names}
    if missing:
        wanted = {key for part in parts for key in part.keys}
        raise FeastEntityDFMissingColumnsError(wanted, missing)  # type: ignore[no-untyped-call]  # so in Feast
    taken = {*spine.column_names}
    for part in parts:
        for column in part.columns.values():
            if column in spine.column_names:
                raise DataError("entity_df", f"has a column {column}, which is a feature of view {part.name}, too",
                                remedy="rename it, or ask with full_feature_names=True")  # fmt: skip
            if column in taken:
                raise FeatureNameCollisionError([f"{part.name}:{column}"], False)
            taken.add(column)


def _moments(parts: Sequence[_Part], known_at: KnownAt, start: datetime, end: datetime) -> pa.Table:
    """Every key of the views and every moment between two dates at which a row of it could first be used, once each.

    Views that have fewer keys than another one add no moments: they answer.
    """
    names = max((part.keys for part in parts), key=len, default=())
    asked = [part for part in parts if {*part.keys} == {*names}]
    others = {key for part in parts for key in part.keys} - {*names}
    if others:
        raise RequestError("get_historical_features", f"without an entity_df, views of different keys: {min(others)}",
                           expected=f"views that are joined by {', '.join(names)}",
                           remedy="ask for them one after the other, or give an entity_df")  # fmt: skip
    first, last = micros(start), micros(end)
    found = []
    for part in asked:
        history = part.source.rows([], known_at, part.source.within(None, last)).history.table()
        since = np.maximum(columns.micros(history["event_timestamp"]), columns.micros(history["known_at"]))
        keys = [history[f"key_{part.keys.index(name)}"] for name in names]
        times = pa.array(since).cast(feast_values.TIME)
        found.append(pa.table([*keys, times], [*names, TIMESTAMP]).filter((since >= first) & (since <= last)))
    spine = pa.concat_tables(found, promote_options="permissive")
    spine = spine.group_by([*names, TIMESTAMP], use_threads=False).aggregate([])
    return spine.sort_by([(TIMESTAMP, "ascending"), *((name, "ascending") for name in names)])


def _check_join_keys(source: Source, keys: Sequence[str]) -> None:
    found = {*source.data.schema.names}
    if not {*keys} <= found:
        raise FeastJoinKeysDuringMaterialization(source.path, {*keys}, found)


def _with_entity(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The table with the key by which Feast knows a view without an entity, if there is no other."""
    if keys:
        return table
    return table.append_column(DUMMY_ENTITY_ID, pa.array([DUMMY_ENTITY_VAL] * len(table), pa.string()))


def _distinct(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _like(table: pa.Table, wanted: pa.Schema, source: Source) -> pa.Table:
    """Rows in the types of a source, without what pandas says of them."""
    columns = []
    for field in wanted:
        column = table[field.name]
        try:
            if pa.types.is_timestamp(field.type):
                column = moments(column, f"{source.where}, column {field.name}")
            columns.append(column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(f"{source.where}, column {field.name}", f"a value does not fit ({error})",
                            expected=str(field.type)) from None  # fmt: skip
    return pa.table(columns, schema=wanted)


def _parquet(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    content: bytes = sink.getvalue().to_pybytes()
    return content


@contextmanager
def _alone(source: Source) -> Iterator[None]:
    """Lets one process at a time append to a local file: each writes what it has read, and more."""
    path = Path(source.path)
    if "://" in source.path or not path.is_file():
        yield
        return
    with (path.parent / f".{path.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
