"""Processes that work for a folder: what a killed step must not leave behind."""

import time
from contextlib import suppress
from pathlib import Path

import psutil


def running_for(folder: Path) -> list[psutil.Process]:
    """Processes with the folder in their command line, environment, working directory or the paths of their sockets."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            texts = [*process.cmdline(), *process.environ().values(), process.cwd()]
            if process.status() != psutil.STATUS_ZOMBIE and any(str(folder) in text for text in texts):
                found.append(process)
    return found


def orphans(folder: Path, seconds: float) -> list[str]:
    """The command lines of the processes that are still running after some time; none as soon as there is none."""
    deadline = time.monotonic() + seconds
    while left := running_for(folder):
        if time.monotonic() > deadline:
            return [f"{process.pid}: {' '.join(process.cmdline())}" for process in left if process.is_running()]
        time.sleep(0.1)
    return []


def end(folder: Path) -> None:
    """Kills what is left, so that a test that fails leaves nothing."""
    for process in running_for(folder):
        with suppress(psutil.NoSuchProcess):
            process.kill()
