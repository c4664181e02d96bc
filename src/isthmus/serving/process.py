"""Start server processes. Settings go through an in-memory file: environments would reveal the Redis password."""

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
    """Start the server as a child process that ends when this process ends. Return the process before it is ready.

    With `log`, the server writes its log to that file in place of stderr. Call this from a thread that lives as long as
    the server: Linux ends the child process with the thread that started it. The child does not inherit environment
    variables that start with `ISTHMUS_`.
    """
    descriptor = _file_of(settings)
    arguments = [*_command(descriptor), "--parent", str(os.getpid())]
    try:
        return subprocess.Popen(arguments, env=_environment(), stderr=log, pass_fds=[descriptor])  # noqa: S603 - ours
    finally:
        os.close(descriptor)


def replace_with_server(settings: ServerSettings) -> NoReturn:
    """Replace this process with the server process (exec). Use this if the caller has nothing to stop after it.

    The server does not inherit environment variables that start with `ISTHMUS_`.
    """
    descriptor = _file_of(settings)
    os.set_inheritable(descriptor, True)
    arguments = _command(descriptor)
    os.execve(arguments[0], arguments, _environment())  # noqa: S606 - this interpreter, our own module


def serve(settings: ServerSettings) -> int:
    """Run the server in a child process and wait until it ends. Return its exit code.

    The child loads only the modules of the server. Call this from the main thread. Until the child ends, SIGTERM is
    passed on to the child, and SIGINT is ignored: after Ctrl-C, the terminal sends SIGINT to the child, too.
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
    with open(descriptor, "rb") as file:
        return ServerSettings.decode(file.read(), "--settings-fd")


def end_with_parent(parent: int) -> None:
    """Ask Linux to send SIGTERM to this process when its parent process ends, so that no orphan keeps running.

    `parent` is the process id of the parent when it started this process. If that process has ended already, this
    process gets SIGTERM at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended already
        signal.raise_signal(signal.SIGTERM)


def listen(where: str, host: str, port: int, remedy: str) -> socket.socket:
    """Open a listening TCP socket. Port 0 chooses a free port.

    Raises a ConfigurationError if the port is in use or the host is not an address of this machine. `where` names the
    command or component in the error, and `remedy` says what to do about a port in use.
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
    """Return the environment without the project's variables, such as the password of its signing key."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith("ISTHMUS_")}
