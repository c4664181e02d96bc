"""The server process: uvicorn, which answered half again as many requests as granian when one worker was measured."""

import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from starlette.types import ASGIApp
from uvicorn.supervisors import Multiprocess

from isthmus.features.errors import IsthmusError, harmless
from isthmus.serving import log
from isthmus.serving.http.protocol import WAIT_SECONDS, Configuration, Connection
from isthmus.serving.process import end_with, listen, received
from isthmus.serving.settings import METRICS_FOLDER, ServerSettings


def main(settings: int | None = None, parent: int | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code.

    Args:
        settings: the descriptor of a file with the settings; without, the environment has them.
        parent: the process with which the server ends, if any.
    """
    log.configure()
    if parent is not None:
        end_with(parent)
    try:
        run(ServerSettings.from_environment() if settings is None else received(settings))
    except IsthmusError as error:
        if sys.stderr.isatty():
            # Nobody collects this log: it is a person who reads it.
            sys.stderr.write(f"isthmus: {harmless(str(error))}\n")
        else:
            log.error("server refused", problem=str(error))
        return error.exit_code
    return 0


def run(settings: ServerSettings) -> None:
    """Serves until SIGTERM or SIGINT, after which requests under way are still answered."""
    # A connection is an open file, and the usual limit of 1,024 is for programs that use select().
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    remedy = "end what listens there, or choose another port"
    listener = listen("server", settings.host, settings.port, remedy)
    host, port = listener.getsockname()[:2]
    log.info("listening", host=host, port=port, workers=settings.workers)
    config = Configuration(
        _Application(settings, os.getpid()),
        factory=True,
        workers=settings.workers,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        loop="uvloop",
        http=Connection,
        ws="none",
        timeout_keep_alive=int(WAIT_SECONDS),
        # Longer than any request may take: what is under way is answered, what hangs is abandoned.
        timeout_graceful_shutdown=math.ceil(settings.limits.deadline_seconds) + 1,
    )
    config.limits = settings.limits
    if settings.workers == 1:
        _Server(config).run([listener])
    else:
        with TemporaryDirectory(prefix="isthmus-metrics-") as folder:
            os.environ[METRICS_FOLDER] = folder
            _Workers(config, [listener], folder).run()


@dataclass(frozen=True)
class _Application:
    """Makes the application of a process: the server itself or a worker, which receives this through a pipe."""

    settings: ServerSettings
    server: int

    def __call__(self) -> ASGIApp:
        if os.getpid() != self.server:
            end_with(self.server)
        # Here, because the parent of workers has no need of it.
        from isthmus.serving.http.app import create

        return create(self.settings)


class _Server(uvicorn.Server):
    """Uvicorn, but a signal that ends it in order is no failure: Uvicorn would raise it again at the end."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Not restored at the end either: a second signal finds a process that is ending anyway.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        yield


class _Workers(Multiprocess):
    """Uvicorn's workers, but at the end the listener is closed first, and the gauges of a dead worker are dropped.

    Workers close their listener when they end. As long as this process had its own, the system would go on accepting
    connections that nobody ever answers.
    """

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
