"""Files and folders that are there whole or not at all."""

import errno
import fcntl
import glob
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from isthmus.features.errors import DataError, DependencyError

if TYPE_CHECKING:
    import msgspec


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replaces a file's content so that a reader, or a crash, meets the old or the new one, never a part.

    Args:
        path: the file.
        content: all of it.
        mode: permissions, less those of the umask; the file never has others, not even while it is written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        # A full disk must not stay full of what did not fit.
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def read_pointer(file: Path) -> Path:
    """The folder beside a file that holds nothing but the folder's name.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: what it holds is not the name of a folder there.
    """
    name = file.read_text()
    if not name or Path(name).name != name or not (file.parent / name).is_dir():
        raise ValueError(f"{file.name} names {name[:40]!r}, which is no folder there")
    return file.parent / name


def publish(target: Path, write: Callable[[Path], None], *, kind: str = "") -> None:
    """Fills a new folder with `write` and moves it to `target`, in place of a folder that is there.

    A reader never sees a half-written file. Of several that publish to one target at the same time, the last one stays.
    If the process dies, what is left beside the target begins with a dot, and
    the next one to publish there removes it; or of several targets of one kind, to any of them.

    Args:
        target: the folder.
        write: fills a folder.
        kind: what the target is, where no two targets have the same name.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target.parent, f".{kind or target.name}") as scratch:
        fresh = scratch / "new"
        fresh.mkdir()
        try:
            write(fresh)
        except OSError as error:
            if error.errno is None or (error.filename is not None and error.filename2 is None):
                raise
            # Arrow says that a disk is full, and not for what; a copy names first what it was reading.
            raise OSError(error.errno, os.strerror(error.errno), str(target)) from error
        for entry in (fresh, *fresh.rglob("*")):
            if entry.is_dir():
                _sync(entry)
            else:
                with entry.open("rb") as handle:
                    os.fsync(handle.fileno())
        for turn in count():
            with suppress(FileNotFoundError):
                target.rename(scratch / f"old-{turn}")
            try:
                fresh.rename(target)
                break
            except OSError as error:  # another one was put there meanwhile
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
    _sync(target.parent)


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """A folder for the block, gone after it; and so are those that killed processes of this machine left there.

    A process holds a lock for as long as it lives. Other machines may share the folder but not its locks: theirs stay.

    Args:
        parent: where to make it.
        name: how its name begins, and the names of those left.
    """
    mine = f"{name}-{socket.gethostname()}-"
    # The whole of it: the name of another machine may begin like that of this one.
    for left in parent.glob(glob.escape(mine) + "[0-9a-f]" * 16):
        with suppress(OSError), ExitStack() as held:
            _lock(left, held)
            shutil.rmtree(left, ignore_errors=True)
    with ExitStack() as held:
        folder = None
        while folder is None:
            fresh = parent / f"{mine}{secrets.token_hex(8)}"
            fresh.mkdir()
            # Before it is locked, another process may take it for one that was left.
            with suppress(FileNotFoundError, BlockingIOError):
                _lock(fresh, held)
                folder = fresh
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def _lock(folder: Path, held: ExitStack) -> None:
    """Locks a folder until `held` ends.

    Raises:
        BlockingIOError: another process has it.
        FileNotFoundError: the folder is gone.
    """
    path = folder / "lock"
    lock = held.enter_context(path.open("w"))
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # Whoever had it before may have removed it, and may be about to remove the folder.
    if not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
        raise FileNotFoundError(path)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


T = TypeVar("T", bound="msgspec.Struct")


class Journal(Generic[T]):
    """Records as JSON, a line each.

    Args:
        file: where they are.
        record: what a line is.
        busy: what is said while another process has the lock, and what to do then.
        remedy: what to do about a line that is not a record.
    """

    def __init__(self, file: Path, record: type[T], *, busy: tuple[str, str], remedy: str) -> None:
        self._file, self._record, self._busy, self._remedy = file, record, busy, remedy

    @contextmanager
    def locked(self) -> Iterator[list[T]]:
        """The records so far; within the block nobody else adds to them.

        Raises:
            DependencyError: another process has the lock.
            DataError: a line is not a record.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # The system gives the lock back, however the process ends.
        with self._file.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                found, remedy = self._busy
                raise DependencyError(str(self._file), found, remedy=remedy) from error
            complete = self._complete_lines()
            # What follows the last newline is of a writer that was killed, or of a full disk.
            os.truncate(self._file, len(complete))
            yield self._records(complete)

    def read(self) -> list[T]:
        """The records so far.

        Raises:
            DataError: the file cannot be read, or a line is not a record.
        """
        try:
            return self._records(self._complete_lines())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(str(self._file), f"cannot be read ({error.strerror})") from error

    def add(self, record: T) -> None:
        """Adds a record, which is on disk when this returns.

        Raises:
            DependencyError: the disk is full.
        """
        import msgspec  # see `_records`

        try:
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(record) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DependencyError(
                str(self._file),
                f"cannot be written ({error.strerror})",
                remedy="make room there; the same command goes on",
            ) from error

    def _complete_lines(self) -> bytes:
        content = self._file.read_bytes()
        return content[: content.rfind(b"\n") + 1]

    def _records(self, lines: bytes) -> list[T]:
        # Not at the top of the module: `isthmus init` runs where nothing but the package is installed.
        import msgspec

        records = []
        for number, line in enumerate(lines.splitlines()):
            try:
                records.append(msgspec.json.decode(line, type=self._record))
            except msgspec.MsgspecError as error:
                raise self._broken(number, f"cannot be read: {error}") from error
        return records

    def _broken(self, number: int, found: str, expected: str = "") -> DataError:
        where = f"{self._file}, line {number + 1}"
        return DataError(where, found, expected=expected, remedy=self._remedy)
