"""The deployment: which package answers, on whose verdict, in a small file."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from isthmus.features.contract.diff import require_service
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import GateFailed, PackageError
from isthmus.features.profiles import ServingProfile
from isthmus.package.manifest import Manifest, Package, open_package, read_contract
from isthmus.package.signature import require_signature
from isthmus.package.verdict import Verdict

CACHE = "deployments"
"""The folder beside a deployment file that has the deployed packages, by digest."""

_VERIFY = "run `isthmus verify` and deploy again"


class Approval(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The verdict a deployment rests on.

    Attributes:
        at: when it was reached, microseconds since 1970 UTC.
        compared: how many values it compared.
        limits: what it says nothing of, in sentences: pushed rows, samples, and runtimes that were not there.
    """

    at: int
    compared: int
    limits: tuple[str, ...] = ()


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployed package.

    Attributes:
        model: name by which `/predict` and `/v2/models` know it.
        package: path of the package folder; in a file from the folder of that file: a copy has its own packages.
        contract: hash of the contract the package was exported under.
        service: feature service whose values the model reads.
        precision: variant of the package that runs.
        threads: CPU threads of one prediction.
        deployed_at: microseconds since 1970 UTC.
        verdict: what the deployment rests on.
        public_key: whose owner must have signed the package, as PEM; None if nobody must.
        candidate: the package beside it, if any.
        probation: what a server goes back to if it fails; None if to nothing.
        undone: the failed deployment that a server went back from to this one, if so.
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
    candidate: "Candidate | None" = None
    probation: "Probation | None" = None
    undone: "Undone | None" = None

    @property
    def alone(self) -> "Deployment":
        """The deployment without what stands beside it and what was before, as the history has it."""
        return msgspec.structs.replace(self, candidate=None, probation=None, undone=None)

    def loaded(self, now: int) -> "list[Deployment]":
        """Whose models a server has: its own, the candidate's, and the former one's while it is on probation."""
        candidate = [] if self.candidate is None else [self.candidate.deployment]
        former = [] if self.probation is None or now >= self.probation.until else [self.probation.before]
        return [self.alone, *candidate, *former]

    @property
    def runs(self) -> tuple[str, str, int]:
        """Digest of the package, precision and threads: the same for deployments that run the same."""
        return self.digest, self.precision, self.threads

    def dumps(self, file: Path) -> bytes:
        """The text of the deployment in this file."""
        return msgspec.json.format(msgspec.json.encode(self.relative(file)), indent=1) + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str = "deployment.json") -> "Deployment":
        """The inverse of `dumps`, for the text of the file at `where`."""
        try:
            deployment = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            remedy = "run `isthmus deploy`, or the version of Isthmus that wrote it"
            raise PackageError(where, f"is not a deployment ({error})", remedy=remedy) from error
        return deployment.beside(Path(where))

    def relative(self, file: Path) -> "Deployment":
        """The deployment as this file, or another in its folder, has it: a package of the cache there by its path."""
        folder = file.parent.resolve()
        return self._with_packages(lambda package, own: own if package == folder / own else str(package))

    def beside(self, file: Path) -> "Deployment":
        """The inverse of `relative`."""
        folder = file.parent.resolve()

        def found(package: Path, own: str) -> str:
            # Earlier versions wrote whole paths, which in a copied project lead to the packages of the original.
            cached = package.parts[-2:] == Path(own).parts and (folder / own).is_dir()
            return str(folder / (own if cached else package))

        return self._with_packages(found)

    def _with_packages(self, path: Callable[[Path, str], str]) -> "Deployment":
        """With paths that follow from a package's path and from its place in the cache."""
        package = path(Path(self.package), f"{CACHE}/{self.digest}")
        candidate, probation = self.candidate, self.probation
        if candidate is not None:
            candidate = msgspec.structs.replace(candidate, deployment=candidate.deployment._with_packages(path))
        if probation is not None:
            probation = msgspec.structs.replace(probation, before=probation.before._with_packages(path))
        return msgspec.structs.replace(self, package=package, candidate=candidate, probation=probation)


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A package beside the deployed package.

    Attributes:
        deployment: the package, as if it were deployed.
        share: of requests that it answers, below 1; 0 for a shadow, whose answers are compared and never returned.
        latency_objective_ms: the largest p99 that a canary may have for a prediction of a single row, in milliseconds.
    """

    deployment: Deployment
    share: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    latency_objective_ms: float


class Probation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a deployment that took all requests at once may be undone for, and until when.

    Attributes:
        before: the deployment before it, which is put in force again.
        until: microseconds since 1970 UTC.
        latency_objective_ms: the largest p99 that it may have for a prediction of a single row, in milliseconds.
    """

    before: Deployment
    until: int
    latency_objective_ms: float


