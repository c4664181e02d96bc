"""Compare training with serving value by value, and the package with its student (`isthmus verify`)."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from isthmus.distill.declaration import Distillation
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import GateFailed
from isthmus.features.files import write_atomically
from isthmus.features.offline.history import ViewHistory
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.progress import Progress, silent
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.orchestration.artifacts import Artifacts, page_file, serving_profile, verdict_file
from isthmus.orchestration.models.students import parity
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.collect import collect
from isthmus.orchestration.verification.client import private_api
from isthmus.orchestration.verification.devices import (
    SNAPSHOT,
    ComparedSnapshot,
    DeviceRows,
    compare_snapshot,
    device_rows,
)
from isthmus.orchestration.verification.page import page
from isthmus.orchestration.verification.recomputation import recompute
from isthmus.orchestration.verification.sides import CHECKED_ROWS, SAMPLE, OnlineSide
from isthmus.orchestration.verification.tiles import compare_tiles
from isthmus.orchestration.verification.views import compare_view
from isthmus.package.manifest import Package, open_package
from isthmus.package.replay import require_device
from isthmus.package.signature import require_signature
from isthmus.package.verdict import Verdict, merged
from isthmus.serving.deployment.record import unverified_deployment

if TYPE_CHECKING:
    from isthmus.orchestration.verification.runtimes import ClientRun

# Rows that a device answers without `all_keys`.
DEVICE_SAMPLE = 100


def verify(
    project: Project, name: str | None = None, *, all_keys: bool = False, progress: Progress = silent,
) -> Verdict:  # fmt: skip
    """Compare training with serving and the package with its student; replace the verdict and its HTML page.

    Compares point-in-time joins at the current time of the project's clock with the answers of a private server. Also
    compares the request transforms in the latest training set with their graphs, run here and in that server, and the
    rows that a stream computes from tiles with those of a build. If the
    distillation has an exported package, its model files run in every available runtime and are compared with the
    student. The package's inputs from offline values are compared with its inputs from served values and from a
    device's snapshot, and the server's predictions with the package's.

    Collects pushed rows into the offline tables first. Starts Redis if it is embedded, and a server for the duration of
    the call. Creates a signing key for snapshots if devices need one. Reports differences without raising an error.

    Args:
        project: project to verify.
        name: distillation; optional if the project has at most one.
        all_keys: compare all keys and content hashes instead of a sample, and more rows of the training set.
        progress: called with a message and a fraction.

    Raises:
        ContractMismatch: the definitions have not been applied, or a table was built under another contract.
        DataError: a table is missing or damaged.
        DependencyError: Redis does not answer, the server cannot start, or its device is not available.
        PackageError: the package is damaged, or lacks the signature that the project requires.
        RequestError: the distillation is unknown, or `name` is missing and there are several.
    """
    require_device(project.settings.profiles.serving.device)
    declared = project.distillation(name) if name or project.definitions.distillations else None
    contract = project.applied()
    offline = project.offline_store()
    collect(project, progress=lambda text, _: progress(text, 0.0))
    histories = [offline.history(view) for view in contract.views.values()]
    at = project.now()
    exported = Artifacts(project, declared).exported(contract) if declared else None
    package = open_package(exported) if exported else None
    with project.redis() as url, connect(url) as client, TemporaryDirectory(prefix="isthmus-verify-") as folder:
        with translate_errors(url):
            client.ping()
        deployment = Path(folder) / "deployment.json"
        if package and package.manifest.inputs:
            # Deployed on the private server only, so that its predictions can be compared.
            if project.public_key is not None:
                require_signature(package.files, project.public_key)
            profile = serving_profile(project, package.files.folder)
            write_atomically(
                deployment, unverified_deployment(package, profile, at, project.public_key).dumps(deployment)
            )
        with private_api(project, contract, url, at, deployment) as api:
            online = OnlineSide(OnlineStore(client, contract), url, api, at)
            run = _Verification(project, contract, declared, package, histories, online, all_keys, progress)
            verdict = run.verdict(offline)
    write_atomically(page_file(project, name), page(verdict, project.name).encode())
    write_atomically(verdict_file(project, declared), verdict.dumps())
    progress("the verdict is written", 1.0)
    return verdict


@dataclass(frozen=True)
class _Verification:
    project: Project
    contract: Contract
    declared: Distillation | None
    package: Package | None
    histories: Sequence[ViewHistory]
    online: OnlineSide
    all_keys: bool
    progress: Progress

    def verdict(self, offline: OfflineStore) -> Verdict:
        tables = {history.view.name: history.commit.base for history in self.histories}
        package = self.package.files.digest if self.package else None
        verdict = Verdict(self.contract.hash, self.online.at, {}, tables, package=package)
        with ThreadPoolExecutor(1) as pool:
            # Started first, since Node takes seconds.
            snapshot, rows, client = self._device(pool)
            self._views(offline, verdict, snapshot)
            if self.declared is None or self.package is None:
                return verdict
            self.progress("comparing the package with its student", 0.9)
            # Imported here as in `_device`.
            from isthmus.orchestration.verification.runtimes import compare_runtimes, compare_served

            profile = serving_profile(self.project, self.package.files.folder)
            with parity(self.project, self.declared, self.package) as beside:
                compare_runtimes(beside, self.package, rows, client, verdict=verdict, all_keys=self.all_keys)
                if profile.device != "cpu":
                    compare_served(beside, self.package, profile, verdict)
            if snapshot.file is not None and rows is None:
                why = "every row of the training set has a key that devices do not keep"
                verdict.skipped["what a device feeds"] = why
            self._inputs(self.declared, self.package, verdict)
        return replace(verdict, model=merged(list(verdict.files.values())))

    def _device(
        self, pool: ThreadPoolExecutor
    ) -> "tuple[ComparedSnapshot, DeviceRows | None, Callable[[], ClientRun] | None]":
        if self.declared is None:
            return ComparedSnapshot(), None, None
        self.progress("comparing the snapshot", 0.0)
        snapshot = compare_snapshot(self.project, self.contract, self.declared, self.histories, self.online.at)
        if self.package is None:
            return snapshot, None, None
        # Imported here: a project without a package may lack the libraries that run one.
        from isthmus.orchestration.verification.runtimes import ask_client

        few = None if self.all_keys else DEVICE_SAMPLE
        rows = device_rows(self.project, self.declared, self.package, self.histories, snapshot, few)
        return snapshot, rows, pool.submit(ask_client, self.package, rows).result if rows else None

    def _views(self, offline: OfflineStore, verdict: Verdict, snapshot: ComparedSnapshot) -> None:
        for n, history in enumerate(self.histories):
            self.progress(f"comparing {history.view.name}", n / len(self.histories))
            compare_view(offline, history, self.online, verdict, all_keys=self.all_keys)
        verdict.views.update(snapshot.views)
        if self.declared and not self.package:
            blocked = Artifacts(self.project, self.declared).blocked()
            no_package = blocked or "no exported package can run under this contract: run `isthmus model export`"
            verdict.skipped["the package"] = no_package
        self.progress("comparing tiles with builds", 0.8)
        compare_tiles(self.project, self.contract, verdict)
        self.progress("comparing request transforms", 0.85)
        recompute(self.project, self.contract, self.declared, self.online.api, verdict, all_keys=self.all_keys)
        if snapshot.skipped:
            verdict.skipped["the snapshot"] = snapshot.skipped

    def _inputs(self, declared: Distillation, package: Package, verdict: Verdict) -> None:
        if not package.manifest.inputs:
            reason = "its task computes the inputs, and requests carry them"
            if package.manifest.generation is not None:
                reason = "its inputs are prompts, which requests carry"
            verdict.skipped["what the package is fed"] = reason
            return
        self.progress("comparing what the package is fed", 0.95)
        # Imported here as in `_device`.
        from isthmus.orchestration.verification.modelinputs import compare_package

        count = CHECKED_ROWS if self.all_keys else SAMPLE
        compare_package(self.project, declared, package, self.histories, self.online, count, verdict)


def require_passed(verdict: Verdict) -> Verdict:
    if verdict.passed:
        return verdict
    parts = verdict.named().items()
    worst = [f"{name} ({part.differing} of {part.compared})" for name, part in parts if part.differing]
    shown = ", ".join(worst[:5]) or "none compared"
    raise GateFailed("verdict", f"{verdict.differing} of {verdict.compared} values differ: {shown}",
                     expected="0 differing", remedy=_remedy(verdict))  # fmt: skip


def _remedy(verdict: Verdict) -> str:
    differing = {
        name for name, features in verdict.views.items() if any(feature.differing for feature in features.values())
    }
    if differing.intersection(verdict.tables) or not verdict.differing:
        return "run `isthmus build` and `isthmus materialize --full`, then verify again"
    if any(name.startswith(f"{SNAPSHOT} ") for name in differing):
        return "run `isthmus features snapshot`, then verify again"
    package = (*verdict.files.values(), *verdict.inputs.values(), *verdict.device.values())
    if not differing and any(part.differing for part in package):
        return "run `isthmus model export`, then verify again"
    if not differing:
        return (
            "a row has different values alone than in a batch: run `isthmus apply` if the graph is older than this "
            "release; otherwise report a bug with the definition of the differing feature"
        )
    return (
        "an engine and a graph may differ in the last digits of some functions (docs/row-functions.md): give the "
        "field a tolerance. If the engine is newer, repeat `isthmus features training-set` and `isthmus model export`"
    )
