"""`isthmus deploy` and `isthmus deploy rollback`. Running servers load a new deployment on their own."""

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from isthmus.distill.gates import DEVICE, bounds_on
from isthmus.features import clock
from isthmus.features.contract.generations import Generations
from isthmus.features.errors import RequestError
from isthmus.orchestration.artifacts import Artifacts, serving_profile, verdict_file
from isthmus.orchestration.models.students import require_release
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import address
from isthmus.package.manifest import open_package, read_contract
from isthmus.package.replay import require_device
from isthmus.package.verdict import Verdict
from isthmus.serving.deployment.record import Deployment
from isthmus.serving.rollout import releases
from isthmus.serving.rollout.releases import Rollout, full_history

SWITCH_SECONDS = 5.0  # how long to wait for a running server to load a deployment
_PAUSE_SECONDS = 0.02


@dataclass(frozen=True)
class ReleaseReport:
    """Result of a deployment or rollback. `server` says in words whether the project's server has switched."""

    rollout: Rollout
    server: str

    @property
    def deployment(self) -> Deployment:
        return self.rollout.deployment

    def as_dict(self) -> dict[str, Any]:
        return {**self.rollout.as_dict(), "server": self.server}


def deploy(project: Project, name: str | None = None, *, share: float | None = None) -> ReleaseReport:
    """Deploy the latest package of a distillation: for all requests, or with `share`, as a candidate on trial.

    Without `share`, the package replaces the deployed package and any candidate. It is then on probation, if it
    replaces a package of the same model: servers roll it back if it fails. With `share`, the package runs beside the
    deployed one and answers this fraction of the requests, at least 0 and below 1. With 0, its answers are only
    compared. A candidate replaces an earlier one, and ends the probation of the deployed package. Writes the deployment
    file, its history and the cache of recent packages. Then waits up to 5 seconds for the project's server to switch. A
    server that does not switch raises no error.

    Raise GateFailed if the package has no passing verdict or measured cost, if a gate or a bound on devices fails, or
    if a candidate does not fit the deployed package. Raise PackageError if the package is damaged, lacks a required
    signature, or cannot be loaded. Raise ContractMismatch if the definitions are not applied, or features that the
    package reads have changed. Raise DataError if nothing was exported, and DependencyError if another deployment is in
    progress, or if the device of the serving profile is not available here.
    """
    if share is not None and not 0 <= share < 1:
        raise RequestError("deployment", f"the share is {share:g}", expected="a number of at least 0 and below 1")
    require_device(project.settings.profiles.serving.device)
    artifacts = Artifacts.of(project, name)
    declared = artifacts.declared
    require_release(project, declared)
    if bounds_on(declared.bounds, DEVICE):
        from isthmus.orchestration.models.devices import device_bounds, require_device_bounds

        require_device_bounds(declared.name, device_bounds(project, declared))
    contract, store = project.applied(), project.offline_store()
    package = artifacts.last_package()
    views = {view for view, _ in contract.stored_features(declared.student.name)}
    file = verdict_file(project, declared)
    verdict = Verdict.loads(file.read_bytes(), str(file)) if file.exists() else None
    with _contracts(project) as contracts:
        contracts.require_compatible(
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


def promote(project: Project) -> ReleaseReport:
    """Replace the deployed package by the candidate, the package that runs beside it on trial.

    For the next `probation_seconds` of the serving profile, servers roll it back if it fails. Writes the deployment
    file and its history, then waits up to 5 seconds for the project's server to switch. Raise GateFailed if there is no
    candidate, or a server has rejected it. Raise PackageError if its package is gone or damaged, or lacks the required
    signature. Raise ContractMismatch if features that the package reads have changed, and DependencyError if another
    deployment is in progress.
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


def rollback(project: Project, to: str | None = None) -> ReleaseReport:
    """Remove the candidate (the package on trial). If there is none, restore the deployment before the current one.

    With `to`, the start of a package's digest, restore that package's deployment and also remove a candidate. After an
    automatic rollback, `to` is required. Writes the deployment file and its history, then waits up to 5 seconds for the
    project's server to switch. Raise GateFailed if no earlier deployment exists, or `to` does not name exactly one of
    them. Raise PackageError, ContractMismatch and DependencyError in the same cases as `promote`.
    """
    key = project.public_key
    with _contracts(project) as contracts:
        done = releases.rollback(project.deployment_file, contracts, at=clock.now(), to=to, public_key=key)
    return _released(project, done)


def undo(project: Project, deployment: Deployment, why: str) -> bool:
    """Restore the deployment that `deployment` replaced, after monitoring found that the new package is worse.

    `why` is the reason, for the deployment file and its history. Works after the probation, too. Does not wait for
    servers to switch. Return False, and change nothing, if `deployment` is no longer deployed or never had a probation.
    Raise PackageError if the earlier package is gone or damaged, or lacks the required signature. Raise
    ContractMismatch if features that it reads have changed, and DependencyError if another deployment is in progress.
    """
    with _contracts(project) as contracts:
        return releases.undo(
            project.deployment_file, deployment, why, at=clock.now(), generations=contracts,
            public_key=project.public_key,
        )  # fmt: skip


@contextmanager
def _contracts(project: Project) -> Iterator[Generations]:
    """Yield the project's contracts, and keep other processes from removing any of them during the block."""
    project.last_applied()
    with project.locked("retirement", shared=True):
        yield project.generations()


def history(project: Project) -> list[dict[str, Any]]:
    return [event.as_dict() for event in reversed(full_history(project.deployment_file))]


def _released(project: Project, done: Rollout) -> ReleaseReport:
    server = _await_switch(project, done.deployment)
    done.done("switch")
    return ReleaseReport(done, server)


def _await_switch(project: Project, deployment: Deployment) -> str:
    url = address(project)
    end = time.monotonic() + SWITCH_SECONDS
    message = f"no server answers at {url}; a server at another port switches on its own"
    # The same package may be deployed again, with another profile.
    candidate = deployment.candidate and deployment.candidate.deployment.digest
    expected = deployment.digest, deployment.deployed_at, candidate
    try:
        with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=SWITCH_SECONDS)) as server:
            status, answer = _get(server, "/readyz")
            if status in (401, 403):
                return "requires an API key: check /models to see whether it has switched"
            if status == 200 and answer.get("project") != project.name:
                return message
            while time.monotonic() < end:
                _, answer = _get(server, "/models")
                models = answer.get("models", ())
                if any(_release_of(model) == expected for model in models):
                    return "has switched"
                if any(model.get("undone", {}).get("package") == deployment.digest for model in models):
                    return "has switched and rolled the deployment back: see `isthmus deploy history`"
                message = f"has not switched: {answer.get('refused') or 'it still serves the previous package'}"
                time.sleep(_PAUSE_SECONDS)
    except (OSError, http.client.HTTPException, ValueError):
        return message
    return message


def _release_of(model: dict[str, Any]) -> tuple[str, int, str | None]:
    return model["package"], model["deployed_at"], model.get("candidate", {}).get("package")


def _get(server: http.client.HTTPConnection, path: str) -> tuple[int, dict[str, Any]]:
    server.request("GET", path)
    response = server.getresponse()
    answer: dict[str, Any] = json.loads(response.read())
    return response.status, answer
