"""Parquet in object storage, which is reached as the tables there are: engines have other words for it."""

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
        found = storage.get_file_info(name)
        if found.type != fs.FileType.File:
            found = storage.get_file_info(fs.FileSelector(name, allow_not_found=True, recursive=True))
        files = [each for each in (found if isinstance(found, list) else [found]) if each.type == fs.FileType.File]
        if any("/_delta_log/" in each.path[len(name) :] for each in files):
            # Read as Parquet, it would have the rows that were deleted, too.
            problem = Problem(f"source {source.name}", f"{source.path} is a Delta table", f'delta="{source.path}"')
            raise ConfigurationError("definitions.py", [problem], remedy="name it with delta= instead of path=")
        files = sorted((each for each in files if _is_data(each.path[len(name) :])), key=lambda each: each.path)
        if not files:
            raise DataError(f"source {source.name}", f"there is nothing at {source.path}",
                            remedy="correct path= of the source, or bring it there")  # fmt: skip
        version = repr([(each.path, each.size, each.mtime_ns) for each in files])
        fragments = fragments_of([each.path for each in files], filesystem=storage)
        super().__init__(source.name, source.path, version, fragments, name)

    @cached_property
    def _footers(self) -> list[Any]:
        with reading(self._source, self.place):
            return super()._footers


@contextmanager
def opened(source: Source, options: Mapping[str, str]) -> Iterator[SourceTable]:
    """The Parquet files at a URL: one, or all of a folder.

    Raises:
        ConfigurationError: the folder is a Delta table.
        DataError: there is none, or one is damaged.
        DependencyError: the storage refuses or does not answer, or deltalake is not installed.
    """
    with extra("offline"):
        import deltalake  # noqa: F401 - only whether it is installed
    with reading(source.name, source.path):
        table = _Objects(source, options)
    yield table


def _is_data(path: str) -> bool:
    # As engines see it: `_SUCCESS`, `_temporary` and what is hidden are none, wherever they are below the folder.
    return not any(part.startswith(("_", ".")) for part in path.split("/"))
