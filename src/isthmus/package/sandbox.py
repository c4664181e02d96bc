"""Limits for a process that runs untrusted files and may crash."""

import os
import resource
import sys
from pathlib import Path


def fork_and_wait() -> int | None:
    """Fork, to run the rest of the program in a child process with limits. Call it before any thread starts.

    Returns None in the child. The parent waits for the child, and gets its exit code, or minus the signal that killed
    it.
    """
    child = os.fork()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None


def limit_cpu(seconds: int) -> None:
    """Limit this process to `seconds` of CPU time since its start. It then gets SIGXCPU, and SIGKILL a second later."""
    # The hard limit sends SIGKILL, which gives no reason.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def limit_memory(more: int) -> None:
    """Let this process and each of its children allocate only `more` bytes above its current private memory.

    Works on Linux only. Elsewhere it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = int(next(line for line in lines if line.startswith("VmData:")).split()[1]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
