"""Files and folders that are there whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file's content so that a reader, or a crash, meets the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


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
