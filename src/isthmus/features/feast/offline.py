"""Feast's offline store with our rules of time: what `offline_store` in a `feature_store.yaml` names.

    offline_store:
      type: isthmus.features.feast.IsthmusOfflineStore

It reads Feast's file sources, Parquet and Delta, and the tables of views that `isthmus apply` has registered. One row
comes out for each row of the entity dataframe, in its order, duplicates included. A row of a source that has a created
timestamp answers no question from before it was created. Times without a time zone are UTC, as everywhere in Feast.
"""

import uuid
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    from feast import FeatureView, OnDemandFeatureView
    from feast.data_source import DataSource
    from feast.errors import (
        FeastJoinKeysDuringMaterialization,
    )
    from feast.feature_logging import LoggingConfig, LoggingSource
    from feast.feature_view import DUMMY_ENTITY_ID, DUMMY_ENTITY_VAL
    from feast.infra.offline_stores.file_source import FileLoggingDestination
    from feast.infra.offline_stores.offline_store import OfflineStore, RetrievalMetadata
    from feast.infra.registry.base_registry import BaseRegistry
    from feast.repo_config import FeastConfigBaseModel, RepoConfig
    from feast.utils import (
        _get_requested_feature_views_to_features_dict,
        _get_requested_on_demand_feature_views,
        compute_non_entity_date_range,
    )

from isthmus.features import clock
from isthmus.features.errors import DataError, RequestError
from isthmus.features.feast import files as feast_files
from isthmus.features.feast.retrieval import (
    AskedView,
    IsthmusRetrievalJob,
    check_columns,
    entity_table,
    known_moments,
    time_column,
)
from isthmus.features.feast.sources import FIRST, LAST, KnownAt, Rows, Source, micros
from isthmus.features.feast.values import moments
from isthmus.features.feast.views import is_registered
from isthmus.features.feast.writing import append


class IsthmusOfflineStoreConfig(FeastConfigBaseModel):
    """The `offline_store` section of a `feature_store.yaml`.

    Attributes:
        known_at: what says when a row could have been used, where its source has a created timestamp: `created`, so
            that no row answers a question from before it was there; or `event`, as Feast's own stores have it, for
            sources whose created timestamp is the time of a backfill. Then it decides between rows of one event time,
            and `filter_by_created_timestamp` is a choice of each call.
    """

    type: Literal[
        "isthmus.features.feast.IsthmusOfflineStore", "isthmus.features.feast_offline.IsthmusOfflineStore"
    ] = "isthmus.features.feast.IsthmusOfflineStore"
    known_at: KnownAt = "created"


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
        parts = [AskedView.of(config, view, features, full_feature_names) for view, features in wanted.items()]
        if entity_df is None:
            spine = known_moments(parts, known_at, *compute_non_entity_date_range(feature_views, start_date, end_date))
        else:
            spine = entity_table(entity_df, config)
        time = time_column(spine)
        at = moments(spine[time], f"entity_df, {time}")
        if at.null_count:
            raise DataError(f"entity_df, {time}", f"{at.null_count} nulls", expected="a time in every row")
        check_columns(spine, parts)
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
        source, names = _queried(
            config, data_source, join_key_columns, feature_name_columns, timestamp_field, created_timestamp_column
        )

        def compute() -> pa.Table:
            rows, places = newest(source, config.offline_store.known_at, start_date, end_date)
            return _with_entity(rows.table.select(names).take(places), join_key_columns)

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
        source, names = _queried(
            config, data_source, join_key_columns, feature_name_columns, timestamp_field, created_timestamp_column
        )

        def compute() -> pa.Table:
            first, last = _bounds(start_date, end_date)
            columns = names if feature_name_columns else source.data.schema.names
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
        append(source, table)
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
        """Adds logged features to the folder that a feature service logs to."""
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
            # The names of the folders say what the column was: it can be read again.
            partitioning_flavor="hive" if destination.partition_by else None,
            filesystem=filesystem,
            format="parquet",
            existing_data_behavior="overwrite_or_ignore",
        )


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
    return FIRST if start is None else micros(start), LAST if end is None else micros(end)


def _queried(
    config: RepoConfig, source: DataSource, keys: list[str], features: list[str], time: str, created: str | None
) -> tuple[Source, list[str]]:
    """A source, and the columns of it that are asked for."""
    queried = Source.queried(config, source, keys, features, time, created)
    found = {*queried.data.schema.names}
    if not {*keys} <= found:
        raise FeastJoinKeysDuringMaterialization(queried.path, {*keys}, found)
    return queried, list(dict.fromkeys([*keys, *features, *queried.times]))


def _with_entity(table: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The table with the key by which Feast knows a view without an entity, if there is no other."""
    if keys:
        return table
    return table.append_column(DUMMY_ENTITY_ID, pa.array([DUMMY_ENTITY_VAL] * len(table), pa.string()))
