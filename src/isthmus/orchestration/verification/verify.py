"""Compare training with serving value by value, and the package with its student (`isthmus verify`)."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from isthmus.features.redis.connection import answering, connect
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
from isthmus.orchestration.verification.sides import CHECKED_ROWS, ComparedPackage, OnlineSide
from isthmus.orchestration.verification.views import SAMPLE, compare_view
from isthmus.package.manifest import Package, open_package
from isthmus.package.signature import require_signature
from isthmus.package.verdict import FeatureVerdict, Verdict, flat, merged
from isthmus.serving.deployment.record import unapproved

if TYPE_CHECKING:
    from isthmus.orchestration.verification.runtimes import ClientRun

# Rows that a device answers without `all_keys`.
DEVICE_SAMPLE = 100

# Name of the server's predictions among the package's files.
PREDICT = "/predict"


def verify(
    project: Project, name: str | None = None, *, all_keys: bool = False, progress: Progress = silent,
    every: bool | None = None,
) -> Verdict:  # fmt: skip
    """Compare everything that must agree, and write the verdict and its page.

    The offline side is the point-in-time join at the project's present. The online side is what a private server of the
    project answers. Values of request transforms in the latest training set are compared with their graphs, run here
    and in that server. If the distillation has an exported package, the verdict also compares its model files in every
    available runtime with the student, its inputs from offline values with those from served values and from a device's
    snapshot, and the server's predictions.

    Collects pushed rows first, and starts a server for the duration of the call.

    Args:
        project: project to verify.
        name: distillation; optional if the project has at most one.
        all_keys: compare all keys, all rows of the training set and all content hashes instead of a sample.
        progress: called with a message and a fraction.
        every: name of `all_keys` in version 0.1; deprecated.

    Raises:
        DependencyError: Redis does not answer, or the server cannot start.
    """
    if every is not None:
        warnings.warn("verify(every=...) is verify(all_keys=...)", DeprecationWarning, stacklevel=2)
        all_keys = every
    declared = project.distillation(name) if name or project.definitions.distillations else None
    contract = project.applied()
    offline = project.offline_store()
    collect(project, progress=lambda text, _: progress(text, 0.0))
    histories = [offline.history(view) for view in contract.views.values()]
    at = project.now()
    exported = Artifacts(project, declared).exported(contract) if declared else None
    package = open_package(exported) if exported else None
    with project.redis() as url, connect(url) as client, TemporaryDirectory(prefix="isthmus-verify-") as folder:
        with answering(url):
            client.ping()
        deployment = Path(folder) / "deployment.json"
        if package and package.manifest.inputs:
            # Deployed on the private server only, so that its predictions can be compared.
            if project.public_key is not None:
                require_signature(package.files, project.public_key)
            profile = serving_profile(project, package.files.folder)
            write_atomically(deployment, unapproved(package, profile, at, project.public_key).dumps(deployment))
        with private_api(project, contract, url, at, deployment) as api:
            online = OnlineSide(OnlineStore(client, contract), url, api, at)
            run = _Verification(project, contract, declared, package, online, all_keys, progress)
            verdict = run.verdict(offline, histories)
    write_atomically(page_file(project, name), page(verdict, project.name).encode())
    write_atomically(verdict_file(project, declared), verdict.dumps())
    progress("the verdict is written", 1.0)
    return verdict


@dataclass(frozen=True)
class _Device:
    """The device side: the snapshot, the rows to run against it, and a call that waits for the client's answers."""

    snapshot: ComparedSnapshot
    rows: DeviceRows | None = None
    client: "Callable[[], ClientRun] | None" = None


