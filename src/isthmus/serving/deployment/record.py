"""The deployment file: the deployed package, its verdict (`Approval`), candidate, probation, and an undone one."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from isthmus.features.contract.diff import require_service
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import GateFailed, PackageError
from isthmus.features.profiles import ServingDevice, ServingProfile
from isthmus.package.inspect import ServedRuntime
from isthmus.package.manifest import Manifest, Package, open_package, read_contract
from isthmus.package.signature import require_signature
from isthmus.package.verdict import Verdict

CACHE = "deployments"
"""Folder next to a deployment file that holds the deployed packages, by digest."""

_VERIFY = "run `isthmus verify` and deploy again"


class Approval(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The verdict of a deployment: its time in microseconds, values compared, and sentences on its `limits`."""

    at: int
    compared: int
    limits: tuple[str, ...] = ()


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployed package. In a file, `package` is relative to the folder, so a copied project uses its own packages.

    Attributes:
        contract: hash of the contract the package was exported under.
        threads: CPU threads per prediction.
        device: device of the predictions.
        deployed_at: microseconds since 1970 UTC.
        public_key: PEM key that the package must be signed with, or None.
        candidate: package on trial next to this one, if any.
        probation: deployment to restore if this one fails, if any.
        undone: failed deployment that a server replaced with this one, if any.
    """

    model: str
    package: str
    digest: str
    contract: str
    service: str
    precision: str
    threads: int
    deployed_at: int
    verdict: Approval
    public_key: str | None = None
    candidate: "CandidateDeployment | None" = None
    probation: "Probation | None" = None
    undone: "Undone | None" = None
    device: ServingDevice = "cpu"

    @property
    def without_trials(self) -> "Deployment":
        return msgspec.structs.replace(self, candidate=None, probation=None, undone=None)

    def to_load(self, now: int) -> "list[Deployment]":
        candidate = [] if self.candidate is None else [self.candidate.deployment]
        former = [] if self.probation is None or now >= self.probation.until else [self.probation.before]
        return [self.without_trials, *candidate, *former]

    @property
    def runtime_key(self) -> tuple[str, str, int, str]:
        return self.digest, self.precision, self.threads, self.device

    def dumps(self, file: Path) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self.relative(file)), indent=1) + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str = "deployment.json") -> "Deployment":
        try:
            deployment = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            remedy = "run `isthmus deploy`, or the version of Isthmus that wrote it"
            raise PackageError(where, f"is not a deployment ({error})", remedy=remedy) from error
        return deployment.absolute(Path(where))

    def relative(self, file: Path) -> "Deployment":
        folder = file.parent.resolve()
        return self._with_packages(lambda package, own: own if package == folder / own else str(package))

    def absolute(self, file: Path) -> "Deployment":
        folder = file.parent.resolve()

        def absolute(package: Path, own: str) -> str:
            # Earlier versions wrote absolute paths, which in a copied project point to the original's packages.
            cached = package.parts[-2:] == Path(own).parts and (folder / own).is_dir()
            return str(folder / (own if cached else package))

        return self._with_packages(absolute)

    def _with_packages(self, path: Callable[[Path, str], str]) -> "Deployment":
        package = path(Path(self.package), f"{CACHE}/{self.digest}")
        candidate, probation = self.candidate, self.probation
        if candidate is not None:
            candidate = msgspec.structs.replace(candidate, deployment=candidate.deployment._with_packages(path))
        if probation is not None:
            probation = msgspec.structs.replace(probation, before=probation.before._with_packages(path))
        return msgspec.structs.replace(self, package=package, candidate=candidate, probation=probation)


class CandidateDeployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A package on trial next to the deployed package. A canary answers the fraction `share` of the requests.

    A shadow has `share` 0: its answers are compared and never returned. `latency_objective_ms` is the largest p99 of a
    canary for predicting a single row.
    """

    deployment: Deployment
    share: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    latency_objective_ms: float


class Probation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trial period of a new deployment: if it fails before `until` (microseconds), a server restores `before`."""

    before: Deployment
    until: int
    latency_objective_ms: float


class Undone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment that a server has undone: the digest of its package, and the reason."""

    digest: str
    why: str


