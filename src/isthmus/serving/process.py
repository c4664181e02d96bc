"""A server process: started with its settings, and ended with the process that started it.

Its settings have the password of Redis in them, and the environment of a process is seen by all that its user runs and
inherited by all that it starts. They are handed over as a file in memory.
"""

import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
from types import FrameType
from typing import IO, NoReturn

import msgspec

from isthmus.features.errors import ConfigurationError, Problem
from isthmus.serving.settings import ServerSettings

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def start(settings: ServerSettings, log: IO[bytes] | None = None) -> "subprocess.Popen[bytes]":
    """A server as a child of this process, which it does not outlive.

    Call it from a thread that lives as long as the server shall: to Linux, the thread is its parent.

    Args:
        settings: of the server.
        log: where it writes its log; by default to this process's stderr.
    """
    descriptor = _file_of(settings)
    arguments = [*_command(descriptor), "--parent", str(os.getpid())]
    try:
        return subprocess.Popen(arguments, env=_environment(), stderr=log, pass_fds=[descriptor])  # noqa: S603 - ours
    finally:
        os.close(descriptor)


def become(settings: ServerSettings) -> NoReturn:
    """Makes this process the server."""
    descriptor = _file_of(settings)
    os.set_inheritable(descriptor, True)
    arguments = _command(descriptor)
    os.execve(arguments[0], arguments, _environment())  # noqa: S606 - this interpreter, our own module


def serve(settings: ServerSettings) -> int:
    """Runs a server in a child process until it ends; returns its exit code.

    The server is a child so that it loads nothing this process has loaded. SIGTERM is passed on; Ctrl-C reaches the
    whole terminal group by itself. Call it from the main thread.
    """
    child = start(settings)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            child.terminate()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def received(descriptor: int) -> ServerSettings:
    """The settings that `start` and `become` hand over."""
    with open(descriptor, "rb") as file:
        return ServerSettings.decode(file.read(), "--settings-fd")


def end_with(parent: int) -> None:
    """Has this process end in order, as by SIGTERM, when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before
        signal.raise_signal(signal.SIGTERM)


def listen(where: str, host: str, port: int, remedy: str) -> socket.socket:
    """A socket that listens on a port, or on any that is free for 0.

    Raises:
        ConfigurationError: the port is taken, or may not be used, which `remedy` mends; or the host is none of this
            machine. It begins with `where`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # Python adds the address, which is there already.
        reason = str(error.strerror).partition(" (while")[0]
        expected = "a free port"
        # Negative numbers are those of the look-up of a name.
        if error.errno == errno.EADDRNOTAVAIL or (error.errno or 0) < 0:
            expected, remedy = "an address of this machine", "choose another host, such as 127.0.0.1"
        problem = Problem(f"{host}:{port}", f"cannot be listened on ({reason})", expected)
        raise ConfigurationError(where, [problem], remedy=remedy) from error


def _file_of(settings: ServerSettings) -> int:
    descriptor = os.memfd_create("isthmus-settings")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(msgspec.json.encode(settings))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _command(descriptor: int) -> list[str]:
    return [sys.executable, "-m", "isthmus.serving", "--settings-fd", str(descriptor)]


def _environment() -> dict[str, str]:
    """Without what is the project's alone: a server signs nothing, and has the address of its Redis already."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("ISTHMUS_")}
