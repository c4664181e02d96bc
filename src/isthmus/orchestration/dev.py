"""`isthmus dev`: run Dagster and the API of a project."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from isthmus.features.errors import DependencyError
from isthmus.orchestration import supervisor
from isthmus.orchestration.graph.instance import dagster_home
from isthmus.orchestration.graph.outline import outline
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import address, serving, url_host
from isthmus.serving.process import listen


def dev(project: Project, *, host: str = "127.0.0.1", port: int | None = None) -> int:
    """Run Dagster and the project's API as child processes, for development, until Ctrl-C or SIGTERM; then return 0.

    `host` and `port` (default: `[dev] port` of isthmus.toml) are the address of the Dagster UI. Starts the embedded
    Redis, too, unless the project uses another one. Collects pushed rows and recorded answers, and reads streams, in
    this process. The child processes log to `logs` in the state folder. Call it in the main thread, because it sets
    signal handlers. Raise ConfigurationError if a port is in use or the definitions have errors, and DependencyError if
    Dagster is not installed or a child process exits.
    """
    _require_free(host, project.settings.dev.port if port is None else port, "--port or [dev] port")
    _require_free(project.settings.server.host, project.settings.server.port, "[server] port")
    # Compile first, so that errors in the definitions show here and not in the browser.
    outline(project.root)
    home = dagster_home(project)
    settings = project.settings
    page = settings.dev.port if port is None else port
    url = f"http://{url_host(host)}:{page}"
    starting = {f"Dagster is ready: {url}/asset-groups": f"{url}/server_info"}
    if settings.server.port:
        url = address(project)
        starting[f"the API is ready: {url}/docs, and /status"] = f"{url}/healthz"
    command = [
        sys.executable, "-P", "-m", "isthmus.orchestration.server.dagster", "dev",
        "--module-name", "isthmus.orchestration.definitions", "--host", host,
        "--port", str(page), "--log-level", settings.dev.log_level,
    ]  # fmt: skip
    environment = {
        **os.environ, "DAGSTER_HOME": str(home), "ISTHMUS_ROOT": str(project.root),
        "DAGSTER_ALLOWED_HOSTS": ",".join(settings.server.hosts),
    }  # fmt: skip
    logs = project.state / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    stopping: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        stopping.append(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with (
            (logs / "server.log").open("ab") as server_log,
            (logs / "dagster.log").open("ab") as dagster_log,
            serving(project, log=server_log) as api,
            _running(command, environment, project.root, dagster_log) as ui,
            _collecting(project),
        ):
            _say(f"starting Dagster and the API; they log to {logs}")
            if not settings.server.port:
                _say(f"the API uses a free port; see {logs / 'server.log'}")
            while not stopping and ui.poll() is None and api.poll() is None:
                for text in [text for text, address in starting.items() if _answers(address)]:
                    if starting[text].endswith("/server_info"):
                        _require_guard(starting[text])
                    _say(text)
                    del starting[text]
                    if not starting:
                        _say("press Ctrl-C to stop both")
                time.sleep(0.2)
            if not stopping:
                ended = "dagster" if ui.poll() is not None else "server"
                raise DependencyError("isthmus dev", f"the {ended} process exited unexpectedly",
                                      remedy=f"see {logs / ended}.log")  # fmt: skip
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


@contextmanager
def _collecting(project: Project) -> Iterator[None]:
    from isthmus.orchestration.recording.collect import follow as follow_answers
    from isthmus.orchestration.server.collect import follow
    from isthmus.orchestration.streams.stream import follow as follow_streams

    stopped = threading.Event()
    works = [follow] if project.settings.server.record is None else [follow, follow_answers]
    if any(view.streams for view in project.definitions.views.values()):
        works.append(follow_streams)
    threads = [threading.Thread(target=work, args=(project, _say, stopped), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join(supervisor.GRACE_SECONDS)


def _require_free(host: str, port: int, where: str) -> None:
    """Raise an error if the port is in use, since another server on it would be mistaken for ours."""
    listen("isthmus dev", host, port, f"choose another port with {where}, or stop the process that uses it").close()


def _say(text: str) -> None:
    sys.stderr.write(f"isthmus: {text}\n")
    sys.stderr.flush()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=1):  # noqa: S310 - a server of ours
            return True
    except OSError:
        return False


@contextmanager
def _running(
    command: list[str], environment: dict[str, str], folder: Path, log: IO[bytes]
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a command under a supervisor in a new session, so that only this process receives Ctrl-C."""
    supervised = [sys.executable, "-I", "-S", supervisor.__file__, *command]
    child = subprocess.Popen(  # noqa: S603 - dagster, beside this interpreter
        supervised, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
    )
    try:
        yield child
    finally:
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=supervisor.GRACE_SECONDS + 5)  # closes its stdin
        # If the supervisor was killed, its process group still runs.
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _require_guard(url: str) -> None:
    """Raise DependencyError if Dagster's web server accepts requests from other web sites, which could control it."""
    request = urllib.request.Request(url, headers={"Sec-Fetch-Site": "cross-site"})  # noqa: S310 - a server of ours
    with suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=10):  # noqa: S310 - likewise
        raise DependencyError("isthmus dev", "Dagster accepts requests from other web sites",
                              remedy="install the version of Dagster that Isthmus requires")  # fmt: skip
