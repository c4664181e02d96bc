"""The join of a training set in the project's engine, for histories too large for this process."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.join import Join
from isthmus.features.pointintime.spine import SpineRows
from isthmus.transforms import engine
from isthmus.transforms.tables.stored import Store
from isthmus.transforms.views import executorset
from isthmus.transforms.views.executorset import JoinedViews, StoredSpine


@dataclass
class EngineJoin:
    """Point-in-time join in the engine `name`, for tables that are too large for this process.

    Has the interface and the result of `Join`. Executors join and write the rows of the spine (training examples), and
    this process reads them in bounded memory. `threads` is the number of cores for a local Apache Spark.
    """

    spine: pa.Schema
    offline: OfflineStore
    histories: Sequence[ViewHistory]
    features: Mapping[str, Sequence[str]]
    status: bool
    threads: int
    name: str

    @cached_property
    def schema(self) -> pa.Schema:
        return Join(self.spine, self.histories, features=self.features, status=self.status).schema

    def batches(self, spine: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Join features to the rows of a spine with the project's engine, and yield the rows in order, in batches.

        Reads the whole spine into files first, then opens a session of the engine. The files are in a temporary folder
        of the offline store. Raises DataError if the join fails in the engine, and DependencyError if the engine cannot
        start or be reached.
        """
        with self.store.scratch("_join") as scratch:
            stored = StoredSpine.write(SpineRows(self.spine, lambda: spine), scratch)
            # Spark allows only one session at a time, and the caller may open its own.
            with self.session() as spark:
                executorset.write_parts(spark, stored, self.views(), self.store)
            yield from stored.joined()

    @property
    def remote(self) -> bool:
        return self.name.startswith("sc://")

    @property
    def store(self) -> Store:
        return Store(self.offline.root, self.offline.storage_options or {})

    def session(self) -> AbstractContextManager[Any]:
        return engine.session(self.name, self.threads)

    def views(self) -> JoinedViews:
        """Return what this join reads and adds, for executors."""
        views = [(each.view, each.files, list(self.features[each.view.name])) for each in self.histories]
        return JoinedViews(views, self.status)