def approve(  # noqa: PLR0913 - all evidence for a deployment
    folder: Path,
    verdict: Verdict | None,
    contract: Contract,
    profile: ServingProfile,
    *,
    tables: Mapping[str, str],
    deployed_at: int,
    public_key: str | None = None,
) -> Deployment:
    """Check that a package may be deployed, as `isthmus deploy` does; return its deployment. Writes and loads nothing.

    `folder` is the package, and `verdict` is the result of `isthmus verify` for it. `tables` has the current
    fingerprint of each view's offline table. `deployed_at` is the time of the deployment in microseconds since 1970
    UTC. `public_key` (PEM) is the key that must have signed the package, or None.

    Raises PackageError if the package is damaged, lacks the precision of `profile`, is not signed with `public_key`,
    or, as a model of rows, has other outputs than one number per row or class. Raises ContractMismatch if its service
    has changed, and RequestError if the service is unknown. Raises GateFailed if the verdict is missing, failed, is for
    another package, contract or device, or did not compare a feature, and if a table has changed since the verdict.
    """
    package = open_package(folder)
    if public_key is not None:
        require_signature(package.files, public_key)
    manifest = package.manifest
    where = f"package {manifest.name}"
    require_service(where, read_contract(package), contract, manifest.service)
    deployment = unverified_deployment(package, profile, deployed_at, public_key)
    if manifest.inputs:
        require_row_output(manifest)
    verdict = _require_passed(where, deployment.digest, contract, verdict)
    if profile.device != "cpu":
        served = ServedRuntime(profile)
        (file,) = served.files(manifest)
        if (expected := served.label(file.file)) not in verdict.files:
            raise GateFailed(where, "its verdict did not run it on its device", expected=expected, remedy=_VERIFY)
    _require_coverage(where, contract, manifest.service, verdict, tables)
    return msgspec.structs.replace(deployment, verdict=Approval(verdict.at, verdict.compared, tuple(verdict.limits)))


def unverified_deployment(
    package: Package, profile: ServingProfile, deployed_at: int, public_key: str | None
) -> Deployment:
    """Return a deployment with an empty verdict, to run a package for verification, replay or comparison.

    `deployed_at` is the time of the deployment in microseconds since 1970 UTC. `public_key` is the key (PEM) that the
    package must be signed with when it is loaded, or None. This function does not check the signature.
    """
    manifest = package.manifest
    manifest.served(profile.precision, profile.device)
    return Deployment(
        model=manifest.name,
        package=str(package.files.folder.resolve()),
        digest=package.files.digest,
        contract=manifest.contract,
        service=manifest.service,
        precision=profile.precision,
        threads=profile.threads,
        device=profile.device,
        deployed_at=deployed_at,
        verdict=Approval(deployed_at, 0),
        public_key=public_key,
    )


def require_row_output(manifest: Manifest) -> str:
    """Check that a package can answer `/predict`: its only output has a number per row, or per row and class.

    Returns the name of the output. Raises PackageError for any other package.
    """
    where = f"package {manifest.name}"
    if len(manifest.outputs) != 1 or len(manifest.outputs[0].shape) != (2 if manifest.classes else 1):
        outputs = ", ".join(f"{tensor.name} {list(tensor.shape)}" for tensor in manifest.outputs)
        raise PackageError(
            where,
            f"gives {outputs}",
            expected="one number for a row, or one for each of its classes",
            remedy="run it on a device",
        )
    return manifest.outputs[0].name


def _require_coverage(
    where: str, contract: Contract, service: str, verdict: Verdict, tables: Mapping[str, str]
) -> None:
    features = [*contract.stored_features(service), *contract.service(service).computed]
    missing = []
    for view, feature in features:
        compared = verdict.views.get(view, {}).get(feature)
        # If more rows were pushed since than compared, the comparison says little about the current rows.
        if compared is None or compared.compared <= verdict.ahead.get(view, 0):
            missing.append(f"{view}.{feature}")
    if missing:
        problem = f"its verdict did not compare {', '.join(missing[:3])}" + (" and more" if len(missing) > 3 else "")
        raise GateFailed(where, problem, expected="every feature of the model", remedy=_VERIFY)
    rebuilt = sorted({view for view, _ in features if tables.get(view) != verdict.tables.get(view)})
    if rebuilt:
        problem = f"tables changed since the verdict: {', '.join(rebuilt)}"
        remedy = "run `isthmus materialize` and `isthmus verify`, then deploy again"
        raise GateFailed(where, problem, expected="the tables that were compared", remedy=remedy)


def _require_passed(where: str, digest: str, contract: Contract, verdict: Verdict | None) -> Verdict:
    refused = partial(GateFailed, where, remedy=_VERIFY)
    if verdict is None:
        raise refused("has no verdict", expected="a verdict that passed")
    if verdict.contract != contract.hash:
        raise refused(f"its verdict is about contract {verdict.contract[:12]}", expected=contract.hash[:12])
    if verdict.package is None or verdict.model is None:
        raise refused("its verdict did not compare model outputs", expected=f"package {digest[:12]}")
    if verdict.package != digest:
        raise refused(f"its verdict is about package {verdict.package[:12]}", expected=digest[:12])
    if not verdict.passed:
        problem = f"its verdict failed: {verdict.differing:,} of {verdict.compared:,} values differ"
        raise refused(problem, expected="0", remedy="run `isthmus verify`, fix the differences, and deploy again")
    return verdict
