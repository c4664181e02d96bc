"""Run a command until stdin closes: `python -I -S supervisor.py command ...`, started in a new session.

Stdin is a pipe from the parent: even if the parent is killed, the command and all processes of its group end.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

GRACE_SECONDS = 20


def main(command: list[str]) -> None:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - the command comes from our caller
    ended = os.pidfd_open(child.pid)
    ready, _, _ = select.select([sys.stdin, ended], [], [])
    if ended not in ready:
        child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
