"""Limits for a process that runs untrusted files and may crash."""

import os
import resource
import sys
from pathlib import Path


def fork_and_wait() -> int | None:
    """Fork, and wait for the child in the parent. Call it before starting threads.

    Returns:
        None in the child. In the parent, the child's exit code, or the negative number of the signal that ended it.
    """
    child = os.fork()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None


def limit(seconds: int) -> None:
    """Limit this process to `seconds` of CPU time, counted from its start.

    Beyond the limit, the system sends SIGXCPU, and SIGKILL a second later.
    """
    # The hard limit sends SIGKILL, which gives no reason.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def confine(more: int) -> None:
    """Limit this process and its children to its current memory plus `more` bytes.

    Counts private writable memory (RLIMIT_DATA), not libraries and mapped files. Does nothing except on Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = int(next(line for line in lines if line.startswith("VmData:")).split()[1]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
