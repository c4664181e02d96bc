"""The folder of recorded answers that wait to be collected: segments, each written by one process.

A process holds a lock on the segment that it writes to, and loses it with its life: a segment that can be locked has
its end. `isthmus recorded` removes such a segment once its answers are in the table.
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
"""After so many bytes or seconds, the next segment begins: this one can be removed."""
COLLECTED = "collected"
"""The file beside the segments that says when they were read last: those of living servers stay."""
LOOK_SECONDS = 0.5
"""How often the sizes of all segments are looked at, as long as there is room: other processes write, too."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class Spool:
    """The segments of one process in a folder; `run` is its name there.

    `most` are the bytes of all segments in the folder, of whatever process. Where a batch has no room, it is dropped
    (`full` is "newest"), or the segments are that have waited longest.
    """

    def __init__(self, folder: Path, most: int, full: Literal["newest", "oldest"]) -> None:
        self.run = secrets.token_hex(6)
        self._folder, self._most, self._full = folder, most, full
        self._segment, self._path = -1, folder
        self._number = self._size = 0
        self._began = self._looked = 0.0
        self._free = self._removed = 0

    def write(self, batch: bytes | bytearray) -> int:
        """Writes a batch; returns how many answers were removed to make room, since the last batch that was written.

        Raises:
            OSError: there is no room for it, or it cannot be written. Nothing of it is there.
        """
        if len(batch) > self._free or time.monotonic() > self._looked + LOOK_SECONDS:
            self._make_room(len(batch))
        if self._segment >= 0 and (
            self._size > SEGMENT_BYTES
            or time.monotonic() - self._began > SEGMENT_SECONDS
            # Somebody has removed the file: what is written to it, nobody can read.
            or not os.fstat(self._segment).st_nlink
        ):
            self.close()
        while True:
            try:
                self._append(batch)
                break
            except OSError as error:
                # The disk may be full of other things.
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
                # Half a batch would hide those that come behind it.
                os.ftruncate(self._segment, self._size)
                os.lseek(self._segment, self._size, os.SEEK_SET)
            raise
        self._size += len(batch)
        self._free -= len(batch)

    def close(self) -> None:
        """Ends the segment, which is on disk then."""
        if self._segment >= 0:
            with suppress(OSError):
                os.fsync(self._segment)
            os.close(self._segment)
            self._segment = -1

    def _open(self) -> None:
        private_folder(self._folder)
        name = f"{self.run}-{self._number:08d}"
        begun, self._path = self._folder / f".{name}", self._folder / f"{name}{SUFFIX}"
        # Keys of people may be in it.
        segment = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(segment, fcntl.LOCK_EX)
            # Whoever sees a segment that is not locked yet would take it for one that has its end, and remove it.
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
        """Removes the segment that has waited longest; returns how many bytes it had, or 0 if there is none."""
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
    """The segments in a folder, those of each run in order."""
    return sorted(path for path, _ in _segments(folder))


def ended(path: Path) -> bool:
    """Whether nobody writes to a segment any more."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def remove(path: Path) -> int | None:
    """Removes a segment that nobody writes to; returns how many answers it had, or None if somebody does."""
    if not ended(path):
        return None
    answers = 0
    with suppress(FileNotFoundError, DamagedBatchError, OtherVersionError):
        for batch in batches(path.read_bytes()):
            answers += count(batch)
    path.unlink(missing_ok=True)
    return answers


class Waiting(NamedTuple):
    """The bytes of all segments, and since when answers wait to be collected, in seconds since 1970 UTC.

    That is exact to a segment, which is a minute. None if all were collected.
    """

    size: int
    since: float | None


def waiting(folder: Path) -> Waiting:
    """What is in a folder of segments."""
    found = [stat for _, stat in _segments(folder)]
    collected = 0.0
    with suppress(OSError, ValueError):
        collected = float((folder / COLLECTED).read_text())
    return Waiting(
        sum(stat.st_size for stat in found),
        min((stat.st_mtime for stat in found if stat.st_mtime > collected), default=None),
    )


def note_collected(folder: Path, at: float) -> None:
    """Notes that what was in a folder at a moment has been collected."""
    # Without a folder there is nothing to wait; and what cannot be noted makes no collection fail.
    if folder.is_dir():
        with suppress(OSError):
            write_atomically(folder / COLLECTED, str(at).encode())


def _segments(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.name.endswith(SUFFIX):
                with suppress(FileNotFoundError):
                    yield Path(entry.path), entry.stat()
