"""The server process. It runs uvicorn, which answered 1.5 times as many requests as granian with one worker."""

import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory

import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from starlette.types import ASGIApp
from uvicorn.supervisors import Multiprocess

from isthmus.features.errors import IsthmusError, escape_unprintable
from isthmus.serving import log
from isthmus.serving.http.protocol import IDLE_SECONDS, Configuration, Connection
from isthmus.serving.process import end_with_parent, listen, received
from isthmus.serving.settings import METRICS_FOLDER, ServerSettings


def main(settings: int | None = None, parent: int | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code of the process. Writes an IsthmusError to stderr.

    Reads the server settings from the file descriptor `settings`, or from the variable `ISTHMUS_SERVER` if it is None.
    With a process id `parent`, the server also ends when that process ends. Replaces the handlers of Python's root
    logger.
    """
    log.configure()
    if parent is not None:
        end_with_parent(parent)
    try:
        run(ServerSettings.from_environment() if settings is None else received(settings))
    except IsthmusError as error:
        if sys.stderr.isatty():
            # A person reads this terminal, not a log collector.
            sys.stderr.write(f"isthmus: {escape_unprintable(str(error))}\n")
        else:
            log.error("server refused", problem=str(error))
        return error.exit_code
    return 0


def run(settings: ServerSettings) -> None:
    """Serve HTTP until SIGTERM or SIGINT, then finish the requests in progress. Each of several workers is a process.

    Replaces the handlers of both signals, and raises this process's limit on open files. With several workers, sets the
    variable `ISTHMUS_METRICS` to a temporary folder that they share. Raises ConfigurationError if it cannot listen.
    """
    # Each connection needs a file descriptor. The usual soft limit of 1,024 is for programs that use select().
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    remedy = "stop the program that uses it, or choose another port"
    listener = listen("server", settings.host, settings.port, remedy)
    host, port = listener.getsockname()[:2]
    log.info("listening", host=host, port=port, workers=settings.workers)
    config = Configuration(
        partial(_application, settings, os.getpid()),
        factory=True,
        workers=settings.workers,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        loop="uvloop",
        http=Connection,
        ws="none",
        timeout_keep_alive=IDLE_SECONDS,
        # Longer than the deadline, so that requests in progress are answered and hung ones abandoned.
        timeout_graceful_shutdown=math.ceil(settings.limits.deadline_seconds) + 1,
    )
    config.limits = settings.limits
    if settings.workers == 1:
        _Server(config).run([listener])
    else:
        with TemporaryDirectory(prefix="isthmus-metrics-") as folder:
            os.environ[METRICS_FOLDER] = folder
            _Workers(config, [listener], folder).run()


def _application(settings: ServerSettings, server: int) -> ASGIApp:
    """Create the application, in the process `server` itself or in a worker process, which ends with `server`."""
    if os.getpid() != server:
        end_with_parent(server)
    # Import here because the parent of workers does not need it.
    from isthmus.serving.http.app import create

    return create(settings)


class _Server(uvicorn.Server):
    """A uvicorn server that treats SIGINT and SIGTERM as normal ends. Uvicorn would raise them again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Do not restore the handlers: a second signal finds a process that is ending anyway.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield


class _Workers(Multiprocess):
    """Uvicorn's workers. At the end, it closes the listener first: no connection may wait for dead workers."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], folder: str) -> None:
        super().__init__(config, sockets)
        self._folder = folder
        self._counting: frozenset[int | None] = frozenset()

    def terminate_all(self) -> None:
        for listener in self.sockets:
            listener.close()
        super().terminate_all()

    def keep_subprocess_alive(self) -> None:
        super().keep_subprocess_alive()
        alive = frozenset(process.pid for process in self.processes)
        for dead in self._counting - alive:
            mark_process_dead(dead, self._folder)  # type: ignore[no-untyped-call]  # so in prometheus_client
        self._counting = alive
