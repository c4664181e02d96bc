"""`isthmus serve`: run the API of a project. Imports only what starting a server needs."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from isthmus.features.files import write_atomically
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.secret import read_or_create_secret
from isthmus.package.replay import require_device
from isthmus.serving.process import replace_with_server, start
from isthmus.serving.process import serve as run_server
from isthmus.serving.settings import ServerSettings

FEAST_SERVER = re.compile(rb"^  path: (http.*)$", re.MULTILINE)  # server address in Feast's feature_store.yaml
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - how to reach a server that listens on all addresses


def serve(project: Project, *, port: int | None = None) -> int:
    """Run the API in the foreground until it is stopped, and return its exit code. `port` overrides the setting.

    Call it in the main thread. First writes the API's address to the Feast files of the project, for Feast's clients.
    If the server records answers, creates the secret that hashes private join keys, if it is missing. Starts an
    embedded Redis, and stops it at the end. If Redis is not embedded, the server replaces this process (exec), and the
    function does not return. Raises a ConfigurationError if a freshness objective names an unknown view.
    """
    _name_to_feast(project, port)
    configured = project.settings.stores.online
    if configured != "embedded":
        replace_with_server(settings(project, configured, port))
    with project.redis() as url:
        return run_server(settings(project, url, port))


@contextmanager
def serving(
    project: Project, *, port: int | None = None, log: IO[bytes] | None = None, private: bool = False
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run the API as a child process during a `with` block, and yield the process.

    The block may begin before the API is ready. `port` overrides the setting. The API logs to `log`, by default to
    stderr. Starts Redis if it is embedded. A `private` API listens on loopback, needs no keys and records nothing.
    Unless `private`, writes the API's address to the project's Feast files.
    """
    if not private:
        _name_to_feast(project, port)
    with project.redis() as url, running(settings(project, url, port, private=private), log) as child:
        yield child


def address(project: Project, port: int | None = None) -> str:
    server = project.settings.server
    return f"http://{url_host(server.host)}:{server.port if port is None else port}"


def url_host(host: str) -> str:
    host = _LOOPBACK.get(host, host)
    return f"[{host}]" if ":" in host else host


@contextmanager
def running(settings: ServerSettings, log: IO[bytes] | None = None) -> "Iterator[subprocess.Popen[bytes]]":
    child = start(settings, log)
    try:
        yield child
    finally:
        child.terminate()
        try:
            # Wait longer than the deadline of pending requests.
            child.wait(settings.limits.deadline_seconds + 5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def settings(project: Project, url: str, port: int | None = None, *, private: bool = False) -> ServerSettings:
    """Return the settings with which to start a server of the project.

    `url` is the Redis of the server, and `port` overrides the port in the project's settings. A `private` server
    listens on loopback, needs no key and records nothing. If the server records answers, the first call creates the
    secret that hashes private join keys. Raises ConfigurationError if the freshness objectives in the project's
    settings name unknown views, and DependencyError if the device of the serving profile is not available.
    """
    server, profiles = project.settings.server, project.settings.profiles
    require_device(profiles.serving.device)
    record = None if private else project.recording()
    return ServerSettings(
        contract=str(project.contract_file),
        deployment=str(project.deployment_file),
        redis=url,
        snapshots=str(project.snapshots),
        keys=None if private else str(project.keys_file),
        require_keys=server.require_keys and not private,
        hosts=server.hosts,
        check_share=server.check_share,
        # A verdict reports missing rows one by one, so lookups must return them as null.
        missing="null" if private else server.missing,
        host="127.0.0.1" if private else server.host,
        port=server.port if port is None else port,
        workers=server.workers,
        limits=server.limits,
        batch=profiles.serving.batch,
        public_key=project.public_key,
        latency=str(project.latency_folder) if profiles.training.give_way and not private else None,
        latency_objective_ms=project.settings.latency_objective_ms,
        freshness_objective_seconds={} if private else project.freshness_objectives(),
        history_seconds=project.settings.stores.history_seconds,
        record=record,
        spool=None if record is None else str(project.spool),
        spool_key="" if record is None else read_or_create_secret(project).hex(),
        now=project.fixed_now,
    )


def _name_to_feast(project: Project, port: int | None) -> None:
    for file in (project.state / "feast").rglob("feature_store.yaml"):
        # A server does not need these files, so a missing file or permission is not an error.
        with suppress(OSError):
            before = file.read_bytes()
            text = FEAST_SERVER.sub(f"  path: {address(project, port)}".encode(), before)
            if text != before and not address(project, port).endswith(":0"):
                write_atomically(file, text)
