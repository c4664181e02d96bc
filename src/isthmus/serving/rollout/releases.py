"""Deploy and roll back: under a lock, in stages, so that a kill at any point leaves a valid deployment."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import GateFailed, PackageError, one_of
from isthmus.features.files import write_atomically
from isthmus.features.profiles import ServingProfile
from isthmus.package.manifest import read_contract
from isthmus.package.verdict import Verdict
from isthmus.serving.deployment import cache
from isthmus.serving.deployment.history import DeploymentHistory, Event, deployment_chain
from isthmus.serving.deployment.record import CandidateDeployment, Deployment, Probation, Undone, approve
from isthmus.serving.predict.model import DeployedModel
from isthmus.serving.rollout.decision import read_decision

STAGES = ("fetch", "verify", "load", "warm", "switch")

CACHED = 10
"""Number of the latest history events whose packages stay in the cache."""


@dataclass
class Rollout:
    """Progress and result of a deployment. `bytes` were copied into the cache; `seconds` has the time per stage."""

    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    _since: float = field(default_factory=time.perf_counter)
    _deployment: Deployment | None = None

    @property
    def deployment(self) -> Deployment:
        assert self._deployment is not None  # noqa: S101 - set before a Rollout is returned
        return self._deployment

    def done(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now

    def load(self, deployment: Deployment, public_key: str | None) -> None:
        model = DeployedModel(deployment, public_key)
        self.done("load")
        self.seconds["load"] -= model.warming
        self.seconds["warm"] += model.warming

    def switch(self, file: Path, deployment: Deployment) -> None:
        write_atomically(file, deployment.dumps(file))
        self.done("switch")
        self._deployment = deployment

    def as_dict(self) -> dict[str, Any]:
        seconds = {stage: round(duration, 4) for stage, duration in self.seconds.items()}
        return {**msgspec.to_builtins(self.deployment), "bytes": self.bytes, "seconds": seconds}


def deploy(  # noqa: PLR0913 - the options of a deployment, by name
    package: Path,
    verdict: Verdict | None,
    contract: Contract,
    profile: ServingProfile,
    file: Path,
    *,
    tables: Mapping[str, str],
    at: int,
    public_key: str | None = None,
    share: float | None = None,
    why: str = "",
) -> Rollout:
    """Deploy a package (a folder with an exported model), or start a trial of it as a candidate if `share` is set.

    `file` is the deployment file of a project. Copies the package to the cache next to that file, loads and warms up
    the model, and only then replaces the file. A running server switches within about a second. Drops an earlier
    candidate, adds an event with the reason `why` to the history, and deletes packages that are no longer needed from
    the cache.

    `share` is the fraction of the requests that the candidate answers. With 0, the candidate is a shadow: the server
    only compares its answers. Without `share`, the package replaces the current deployment. If that has the same model
    and service, the new one is on probation for `probation_seconds` of the profile, and a server that finds it worse
    restores the previous deployment. A new candidate ends a probation.

    `verdict` is the result of `isthmus verify` for this package, and `tables` the current fingerprint of each view's
    offline table. `contract` has the current features. `at` is the time of the deployment in microseconds since 1970
    UTC. `public_key` is the PEM key that the package must be signed with, or None.

    Raises:
        PackageError: the package is damaged, lacks the precision of `profile`, is not signed with the key, or does not
            reproduce its golden outputs here.
        ContractMismatch: features that the package reads have changed.
        GateFailed: the verdict is missing, failed or outdated; or, for a candidate, no package of the same service is
            deployed, or a server has given up the deployed one.
        DependencyError: another deployment is in progress, or the history cannot be written; in the second case the
            package may be deployed already.
        DataError: the history is damaged.
        OSError: another file cannot be written.
    """
    with _locked_history(file) as (history, _):
        rollout = Rollout()
        current = None if share is None else _beside(file)
        deployment = approve(package, verdict, contract, profile, tables=tables, deployed_at=at, public_key=public_key)
        rollout.done("verify")
        cached, rollout.bytes = cache.fetch(package, deployment.digest, cache.folder_of(file), public_key, rollout.done)
        deployment = msgspec.structs.replace(deployment, package=str(cached.resolve()))
        rollout.load(deployment, public_key)
        if current is None or share is None:
            rollout.switch(
                file, _on_probation(file, deployment, profile.probation_seconds, profile.latency_objective_ms)
            )
            history.add(Event(at=at, action="deploy", deployment=deployment, why=why))
            return rollout
        if deployment.service != current.service:
            raise GateFailed(f"package {deployment.model}", f"reads service {deployment.service}",
                             expected=f"{current.service}, like the current deployment",
                             remedy="run `isthmus deploy` to replace the deployment")  # fmt: skip
        if decision := read_decision(file, current):
            raise GateFailed(f"package {current.digest[:12]}", f"was given up: {decision.why}",
                             expected="a deployment to try a package beside",
                             remedy="deploy again when the server is back, or `isthmus deploy rollback`")  # fmt: skip
        objective = profile.latency_objective_ms
        candidate = CandidateDeployment(deployment=deployment, share=share, latency_objective_ms=objective)
        # Only one trial runs at a time: the server keeps one model on standby.
        rollout.switch(file, msgspec.structs.replace(current, candidate=candidate, probation=None))
        history.add(Event(at=at, action="canary" if share else "shadow", deployment=deployment, why=why))
    return rollout


def promote(
    file: Path,
    generations: Generations,
    *,
    at: int,
    probation_seconds: float = 0.0,
    public_key: str | None = None,
    why: str = "",
) -> Rollout:
    """Replace the current deployment by its candidate, after checking and loading the candidate's package again.

    Writes the deployment file `file` and the history, with the reason `why`. For `probation_seconds`, a server may
    restore the previous deployment. `generations` has the project's contracts. `at` is the time in microseconds since
    1970 UTC. `public_key` is the PEM key that the package must be signed with, or None.

    Raises:
        GateFailed: there is no candidate, or a server has ended its trial because it failed.
        PackageError: the package is damaged, not signed with the key, or no longer in the cache.
        ContractMismatch: features that the package reads have changed.
        DependencyError: another deployment is in progress.
        DataError: the history is damaged.
    """
    with _locked_history(file) as (history, _):
        rollout = Rollout()
        candidate = _beside(file).candidate
        if candidate is None:
            raise GateFailed(str(file), "has no candidate", expected="a candidate to promote",
                             remedy="run `isthmus deploy shadow`, or `canary SHARE` in its place")  # fmt: skip
        if decision := read_decision(file, candidate.deployment):
            where = f"package {candidate.deployment.digest[:12]}"
            raise GateFailed(where, f"was given up: {decision.why}", expected="a candidate that still runs",
                             remedy="run `isthmus deploy rollback` to drop it")  # fmt: skip
        deployment = _verified(rollout, candidate.deployment, generations, at, public_key)
        rollout.switch(file, _on_probation(file, deployment, probation_seconds, candidate.latency_objective_ms))
        history.add(Event(at=at, action="promote", deployment=deployment, why=why))
    return rollout


def rollback(
    file: Path,
    generations: Generations,
    *,
    at: int,
    to: str | None = None,
    public_key: str | None = None,
    why: str = "",
) -> Rollout:
    """Drop the candidate, or restore an earlier deployment if there is no candidate or `to` is set.

    `to` is the start of the digest of a deployed package. If it is set, a candidate is dropped, too. Without it, the
    deployment before the current one is restored. After a server has restored a deployment by itself, `to` is required.
    A restored deployment gets no probation. Writes the deployment file `file` and the history, with the reason `why`.
    The other parameters are those of `promote`.

    Raises GateFailed if no earlier deployment exists, or `to` does not select exactly one other package. Raises the
    other errors of `promote`.
    """
    with _locked_history(file) as (history, events):
        rollout = Rollout()
        # `to` works even if the deployment file is damaged.
        current = _read(file) if to is None else current_deployment(file)
        if current is not None and current.candidate is not None and to is None:
            dropped = current.candidate.deployment
            rollout.switch(file, msgspec.structs.replace(current, candidate=None))
            history.add(Event(at=at, action="drop", deployment=dropped, why=why))
            return rollout
        earlier = _earlier(file, events, current, to)
        deployment = _verified(rollout, earlier, generations, at, public_key)
        rollout.switch(file, deployment)
        left = "" if current is None else f"from {current.digest[:12]}"
        history.add(Event(at=at, action="rollback", deployment=deployment, why=why or left))
    return rollout


def undo(
    file: Path,
    deployment: Deployment,
    why: str,
    *,
    at: int,
    generations: Generations | None = None,
    public_key: str | None = None,
) -> bool:
    """Restore the previous deployment because `deployment` is worse. Return True if this call restored it.

    A server calls this during the probation, and monitoring also later. Returns False if `deployment` is not current
    any more, for example because another worker was faster, or has no previous deployment. Writes the reason `why` to
    the deployment file `file` and the history. `at` is the time in microseconds since 1970 UTC. With `generations` (the
    project's contracts), checks and loads the package again. A server passes None, since it has that model loaded.
    Raises the errors of `promote` other than GateFailed.
    """
    with _locked_history(file) as (history, _):
        current = _read(file)
        if current is None or current.probation is None or current.without_trials != deployment.without_trials:
            return False
        before = current.probation.before
        if generations is not None:
            before = _verified(Rollout(), before, generations, at, public_key)
        undone = Undone(digest=current.digest, why=f"{current.digest[:12]} was undone: {why}")
        restored = msgspec.structs.replace(before, deployed_at=at, undone=undone)
        write_atomically(file, restored.dumps(file))
        history.add(_restoration(restored, undone))
        return True


def _restoration(restored: Deployment, undone: Undone) -> Event:
    return Event(at=restored.deployed_at, action="rollback", deployment=restored.without_trials, why=undone.why)


def _on_probation(file: Path, deployment: Deployment, seconds: float, objective_ms: float) -> Deployment:
    """Return a new deployment with a probation, during which a server may restore the previous deployment.

    Returns it unchanged if `seconds` is 0, or without a previous deployment of the same model and service.
    """
    before = current_deployment(file)
    if before is not None and before.probation is not None and read_decision(file, before):
        # A server is waiting for the lock to undo it.
        before = before.probation.before
    if before is not None and before.runtime_key == deployment.runtime_key:
        # The same package again: keep the deployment before it.
        before = before.probation.before if before.probation else None
    if before is None or seconds == 0 or (before.model, before.service) != (deployment.model, deployment.service):
        return deployment
    until = deployment.deployed_at + round(seconds * 1e6)
    probation = Probation(before=before.without_trials, until=until, latency_objective_ms=objective_ms)
    return msgspec.structs.replace(deployment, probation=probation)


def _beside(file: Path) -> Deployment:
    current = _read(file)
    if current is None:
        raise GateFailed(str(file), "nothing is deployed", expected="a deployment to try a package beside",
                         remedy="run `isthmus deploy`")  # fmt: skip
    return current


def _verified(
    rollout: Rollout, earlier: Deployment, generations: Generations, at: int, public_key: str | None
) -> Deployment:
    where = f"package {earlier.model} {earlier.digest[:12]}"
    folder = Path(earlier.package)
    if not folder.is_dir():
        raise PackageError(where, f"is no longer in {folder.parent}", expected=f"one of the last {CACHED}",
                           remedy="export and deploy it again, or choose another with --to")  # fmt: skip
    package = cache.require(folder, earlier.digest, public_key)
    generations.require_compatible(where, read_contract(package), package.manifest.service)
    rollout.done("verify")
    deployment = msgspec.structs.replace(earlier, deployed_at=at, public_key=public_key or earlier.public_key)
    rollout.load(deployment, public_key)
    return deployment


def current_deployment(file: Path) -> Deployment | None:
    with suppress(OSError, PackageError):
        return _read(file)
    return None


def _read(file: Path) -> Deployment | None:
    try:
        return Deployment.loads(file.read_bytes(), str(file))
    except FileNotFoundError:
        return None


@contextmanager
def _locked_history(file: Path) -> Iterator[tuple[DeploymentHistory, list[Event]]]:
    """Lock the deployment history for the block, and yield it with its events.

    First adds events that a killed process or a server did not write. Afterwards deletes packages from the cache that
    neither recent events nor the deployment file name.
    """
    history = DeploymentHistory(file)
    with history.locked() as events:
        for event in _unnoted(file, events):
            history.add(event)
            events.append(event)
        yield history, events
        last = [event.deployment.digest for event in history.read()[-CACHED:]]
        current = current_deployment(file)
        # Keep the previous package even after probation: production quality may still undo the deployment.
        named = [] if current is None else current.to_load(current.deployed_at)
        cache.prune(cache.folder_of(file), {*last, *(deployment.digest for deployment in named)})


def full_history(file: Path) -> list[Event]:
    events = DeploymentHistory(file).read()
    return [*events, *_unnoted(file, events)]


def _unnoted(file: Path, events: list[Event]) -> Iterator[Event]:
    current = current_deployment(file)
    if current is None:
        return
    deployed, candidate = deployment_chain(events), current.candidate
    alone = current.without_trials
    if not deployed or deployed[-1] != alone:
        # The process was killed between writing the two files, or the deployment predates the history.
        if current.undone is not None:
            yield _restoration(current, current.undone)
        else:
            yield Event(at=alone.deployed_at, action="deploy", deployment=alone, why="found in force")
    # A server gives up a candidate without waiting for the lock.
    if candidate is not None and (decision := read_decision(file, candidate.deployment)) is not None:
        event = Event(at=decision.at, action="refuse", deployment=candidate.deployment, why=decision.why)
        if event not in events:
            yield event


def _earlier(file: Path, events: list[Event], current: Deployment | None, to: str | None) -> Deployment:
    if to is not None:
        known = {event.deployment.digest: event.deployment for event in events}
        matches = [digest for digest in known if digest.startswith(to)]
        if len(matches) != 1:
            expected = one_of(digest[:12] for digest in known) if known else "a deployment; nothing was ever deployed"
            what = f"{len(matches)} packages of the history begin" if matches else "no package of the history begins"
            raise GateFailed(str(file), f"{what} with {to!r}", expected=expected,
                             remedy="see `isthmus deploy history`")  # fmt: skip
        if current is not None and current.digest == matches[0]:
            raise GateFailed(str(file), f"package {matches[0][:12]} is already in force", expected="another package",
                             remedy="see `isthmus deploy history`")  # fmt: skip
        return known[matches[0]]
    if current is None:
        raise GateFailed(str(file), "nothing is deployed", expected="a deployment to go back from",
                         remedy="run `isthmus deploy`")  # fmt: skip
    before = deployment_chain(events)[:-1]
    if current.undone is not None:
        # The user may mean the deployment that failed, which is no longer in force.
        further = (
            f"run `isthmus deploy rollback --to {before[-1].digest[:12]}`" if before else "no earlier deployment exists"
        )
        raise GateFailed(str(file), f"the server has gone back by itself: {current.undone.why}",
                         expected="--to with a package, to go further back",
                         remedy=further)  # fmt: skip
    if not before:
        raise GateFailed(str(file), f"no deployment before package {current.digest[:12]}",
                         expected="an earlier deployment",
                         remedy="run `isthmus deploy` for another package")  # fmt: skip
    return before[-1]
