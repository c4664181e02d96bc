"""Maintain one Delta table: merge small files, remove versions that are no longer needed, and shorten its log."""

import json
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import msgspec
import pyarrow as pa
import pyarrow.fs as fs
from deltalake import ColumnProperties, DeltaTable, WriterProperties

from isthmus.features.errors import DataError
from isthmus.features.offline.delta import HARMLESS, StoredTable, VersionGoneError, storage_files
from isthmus.features.projectstatus import TableSpace

_LOG = "_delta_log/"
_DAY = 86_400.0
_CROWDED = 1.2
"""Average files per partition above which small files are merged."""
_ENTRIES = 10
"""Write a checkpoint once the newest one is this many log entries old."""


class TableUpkeep(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run for one table.

    Attributes:
        merged: number of small data files that were merged into larger ones.
        deleted: number of deleted data files.
        entries: number of deleted log files.
        freed: bytes of all deleted files.
        space: size of the table after the run.
    """

    merged: int
    deleted: int
    entries: int
    freed: int
    space: TableSpace


def space(stored: StoredTable) -> TableSpace:
    """Measure the size and number of a table's files; zeros if the table is missing."""
    with stored.reading():
        files = _Files(stored)
    infos = [*files.data.values(), *files.entries.values(), *files.checkpoints.values()]
    return TableSpace(bytes=sum(info.size for info in infos), files=len(infos), versions=len(files.entries))


def maintain(
    stored: StoredTable, days: float, needed: Collection[int] = (), *, merge: bool = True, now: float | None = None
) -> TableUpkeep | None:
    """Merge small files of a table, delete the files that only removed versions use, and shorten its log.

    Return None if the table is missing. Versions stay if they were current in the last `days` or are in `needed`. Files
    younger than `days` stay, too: a writer may be about to commit them. No row changes. If the run is interrupted at
    any point, these versions can still be read, and the next run finishes. `now` is the time in seconds since 1970, by
    default the present.

    The caller must keep other writers out, except writers that only append. Raise DataError if the table is damaged or
    cannot be written, and DependencyError if object storage does not answer.
    """
    table = stored.open(check=False)
    if table is None:
        return None
    merged, cutoff = 0, (time.time() if now is None else now) - days * _DAY
    with stored.writing():
        files = _Files(stored)
        if not files.entries:
            raise DataError(
                stored.path, "its log has only checkpoints and no entries", remedy="write any commit to the table"
            )
        start = files.current(cutoff)
        older = sorted({version for version in needed if version in files.entries and version < (start or 0)})
        # Delete first: on a full disk, merging needs the space.
        data = files.unreferenced(cutoff, start, older)
        files.delete(data)
        if merge and _crowded(table):
            # As builds write them: dictionaries would make the file of a day larger and slower to read.
            properties = WriterProperties(default_column_properties=ColumnProperties(dictionary_enabled=False))
            done = table.optimize.compact(writer_properties=properties, post_commithook_properties=stored.hook)
            merged = done["numFilesRemoved"]
        log = files.log_to_delete(start, older)
        files.delete(log)
    freed = sum(info.size for info in (*data, *log))
    return TableUpkeep(merged=merged, deleted=len(data), entries=len(log), freed=freed, space=space(stored))


def _crowded(table: DeltaTable) -> bool:
    partitions = [path.rpartition("/")[0] for path in pa.table(table.get_add_actions())["path"].to_pylist()]
    return len(partitions) > _CROWDED * len(set(partitions))


class _Files:
    """The files in a table's folder: log entries and checkpoints by version, and data files by path."""

    def __init__(self, stored: StoredTable) -> None:
        self._stored, self._storage = stored, storage_files(stored.path, stored.options or {})
        self.entries, self.checkpoints, self.data = dict[int, Any](), dict[int, Any](), dict[str, Any]()
        for info in self._storage.get_file_info(fs.FileSelector("", allow_not_found=True, recursive=True)):
            version, _, kind = info.path.removeprefix(_LOG).partition(".")
            if not info.path.startswith(_LOG):
                if info.path.endswith(".parquet"):
                    self.data[info.path] = info
            elif version.isdecimal() and kind == "json":
                self.entries[int(version)] = info
            elif version.isdecimal() and kind.startswith("checkpoint"):
                self.checkpoints[int(version)] = info

    def delete(self, infos: Collection[Any]) -> None:
        for info in infos:
            with suppress(FileNotFoundError):
                self._storage.delete_file(info.path)

    def current(self, at: float) -> int | None:
        """Return the version that was current at `at`, in seconds since 1970; None if the log begins later."""
        before = [version for version, info in self.entries.items() if _written(info) <= at]
        return self._origin(max(before)) if before else None

    def _origin(self, version: int) -> int:
        """Return the earliest version with the rows of `version`: commits after it only moved rows to other files."""
        while version - 1 in self.entries and any(
            info.get("operation") in HARMLESS for info in self._actions(version, "commitInfo")
        ):
            version -= 1
        return version

    def _actions(self, version: int, kind: str) -> Iterator[dict[str, Any]]:
        begin = f'{{"{kind}"'.encode()
        with self._storage.open_input_file(self.entries[version].path) as file:
            yield from (json.loads(line)[kind] for line in file.read().splitlines() if line.startswith(begin))

    def unreferenced(self, cutoff: float, start: int | None, older: Collection[int]) -> list[Any]:
        """Return data files from before `cutoff` that are in no version from `start` on and in none of `older`."""
        # deltalake's own vacuum needs the times at which files were replaced. Its checkpoints drop these times after a
        # week, and vacuum then deletes files of versions that are younger than its retention.
        if start is None and 0 not in self.entries:
            # No version is too old, and the log begins at a checkpoint.
            start = min(self.checkpoints.keys() & self.entries.keys(), default=None)
        kept = self._paths(None) | (set() if start is None else self._paths(start))
        for version in self.entries:
            if start is None or version > start:
                kept |= {unquote(add["path"]) for add in self._actions(version, "add")}
                if version - 1 not in self.entries:
                    # Earlier runs kept fewer days, and removed the entries that added its other files.
                    kept |= self._paths(version)
        for version in older:
            with suppress(VersionGoneError):
                kept |= self._paths(version)
        return [info for path, info in self.data.items() if _written(info) <= cutoff and path not in kept]

    def _paths(self, version: int | None) -> set[str]:
        return {unquote(path) for path in pa.table(self._open(version).get_add_actions())["path"].to_pylist()}

    def _open(self, version: int | None) -> DeltaTable:
        if (table := self._stored.open(version, check=False)) is None:
            raise OSError("the table was removed")
        return table

    def log_to_delete(self, start: int | None, older: Collection[int]) -> list[Any]:
        """Write missing checkpoints, and return the log files before `start` that the versions in `older` do not need.

        Delete them in the returned order: newest versions first, and entries before checkpoints. Then every version
        that can still be opened is complete, even if the deletion is interrupted.
        """
        kept, trim = set[int](), start is not None and start > min((*self.entries, *self.checkpoints))
        if start is not None and trim:
            self._checkpoint(start)
            for version in older:
                first = self._origin(version)
                kept |= {*range(first, version + 1)}
                with suppress(VersionGoneError):
                    self._checkpoint(first)
        # Write the newest checkpoint last: readers begin at the last one that was written.
        if trim or max(self.entries) - max(self.checkpoints, default=-1) >= _ENTRIES:
            self._open(None).create_checkpoint()
        versions = sorted({*self.entries, *self.checkpoints} - kept, reverse=True)
        infos = [part.get(n) for n in versions if n < (start or 0) for part in (self.entries, self.checkpoints)]
        return [info for info in infos if info is not None]

    def _checkpoint(self, version: int) -> None:
        if version not in self.checkpoints:
            self._open(version).create_checkpoint()


def _written(info: Any) -> float:
    return (info.mtime_ns or 0) / 1e9
