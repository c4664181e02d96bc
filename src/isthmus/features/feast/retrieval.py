"""A retrieval by Feast's offline store: the entity dataframe, and what each view adds to it."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

with warnings.catch_warnings():
    # Feast's dependencies warn of their own deprecations when they are imported.
    warnings.simplefilter("ignore")
    from feast import FeatureView, OnDemandFeatureView
    from feast.errors import (
        EntityTimestampInferenceException,
        FeastEntityDFMissingColumnsError,
        FeatureNameCollisionError,
        SavedDatasetLocationAlreadyExists,
    )
    from feast.infra.offline_stores.offline_store import RetrievalJob, RetrievalMetadata
    from feast.repo_config import RepoConfig
    from feast.saved_dataset import SavedDatasetStorage

from isthmus.features.contract.contract import one_of
from isthmus.features.errors import DataError, RequestError
from isthmus.features.feast import files as feast_files
from isthmus.features.feast import values as feast_values
from isthmus.features.feast.sources import FIRST, KnownAt, Source, micros
from isthmus.features.feast.values import typed
from isthmus.features.feast.writing import save
from isthmus.features.offline.history import connection
from isthmus.features.values import columns

TIMESTAMP = "event_timestamp"


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
        target = feast_files.file_source(storage.to_data_source(), "the saved dataset")
        path = feast_files.path_of(target, self._repository)
        filesystem, inside = feast_files.filesystem_of(target, path)
        there = Path(inside).exists() if filesystem is None else bool(filesystem.get_file_info(inside).type.value)
        if there and not allow_overwrite:
            raise SavedDatasetLocationAlreadyExists(location=path)
        save(self.to_arrow(timeout=timeout), target, path)


@dataclass(frozen=True, eq=False)
class AskedView:
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
    def of(cls, config: RepoConfig, view: FeatureView, features: Sequence[str], full_names: bool) -> "AskedView":
        """The view of a feature list, checked against what its source holds."""
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
            condition = self.source.within(None if ttl is None else max(first - ttl, FIRST), last)
        rows = self.source.rows(list(self.columns), known_at, condition)
        places = rows.answer(at, keys, os.cpu_count() or 1)
        for feature, column in self.columns.items():
            spine = spine.append_column(column, rows.values[feature].take(places))
        return spine


def entity_table(entity_df: pd.DataFrame | pa.Table | str, config: RepoConfig) -> pa.Table:
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


def time_column(spine: pa.Table) -> str:
    """The column of the times: `event_timestamp`, or the only one there is."""
    if TIMESTAMP in spine.column_names:
        return TIMESTAMP
    times = [field.name for field in spine.schema if pa.types.is_timestamp(field.type)]
    if len(times) != 1:
        raise EntityTimestampInferenceException(TIMESTAMP)
    return str(times[0])


def check_columns(spine: pa.Table, parts: Sequence[AskedView]) -> None:
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


def known_moments(parts: Sequence[AskedView], known_at: KnownAt, start: datetime, end: datetime) -> pa.Table:
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
