"""A process that runs what strangers made, and may die of it."""

import os
import resource
import sys
from pathlib import Path


def fork_and_wait() -> int | None:
    """Goes on in a process of its own, for which this one waits. To be called before there are threads.

    Returns:
        None in the new process; in the old one what the new one ended with: an exit code, or less than zero if it was
        the signal of that number.
    """
    child = os.fork()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else None


def limit(seconds: int) -> None:
    """Ends this process, by SIGXCPU, when it has computed for so long from its begin on."""
    # At the second number it is SIGKILL, which says nothing.
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def confine(more: int) -> None:
    """Gives this process no more memory than it has now and so many bytes; who asks for more is told there is none.

    What counts is what is its own and can be written (RLIMIT_DATA): neither libraries nor files that are mapped. The
    bound stays for the rest of its life, and is of those that it starts. Other systems than Linux have no such
    bound, and there this does nothing.

    Args:
        more: bytes.
    """
    if not sys.platform.startswith("linux"):
        return
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    now = int(next(line for line in lines if line.startswith("VmData:")).split()[1]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
