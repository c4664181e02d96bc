"""Stops a folder's server when its users are gone: `python -I -S watcher.py folder seconds present start server`."""

# The watcher is started together with the server. Usually the last user stops the server. If that user is killed, its
# lock on `present.lock` is released and the watcher stops the server.

import fcntl
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path


def main(seconds: float, present: int, start: int, server: int) -> None:
    # Take the locks in the same order as the users, to avoid a deadlock.
    for lock in (present, start):
        fcntl.flock(lock, fcntl.LOCK_EX)
    deadline = None
    while not _stopped(server):
        process, _, socket = os.pread(server, 4096, 0).decode().partition(" ")
        # A server that has just been started has not written its process id yet.
        if socket and deadline is None:
            deadline = time.monotonic() + seconds
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            sys.stdout.write(f"process {process} did not stop after SIGTERM\n")
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
