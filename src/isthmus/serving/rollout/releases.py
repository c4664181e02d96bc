"""Deploying and rolling back: under a lock, in stages, so that a kill at any point leaves a valid deployment."""

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
from isthmus.serving.deployment.history import DeploymentHistory, Event, succession
from isthmus.serving.deployment.record import Candidate, Deployment, Probation, Undone, approve
from isthmus.serving.predict.model import Model
from isthmus.serving.rollout.decision import read_decision

STAGES = ("fetch", "verify", "load", "warm", "switch")

CACHED = 10
"""Lines of the history whose packages stay in the cache."""


@dataclass
class Rollout:
    """A deployment under way, and then what came of it: the bytes that were copied, and the seconds of each stage."""

    bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    _since: float = field(default_factory=time.perf_counter)
    _deployment: Deployment | None = None

    @property
    def deployment(self) -> Deployment:
        """What is in force at the end."""
        assert self._deployment is not None  # noqa: S101 - set before it is returned
        return self._deployment

    def done(self, stage: str) -> None:
        """Counts the time since the last call for a stage."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._since
        self._since = now

    def load(self, deployment: Deployment, public_key: str | None) -> None:
        """Loads and warms the model of a deployment like the server."""
        model = Model(deployment, public_key)
        self.done("load")
        self.seconds["load"] -= model.warming
        self.seconds["warm"] += model.warming

    def switch(self, file: Path, deployment: Deployment) -> None:
        """Puts a deployment in force."""
        write_atomically(file, deployment.dumps(file))
        self.done("switch")
        self._deployment = deployment

    def as_dict(self) -> dict[str, Any]:
        """The deployment in its machine-readable form, with what it took."""
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
    """Puts a package behind the API: a running server takes it up within a second.

    The package is copied into the cache beside the file, and loaded and warmed from there before it is in force. Until
    then, what was in force stays so, whatever happens.

    Args:
        package: the package folder.
        verdict: the outcome of `isthmus verify` for this package, if there is one.
        contract: the contract in use.
        profile: precision and threads.
        file: where the deployment is written, all at once.
        tables: view to the fingerprint that the last build of its offline table has left; the verdict must be about
            these.
        at: the present time in microseconds since 1970 UTC.
        public_key: whose owner must have signed the package, as PEM.
        share: of requests that it answers as a candidate beside what is in force; 0 for a shadow, whose answers are
            compared and never returned; None to put it in force itself.
        why: the reason, for the history.

    Raises:
        PackageError: the package is damaged, not signed by the owner of the key, lacks the profile's precision, or
            does not reproduce its golden rows here.
        ContractMismatch: what the model reads has changed since the package was exported.
        GateFailed: there is no verdict, or it did not pass, or it is about something else or not about everything; or
            nothing is deployed that a candidate could be beside, or that was given up.
        DependencyError: another deployment is under way.
        DataError: the history cannot be read.
    """
    with _changing(file) as (history, _):
        rollout = Rollout()
        current = None if share is None else _beside(file)
        deployment = approve(package, verdict, contract, profile, tables=tables, at=at, public_key=public_key)
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
                             expected=f"{current.service}, as what is in force",
                             remedy="deploy it without --shadow or --canary")  # fmt: skip
        if decision := read_decision(file, current):
            raise GateFailed(f"package {current.digest[:12]}", f"was given up: {decision.why}",
                             expected="a deployment to try a package beside",
                             remedy="deploy again once the server has gone back, or `isthmus rollback`")  # fmt: skip
        objective = profile.latency_objective_ms
        candidate = Candidate(deployment=deployment, share=share, latency_objective_ms=objective)
        # One trial at a time: the server has one model to stand by.
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
    """Puts the candidate in force. Errors: see `deploy`; and a GateFailed if there is none, or it was given up."""
    with _changing(file) as (history, _):
        rollout = Rollout()
        candidate = _beside(file).candidate
        if candidate is None:
            raise GateFailed(str(file), "there is no candidate", expected="a candidate to promote",
                             remedy="run `isthmus deploy --shadow`, or with `--canary SHARE`")  # fmt: skip
        if decision := read_decision(file, candidate.deployment):
            where = f"package {candidate.deployment.digest[:12]}"
            raise GateFailed(where, f"was given up: {decision.why}", expected="a candidate that is still running",
                             remedy="run `isthmus rollback`, which drops it")  # fmt: skip
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
    """Drops the candidate, if any; else puts an earlier deployment in force again. Errors: see `deploy`.

    `to` is how the digest of that deployment begins; by default it is the deployment before the current one;
    after a server has undone a deployment, it must be named.
    """
    with _changing(file) as (history, events):
        rollout = Rollout()
        # With --to there is a way back from a damaged file, too.
        current = _read(file) if to is None else in_force(file)
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
    """Puts the deployment before a deployment on probation in force again; whether it was still to be done.

    Of several workers the first does it. The reason is in the file that puts it in force, so that a kill at any point
    leaves the failed deployment without a decision, or the decision with its reason. `generations` are those of the
    project where the package is to be verified anew: a server has its model loaded, others do not.

    Raises:
        DependencyError: another deployment is under way, or the disk is full.
        DataError: the history cannot be read.
        PackageError: the deployment cannot be read; or the package before it is gone, damaged, or not signed by whom it
            must be.
        ContractMismatch: what the model before it reads has changed since.
    """
    with _changing(file) as (history, _):
        current = _read(file)
        if current is None or current.probation is None or current.alone != deployment.alone:
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
    return Event(at=restored.deployed_at, action="rollback", deployment=restored.alone, why=undone.why)


def _on_probation(file: Path, deployment: Deployment, seconds: float, objective_ms: float) -> Deployment:
    """A deployment that is about to be in force, with the way back from it."""
    before = in_force(file)
    if before is not None and before.probation is not None and read_decision(file, before):
        # A server is about to undo it, and waits for this deployment.
        before = before.probation.before
    if before is not None and before.runs == deployment.runs:
        # The same again: behind it is still what was there before.
        before = before.probation.before if before.probation else None
    if before is None or seconds == 0 or (before.model, before.service) != (deployment.model, deployment.service):
        return deployment
    until = deployment.deployed_at + round(seconds * 1e6)
    probation = Probation(before=before.alone, until=until, latency_objective_ms=objective_ms)
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
                           remedy="export and deploy it again, or name another with --to")  # fmt: skip
    package = cache.require(folder, earlier.digest, public_key)
    generations.require_model(where, read_contract(package), package.manifest.service)
    rollout.done("verify")
    deployment = msgspec.structs.replace(earlier, deployed_at=at, public_key=public_key or earlier.public_key)
    rollout.load(deployment, public_key)
    return deployment


def in_force(file: Path) -> Deployment | None:
    """What a deployment file says; None if there is none, or it cannot be read."""
    with suppress(OSError, PackageError):
        return _read(file)
    return None


def _read(file: Path) -> Deployment | None:
    try:
        return Deployment.loads(file.read_bytes(), str(file))
    except FileNotFoundError:
        return None


@contextmanager
def _changing(file: Path) -> Iterator[tuple[DeploymentHistory, list[Event]]]:
    """The history, locked against other deployments; afterwards the cache holds no more than it names."""
    history = DeploymentHistory(file)
    with history.locked() as events:
        for event in _unnoted(file, events):
            history.add(event)
            events.append(event)
        yield history, events
        last = [event.deployment.digest for event in history.read()[-CACHED:]]
        current = in_force(file)
        # As at its first moment: the way back for its production quality stays open after probation.
        named = [] if current is None else current.loaded(current.deployed_at)
        cache.prune(cache.folder_of(file), {*last, *(deployment.digest for deployment in named)})


def happened(file: Path) -> list[Event]:
    """The history of a deployment file, the newest last."""
    events = DeploymentHistory(file).read()
    return [*events, *_unnoted(file, events)]


def _unnoted(file: Path, events: list[Event]) -> Iterator[Event]:
    """Events that the files show and the history lacks."""
    current = in_force(file)
    if current is None:
        return
    deployed, candidate = succession(events), current.candidate
    alone = current.alone
    if not deployed or deployed[-1] != alone:
        # Its process was killed between the two files; or it is older than the history.
        if current.undone is not None:
            yield _restoration(current, current.undone)
        else:
            yield Event(at=alone.deployed_at, action="deploy", deployment=alone, why="found in force")
    # A server that gives a candidate up does not wait for the lock.
    if candidate is not None and (decision := read_decision(file, candidate.deployment)) is not None:
        event = Event(at=decision.at, action="refuse", deployment=candidate.deployment, why=decision.why)
        if event not in events:
            yield event


def _earlier(file: Path, events: list[Event], current: Deployment | None, to: str | None) -> Deployment:
    if to is not None:
        known = {event.deployment.digest: event.deployment for event in events}
        matches = [digest for digest in known if digest.startswith(to)]
        if len(matches) != 1:
            expected = one_of(digest[:12] for digest in known) if known else "none: nothing was ever deployed"
            what = f"{len(matches)} packages of the history begin" if matches else "no package of the history begins"
            raise GateFailed(str(file), f"{what} with {to!r}", expected=expected,
                             remedy="see `isthmus history`")  # fmt: skip
        if current is not None and current.digest == matches[0]:
            raise GateFailed(str(file), f"package {matches[0][:12]} is in force already", expected="another package",
                             remedy="see `isthmus history`")  # fmt: skip
        return known[matches[0]]
    if current is None:
        raise GateFailed(str(file), "nothing is deployed", expected="a deployment to go back from",
                         remedy="run `isthmus deploy`")  # fmt: skip
    before = succession(events)[:-1]
    if current.undone is not None:
        # Whoever means the deployment that failed would go one too far.
        further = f"run `isthmus rollback --to {before[-1].digest[:12]}`" if before else "there is none further back"
        raise GateFailed(str(file), f"the server has gone back by itself: {current.undone.why}",
                         expected="--to with a package, to go further back",
                         remedy=further)  # fmt: skip
    if not before:
        raise GateFailed(str(file), f"there is no deployment before package {current.digest[:12]}",
                         expected="an earlier deployment",
                         remedy="run `isthmus deploy` for another package")  # fmt: skip
    return before[-1]
