"""The join of a training set in the project's engine, for histories too large for this process."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.features.errors import DataError, RequestError
from isthmus.features.files import scratch_folder
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.scan import rebatch
from isthmus.features.offline.store import OfflineStore
from isthmus.features.pointintime.join import BATCH, PASS, Join
from isthmus.transforms import engine
from isthmus.transforms.views import executorjoin, tablefiles

_WHERE = "join by the engine"
_ROWS, _QUESTIONS = "rows.arrow", "questions.parquet"
# Rows of the spine per task of the engine.
_PART = PASS


class EngineJoin:
    """Point-in-time join in the engine `name`, for tables that are too large for this process.

    Has the interface and the result of `Join`. Executors write answers as Parquet, and this process combines them with
    the spine (training examples) in bounded memory. `threads` is the number of cores for a local Apache Spark. Raises
    RequestError if the offline store is not a folder.
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
        if "://" in offline.root:
            raise RequestError(_WHERE, f"stores.offline is {offline.root}", expected="a folder for the executors",
                               remedy="join in this process: omit --join")  # fmt: skip
        self._join = Join(spine, histories, features=features, status=status)
        self.schema = self._join.schema
        self._spine = pa.schema([self.schema.field(n) for n in range(len(spine.names))])
        self._offline, self._histories, self._features = offline, histories, features
        self._status, self._threads, self._name = status, threads, name

    def batches(self, spine: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Join features to the rows of a spine with the project's engine, and yield the rows in order, in batches.

        Reads the whole spine into files first, then opens a session of the engine. The temporary folder is in the
        offline store, because executors can access it. Raises DataError if the join fails in the engine, and
        DependencyError if the engine cannot start or be reached.
        """
        # In the offline store, which executors can access even as another user.
        with scratch_folder(Path(self._offline.root), "_join") as folder:
            count = self._write(spine, folder)
            self._run(folder)
            answers = executorjoin.read_joined(folder, [history.view.name for history in self._histories], count, _PART)
            with pa.ipc.open_stream(folder / _ROWS) as rows:
                for batch in rows:
                    yield self._join.with_engine_output(batch, next(answers) if self._histories else pa.table({}))

    def _write(self, spine: Iterable[pa.RecordBatch], folder: Path) -> int:
        count, questions = 0, self._join.engine_inputs(self._spine.empty_table(), 0).schema
        with (
            pa.ipc.new_stream(folder / _ROWS, self._spine) as spine_file,
            pq.ParquetWriter(folder / _QUESTIONS, questions) as questions_file,
        ):
            for rows in rebatch(spine, BATCH):
                for batch in rows.combine_chunks().to_batches():
                    spine_file.write_batch(batch)
                questions_file.write_table(self._join.engine_inputs(rows, count))
                count += len(rows)
        return count

    def _run(self, folder: Path) -> None:
        files = [
            (history.view, tablefiles.files(self._offline.path(history.view.table), history.version))
            for history in self._histories
        ]
        try:
            with engine.session(self._name, self._threads) as spark:
                executorjoin.join_files(
                    spark, folder / _QUESTIONS, files, self._features, folder, status=self._status, rows=_PART
                )
        except executorjoin.RefusedError as error:
            place = self._name.partition("/;")[0]  # the remainder may contain a token
            raise DataError(
                _WHERE, f"{place} refused it: {error}",
                remedy="executors need this package, and read and write access to stores.offline",
            ) from error  # fmt: skip
