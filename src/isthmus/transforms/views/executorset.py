"""Build a training set on an engine's executors: compute the spine, join it, and write and measure part files."""

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from isthmus.features.contract.schema import Column, ViewContract
from isthmus.features.definition.spec import Spine
from isthmus.features.errors import DataError, first_line
from isthmus.features.files import is_url
from isthmus.features.offline.delta import open_output
from isthmus.features.offline.history import ViewHistory, table_schema
from isthmus.features.offline.partitions import dataset_of
from isthmus.features.offline.scan import rebatch
from isthmus.features.pointintime.join import Join
from isthmus.features.pointintime.spine import HashedSpine, SpineRows
from isthmus.features.quality.statistics import (
    FeatureStatistics,
    ViewStatistics,
    latest_event,
    measure,
    read,
    view_statistics,
)
from isthmus.transforms.tables.stored import Store, using
from isthmus.transforms.views.compute import Frames, sorted_spine, spine_frame
from isthmus.transforms.views.executors import failure, result, run

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from pyspark.sql import SparkSession

PART = 1 << 18
"""Rows per part file. A task holds them in memory with all features."""
DATA = "data.parquet"
"""Folder of the part files."""


@dataclass(frozen=True)
class StoredSpine:
    """A spine (training examples) in numbered files of a store, in order.

    Attributes:
        rows: number of rows.
        sha256: hash of the rows.
        part: number of rows per file, and per task that joins them.
    """

    store: Store
    schema: pa.Schema
    rows: int
    sha256: str
    part: int = PART

    @property
    def parts(self) -> int:
        return -(-self.rows // self.part)

    @classmethod
    def write(cls, spine: SpineRows, store: Store, part: int = PART) -> "StoredSpine":
        """Write the rows of a spine to the folder of `store`."""
        hashed, storage = HashedSpine(spine), store.files()
        for number, rows in enumerate(rebatch(hashed.batches(), part)):
            place = store.path(spine_part(number))
            with open_output(storage, place) as sink, pa.ipc.new_stream(sink, spine.schema) as file:
                file.write_table(rows)
        return cls(store, spine.schema, hashed.rows, hashed.sha256, part)

    def joined(self) -> Iterator[pa.RecordBatch]:
        """Read the rows that `write_parts` joined and wrote to the folder of the spine, in order."""
        for number in range(self.parts):
            with self.store.files().open_input_file(self.store.path(_joined_part(number))) as file:
                yield from pa.ipc.open_stream(file)


@dataclass(frozen=True)
class JoinedViews:
    """The views to join to a spine.

    Attributes:
        views: (view, files of its table to read, features to join).
        status: True to add status columns.
    """

    views: Sequence[tuple[ViewContract, Sequence[str], Sequence[str]]]
    status: bool

    def histories(self, store: Store) -> list[ViewHistory]:
        histories, storage = [], store.files()
        for view, files, _ in self.views:
            paths = [(f"{view.table}/{file}", None) for file in files]
            histories.append(ViewHistory(view, dataset_of(paths, table_schema(view), storage), 0))
        return histories

    def join(self, spine: pa.Schema, store: Store, rows: int) -> Join:
        features = {view.name: features for view, _, features in self.views}
        return Join(spine, self.histories(store), features=features, status=self.status, threads=1, rows=rows)


def spine_part(number: int) -> str:
    return f"_spine-{number:05}.arrow"


def _joined_part(number: int) -> str:
    return f"_joined-{number:05}.arrow"


def stored_spine(store: Store) -> SpineRows:
    """Open the spine in the folder of a training set."""
    import pyarrow.fs as fs

    storage, where = store.files(), f"spine of the training set {store.place}"
    try:
        found = storage.get_file_info(fs.FileSelector(store.folder))
        paths = sorted(info.path for info in found if info.base_name.startswith("_spine"))
        schema = pa.ipc.open_stream(storage.open_input_file(paths[0])).schema
    except (OSError, IndexError, pa.ArrowException) as error:
        remedy = "create the training set again"
        raise DataError(where, f"cannot be read ({first_line(error)})", remedy=remedy) from error
    return SpineRows(
        schema, lambda: (batch for path in paths for batch in pa.ipc.open_stream(storage.open_input_file(path)))
    )


def parts(store: Store) -> "ds.Dataset":
    """Open the part files in the folder of a training set, in order."""
    import pyarrow.dataset as ds

    return ds.dataset(store.path(DATA), filesystem=store.files(), format="parquet", partitioning=None)


def write_spine(
    spine: Spine, columns: Sequence[Column], frames: Frames, store: Store, absent: Mapping[str, pa.DataType]
) -> StoredSpine:
    """Compute a spine like `compute_spine` and write it to the folder of `store`, in one task of the engine.

    The task holds all rows in memory. `absent` has columns of nulls to add, with their types.
    """
    place, frame = spine_frame(spine, columns, frames)
    (found,) = run(place, frame.repartition(1), _WriteSpine(spine.name, place, columns, store, dict(absent)))
    schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(found["schema"])))
    return StoredSpine(store, schema, found["rows"], found["sha256"])


