"""The folder of recorded answers waiting to be collected: segments, each written by one process.

A process locks the segment that it writes to until it ends, so a segment that can be locked is complete.
"""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from isthmus.features.files import private_folder, write_atomically
from isthmus.serving.recorder.batch import DamagedBatchError, OtherVersionError, batches, count

SUFFIX = ".answers"
SEGMENT_BYTES = 16 << 20
SEGMENT_SECONDS = 60.0
"""The next segment begins after so many bytes or seconds, so that this one can be collected."""
COLLECTED = "collected"
"""File with the time of the last collection. It is needed because segments of running servers stay."""
LOOK_SECONDS = 0.5
"""Seconds between two checks of all segment sizes while there is room: other processes write too."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Spool:
    """Write a process's recorded answers to segment files in `folder`, where they wait to be collected.

    `run` is a random name of the process. `most` limits the bytes of all processes' files. If a batch does not fit, it
    is dropped (`full` is "newest") or the oldest segment files are deleted ("oldest").
    """

    def __init__(self, folder: Path, most: int, full: Literal["newest", "oldest"]) -> None:
        self.run = secrets.token_hex(6)
        self._folder, self._most, self._full = folder, most, full
        self._segment, self._path = -1, folder
        self._number = self._size = 0
        self._began = self._looked = 0.0
        self._free = self._removed = 0

    def write(self, batch: bytes | bytearray) -> int:
        """Append an encoded batch of answers to this process's file. Return how many older answers it deleted.

        Begins a new file after `SEGMENT_BYTES` or `SEGMENT_SECONDS`. If the spool or the disk is full and `full` is
        "oldest", first deletes the oldest files that no other process writes to. Raises an OSError if there is still no
        room or the disk fails.
        """
        if len(batch) > self._free or time.monotonic() > self._looked + LOOK_SECONDS:
            self._make_room(len(batch))
        if self._segment >= 0 and (
            self._size > SEGMENT_BYTES
            or time.monotonic() - self._began > SEGMENT_SECONDS
            # The file was removed, so no reader would find what we write to it.
            or not os.fstat(self._segment).st_nlink
        ):
            self.close()
        while True:
            try:
                self._append(batch)
                break
            except OSError as error:
                # Other files may fill the disk.
                if self._full == "newest" or error.errno not in _NO_ROOM or not self._remove_oldest():
                    raise
        removed, self._removed = self._removed, 0
        return removed

    def _append(self, batch: bytes | bytearray) -> None:
        if self._segment < 0:
            self._open()
        try:
            written = 0
            while written < len(batch):
                written += os.write(self._segment, memoryview(batch)[written:])
        except OSError:
            with suppress(OSError):
                # A partial batch would hide the batches behind it.
                os.ftruncate(self._segment, self._size)
                os.lseek(self._segment, self._size, os.SEEK_SET)
            raise
        self._size += len(batch)
        self._free -= len(batch)

    def close(self) -> None:
        if self._segment >= 0:
            with suppress(OSError):
                os.fsync(self._segment)
            os.close(self._segment)
            self._segment = -1

    def _open(self) -> None:
        private_folder(self._folder)
        name = f"{self.run}-{self._number:08d}"
        begun, self._path = self._folder / f".{name}", self._folder / f"{name}{SUFFIX}"
        # The file may contain personal keys.
        segment = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(segment, fcntl.LOCK_EX)
            # Lock first: a collector would take an unlocked segment for a finished one and remove it.
            begun.rename(self._path)
        except OSError:
            os.close(segment)
            raise
        self._segment = segment
        self._number += 1
        self._size, self._began = 0, time.monotonic()

    def _make_room(self, needed: int) -> None:
        over = sum(stat.st_size for _, stat in _segments(self._folder)) + needed - self._most
        while over > 0 and self._full == "oldest" and (size := self._remove_oldest()):
            over -= size
        self._free, self._looked = needed - over, time.monotonic()
        if over > 0:
            raise OSError(f"the spool has no room: {self._most / (1 << 20):g} MB at most")

    def _remove_oldest(self) -> int:
        for _, path, size in sorted((stat.st_mtime, path, stat.st_size) for path, stat in _segments(self._folder)):
            if not size:
                continue
            if path == self._path:
                self.close()
            answers = remove(path)
            if answers is not None:
                self._removed += answers
                return size
        return 0


def segments(folder: Path) -> list[Path]:
    return sorted(path for path, _ in _segments(folder))


def is_complete(path: Path) -> bool:
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def remove(path: Path) -> int | None:
    """Delete a file of recorded answers, and return how many of its answers were readable.

    Returns None, and deletes nothing, if a process still writes to the file.
    """
    if not is_complete(path):
        return None
    answers = 0
    with suppress(FileNotFoundError, DamagedBatchError, OtherVersionError):
        for batch in batches(path.read_bytes()):
            answers += count(batch)
    path.unlink(missing_ok=True)
    return answers


class SpoolBacklog(NamedTuple):
    """Recorded answers that are not collected yet.

    Attributes:
        size: bytes of all segment files.
        since: oldest change after the last collection, in seconds since 1970; None if all is collected.
    """

    size: int
    since: float | None


def waiting(folder: Path) -> SpoolBacklog:
    stats = [stat for _, stat in _segments(folder)]
    collected = 0.0
    with suppress(OSError, ValueError):
        collected = float((folder / COLLECTED).read_text())
    return SpoolBacklog(
        sum(stat.st_size for stat in stats),
        min((stat.st_mtime for stat in stats if stat.st_mtime > collected), default=None),
    )


def note_collected(folder: Path, at: float) -> None:
    # A missing folder has nothing to collect, and a failed note must not fail the collection.
    if folder.is_dir():
        with suppress(OSError):
            write_atomically(folder / COLLECTED, str(at).encode())


def _segments(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.name.endswith(SUFFIX):
                with suppress(FileNotFoundError):
                    yield Path(entry.path), entry.stat()
