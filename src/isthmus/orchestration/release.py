"""`deploy` and `serve`: puts a package behind the API, and runs the API."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import msgspec

from isthmus.features import clock
from isthmus.features.offline import OfflineStore
from isthmus.features.verdict import Verdict
from isthmus.orchestration.materialization import redis_url
from isthmus.orchestration.models import last_package
from isthmus.orchestration.project import Project
from isthmus.orchestration.trainingset import distillation
from isthmus.orchestration.verification import verdict_file
from isthmus.serving import deployment
from isthmus.serving.deployment import Deployment
from isthmus.serving.settings import ServerSettings, command
from isthmus.serving.settings import serve as run_server


def deploy(project: Project, name: str | None = None) -> Deployment:
    """Puts the last package of a distillation behind the API. A running server takes it up by itself.

    Args:
        project: the project, with a package and a verdict.
        name: the distillation; may be left out where there is only one.

    Raises:
        GateFailed: there is no passing verdict for this package under this contract.
        PackageError: the package is damaged or altered.
    """
    declared = distillation(project, name)
    contract, store = project.applied(), OfflineStore(project.offline)
    views = [contract.view(view) for view in {view for view, _ in contract.service(declared.student.name).features}]
    file = verdict_file(project, declared)
    verdict = Verdict.loads(file.read_bytes(), str(file)) if file.exists() else None
    return deployment.deploy(
        last_package(project, declared),
        verdict,
        contract,
        project.settings.profiles.serving,
        project.deployment_file,
        tables={view.name: store.fingerprint(store.history(view)) for view in views},
        at=clock.now(),
    )


def serve(project: Project, *, port: int | None = None) -> int:
    """Runs the API until it is told to stop; returns its exit code.

    Over a Redis of the user's own this process becomes the server and does not return: what it has loaded to read the
    project would only take memory beside it. The embedded Redis needs somebody who stops it at the end.
    """
    configured = project.settings.stores.online
    if configured != "embedded":
        arguments, environment = command(settings(project, configured, port))
        os.execve(arguments[0], arguments, environment)  # noqa: S606 - this interpreter, our own module
    with redis_url(project) as url:
        return run_server(settings(project, url, port))


@contextmanager
def serving(
    project: Project, *, port: int | None = None, log: IO[bytes] | None = None
) -> "Iterator[subprocess.Popen[bytes]]":
    """The API as a child process that ends with the block; it logs to `log`, or to this process's stderr."""
    with redis_url(project) as url:
        arguments, environment = command(settings(project, url, port))
        child = subprocess.Popen(arguments, env=environment, stderr=log)  # noqa: S603 - this interpreter, our own module
        try:
            yield child
        finally:
            child.terminate()
            child.wait(10)


def settings(project: Project, url: str, port: int | None = None) -> ServerSettings:
    """What a server of the project is told."""
    server = project.settings.server
    return ServerSettings(
        contract=str(project.contract_file),
        deployment=str(project.deployment_file),
        redis=url,
        keys=str(project.keys_file),
        host=server.host,
        port=server.port if port is None else port,
        workers=server.workers,
        limits=server.limits,
        now=project.fixed_now,
    )


def deployed(deployment: Deployment) -> dict[str, Any]:
    """A deployment in its machine-readable form."""
    report: dict[str, Any] = msgspec.to_builtins(deployment)
    return report