@dataclass(frozen=True)
class _Verification:
    project: Project
    contract: Contract
    declared: Distillation | None
    package: Package | None
    online: OnlineSide
    all_keys: bool
    progress: Progress

    def verdict(self, offline: OfflineStore, histories: Sequence[ViewHistory]) -> Verdict:
        with ThreadPoolExecutor(1) as pool:
            # Started first, since Node takes seconds.
            device = self._device(histories, pool)
            return self._verdict(offline, histories, device)

    def _device(self, histories: Sequence[ViewHistory], pool: ThreadPoolExecutor) -> "_Device":
        if self.declared is None:
            return _Device(ComparedSnapshot())
        self.progress("comparing the snapshot", 0.0)
        snapshot = compare_snapshot(self.project, self.contract, self.declared, histories, self.online.at)
        if self.package is None:
            return _Device(snapshot)
        # Imported here: a project without a package may lack the libraries that run one.
        from isthmus.orchestration.verification.runtimes import ask_client

        few = None if self.all_keys else DEVICE_SAMPLE
        rows = device_rows(self.project, self.declared, self.package, histories, snapshot, few)
        return _Device(snapshot, rows, pool.submit(ask_client, self.package, rows).result if rows else None)

    def _verdict(self, offline: OfflineStore, histories: Sequence[ViewHistory], device: "_Device") -> Verdict:
        snapshot = device.snapshot
        views: dict[str, Mapping[str, FeatureVerdict]] = {}
        singly: dict[str, Mapping[str, FeatureVerdict]] = {}
        ahead, samples = {}, {}
        for n, history in enumerate(histories):
            view = history.view.name
            self.progress(f"comparing {view}", n / len(histories))
            compared = compare_view(offline, history, self.online, all_keys=self.all_keys)
            views[view], singly[view], ahead[view] = compared.features, compared.singly, compared.ahead
            if compared.sample is not None:
                samples[f"keys of {view}"] = compared.sample
        self.progress("comparing request transforms", 0.85)
        sample, requests = (None, CHECKED_ROWS) if self.all_keys else (SAMPLE, SAMPLE)
        computed, alone, skipped, rows = recompute(
            self.project, self.contract, self.declared, sample, self.online.api, requests
        )
        samples |= {} if rows is None else {"rows of request transforms": rows}
        if self.declared and not self.package:
            blocked = Artifacts(self.project, self.declared).blocked()
            no_package = blocked or "no exported package can run under this contract: run `isthmus model export`"
            skipped = {"the package": no_package} | skipped
        skipped = {**skipped, **({"the snapshot": snapshot.skipped} if snapshot.skipped else {})}
        parts = self._package(histories, device)
        tables = {history.view.name: history.commit.base for history in histories}
        model = merged(list(parts.files.values())) if self.package else None
        return Verdict(
            self.contract.hash, self.online.at, {**views, **snapshot.views, **computed}, tables, ahead,
            self.package.files.digest if self.package else None, model, parts.files, parts.inputs,
            {**skipped, **parts.skipped},
            flat(singly | alone) | parts.singly, parts.device, parts.runtimes, samples | parts.samples,
        )  # fmt: skip

    def _package(self, histories: Sequence[ViewHistory], device: "_Device") -> ComparedPackage:
        if self.declared is None or self.package is None:
            return ComparedPackage()
        self.progress("comparing the package with its student", 0.9)
        # Imported here as in `_device`.
        from isthmus.orchestration.verification.modelinputs import compare_package
        from isthmus.orchestration.verification.runtimes import compare_runtimes

        with parity(self.project, self.declared, self.package) as beside:
            parts = compare_runtimes(beside, self.package, device.rows, device.client, all_keys=self.all_keys)
        if device.snapshot.file is not None and device.rows is None:
            parts.skipped["what a device feeds"] = "every row of the training set has a key that devices do not keep"
        if not self.package.manifest.inputs:
            reason = "its task computes the inputs, and requests carry them"
            if self.package.manifest.generation is not None:
                reason = "its inputs are prompts, which requests carry"
            parts.skipped["what the package is fed"] = reason
            return parts
        self.progress("comparing what the package is fed", 0.95)
        inputs, predicted, alone, api_rows = compare_package(
            self.project, self.declared, self.package, histories, self.online,
            CHECKED_ROWS if self.all_keys else SAMPLE,
        )  # fmt: skip
        if api_rows.rows < api_rows.of:
            parts.samples["rows asked of the API"] = api_rows
        parts.files[PREDICT], parts.singly[f"file {PREDICT}"] = predicted, alone
        parts.inputs.update(inputs)
        return parts


def require_passed(verdict: Verdict) -> Verdict:
    """Return the verdict if it passed.

    Raises:
        GateFailed: the verdict failed; the message names the first differing features.
    """
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
