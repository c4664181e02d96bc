"""A file with a line for each record, added at once and never changed; one process at a time adds to it."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from isthmus.features.errors import DataError, DependencyError

T = TypeVar("T", bound=msgspec.Struct)


class Journal(Generic[T]):
    """Records as JSON, a line each.

    Args:
        file: where they are.
        record: what a line is.
        busy: what is said while another process holds the journal, and what to do then.
        remedy: what to do about a line that is no record.
    """

    def __init__(self, file: Path, record: type[T], *, busy: tuple[str, str], remedy: str) -> None:
        self._file, self._record, self._busy, self._remedy = file, record, busy, remedy

    @contextmanager
    def held(self) -> Iterator[list[T]]:
        """The records so far; within the block nobody else adds to them.

        Raises:
            DependencyError: another process holds the journal.
            DataError: a line is no record.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # The system gives the lock back, however the process ends.
        with self._file.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                found, remedy = self._busy
                raise DependencyError(str(self._file), found, remedy=remedy) from error
            whole = self._whole()
            # Whoever wrote what is behind it was killed, or the disk was full.
            os.truncate(self._file, len(whole))
            yield self._records(whole)

    def read(self) -> list[T]:
        """The records so far.

        Raises:
            DataError: the file cannot be read, or a line is no record.
        """
        try:
            return self._records(self._whole())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(str(self._file), f"cannot be read ({error.strerror})") from error

    def add(self, one: T) -> None:
        """Adds a record, which is on disk when this returns.

        Raises:
            DependencyError: the disk is full.
        """
        try:
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(one) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DependencyError(
                str(self._file),
                f"cannot be written ({error.strerror})",
                remedy="make room there; the same command goes on",
            ) from error

    def _whole(self) -> bytes:
        content = self._file.read_bytes()
        return content[: content.rfind(b"\n") + 1]

    def _records(self, whole: bytes) -> list[T]:
        found = []
        for number, line in enumerate(whole.splitlines()):
            try:
                found.append(msgspec.json.decode(line, type=self._record))
            except msgspec.MsgspecError as error:
                raise self._broken(number, f"cannot be read: {error}") from error
        return found

    def _broken(self, number: int, found: str, expected: str = "") -> DataError:
        where = f"{self._file}, line {number + 1}"
        return DataError(where, found, expected=expected, remedy=self._remedy)
