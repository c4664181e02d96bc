"""The join of a training set by the project's engine: for histories that are too large for this process.

The executors get the keys and moments of the spine, number the rows' answers, and write them as Parquet; this process
puts them beside the spine's rows again. Nothing is collected, and the result is that of `Join`, batch for batch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.features.errors import DataError, RequestError
from isthmus.features.files import scratch_folder
from isthmus.features.offline import OfflineStore
from isthmus.features.pointintime import BATCH, History, Join
from isthmus.features.scan import in_lots
from isthmus.transforms import engine, pointintime

_WHERE = "join by the engine"
_ROWS, _ASKED, _FOUND = "rows.arrow", "asked.parquet", "found"


class EngineJoin:
    """The point-in-time join of a spine by an engine. It has the interface of `Join`, and its result.

    Args:
        spine: the columns of the spine.
        offline: where the histories are. The executors must reach its folder: what they read and write is there.
        histories: the views to join.
        features: as `Join` takes them.
        status: whether to say what each view answered.
        threads: cores of a local Apache Spark.
        name: the engine, as `engine.session` takes it.

    Attributes:
        schema: the columns of the result.

    Raises:
        DataError: as `Join`.
        RequestError: the offline store is no folder.
    """

    def __init__(
        self,
        spine: pa.Schema,
        offline: OfflineStore,
        histories: Sequence[History],
        *,
        features: Mapping[str, Sequence[str]],
        status: bool,
        threads: int,
        name: str,
    ) -> None:
        if "://" in offline.root:
            raise RequestError(_WHERE, f"stores.offline is {offline.root}", expected="a folder that executors reach",
                               remedy="join in this process: leave --join out")  # fmt: skip
        self._join = Join(spine, histories, features=features, status=status)
        self.schema = self._join.schema
        self._added = self.schema.names[len(spine.names) :]
        self._offline, self._histories, self._features = offline, histories, features
        self._status, self._threads, self._name = status, threads, name

    def batches(self, spine: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Joins batches of any sizes, none included. The first one comes when the engine is done.

        Raises:
            DataError: a row has no time, or a value that does not fit its type; or the engine failed.
        """
        # Executors reach it, and may be another user.
        with scratch_folder(Path(self._offline.root), "_join") as folder:
            self._write(spine, folder)
            self._run(folder)
            parts = (batch for part in pointintime.parts(folder / _FOUND) for batch in part.to_batches())
            answers = in_lots(parts, BATCH)
            with pa.ipc.open_stream(folder / _ROWS) as rows:
                for batch in rows:
                    found = next(answers, None)
                    if found is None or len(found) != len(batch):
                        raise DataError(_WHERE, "rows were lost on the way", expected="one for each row of the spine")
                    yield self._join.answered(batch, found)

    def _write(self, spine: Iterable[pa.RecordBatch], folder: Path) -> None:
        """The rows of the spine as they are, and what is asked of the engine: types of a spine are not all Spark's."""
        width = len(self.schema) - len(self._added)
        plain, first = pa.schema([self.schema.field(n) for n in range(width)]), 0
        asked = self._join.questions(plain.empty_table(), 0).schema.append(pa.field(pointintime.ROW, pa.int64()))
        with pa.ipc.new_stream(folder / _ROWS, plain) as kept, pq.ParquetWriter(folder / _ASKED, asked) as file:
            for rows in in_lots(spine, BATCH):
                for batch in rows.combine_chunks().to_batches():
                    kept.write_batch(batch)
                numbers = pa.array(range(first, first + len(rows)), pa.int64())
                file.write_table(self._join.questions(rows, first).append_column(pointintime.ROW, numbers))
                first += len(rows)

    def _run(self, folder: Path) -> None:
        histories = []
        for history in self._histories:
            view = history.view
            if not self._status:
                wanted = self._features[view.name]
                view = replace(view, fields=tuple(c for c in view.fields if c.name in wanted))
            histories.append((view, pointintime.files(self._offline.path(view.table), history.version)))
        try:
            with engine.session(self._name, self._threads) as spark:
                pointintime.join_files(spark, folder / _ASKED, histories, self._added, folder / _FOUND)
        except pointintime.RefusedError as error:
            place = self._name.partition("/;")[0]  # what follows may hold a token
            raise DataError(
                _WHERE, f"{place} refused it: {error}",
                remedy="the executors must reach stores.offline, to read and to write",
            ) from error  # fmt: skip
