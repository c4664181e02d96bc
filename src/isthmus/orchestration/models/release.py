"""`deploy`, `promote` and `rollback`: put a package behind the API, and the package before it again.

A running server takes up the change by itself.
"""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from isthmus.features import clock
from isthmus.features.contract.generations import Generations
from isthmus.orchestration.artifacts import Artifacts, serving_profile, verdict_file
from isthmus.orchestration.models.students import require_release
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import address
from isthmus.package.manifest import open_package, read_contract
from isthmus.package.verdict import Verdict
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.rollout import releases
from isthmus.serving.rollout.releases import Rollout, happened

SWITCH_SECONDS = 5.0
"""How long to wait for a running server, which looks for a new deployment and loads it."""
_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class Released:
    """The outcome of a deployment or a rollback: what it took, and what the server of the project says of it."""

    rollout: Rollout
    server: str

    @property
    def deployment(self) -> Deployment:
        """What is in force."""
        return self.rollout.deployment

    def as_dict(self) -> dict[str, Any]:
        """The deployment in its machine-readable form, with bytes moved and seconds per stage."""
        return {**self.rollout.as_dict(), "server": self.server}


def deploy(project: Project, name: str | None = None, *, share: float | None = None) -> Released:
    """Puts the last package of a distillation behind the API, beside what is deployed or instead.

    `share` is that of the requests that it answers beside it; 0 for a shadow; None to replace what is deployed.

    Raises:
        GateFailed: there is no passing verdict for this package under this contract, what it costs to train or to
            serve it has not been measured, or a gate does not hold.
        PackageError: the package is damaged or altered, not signed by whom it must be, or cannot be loaded.
        DependencyError: another deployment is under way.
    """
    artifacts = Artifacts.of(project, name)
    declared = artifacts.declared
    require_release(project, declared)
    contract, store = project.applied(), project.offline_store()
    package = artifacts.last_package()
    views = {view for view, _ in contract.read(declared.student.name)}
    file = verdict_file(project, declared)
    verdict = Verdict.loads(file.read_bytes(), str(file)) if file.exists() else None
    with _contracts(project) as contracts:
        contracts.require_model(
            f"package of {declared.name}", read_contract(open_package(package)), declared.student.name
        )
        done = releases.deploy(
            package,
            verdict,
            contract,
            serving_profile(project, package),
            project.deployment_file,
            tables={view: store.base(contract.view(view)) for view in views},
            at=clock.now(),
            public_key=project.public_key,
            share=share,
        )
    return _released(project, done)


def promote(project: Project) -> Released:
    """Puts the candidate in force.

    Raises:
        GateFailed: there is no candidate, or it was given up.
        PackageError: its package is gone, damaged, or not signed by whom it must be.
        ContractMismatch: nothing is applied, or what its model reads has changed since.
        DependencyError: another deployment is under way.
    """
    with _contracts(project) as contracts:
        done = releases.promote(
            project.deployment_file,
            contracts,
            at=clock.now(),
            probation_seconds=project.settings.profiles.serving.probation_seconds,
            public_key=project.public_key,
        )
    return _released(project, done)


def rollback(project: Project, to: str | None = None) -> Released:
    """Drops the candidate, if there is one; else puts an earlier deployment behind the API again.

    `to` is how the digest of that deployment begins; the default is the deployment before the current one.

    Errors: see `promote`; and a GateFailed if there is nothing to go back to.
    """
    key = project.public_key
    with _contracts(project) as contracts:
        done = releases.rollback(project.deployment_file, contracts, at=clock.now(), to=to, public_key=key)
    return _released(project, done)


def undo(project: Project, deployment: Deployment, why: str) -> bool:
    """Puts the deployment before this one behind the API again, with the reason on record; whether it was to be done.

    Errors: see `promote`.
    """
    with _contracts(project) as contracts:
        return releases.undo(
            project.deployment_file, deployment, why, at=clock.now(), generations=contracts,
            public_key=project.public_key,
        )  # fmt: skip


@contextmanager
def _contracts(project: Project) -> Iterator[Generations]:
    """Those of the project, of which none is forgotten within the block.

    Not that of the definitions: neither promotion nor rollback waits for a new apply.
    """
    project.last_applied()
    with project.locked("retirement", shared=True):
        yield project.generations()


def history(project: Project) -> list[dict[str, Any]]:
    """The deployments and rollbacks, the newest first."""
    return [event.as_dict() for event in reversed(happened(project.deployment_file))]


def _released(project: Project, done: Rollout) -> Released:
    server = _await_switch(project, done.deployment)
    done.done("switch")
    return Released(done, server)


def _await_switch(project: Project, deployment: Deployment) -> str:
    """Waits until the project's server answers with a package, and says in words how that ended."""
    url = address(project)
    end = time.monotonic() + SWITCH_SECONDS
    message = f"none answers at {url}; one at another port switches by itself"
    wanted = deployment.digest, deployment.candidate and deployment.candidate.deployment.digest
    try:
        with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=SWITCH_SECONDS)) as server:
            status, answer = _get(server, "/readyz")
            if status in (401, 403):
                return "answers those with a key: its /models says whether it has switched"
            if status == 200 and answer.get("project") != project.name:
                return message
            while time.monotonic() < end:
                _, answer = _get(server, "/models")
                models = answer.get("models", ())
                if any((model["package"], model.get("candidate", {}).get("package")) == wanted for model in models):
                    return "has switched"
                if any(model.get("undone", {}).get("package") == deployment.digest for model in models):
                    return "has switched, and undone the deployment: see `isthmus history`"
                message = f"has not switched: {answer.get('refused') or 'it still answers with the package before'}"
                time.sleep(_PAUSE_SECONDS)
    except (OSError, http.client.HTTPException, ValueError):
        return message
    return message


def _get(server: http.client.HTTPConnection, path: str) -> tuple[int, dict[str, Any]]:
    server.request("GET", path)
    response = server.getresponse()
    answer: dict[str, Any] = json.loads(response.read())
    return response.status, answer
