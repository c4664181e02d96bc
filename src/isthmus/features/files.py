"""Atomic writes of local files and folders, checks of paths, and journals of JSON lines."""

import ctypes
import errno
import fcntl
import glob
import importlib.util
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from isthmus.features.errors import ConfigurationError, DataError, DependencyError, Problem, RequestError

if TYPE_CHECKING:
    import msgspec


_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
_PACKAGE = "package:"
_DELTA = re.compile(r"%[0-9A-Fa-f]{2}|[][^|\\\x00-\x1f\x7f\ud800-\udfff]")
UNPRINTED = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and bytes that are not UTF-8."""
_CWD, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux's renameat2."""


def is_url(place: object) -> bool:
    return bool(_URL.match(str(place)))


def installed_path(place: str, where: str) -> Path | None:
    """Return the path of `package:NAME/FILE`, a file or folder in an installed Python package; None for other places.

    Raise a DependencyError at `where` if the package is not installed.
    """
    if not place.startswith(_PACKAGE):
        return None
    name, _, rest = place.removeprefix(_PACKAGE).partition("/")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        found = f"the Python package {name}, which contains its file, is not installed"
        raise DependencyError(where, found, remedy=f"install it with: pip install {name}")
    return Path(spec.submodule_search_locations[0]) / rest


def require_local(where: str, place: Path | str) -> Path:
    if is_url(place):
        raise RequestError(where, f"{place} is a URL", expected="a local path",
                           remedy="use a local folder, and copy it with the storage's own tool")  # fmt: skip
    return Path(place)


