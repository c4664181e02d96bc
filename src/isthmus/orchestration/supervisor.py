"""A command that ends when stdin does: `python -I -S supervisor.py command ...`, in a session of its own.

Stdin is a pipe from the process that needs the command, so the command ends with that process, however that ends. What
the command has started is of its process group, and ends with it.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

GRACE_SECONDS = 20


def main(command: list[str]) -> None:
    """Runs the command, then kills the process group, this process included."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - of the caller
    ended = os.pidfd_open(child.pid)
    ready, _, _ = select.select([sys.stdin, ended], [], [])
    if ended not in ready:
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
