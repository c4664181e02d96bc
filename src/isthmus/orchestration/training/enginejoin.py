"""The join of a training set in the project's engine, for histories too large for this process."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.features.errors import DataError
from isthmus.features.offline.delta import open_output
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.scan import rebatch
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.join import BATCH, PASS, Join
from isthmus.transforms import engine
from isthmus.transforms.tables.stored import Store
from isthmus.transforms.views import executorjoin, tablefiles
from isthmus.transforms.views.executorset import JoinedViews

_WHERE = "join by the engine"
_QUESTIONS = "questions.parquet"
# Rows of the spine per task of the engine.
_PART = PASS


class EngineJoin:
    """Point-in-time join in the engine `name`, for tables that are too large for this process.

    Has the interface and the result of `Join`. Executors write answers as Parquet, and this process combines them with
    the spine (training examples) in bounded memory. `threads` is the number of cores for a local Apache Spark.
    """

    def __init__(  # noqa: PLR0913 - options of a join, by name
        self,
        spine: pa.Schema,
        offline: OfflineStore,
        histories: Sequence[ViewHistory],
        *,
        features: Mapping[str, Sequence[str]],
        status: bool,
        threads: int,
        name: str,
    ) -> None:
        self._join = Join(spine, histories, features=features, status=status)
        self.schema = self._join.schema
        self._spine = pa.schema([self.schema.field(n) for n in range(len(spine.names))])
        self._offline, self._histories, self._features = offline, histories, features
        self._status, self._threads, self._name = status, threads, name

    def batches(self, spine: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Join features to the rows of a spine with the project's engine, and yield the rows in order, in batches.

        Reads the whole spine into files first, then opens a session of the engine. The files for executors are in a
        temporary folder of the offline store. Raises DataError if the join fails in the engine, and
        DependencyError if the engine cannot start or be reached.
        """
        with tempfile.TemporaryDirectory(prefix="isthmus-") as here, self.store.scratch("_join") as store:
            file = Path(here) / "rows.arrow"
            count = self._write(spine, file, store)
            self._run(store)
            answers = executorjoin.read_joined(store, [history.view.name for history in self._histories], count, _PART)
            with pa.ipc.open_stream(file) as rows:
                for batch in rows:
                    yield self._join.with_engine_output(batch, next(answers) if self._histories else pa.table({}))

    def _write(self, spine: Iterable[pa.RecordBatch], file: Path, store: Store) -> int:
        count, questions = 0, self._join.engine_inputs(self._spine.empty_table(), 0).schema
        with (
            pa.ipc.new_stream(file, self._spine) as spine_file,
            open_output(store.files(), store.path(_QUESTIONS)) as sink,
            pq.ParquetWriter(sink, questions) as questions_file,
        ):
            for rows in rebatch(spine, BATCH):
                for batch in rows.combine_chunks().to_batches():
                    spine_file.write_batch(batch)
                questions_file.write_table(self._join.engine_inputs(rows, count))
                count += len(rows)
        return count

    @property
    def remote(self) -> bool:
        return self._name.startswith("sc://")

    @property
    def store(self) -> Store:
        return Store(self._offline.root, self._offline.storage_options or {})

    def session(self) -> AbstractContextManager[Any]:
        return engine.session(self._name, self._threads)

    def views(self) -> JoinedViews:
        """Return what this join reads and adds, as plain data for executors."""
        views = [
            (each.view.name, each.view.as_dict(), tablefiles.files(self.store, each.view, each.version),
             list(self._features[each.view.name]))
            for each in self._histories
        ]  # fmt: skip
        return JoinedViews(views, self._status)

    def _run(self, store: Store) -> None:
        files = [(history.view, tablefiles.files(store, history.view, history.version)) for history in self._histories]
        try:
            with self.session() as spark:
                executorjoin.join_files(
                    spark, store, _QUESTIONS, files, self._features, status=self._status, rows=_PART
                )
        except executorjoin.RefusedError as error:
            place = self._name.partition("/;")[0]  # the remainder may contain a token
            raise DataError(
                _WHERE, f"{place} refused it: {error}",
                remedy="executors need this package, and read and write access to stores.offline",
            ) from error  # fmt: skip
