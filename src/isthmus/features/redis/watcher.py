"""Stops the server of a folder when its users are gone: `python -I -S watcher.py folder`, started beside the server.

Users stop the server themselves. A killed user cannot, but the lock that it holds on `present.lock` ends with it.
"""

import fcntl
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path


def main(folder: Path) -> None:
    """Waits until no process uses the server, and stops it if it still runs."""
    # In the order in which users take them, so that nobody waits for somebody who waits for him.
    for name in ("present", "start"):
        fcntl.flock(_opened(folder, name), fcntl.LOCK_EX)
    server = _opened(folder, "server")
    try:
        fcntl.flock(server, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # it runs
        process, _, socket = os.pread(server, 4096, 0).decode().partition(" ")
        os.kill(int(process), signal.SIGTERM)
        fcntl.flock(server, fcntl.LOCK_EX)
        with suppress(OSError):
            Path(socket).parent.rmdir()


def _opened(folder: Path, lock: str) -> int:
    return os.open(folder / f"{lock}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
