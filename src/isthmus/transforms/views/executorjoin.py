"""The point-in-time join on an engine's executors, without a shuffle: each task joins part of a spine to a view."""

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.features.contract.schema import ViewContract
from isthmus.features.files import is_url
from isthmus.features.offline.delta import open_output
from isthmus.features.offline.history import ViewHistory, table_schema
from isthmus.features.offline.partitions import dataset_of
from isthmus.features.offline.scan import rebatch
from isthmus.features.pointintime.join import BATCH, Join
from isthmus.transforms.sources import first_line
from isthmus.transforms.tables.missing import explain_missing
from isthmus.transforms.tables.stored import Store, using

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class RefusedError(Exception):
    """An engine's query failed. The message is the first line of its error."""


def join_files(  # noqa: PLR0913 - options of a join, by name
    spark: "SparkSession",
    store: Store,
    spine: str,
    histories: Sequence[tuple[ViewContract, Sequence[str]]],
    features: Mapping[str, Sequence[str]],
    *,
    status: bool,
    rows: int,
) -> None:
    """Join views to a spine (the training examples) on an engine's executors. Return when all files are written.

    Each task joins one view to `rows` rows of the spine and writes a Parquet file to the folder of `store`, which
    `read_joined` reads. `rows` must be a multiple of `BATCH`. `spine` is a Parquet file in that folder with the join
    keys and `event_timestamp`. `histories` has each view with the files in the folder of its offline table, and
    `features` the features to join, by view name. `status` adds a status column per view.

    Raises RefusedError if the engine fails, and DependencyError if an executor lacks a file or this package.
    """
    from pyspark.errors import PySparkException

    views = {
        view.name: {"contract": view.as_dict(), "files": list(files), "features": list(features[view.name])}
        for view, files in histories
    }
    with store.files().open_input_file(store.path(spine)) as file:
        count = -(-pq.read_metadata(file).num_rows // rows)
    tasks = [(view, part) for part in range(count) for view in views]
    if not tasks:
        return
    work = _Work(json.dumps([views, tasks]), store, spine, status, rows)
    try:
        # A partition is a single row, the number of its task.
        with explain_missing("join by the engine"):
            spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(work, "rows bigint").toArrow()
    except PySparkException as error:
        raise RefusedError(first_line(error)) from error


def read_joined(store: Store, views: Sequence[str], count: int, rows: int) -> Iterator[pa.Table]:
    """Yield the features that `join_files` wrote, in batches of at most `BATCH` rows, in the order of the spine.

    `views` are the names of the joined views, and `count` is the number of rows of the spine. Pass the same `store`
    and `rows` as to `join_files`.
    """
    for part in range(-(-count // rows)):
        files = [pq.ParquetFile(store.files().open_input_file(_name(store, view, part))) for view in views]
        for lots in zip(*(rebatch(file.iter_batches(BATCH), BATCH) for file in files), strict=True):
            yield pa.table({name: lot[name] for lot in lots for name in lot.column_names})


def _name(store: Store, view: str, part: int) -> str:
    return store.path(f"{view}-{part}.parquet")


@dataclass(eq=False)
class _Work:
    work: str
    store: Store
    spine: str
    status: bool
    rows: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        views, tasks = json.loads(self.work)
        for batch in batches:
            work = [tasks[number] for number in batch.column(0).to_pylist()]
            with using(self.store.root):
                done = [self._join(name, views[name], part) for name, part in work]
            yield pa.RecordBatch.from_pydict({"rows": pa.array(done, pa.int64())})

    def _join(self, name: str, params: Mapping[str, Any], part: int) -> int:
        view, storage = ViewContract.from_dict(name, params["contract"]), self.store.files()
        files = [(f"{view.table}/{file}", None) for file in params["files"]]
        with storage.open_input_file(self.store.path(self.spine)) as file:
            spine = _rows(pq.ParquetFile(file), part * self.rows, self.rows)
        features = {name: params["features"]}
        history = ViewHistory(view, dataset_of(files, table_schema(view), storage), 0)
        join = Join(spine.schema, [history], features=features, status=self.status, threads=1, rows=self.rows)
        added = list(join.schema)[len(spine.schema) :]
        # Parquet has no dictionaries: the status is written as text.
        schema = pa.schema([(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in added])
        # A task that the engine runs twice writes the same file twice. In a folder, it takes its name when it is whole,
        # as in object storage.
        target = _name(self.store, name, part)
        scratch = target if is_url(self.store.root) else f"{target}-{secrets.token_hex(8)}"
        with open_output(storage, scratch) as sink, pq.ParquetWriter(sink, schema) as parquet:
            for batch in join.batches(spine.to_batches()):
                parquet.write_table(pa.Table.from_batches([batch]).select(schema.names).cast(schema))
        if scratch != target:
            storage.move(scratch, target)
        return len(spine)


def _rows(content: pq.ParquetFile, first: int, count: int) -> pa.Table:
    # Reads only the row groups with these rows.
    sizes = [content.metadata.row_group(number).num_rows for number in range(content.num_row_groups)]
    starts = [0, *accumulate(sizes)]
    groups = [n for n, (start, end) in enumerate(pairwise(starts)) if start < first + count and end > first]
    return content.read_row_groups(groups).slice(first - starts[groups[0]], count)
