"""A compute engine for Feast that materializes views as Arrow columns: `batch_engine` in a `feature_store.yaml`."""

from typing import Any, Literal

import pyarrow as pa
from feast import FeatureView
from feast.data_source import DataSource
from feast.feature_view import FeatureViewState
from feast.infra.common.materialization_job import MaterializationJobStatus, MaterializationTask
from feast.infra.compute_engines.local.compute import LocalComputeEngine
from feast.infra.compute_engines.local.job import LocalMaterializationJob
from feast.infra.registry.base_registry import BaseRegistry
from feast.repo_config import FeastConfigBaseModel
from feast.utils import _convert_arrow_to_proto, _get_column_names, _validate_vector_field_lengths

from isthmus.features.feast.offline import IsthmusOfflineStore, newest_rows, with_entity
from isthmus.features.feast.online import IsthmusOnlineStore
from isthmus.features.feast.sources import FeastSource, untyped_keys

PIECE = 100_000
"""Rows that are converted and written at a time."""


class IsthmusComputeEngineConfig(FeastConfigBaseModel):
    """The `batch_engine` section of a `feature_store.yaml`: `batch_engine: isthmus.feast.IsthmusComputeEngine`."""

    type: Literal["isthmus.feast.IsthmusComputeEngine", "isthmus.features.feast.IsthmusComputeEngine"] = (
        "isthmus.feast.IsthmusComputeEngine"
    )


class IsthmusComputeEngine(LocalComputeEngine):
    """Feast compute engine that writes the newest row of each key of a view to the online store, as Arrow columns.

    Online stores other than `IsthmusOnlineStore` get the rows the way Feast writes them. Feast's local engine handles
    views with a Feast transformation. A view that has been materialized before stays readable during a run.
    """

    def _materialize_one(
        self, registry: BaseRegistry, task: MaterializationTask, **kwargs: Any
    ) -> LocalMaterializationJob:
        _keep_readable(registry, task)
        source = _plain_source(task)
        if source is None:
            return super()._materialize_one(registry, task, **kwargs)
        job = f"{task.feature_view.name}-{task.start_time}-{task.end_time}"
        try:
            self._write(registry, task, source)
        except Exception as error:  # noqa: BLE001 - Feast raises the error of the job
            return LocalMaterializationJob(job, MaterializationJobStatus.ERROR, error)
        return LocalMaterializationJob(job, MaterializationJobStatus.SUCCEEDED)

    def _write(self, registry: BaseRegistry, task: MaterializationTask, source: DataSource) -> None:
        view, rows = task.feature_view, self._rows(registry, task, source)
        _validate_vector_field_lengths(rows, view)
        event, created = source.timestamp_field, source.created_timestamp_column
        store, untyped = self.online_store, untyped_keys(registry, task.project, view)
        if isinstance(store, IsthmusOnlineStore):
            for start in range(0, len(rows), PIECE):
                piece = rows.slice(start, PIECE)
                columns = dict(zip(piece.column_names, piece.columns, strict=True))
                store.online_write_table(
                    self.repo_config, view, columns, piece[event], piece[created] if created else None, untyped
                )
            return
        types = {entity.name: entity.dtype.to_value_type() for entity in view.entity_columns}
        size = self.repo_config.materialization_config.online_write_batch_size or PIECE
        for batch in rows.combine_chunks().to_batches(max_chunksize=size):
            protos = _convert_arrow_to_proto(batch, view, types)
            store.online_write_batch(self.repo_config, view, protos, lambda _: None)

    def _rows(self, registry: BaseRegistry, task: MaterializationTask, source: DataSource) -> pa.Table:
        view = task.feature_view
        if isinstance(self.offline_store, IsthmusOfflineStore):
            view_source = FeastSource.of(self.repo_config, view, untyped_keys(registry, task.project, view))
            view_source.require_keys()
            known_at = self.repo_config.offline_store.known_at
            source_rows, places = newest_rows(view_source, known_at, task.start_time, task.end_time)
            rows = with_entity(source_rows.table.take(places), view_source.keys)
        else:
            entities = [registry.get_entity(name, task.project) for name in view.entities]
            keys, features, event, created = _get_column_names(view, entities)
            rows = self.offline_store.pull_latest_from_table_or_query(
                self.repo_config, source, keys, features, event, created, task.start_time, task.end_time
            ).to_arrow()
        return rows.rename_columns([source.field_mapping.get(name, name) for name in rows.column_names])


def _plain_source(task: MaterializationTask) -> DataSource | None:
    """Return the source if the task only copies its newest rows, without computing or validating; else None."""
    view = task.feature_view
    computed = ("aggregations", "feature_transformation", "source_views", "enable_validation", "offline")
    if not isinstance(view, FeatureView) or any(getattr(view, part, None) for part in computed):
        return None
    return view.batch_source if view.online and task.only_latest else None


def _keep_readable(registry: BaseRegistry, task: MaterializationTask) -> None:
    # Feast does not read a marked view, so a killed process would leave it unreadable. Our rows are replaced one at a
    # time. `serve_features_while_materializing` in the section `registry` covers the moment before this call.
    view = task.feature_view
    if view.state == FeatureViewState.MATERIALIZING and view.materialization_intervals:
        view.state = FeatureViewState.AVAILABLE_ONLINE
        registry.apply_feature_view(view, task.project, commit=True)
