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