def write_parts(
    spark: "SparkSession", spine: StoredSpine, views: JoinedViews, tables: Store, target: Store | None = None
) -> None:
    """Join views to a spine on the executors, and write the result and the spine as part files to `target`.

    Without `target`, write the result to the folder of the spine: read it with `StoredSpine.joined`. `tables` is the
    offline store. A task that runs twice writes the same files. After a DataError or DependencyError, some part files
    may exist.
    """
    tasks = spark.range(0, spine.parts, 1, max(spine.parts, 1))
    remedy = "executors need this package, and read and write access to stores.offline"
    written = run("join by the engine", tasks, _WriteParts(spine, views, tables, target), remedy=remedy)
    if (rows := sum(part["rows"] for part in written)) != spine.rows:
        expected = f"{spine.rows}, as in the spine"
        raise DataError("join by the engine", f"wrote {rows} rows", expected=expected, remedy="run the command again")


def measure_parts(
    spark: "SparkSession", target: Store, columns: Sequence[Column], views: JoinedViews, tables: Store
) -> tuple[int, int, dict[str, FeatureStatistics], dict[str, ViewStatistics]]:
    """Measure part files, and the tables of the joined views, in one task of the engine.

    Returns the row count, the latest event time, statistics by column, and table statistics by view.
    """
    (found,) = run("statistics", spark.range(0, 1, 1, 1), _Measure(target, columns, views, tables))
    features = msgspec.convert(found["features"], dict[str, FeatureStatistics])
    return found["rows"], found["last"], features, msgspec.convert(found["views"], dict[str, ViewStatistics])


@dataclass(eq=False)
class _WriteSpine:
    name: str
    place: str
    columns: Sequence[Column]
    store: Store
    absent: Mapping[str, pa.DataType]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        tables = (pa.Table.from_batches([batch]) for batch in batches)
        try:
            rows = sorted_spine(self.name, self.place, self.columns, tables)
        except DataError as error:
            yield failure(error)
            return
        for name, dtype in self.absent.items():
            rows = rows.append_column(name, pa.nulls(len(rows), dtype))
        with using(self.store.root):
            spine = StoredSpine.write(SpineRows(rows.schema, rows.to_batches), self.store)
        schema = bytes(spine.schema.serialize()).hex()
        yield result({"rows": spine.rows, "sha256": spine.sha256, "schema": schema})


@dataclass(eq=False)
class _WriteParts:
    spine: StoredSpine
    views: JoinedViews
    tables: Store
    target: Store | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                try:
                    with using((self.target or self.spine.store).root):
                        yield result({"rows": self._join(number)})
                except DataError as error:
                    yield failure(error)

    def _join(self, number: int) -> int:
        spine, target, form, name = self.spine, self.target, pa.ipc.new_stream, _joined_part(number)
        with spine.store.files().open_input_file(spine.store.path(spine_part(number))) as file:
            rows = pa.ipc.open_stream(file).read_all()
        join = self.views.join(rows.schema, self.tables, spine.part)
        if target is not None:
            form, name = pq.ParquetWriter, f"{DATA}/part-{number:05}.parquet"
            with _output(target, spine_part(number)) as sink, pa.ipc.new_stream(sink, rows.schema) as copy:
                copy.write_table(rows)
        with _output(target or spine.store, name) as sink, form(sink, join.schema) as parts:
            for joined in join.batches(rows.to_batches(), number * spine.part):
                parts.write_batch(joined)
        return len(rows)


@contextmanager
def _output(store: Store, name: str) -> Iterator[Any]:
    """Open a file to write. It appears under its name only when it is complete."""
    storage, path = store.files(), store.path(name)
    if is_url(store.root):
        with open_output(storage, path) as sink:
            yield sink
        return
    parent, slash, _ = path.rpartition("/")
    if parent:
        storage.create_dir(parent, recursive=True)
    scratch = f"{parent}{slash}.{secrets.token_hex(8)}"
    with open_output(storage, scratch) as sink:
        yield sink
    storage.move(scratch, path)


@dataclass(eq=False)
class _Measure:
    target: Store
    columns: Sequence[Column]
    views: JoinedViews
    tables: Store

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            with using(self.tables.root):
                examples = parts(self.target)
                last = latest_event(examples)
                rows, features = measure(self.columns, read(examples, [column.name for column in self.columns]))
                views = {
                    history.view.name: view_statistics(history.view, history.data, 0, "", until=last)
                    for history in self.views.histories(self.tables)
                }
            plain: dict[str, Any] = msgspec.to_builtins({"features": features, "views": views})
            yield result({"rows": rows, "last": last, **plain})
