"""An offline store for Feast with our point-in-time join: `offline_store` in a `feature_store.yaml`."""

import fcntl
import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from deltalake import write_deltalake
from feast import FeatureView, OnDemandFeatureView, utils
from feast.data_format import DeltaFormat
from feast.data_source import DataSource
from feast.feature_logging import LoggingConfig, LoggingSource
from feast.feature_view import DUMMY_ENTITY_ID, DUMMY_ENTITY_VAL
from feast.infra.offline_stores.file_source import FileLoggingDestination
from feast.infra.offline_stores.offline_store import OfflineStore, RetrievalMetadata
from feast.infra.registry.base_registry import BaseRegistry
from feast.repo_config import FeastConfigBaseModel, RepoConfig

from isthmus.features import clock
from isthmus.features.errors import DataError, RequestError
from isthmus.features.feast import files as feast_files
from isthmus.features.feast import pushes, retrieval
from isthmus.features.feast.retrieval import IsthmusRetrievalJob, WithoutEntities
from isthmus.features.feast.sources import (
    FIRST,
    LAST,
    FeastSource,
    KnownAt,
    SourceRows,
    ValueTypes,
    micros,
    untyped_keys,
)
from isthmus.features.feast.values import TIME, to_timestamps
from isthmus.features.feast.views import is_registered
from isthmus.features.files import write_atomically
from isthmus.features.values import arrow
from isthmus.features.values.columns import Ints


class IsthmusOfflineStoreConfig(FeastConfigBaseModel):
    """The `offline_store` section of a `feature_store.yaml`.

    Attributes:
        known_at: timestamp from which a row is visible, for sources with a created timestamp. With `event`, as in
            Feast's own stores, the created timestamp only decides between rows with the same event time. With
            `created`, rows are hidden until they were created; `filter_by_created_timestamp` requests this for one
            call. Rows of views that `isthmus apply` has registered are always visible from their known time.
        without_entities: rows of a retrieval without an entity dataframe. `moments` gives each key at all times between
            two dates at which its value changed; `snapshot` gives each key at the end, as in Feast's dask store.
        types: types of the values. `source` keeps the types of the source, as in Feast's own stores; `declared` uses
            the types that the view declares and the online store serves.
    """

    type: Literal["isthmus.feast.IsthmusOfflineStore", "isthmus.features.feast.IsthmusOfflineStore"] = (
        "isthmus.feast.IsthmusOfflineStore"
    )
    known_at: KnownAt = "event"
    without_entities: WithoutEntities = "moments"
    types: ValueTypes = "source"


