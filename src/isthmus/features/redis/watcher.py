"""Stops the server of a folder when its users are gone: `python -I -S watcher.py folder seconds present start server`.

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


def main(seconds: float, present: int, start: int, server: int) -> None:
    """Waits until no process uses the server, and stops it if it still runs; the arguments are open lock files.

    A server that does not stop within so many seconds is left to itself, so that the next user is told of it.
    """
    # In the order in which users take them, so that nobody waits for somebody who waits for him.
    for lock in (present, start):
        fcntl.flock(lock, fcntl.LOCK_EX)
    deadline = None
    while not _stopped(server):
        process, _, socket = os.pread(server, 4096, 0).decode().partition(" ")
        # A server that has just been started has not noted yet who it is.
        if socket and deadline is None:
            deadline = time.monotonic() + seconds
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            sys.stdout.write(f"process {process} has got SIGTERM and does not end\n")
            return
        time.sleep(0.01)
    if deadline is not None:
        with suppress(OSError):
            Path(socket).parent.rmdir()


def _stopped(server: int) -> bool:
    try:
        fcntl.flock(server, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    main(float(sys.argv[2]), *map(int, sys.argv[3:]))
