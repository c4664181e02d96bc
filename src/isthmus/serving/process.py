"""Start a server process that ends with its parent.

Settings include the Redis password. Environment variables are visible to all processes of the user and inherited by
children, so settings are passed in an in-memory file instead.
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
    """Start a server as a child process that ends with this process. Returns at once, before the server answers.

    Call it from a thread that outlives the server: Linux ends the child with the thread that started it. The child
    inherits no environment variables that start with `ISTHMUS_`.

    Args:
        settings: settings of the server.
        log: file for the server's log; default: this process's stderr.
    """
    descriptor = _file_of(settings)
    arguments = [*_command(descriptor), "--parent", str(os.getpid())]
    try:
        return subprocess.Popen(arguments, env=_environment(), stderr=log, pass_fds=[descriptor])  # noqa: S603 - ours
    finally:
        os.close(descriptor)


def become(settings: ServerSettings) -> NoReturn:
    """Replace this process with the server, which keeps its process id. Does not return.

    The server inherits no environment variables that start with `ISTHMUS_`.
    """
    descriptor = _file_of(settings)
    os.set_inheritable(descriptor, True)
    arguments = _command(descriptor)
    os.execve(arguments[0], arguments, _environment())  # noqa: S606 - this interpreter, our own module


def serve(settings: ServerSettings) -> int:
    """Run a server in a child process until it ends, and return its exit code.

    The child loads only the server's modules, not the others that this process has loaded. While waiting, this process
    forwards SIGTERM to the child and ignores SIGINT: Ctrl-C reaches the child through the terminal. Call it from the
    main thread.
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
    """Read the settings passed by `start` or `become`, and close the file descriptor."""
    with open(descriptor, "rb") as file:
        return ServerSettings.decode(file.read(), "--settings-fd")


def end_with(parent: int) -> None:
    """Make this process receive SIGTERM when its parent ends; at once if the process `parent` has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended already
        signal.raise_signal(signal.SIGTERM)


def listen(where: str, host: str, port: int, remedy: str) -> socket.socket:
    """Open a listening socket; port 0 picks a free port.

    Raises:
        ConfigurationError: the port is in use or not permitted (`remedy` says what to do), or this machine does not
            have the host's address. `where` begins the message.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        # Python appends the address, which our message has already.
        reason = str(error.strerror).partition(" (while")[0]
        expected = "a free port"
        # Negative numbers are errors of name lookup.
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
    """Return the environment without the project's variables, such as its signing key."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("ISTHMUS_")}
