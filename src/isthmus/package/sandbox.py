"""Limits for a process that runs untrusted files and may crash."""

import os
import resource
import sys
from pathlib import Path


def fork_and_wait() -> int | None:
    """Fork, before threads start. Return None in the child; in the parent, wait and return its exit code or -signal."""
    child = os.fork()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None


def limit_cpu(seconds: int) -> None:
    """Limit this process to `seconds` of CPU time since its start. It then gets SIGXCPU, and SIGKILL a second later."""
    # The hard limit sends SIGKILL, which gives no reason.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def limit_memory(more: int) -> None:
    """On Linux, limit private writable memory of this process and each child to its current size plus `more` bytes."""
    if not sys.platform.startswith("linux"):
        return
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = int(next(line for line in lines if line.startswith("VmData:")).split()[1]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