class IsthmusOfflineStore(OfflineStore):
    """Feast offline store with our point-in-time join, for Parquet, Delta and the tables of registered views.

    A retrieval returns one row per row of the entity dataframe, in the same order, including duplicates. Times without
    a time zone are UTC, as everywhere in Feast.
    """

    supports_filter_by_created_timestamp = True

    @staticmethod
    def get_historical_features(  # noqa: PLR0913 - the signature is Feast's
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
        """Return a job that adds features to each entity row, as of the time in that row, to get training data.

        The job reads the views when its result is requested.

        `entity_df` is a table with the join keys and a time, or a DuckDB SQL query for such a table, with paths
        relative to the repository. If it is None, keys and times between `start_date` and `end_date` come from the
        views, in the way that the setting `without_entities` of `IsthmusOfflineStoreConfig` selects.
        `full_feature_names` puts the view's name before the name of each feature. `filter_by_created_timestamp` hides
        each row before its created time.

        Raises:
            EntityTimestampInferenceException: `entity_df` has neither `event_timestamp` nor exactly one time column.
            FeastEntityDFMissingColumnsError: `entity_df` lacks a join key.
            FeatureNameCollisionError: two views have a feature with the same name.
            DataError: `entity_df` cannot be read, or has an invalid time or key, or a column with the name of a
                feature.
            RequestError: a view lacks a feature; or `entity_df` is None, and no view has the join keys of all views.
            ConfigurationError: the source of a view is not a file.
        """
        known_at: KnownAt = "created" if filter_by_created_timestamp else config.offline_store.known_at
        on_demand = utils._get_requested_on_demand_feature_views(feature_refs, project, registry)
        requested_views, _ = utils._get_requested_feature_views_to_features_dict(feature_refs, feature_views, on_demand)
        parts = []
        for view, features in requested_views.items():
            source = FeastSource.of(config, view, untyped_keys(registry, project, view))
            types = config.offline_store.types
            parts.append(retrieval.ViewJoin.of(source, view, features, full_feature_names, known_at, types))
        if entity_df is None:
            interval = utils.compute_non_entity_date_range(feature_views, start_date, end_date)
            names, time = [*retrieval.spine_keys(parts), retrieval.TIMESTAMP], retrieval.TIMESTAMP
            first, last = (pa.scalar(bound, TIME) for bound in interval)
        else:
            entity_rows = retrieval.entity_table(entity_df, config)
            names, time = entity_rows.column_names, retrieval.time_column(entity_rows)
            at = to_timestamps(entity_rows[time], f"entity_df, {time}")
            if at.null_count:
                raise DataError(f"entity_df, {time}", f"{at.null_count} nulls", expected="a time in every row")
            first, last = pc.min_max(at).values() if len(at) else (None, None)
        retrieval.check_columns(names, parts)
        kind = config.offline_store.without_entities

        def compute() -> pa.Table:
            # Sources are read lazily, as in Feast's own stores.
            spine = retrieval.known_moments(parts, *interval, kind) if entity_df is None else entity_rows
            at = to_timestamps(spine[time], f"entity_df, {time}")
            for part in parts:
                spine = part.join(spine, at)
            return spine

        metadata = RetrievalMetadata(
            features=feature_refs,
            keys=[name for name in names if name != time],
            min_event_timestamp=first and first.as_py(),
            max_event_timestamp=last and last.as_py(),
        )
        requested = OnDemandFeatureView.get_requested_odfvs(feature_refs, project, registry)
        return IsthmusRetrievalJob(compute, config.repo_path, full_feature_names, requested, metadata)

    @staticmethod
    def pull_latest_from_table_or_query(  # noqa: PLR0913 - the signature is Feast's
        config: RepoConfig,
        data_source: DataSource,
        join_key_columns: list[str],
        feature_name_columns: list[str],
        timestamp_field: str,
        created_timestamp_column: str | None,
        start_date: datetime | None,
        end_date: datetime | None,
    ) -> IsthmusRetrievalJob:
        """Return a job for the newest row of each key, which `feast materialize` writes to the online store.

        It chooses among rows with an event time or a created time from `start_date` to `end_date`. The created time
        counts, so that later runs do not miss rows that were created late. Rows with an event time after `end_date`
        never count.

        Raises:
            ConfigurationError: the source is not a file.
            FeastJoinKeysDuringMaterialization: the source lacks a join key.
        """
        source = FeastSource.for_query(
            config, data_source, join_key_columns, feature_name_columns, timestamp_field, created_timestamp_column
        )

        def compute() -> pa.Table:
            rows, places = newest_rows(source, config.offline_store.known_at, start_date, end_date)
            return with_entity(rows.table.select(source.names(source.features)).take(places), join_key_columns)

        return IsthmusRetrievalJob(compute, config.repo_path)

    @staticmethod
    def pull_all_from_table_or_query(  # noqa: PLR0913 - the signature is Feast's
        config: RepoConfig,
        data_source: DataSource,
        join_key_columns: list[str],
        feature_name_columns: list[str],
        timestamp_field: str,
        created_timestamp_column: str | None = None,
        start_date: datetime | None = None,
        end_date: datetime | None = None,
    ) -> IsthmusRetrievalJob:
        """Return a job for all rows with an event time from `start_date` to `end_date`, also several per key.

        Feast's compute engine and monitoring call this. If a date is None, the range is open on that side. If
        `feature_name_columns` is empty, the job returns all columns of the source.

        Raises:
            ConfigurationError: the source is not a file.
            FeastJoinKeysDuringMaterialization: the source lacks a join key.
        """
        source = FeastSource.for_query(
            config, data_source, join_key_columns, feature_name_columns, timestamp_field, created_timestamp_column
        )

        def compute() -> pa.Table:
            first, last = _bounds(start_date, end_date)
            columns = source.names(source.features) if source.features else source.data.schema.names
            table = source.columns(columns, source.time_filter(first, last))
            event = to_timestamps(table[timestamp_field], f"{source.where}, column {timestamp_field}").cast(pa.int64())
            inside = pc.and_(pc.greater_equal(event, first), pc.less_equal(event, last))
            return with_entity(table.filter(inside), join_key_columns)

        return IsthmusRetrievalJob(compute, config.repo_path)

    def get_table_column_names_and_types_from_data_source(
        self, config: RepoConfig, data_source: DataSource
    ) -> Iterable[tuple[str, str]]:
        """Return the name and type of each column of a source, for `feast apply` and before Feast writes rows.

        For the source of a view that `isthmus apply` has registered, return the columns that pushed rows need.
        """
        if columns := data_source.tags.get(pushes.COLUMNS):
            return [(name, kind) for name, kind in json.loads(columns)]
        return data_source.get_table_column_names_and_types(config)

    @staticmethod
    def offline_write_batch(
        config: RepoConfig, feature_view: FeatureView, table: pa.Table, progress: Callable[[int], Any] | None
    ) -> None:
        """Append rows to the source of a view, atomically. Feast calls this when rows are written or pushed offline.

        For a view that `isthmus apply` has registered, append the rows to a stream in Redis instead. Later, the command
        `isthmus pushes collect` adds them to the view's table.

        `progress` is called with the number of rows after the write, unless it is None.

        Raises:
            ValueError: the rows have other columns than the source, or another order.
            DataError: a column has another type than the source's, or the source cannot be read.
            RequestError: the source is a single remote Parquet file, which cannot be locked while it is rewritten.
            IsthmusError: rows of a registered view are rejected, see `isthmus.features.feast.pushes.push`.
        """
        if is_registered(feature_view.tags):
            pushes.push(config, feature_view, table)
        else:
            _append(FeastSource.of(config, feature_view), table)
        if progress:
            progress(len(table))

    @staticmethod
    def write_logged_features(
        config: RepoConfig,
        data: pa.Table | Path,
        source: LoggingSource,  # noqa: ARG004 - Feast's interface
        logging_config: LoggingConfig,
        registry: BaseRegistry,  # noqa: ARG004
    ) -> None:
        """Add features that Feast's server has logged to the folder of the log, as new Parquet files.

        `data` is a table, or the path of Parquet files. Raise RequestError if the log's destination is not a
        `FileLoggingDestination`.
        """
        destination = logging_config.destination
        if not isinstance(destination, FileLoggingDestination):
            raise RequestError("logging_config", f"logs to a {type(destination).__name__}",
                               expected="FileLoggingDestination")  # fmt: skip
        target = feast_files.file_source(destination.to_data_source(), "the log")
        filesystem, path = feast_files.filesystem_of(target, feast_files.path_of(target, config.repo_path))
        ds.write_dataset(
            data if isinstance(data, pa.Table) else pq.read_table(data),
            base_dir=path,
            basename_template=f"{uuid.uuid4().hex}-{{i}}.parquet",
            partitioning=destination.partition_by,
            # Hive folder names include the column name, so that it can be read back.
            partitioning_flavor="hive" if destination.partition_by else None,
            filesystem=filesystem,
            format="parquet",
            existing_data_behavior="overwrite_or_ignore",
        )


def newest_rows(
    source: FeastSource, known_at: KnownAt, start: datetime | None, end: datetime | None
) -> tuple[SourceRows, Ints]:
    """Read a source, and return its rows and the int64 positions of the newest row of each key, for materialization.

    A row counts if its event time or its created time is between `start` and `end`, but not if its event time is after
    `end`. So later runs do not miss rows that were created late. A bound of None does not limit. If `known_at` is
    "created", rows created after now do not count yet.
    """
    first, last = _bounds(start, end)
    condition = source.time_filter(first, last)
    if source.created and condition is not None:
        created_within = source.time_filter(first, last, source.created)
        condition = None if created_within is None else condition | created_within
    rows = source.rows([feature.name for feature in source.features], known_at, condition)
    event = arrow.micros(rows.history.table()["event_timestamp"])
    inside = (event >= first) | ((rows.created >= first) & (rows.created <= last))
    if source.created and known_at == "created":
        inside &= rows.created <= clock.now()
    places = np.flatnonzero(inside & (event <= last))
    return rows, rows.newest(places)


def _bounds(start: datetime | None, end: datetime | None) -> tuple[int, int]:
    return FIRST if start is None else micros(start), LAST if end is None else micros(end)


def with_entity(table: pa.Table, keys: Sequence[object]) -> pa.Table:
    if keys:
        return table
    return table.append_column(DUMMY_ENTITY_ID, pa.array([DUMMY_ENTITY_VAL] * len(table), pa.string()))


def _append(source: FeastSource, table: pa.Table) -> None:
    with _locked(source):
        schema = source.data.schema
        # pandas adds its index as columns.
        names = [name for name in table.column_names if not name.startswith("__index_level_")]
        if names != schema.names:
            raise ValueError(
                f"The input pyarrow table has the incorrect columns {names}. The columns are "
                f"expected to be {schema.names}, in this order."
            )
        rows = _cast(table, schema, source)
        filesystem, path = feast_files.filesystem_of(source.files, source.path)
        if isinstance(source.files.file_format, DeltaFormat):
            write_deltalake(path, rows, mode="append", storage_options=feast_files.storage_options(source.files))
        elif filesystem is not None and filesystem.get_file_info(path).is_file:
            raise RequestError(
                source.where, f"{source.path} is a single remote file: writers at the same time would lose rows",
                expected="a folder of Parquet files, or a Delta table",
                remedy="move the file into a folder, and change the path of the source to the folder",
            )  # fmt: skip
        elif filesystem is None and Path(path).is_file():
            with source.reading():
                content = feast_files.parquet(pa.concat_tables([source.data.to_table(), rows]))
            write_atomically(Path(path), content)
        elif filesystem is None:
            write_atomically(Path(path) / f"{uuid.uuid4().hex}.parquet", feast_files.parquet(rows))
        else:
            pq.write_table(rows, f"{path}/{uuid.uuid4().hex}.parquet", filesystem=filesystem)


def _cast(table: pa.Table, schema: pa.Schema, source: FeastSource) -> pa.Table:
    columns = []
    for field in schema:
        column, where = table[field.name], f"{source.where}, column {field.name}"
        try:
            if pa.types.is_timestamp(field.type):
                column = to_timestamps(column, where)
            columns.append(column.cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise DataError(where, f"a value does not fit ({error})", expected=str(field.type)) from None
    return pa.table(columns, schema=schema)


@contextmanager
def _locked(source: FeastSource) -> Iterator[None]:
    """Let only one process at a time append to a local file, because appending rewrites the file."""
    path = Path(source.path)
    if "://" in source.path or not path.is_file():
        yield
        return
    with (path.parent / f".{path.name}.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
