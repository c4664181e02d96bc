"""Limits for a process that runs files of strangers, and may die of them."""

import os
import resource
import sys
from pathlib import Path


def fork_and_wait() -> int | None:
    """Continues in a child process, for which this one waits. Call it before there are threads.

    Returns:
        None in the child; in the parent the child's exit code, or the negative number of the signal that ended it.
    """
    child = os.fork()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None


def limit(seconds: int) -> None:
    """Ends this process, by SIGXCPU, after so many seconds of CPU time since its start."""
    # The second number brings SIGKILL, which explains nothing.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def confine(more: int) -> None:
    """Limits this process, and those that it starts, to its present memory and `more` bytes.

    Private writable memory counts (RLIMIT_DATA), not libraries and mapped files. Only Linux has such a limit; elsewhere
    this does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = int(next(line for line in lines if line.startswith("VmData:")).split()[1]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
