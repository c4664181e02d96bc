"""`deploy`: puts a package behind the API."""

from typing import Any

import msgspec

from isthmus.features import clock
from isthmus.features.offline import OfflineStore
from isthmus.features.verdict import Verdict
from isthmus.orchestration.models import last_package, require_release
from isthmus.orchestration.papers import serving_profile
from isthmus.orchestration.project import Project
from isthmus.orchestration.trainingset import distillation
from isthmus.orchestration.verification import verdict_file
from isthmus.serving import deployment
from isthmus.serving.deployment import Deployment


def deploy(project: Project, name: str | None = None) -> Deployment:
    """Puts the last package of a distillation behind the API. A running server takes it up by itself.

    Args:
        project: the project, with a package and a verdict.
        name: the distillation; may be left out where there is only one.

    Raises:
        GateFailed: there is no passing verdict for this package under this contract, what it costs to train or to
            serve it has not been measured, or a gate does not hold.
        PackageError: the package is damaged or altered, or not signed by whom it must be.
    """
    declared = distillation(project, name)
    require_release(project, declared)
    contract, store = project.applied(), OfflineStore(project.offline)
    views = [contract.view(view) for view in {view for view, _ in contract.read(declared.student.name)}]
    file = verdict_file(project, declared)
    verdict = Verdict.loads(file.read_bytes(), str(file)) if file.exists() else None
    package = last_package(project, declared)
    return deployment.deploy(
        package,
        verdict,
        contract,
        serving_profile(project, package),
        project.deployment_file,
        tables={view.name: store.fingerprint(store.history(view)) for view in views},
        at=clock.now(),
        public_key=project.public_key,
    )


def deployed(deployment: Deployment) -> dict[str, Any]:
    """A deployment in its machine-readable form."""
    report: dict[str, Any] = msgspec.to_builtins(deployment)
    return report
