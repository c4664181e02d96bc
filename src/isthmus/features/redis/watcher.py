"""Stops the server of a folder when its users are gone: `python -I -S watcher.py folder present start server`.

It is started beside the server. Users stop that themselves. A killed user cannot, but the lock that it holds on
`present.lock` ends with it.
"""

import fcntl
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path


def main(present: int, start: int, server: int) -> None:
    """Waits until no process uses the server, and stops it if it still runs; the arguments are open lock files."""
    # In the order in which users take them, so that nobody waits for somebody who waits for him.
    for lock in (present, start):
        fcntl.flock(lock, fcntl.LOCK_EX)
    while not _stopped(server):
        process, _, socket = os.pread(server, 4096, 0).decode().partition(" ")
        # A server that has just been started has not noted yet who it is.
        if socket:
            os.kill(int(process), signal.SIGTERM)
            fcntl.flock(server, fcntl.LOCK_EX)
            with suppress(OSError):
                Path(socket).parent.rmdir()
            return
        time.sleep(0.01)


def _stopped(server: int) -> bool:
    try:
        fcntl.flock(server, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    main(*map(int, sys.argv[2:]))
