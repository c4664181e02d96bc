"""A file that is reloaded when it changes."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from isthmus.features.errors import DataError, IsthmusError
from isthmus.serving import log

T = TypeVar("T")


@dataclass(eq=False)
class WatchedFile(Generic[T]):
    """A file and its parsed content. Call `load` when `changed` returns True; it logs errors and does not raise them.

    `content` is None before the first `load` or without a file, and an error if no valid content was ever read.
    `problem` is the error of the last `load`; valid content from before it stays in `content`.
    """

    path: Path
    _parse: Callable[[bytes, str], T]
    content: T | IsthmusError | None = None
    problem: IsthmusError | None = None
    _stamp: tuple[int, int, int] | None = None

    def changed(self) -> bool:
        return _stamp(self.path) != self._stamp

    @property
    def written(self) -> float | None:
        return None if self._stamp is None else self._stamp[0] / 1e9

    def load(self) -> None:
        # Take the stamp first: a file that changes during reading is then read again.
        self._stamp = _stamp(self.path)
        if self._stamp is None:
            log.info("file is gone", path=str(self.path))
            self.content = self.problem = None
            return
        try:
            try:
                self.content, self.problem = self._parse(self._read(), str(self.path)), None
            except (ValueError, TypeError, RecursionError, OverflowError) as error:
                raise DataError(str(self.path), f"cannot be read ({type(error).__name__})") from error
        except IsthmusError as error:
            good = self.content is not None and not isinstance(self.content, IsthmusError)
            log.warning("file refused", path=str(self.path), problem=str(error), previous="kept" if good else "none")
            self.problem = error
            if not good:
                self.content = error
            return
        log.info("file loaded", path=str(self.path))

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                # The path may point to another file by now, so take the stamp of the open file.
                self._stamp = _of(os.fstat(file.fileno()))
                return file.read()
        except OSError as error:
            raise DataError(str(self.path), f"cannot be read ({error.strerror})") from error


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes with the file; None only if the file certainly does not exist."""
    try:
        return _of(path.stat())
    except FileNotFoundError:
        return None
    except OSError as error:
        return 0, 0, -(error.errno or 1)


def _of(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_mtime_ns, status.st_size, status.st_ino
