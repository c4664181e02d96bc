"""Retrievals of Feast's offline store: the entity dataframe, and the columns that each view adds to it."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from feast import FeatureView, OnDemandFeatureView
from feast import errors as feast_errors
from feast.infra.offline_stores.offline_store import RetrievalJob, RetrievalMetadata
from feast.repo_config import RepoConfig
from feast.saved_dataset import SavedDatasetStorage

from isthmus.features import clock
from isthmus.features.errors import DataError, RequestError, one_of
from isthmus.features.feast import files as feast_files
from isthmus.features.feast import values as feast_values
from isthmus.features.feast.sources import FIRST, FeastSource, KnownAt, SourceRows, ValueTypes, micros
from isthmus.features.offline.history import connection
from isthmus.features.values import arrow

TIMESTAMP = "event_timestamp"

WithoutEntities = Literal["moments", "snapshot"]


@dataclass(eq=False)
class IsthmusRetrievalJob(RetrievalJob):
    """A Feast job that computes its table when it is read. `metadata` is None if the job only reads a source."""

    compute: Callable[[], pa.Table]
    repository: Path | str | None
    full_feature_names: bool = False
    on_demand: Sequence[OnDemandFeatureView] = ()
    metadata: RetrievalMetadata | None = None

    @property
    def on_demand_feature_views(self) -> list[OnDemandFeatureView]:
        return list(self.on_demand)

    def _to_arrow_internal(self, timeout: int | None = None) -> pa.Table:  # noqa: ARG002 - Feast's interface
        return self.compute()

    def _to_df_internal(self, timeout: int | None = None) -> pd.DataFrame:
        return self._to_arrow_internal(timeout).to_pandas()

    def persist(self, storage: SavedDatasetStorage, allow_overwrite: bool = False, timeout: int | None = None) -> None:
        """Compute the table, and write it to the file, folder or Delta table of `storage`, a saved dataset of Feast.

        If `allow_overwrite` is False and the location exists, raise SavedDatasetLocationAlreadyExists. Raise
        RequestError for a remote folder with files other than `0.parquet`, which this method writes. `timeout` is
        ignored.
        """
        target = feast_files.file_source(storage.to_data_source(), "the saved dataset")
        path = feast_files.path_of(target, self.repository)
        filesystem, inside = feast_files.filesystem_of(target, path)
        exists = Path(inside).exists() if filesystem is None else bool(filesystem.get_file_info(inside).type.value)
        if exists and not allow_overwrite:
            raise feast_errors.SavedDatasetLocationAlreadyExists(location=path)
        feast_files.save(self.to_arrow(timeout=timeout), target, path)


@dataclass(frozen=True, eq=False)
class ViewJoin:
    """The join of a view to entity rows. `keys` are columns of these rows; `columns` maps features to new columns."""

    name: str
    source: FeastSource
    keys: tuple[str, ...]
    columns: Mapping[str, str]
    known_at: KnownAt
    types: ValueTypes

    @classmethod
    def of(
        cls, source: FeastSource, view: FeatureView, features: Sequence[str], full_names: bool, known_at: KnownAt,
        types: ValueTypes,
    ) -> "ViewJoin":  # fmt: skip
        name = str(view.projection.name_to_use())  # type: ignore[no-untyped-call]  # so in Feast
        known = [column.name for column in source.features]
        for feature in features:
            if feature not in known:
                raise RequestError(f"view {view.name}", f"no feature {feature!r}", expected=one_of(known))
        key_map = view.projection.join_key_map
        keys = tuple(key_map.get(key.name, key.name) for key in source.keys)
        columns = {feature: f"{name}__{feature}" if full_names else feature for feature in features}
        if source.contract is not None:
            known_at = "created"
        return cls(name, source, keys, columns, known_at, types)

    def join(self, spine: pa.Table, at: pa.ChunkedArray) -> pa.Table:
        keys = [
            feast_values.cast_to(spine[name], self.source.key_type(key), f"entity_df, join key {name}")
            for name, key in zip(self.keys, self.source.keys, strict=True)
        ]
        # Events after the last time of the spine, or expired before its first time, cannot match.
        condition = None
        if len(at):
            first, last = (int(bound.value) for bound in pc.min_max(at).values())
            ttl = self.source.ttl
            condition = self.source.time_filter(None if ttl is None else max(first - ttl, FIRST), last)
        rows = self.source.rows(list(self.columns), self.known_at, condition)
        if len(at) and self.source.contract is None:
            self._warn_of_hidden(rows, last)
        places = rows.positions_at(at, keys, os.cpu_count() or 1)
        for feature, column in self.columns.items():
            spine = spine.append_column(column, self.source.values(rows.table, feature, self.types).take(places))
        return spine

    def _warn_of_hidden(self, rows: SourceRows, last: int) -> None:
        event, known = (arrow.micros(rows.history.table()[name]) for name in (TIMESTAMP, "known_at"))
        if hidden := np.count_nonzero((event <= last) & (known > last)):
            warnings.warn(
                f"view {self.name}: {hidden:,} of {len(event):,} rows are hidden: they were created after the last "
                f"requested time, {clock.moment(last)}. If they were created by loading history, do not use "
                "filter_by_created_timestamp, and set `known_at: event` in `offline_store`",
                stacklevel=2,
            )


def entity_table(entity_df: pd.DataFrame | pa.Table | str, config: RepoConfig) -> pa.Table:
    where = "entity_df"
    if isinstance(entity_df, str):
        with connection(os.cpu_count() or 1) as db:
            try:
                db.execute("SET TimeZone = 'UTC'")
                if config.repo_path is not None:
                    db.execute("SET file_search_path = ?", [str(config.repo_path)])
                return db.sql(entity_df).to_arrow_table()
            except duckdb.Error as error:
                first = next(iter(str(error).strip().splitlines()), "it returns no rows")
                raise DataError(where, f"the query fails ({first})", expected="a SELECT in DuckDB's SQL") from error
    if isinstance(entity_df, pa.Table):
        return entity_df
    if not isinstance(entity_df, pd.DataFrame):
        raise DataError(where, f"is a {type(entity_df).__name__}", expected="a pandas.DataFrame, or SQL")
    try:
        return pa.Table.from_pandas(entity_df, preserve_index=False)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(where, f"cannot be converted to a table ({error})",
                        expected="columns of one type each, with unique names") from error  # fmt: skip


def time_column(spine: pa.Table) -> str:
    if TIMESTAMP in spine.column_names:
        return TIMESTAMP
    times = [field.name for field in spine.schema if pa.types.is_timestamp(field.type)]
    if len(times) != 1:
        raise feast_errors.EntityTimestampInferenceException(TIMESTAMP)
    return str(times[0])


def check_columns(spine: Sequence[str], views: Sequence[ViewJoin]) -> None:
    required = {key for view in views for key in view.keys}
    if missing := required - {*spine}:
        raise feast_errors.FeastEntityDFMissingColumnsError(required, missing)  # type: ignore[no-untyped-call]  # so in Feast
    names = {*spine}
    for view in views:
        for column in view.columns.values():
            if column in spine:
                raise DataError("entity_df", f"has a column {column}, which is also a feature of view {view.name}",
                                remedy="rename it, or use full_feature_names=True")  # fmt: skip
            if column in names:
                raise feast_errors.FeatureNameCollisionError([f"{view.name}:{column}"], False)
            names.add(column)


def spine_keys(views: Sequence[ViewJoin]) -> tuple[str, ...]:
    names = max((view.keys for view in views), key=len, default=())
    extra = {key for view in views for key in view.keys} - {*names}
    if extra:
        raise RequestError("get_historical_features", f"no entity_df, and only some views have the key {min(extra)}",
                           expected=f"views with the join keys {', '.join(names)}",
                           remedy="retrieve the views one at a time, or pass an entity_df")  # fmt: skip
    return names


def known_moments(views: Sequence[ViewJoin], start: datetime, end: datetime, kind: WithoutEntities) -> pa.Table:
    """Return entity rows from the views themselves: each key with each of its times, sorted, without duplicates.

    A retrieval without an entity dataframe uses these rows. If `kind` is "moments", the times are those from `start` to
    `end` at which a row of the key became visible. If `kind` is "snapshot", the only time is `end`, for keys with a row
    that is valid then. Views that lack one of the join keys are skipped. Raise RequestError if no view has all join
    keys.
    """
    names = spine_keys(views)
    first, last = micros(start), micros(end)
    tables = []
    for view in views:
        if {*view.keys} != {*names}:
            continue
        history = view.source.rows([], view.known_at, view.source.time_filter(None, last)).history.table()
        event = arrow.micros(history["event_timestamp"])
        since = np.maximum(event, arrow.micros(history["known_at"]))
        inside = since <= last
        if kind == "moments":
            inside &= since >= first
        elif view.source.ttl is not None:
            inside &= last - event <= view.source.ttl
        keys = [history[f"key_{view.keys.index(name)}"] for name in names]
        times = pa.array(since if kind == "moments" else np.full_like(since, last)).cast(feast_values.TIME)
        tables.append(pa.table([*keys, times], [*names, TIMESTAMP]).filter(pa.array(inside)))
    spine = pa.concat_tables(tables, promote_options="permissive")
    spine = spine.group_by([*names, TIMESTAMP], use_threads=False).aggregate([])
    return spine.sort_by([(TIMESTAMP, "ascending"), *((name, "ascending") for name in names)])
