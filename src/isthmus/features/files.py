"""Files and folders that are there whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
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


def publish(target: Path, write: Callable[[Path], None]) -> None:
    """Fills a new folder with `write` and moves it to `target`, in place of a folder that is there.

    A reader never sees a half-written file. If the process dies, what is left beside the target begins with a dot.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        write(fresh)
        for file in fresh.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        _sync(fresh)
        if target.exists():
            target.rename(Path(scratch) / "old")
        fresh.rename(target)
    _sync(target.parent)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
