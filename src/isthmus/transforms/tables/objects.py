"""Reads Parquet files in object storage directly, since each engine configures storage differently."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from isthmus.features.definition.spec import Source
from isthmus.features.errors import ConfigurationError, DataError, Problem, extra
from isthmus.transforms.tables.parquet import ParquetFiles, fragments_of
from isthmus.transforms.tables.table import SourceTable, reading

SCHEMES = ("s3://", "s3a://")


class _Objects(ParquetFiles):
    def __init__(self, source: Source, options: Mapping[str, str]) -> None:
        import pyarrow.fs as fs
        from deltalake.fs import DeltaStorageHandler

        folder, _, name = source.path.rstrip("/").rpartition("/")
        storage = fs.PyFileSystem(DeltaStorageHandler(folder, dict(options)))
        info = storage.get_file_info(name)
        if info.type != fs.FileType.File:
            info = storage.get_file_info(fs.FileSelector(name, allow_not_found=True, recursive=True))
        files = [each for each in (info if isinstance(info, list) else [info]) if each.type == fs.FileType.File]
        if any("/_delta_log/" in each.path[len(name) :] for each in files):
            # Read as Parquet, it would include deleted rows.
            problem = Problem(f"source {source.name}", f"{source.path} is a Delta table", f'delta="{source.path}"')
            raise ConfigurationError("definitions.py", [problem], remedy="name it with delta= instead of path=")
        files = sorted((each for each in files if _is_data(each.path[len(name) :])), key=lambda each: each.path)
        if not files:
            raise DataError(f"source {source.name}", f"{source.path} not found",
                            remedy="correct path= of the source, or create the file")  # fmt: skip
        version = repr([(each.path, each.size, each.mtime_ns) for each in files])
        fragments = fragments_of([each.path for each in files], filesystem=storage)
        super().__init__(source.name, source.path, version, fragments, name)

    @cached_property
    def _footers(self) -> list[Any]:
        with reading(self._source, self.place):
            return super()._footers


@contextmanager
def open_table(source: Source, options: Mapping[str, str]) -> Iterator[SourceTable]:
    """Open the Parquet files at a URL: a single file, or all files of a folder.

    Raises:
        ConfigurationError: the folder is a Delta table.
        DataError: there are no files, or a file is damaged.
        DependencyError: the storage refuses or does not answer, or deltalake is not installed.
    """
    with extra("offline"):
        import deltalake  # noqa: F401 - only whether it is installed
    with reading(source.name, source.path):
        table = _Objects(source, options)
    yield table


def _is_data(path: str) -> bool:
    # Like engines, skip `_SUCCESS`, `_temporary` and hidden files at any depth.
    return not any(part.startswith(("_", ".")) for part in path.split("/"))
