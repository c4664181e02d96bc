"""Parquet files of the offline store as DataFrames, for executors that see that store but not this machine's disk.

Python workers, not the engine, read files in object storage, so the engine needs no jar. Sail's read all files.
"""

import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake.exceptions import DeltaError

from isthmus.features.errors import DataError, DependencyError, first_line
from isthmus.features.files import is_url, scratch_folder
from isthmus.features.offline.delta import open_output, storage_files
from isthmus.features.offline.partitions import dataset_of
from isthmus.transforms.tables import parquet

if TYPE_CHECKING:
    import pyarrow.fs as fs
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_TASKS = 64
"""The most tasks that read a DataFrame."""


@dataclass(frozen=True)
class Store:
    """The offline store as executors open it: a folder or URL, and storage options without credentials.

    Attributes:
        folder: temporary folder in the store, of `scratch`.
    """

    root: str
    options: Mapping[str, str]
    folder: str = ""

    @contextmanager
    def scratch(self, name: str) -> Iterator["Store"]:
        """Open a new folder in the store, whose name begins with `name`. The end of the block deletes it."""
        if not is_url(self.root):
            Path(self.root).mkdir(parents=True, exist_ok=True)
            with scratch_folder(Path(self.root), name) as folder:
                # The executors may run as another user.
                yield Store(self.root, self.options, folder.name)
            return
        fresh = f"{name}-{secrets.token_hex(8)}"
        try:
            yield Store(self.root, self.options, fresh)
        finally:
            with suppress(OSError):
                self.files().delete_dir(fresh)

    @property
    def place(self) -> str:
        return f"{self.root}/{self.folder}" if self.folder else self.root

    def require_only(self, record: str, where: str) -> None:
        """Raise DataError if the folder has files, but none with the name `record`."""
        if (paths := self._paths()) and self.path(record) not in paths:
            raise DataError(where, "has other files", remedy="choose another place")

    def clear(self, record: str) -> None:
        """Delete the files in the folder, the one with the name `record` first: without it, the others are garbage."""
        for path in sorted(self._paths(), key=lambda path: path != self.path(record)):
            self.files().delete_file(path)

    def _paths(self) -> list[str]:
        import pyarrow.fs as fs

        found = self.files().get_file_info(fs.FileSelector(self.folder, allow_not_found=True, recursive=True))
        return [info.path for info in found if info.type == fs.FileType.File]

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}" if self.folder else name

    def files(self) -> "fs.FileSystem":
        return storage_files(self.root, self.options)

    def copy(self, file: Path) -> list[str]:
        """Copy a Parquet file into the folder, as a file per row group; return the paths in the store."""
        import pyarrow.parquet as pq

        storage, rows = self.files(), pq.ParquetFile(file)
        paths = [self.path(f"{file.stem}-{number:05}.parquet") for number in range(rows.num_row_groups)]
        for number, path in enumerate(paths):
            with open_output(storage, path) as sink:
                pq.write_table(rows.read_row_group(number), sink)
        return paths

    def read(self, spark: "SparkSession", paths: Sequence[str], schema: pa.Schema, *, together: int = 1) -> "DataFrame":
        """Return a DataFrame of Parquet files in the store. Columns that a file lacks are null.

        A task reads at least `together` files: starting a task for a small file takes longer than reading it. The
        engine's query raises DependencyError if an executor cannot read a file.
        """
        from pyspark.sql.pandas.types import from_arrow_schema

        types = from_arrow_schema(schema, prefer_timestamp_ntz=True)
        if not paths:
            return spark.createDataFrame([], types)
        # Sail takes a file that it does not find for an empty one. Without its rows, a run would empty Redis.
        if not is_url(self.root) and parquet.is_apache(spark):
            return parquet.read(spark, *(f"{self.root}/{path}" for path in paths), schema=_ddl(types))
        count = min(-(-len(paths) // together), _TASKS)
        work = _Read(self, [list(paths[n::count]) for n in range(count)], schema)
        return spark.range(0, count, 1, count).mapInArrow(work, types)


def _ddl(types: "StructType") -> str:
    return ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in types)


@dataclass(eq=False)
class _Read:
    store: Store
    tasks: Sequence[Sequence[str]]
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        storage = self.store.files()
        with using(self.store.root):
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    files = dataset_of([(path, None) for path in self.tasks[number]], self.schema, storage)
                    yield from files.to_batches(batch_readahead=2, fragment_readahead=1)


@contextmanager
def using(root: str) -> Iterator[None]:
    """Turn store errors on an executor into DependencyError, which `explain_missing` shows to the user."""
    try:
        yield
    except (OSError, pa.ArrowException, DeltaError) as error:
        where = f"{root} on executor {socket.gethostname()}"
        raise DependencyError(where, f"cannot be used ({first_line(error)})") from error