class Undone(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment that a server has undone: its package, and why."""

    digest: str
    why: str


def approve(  # noqa: PLR0913 - what a deployment rests on, all of it checked
    folder: Path,
    verdict: Verdict | None,
    contract: Contract,
    profile: ServingProfile,
    *,
    tables: Mapping[str, str],
    at: int,
    public_key: str | None = None,
) -> Deployment:
    """The deployment of a package where it lies, if nothing speaks against it. Arguments and errors: see `deploy`."""
    package = open_package(folder)
    if public_key is not None:
        require_signature(package.files, public_key)
    manifest = package.manifest
    where = f"package {manifest.name}"
    require_service(where, read_contract(package), contract, manifest.service)
    deployment = unapproved(package, profile, at, public_key)
    if manifest.inputs:
        require_rows(manifest)
    verdict = _require_passed(where, deployment.digest, contract, verdict)
    _require_coverage(where, contract, manifest.service, verdict, tables)
    return msgspec.structs.replace(deployment, verdict=Approval(verdict.at, verdict.compared, tuple(verdict.limits)))


def unapproved(package: Package, profile: ServingProfile, at: int, public_key: str | None) -> Deployment:
    """The deployment of a package where it lies, with a verdict that compared nothing."""
    manifest = package.manifest
    manifest.variant(profile.precision)
    return Deployment(
        model=manifest.name,
        package=str(package.files.folder.resolve()),
        digest=package.files.digest,
        contract=manifest.contract,
        service=manifest.service,
        precision=profile.precision,
        threads=profile.threads,
        deployed_at=at,
        verdict=Approval(at, 0),
        public_key=public_key,
    )


def require_rows(manifest: Manifest) -> str:
    """The only output of a model of rows.

    Raises:
        PackageError: it answers a row neither with a number nor with classes.
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
    """Refuses a verdict that did not compare every feature the model reads, as the tables have them now."""
    features = [*contract.read(service), *contract.service(service).computed]
    missing = []
    for view, feature in features:
        compared = verdict.views.get(view, {}).get(feature)
        # If more rows were pushed since than compared, that is no comparison either.
        if compared is None or compared.compared <= verdict.ahead.get(view, 0):
            missing.append(f"{view}.{feature}")
    if missing:
        problem = f"its verdict did not compare {', '.join(missing[:3])}" + (" and more" if len(missing) > 3 else "")
        raise GateFailed(where, problem, expected="every feature of the model", remedy=_VERIFY)
    rebuilt = sorted({view for view, _ in features if tables.get(view) != verdict.tables.get(view)})
    if rebuilt:
        problem = f"the tables of {', '.join(rebuilt)} have changed since its verdict"
        remedy = "run `isthmus materialize` and `isthmus verify`, then deploy again"
        raise GateFailed(where, problem, expected="the tables that were compared", remedy=remedy)


def _require_passed(where: str, digest: str, contract: Contract, verdict: Verdict | None) -> Verdict:
    refused = partial(GateFailed, where, remedy=_VERIFY)
    if verdict is None:
        raise refused("has no verdict", expected="a verdict that passed")
    if verdict.contract != contract.hash:
        raise refused(f"its verdict is about contract {verdict.contract[:12]}", expected=contract.hash[:12])
    if verdict.package is None or verdict.model is None:
        raise refused("its verdict compared no model output", expected=f"package {digest[:12]}")
    if verdict.package != digest:
        raise refused(f"its verdict is about package {verdict.package[:12]}", expected=digest[:12])
    if not verdict.passed:
        problem = f"its verdict failed: {verdict.differing:,} of {verdict.compared:,} values differ"
        raise refused(problem, expected="none", remedy="run `isthmus verify`, mend what differs, and deploy again")
    return verdict