def require_delta(where: str, place: str, remedy: str) -> str:
    # deltalake resolves links, converts the path to a URL and decodes it again, so escaping does not help.
    url = is_url(place)
    invalid = _DELTA.search(place if url else os.path.realpath(place)) or (re.search("[#?]", place) if url else None)
    if invalid:
        problem = Problem("path", f"deltalake cannot open {place!r}, because it contains {invalid[0]!r}")
        raise ConfigurationError(where, [problem], remedy=remedy)
    return place


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Write a file, and create missing parent folders. After a crash, the file has the old or the new content.

    `mode` has the permissions of the file before the umask, such as 0o600.
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
        # On a full disk, the partial file must not stay.
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def private_folder(folder: Path) -> None:
    """Create a folder, with missing parents, that only its owner can enter.

    If the folder exists and belongs to this user, remove the permissions of all other users. The folder of another
    user stays as it is.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_mode & 0o077 and status.st_uid == os.geteuid():
        folder.chmod(0o700)


def move_atomically(partial: Path, path: Path) -> None:
    _sync(partial)
    partial.replace(path)
    _sync(path.parent)


def read_pointer(file: Path) -> Path:
    """Return the folder that a pointer file names, such as the latest training set in the file `latest`.

    The file contains the name of a folder in its own folder. Raise FileNotFoundError if the file does not exist, and
    ValueError if the folder does not exist.
    """
    name = file.read_text()
    if not name or Path(name).name != name or not (file.parent / name).is_dir():
        raise ValueError(f"{file.name} names {name[:40]!r}, which is not a folder next to it")
    return file.parent / name


def publish(target: Path, write: Callable[[Path], None], *, scratch_name: str = "") -> None:
    """Replace the folder `target` with a new folder, so that a reader never sees an incomplete one.

    `write` gets the path of the new folder and fills it. If `write` raises an error, `target` stays as it was. On
    systems that cannot exchange two folders, `target` is missing for a moment, and stays missing if the process is
    killed then. If several processes publish, the last one wins.

    Temporary folders get a name with `scratch_name`, by default the name of `target`. The next call with the same name
    and parent folder deletes those that killed processes left behind.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(target.parent, f".{scratch_name or target.name}") as scratch:
        fresh = scratch / "new"
        fresh.mkdir()
        try:
            write(fresh)
        except OSError as error:
            if error.errno is None or (error.filename is not None and error.filename2 is None):
                raise
            # Arrow's "disk full" error names no file, and a failed copy names the source: name the target.
            raise OSError(error.errno, os.strerror(error.errno), str(target)) from error
        for entry in (fresh, *fresh.rglob("*")):
            _sync(entry)
        for turn in count():
            try:
                fresh.rename(target)
                break
            except OSError as error:  # something is there
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            if _exchange(fresh, target):
                break
            with suppress(FileNotFoundError):
                target.rename(scratch / f"old-{turn}")
    _sync(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two paths in one step. Return False if the system cannot do so, or if a path does not exist."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux only, and not on all file systems
    return rename is not None and not rename(_CWD, os.fsencode(first), _CWD, os.fsencode(second), _EXCHANGE)


@contextmanager
def scratch_folder(parent: Path, name: str) -> Iterator[Path]:
    """Yield a new temporary folder in `parent`, and delete it at the end of the `with` block.

    Its name begins with `name`. First delete such folders of processes of this machine that were killed.
    """
    prefix = f"{name}-{socket.gethostname()}-"
    # Each process locks its folder. Locks of other machines are not visible here, so their folders stay.
    # Match all 16 digits: another machine's name may start with this machine's name.
    for stale in parent.glob(glob.escape(prefix) + "[0-9a-f]" * 16):
        with suppress(OSError), ExitStack() as stack:
            _lock(stale, stack)
            shutil.rmtree(stale, ignore_errors=True)
    with ExitStack() as stack:
        folder = None
        while folder is None:
            fresh = parent / f"{prefix}{secrets.token_hex(8)}"
            fresh.mkdir()
            # Until it is locked, another process may remove it as stale.
            with suppress(FileNotFoundError, BlockingIOError):
                _lock(fresh, stack)
                folder = fresh
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def _lock(folder: Path, stack: ExitStack) -> None:
    path = folder / "lock"
    lock = stack.enter_context(path.open("w"))
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # The previous owner of the lock may have deleted the file and be about to delete the folder.
    if not os.path.samestat(os.fstat(lock.fileno()), path.stat()):
        raise FileNotFoundError(path)


@contextmanager
def locked(file: Path, *, shared: bool = False, wait: bool = True) -> Iterator[None]:
    """Hold a lock on a file during the block, which waits for it; see `Project.locked`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        yield


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


T = TypeVar("T", bound="msgspec.Struct")


class Journal(Generic[T]):
    """A file of JSON lines. `busy` is (problem, remedy) if the file is locked, `remedy` is for a damaged line."""

    def __init__(self, file: Path, record: type[T], *, busy: tuple[str, str], remedy: str) -> None:
        self._file, self._record, self._busy, self._remedy = file, record, busy, remedy

    @contextmanager
    def locked(self) -> Iterator[list[T]]:
        """Lock the file, and yield its records. Call `add` within this `with` block.

        Create the file if it is missing, and cut off an incomplete last line of a killed writer. Raise DependencyError
        at once if the file is locked, by another process or by this one, and DataError if a line is damaged.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # The system releases the lock even if the process is killed.
        with self._file.open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                problem, remedy = self._busy
                raise DependencyError(str(self._file), problem, remedy=remedy) from error
            complete = self._complete_lines()
            # Bytes after the last newline come from a writer that was killed, or from a full disk.
            os.truncate(self._file, len(complete))
            yield self._records(complete)

    def read(self) -> list[T]:
        try:
            return self._records(self._complete_lines())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(str(self._file), f"cannot be read ({error.strerror})") from error

    def add(self, record: T) -> None:
        """Append a record and sync it to disk. Call this within `locked`. Raise DependencyError if writing fails."""
        import msgspec  # see `_records`

        try:
            with self._file.open("ab") as file:
                file.write(msgspec.json.encode(record) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
            remedy = "free disk space and repeat the command; it continues from here"
            raise DependencyError(str(self._file), problem, remedy=remedy) from error

    def _complete_lines(self) -> bytes:
        content = self._file.read_bytes()
        return content[: content.rfind(b"\n") + 1]

    def _records(self, lines: bytes) -> list[T]:
        # Imported late: `isthmus init` must run without any dependency installed.
        import msgspec

        records = []
        for number, line in enumerate(lines.splitlines()):
            try:
                records.append(msgspec.json.decode(line, type=self._record))
            except msgspec.MsgspecError as error:
                raise self._broken(number, f"cannot be read: {error}") from error
        return records

    def _broken(self, number: int, problem: str, expected: str = "") -> DataError:
        where = f"{self._file}, line {number + 1}"
        return DataError(where, problem, expected=expected, remedy=self._remedy)
