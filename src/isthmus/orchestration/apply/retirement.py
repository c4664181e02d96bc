"""Removal of retired contracts and their online rows."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from isthmus.features import clock
from isthmus.features.contract.generations import Generations
from isthmus.features.errors import IsthmusError
from isthmus.features.online.store import OnlineStore
from isthmus.orchestration.project import Project
from isthmus.package.manifest import open_package, read_contract
from isthmus.serving.rollout.releases import in_force

HOUR = 3600 * 1_000_000
# Minimum microseconds before rows are removed. Every server must have seen the new contract or deployment by then, even
# over NFS.
LEAST = 60 * 1_000_000


def forget(project: Project, store: OnlineStore) -> None:
    """Remove contracts that were retired long enough ago and are not needed by a deployed model, and their rows.

    Also finishes an earlier call that was killed. Does nothing while another process runs it.
    """
    with _alone(project) as alone:
        if not alone:
            return
        with project.locked("contract"), project.locked("retirement"):
            before = project.generations()
            left = _without_old(project, before)
            if left != before:
                # Write the contracts before dropping rows, so that servers stop reading the rows first.
                left.write(project.contract_file)
        if not left.forgotten:
            return
        # No lock while rows are dropped: it may take long, and no other contract uses these rows.
        for view in left.abandoned():
            store.drop(view)
        with project.locked("contract"):
            replace(project.generations(), forgotten=()).write(project.contract_file)


@contextmanager
def _alone(project: Project) -> Iterator[bool]:
    with (project.state / "forget.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _without_old(project: Project, generations: Generations) -> Generations:
    keep = max(project.settings.stores.keep_contracts_hours * HOUR, LEAST)
    now, needed = clock.now(), _needed(project, generations)
    retired = tuple(item for item in generations.retired if item.at + keep > now or item.contract.hash in needed)
    gone = [item.contract for item in generations.retired if item not in retired]
    return replace(generations, retired=retired, forgotten=(*generations.forgotten, *gone))


def _needed(project: Project, generations: Generations) -> set[str]:
    file, every = project.deployment_file, {item.contract.hash for item in generations.retired}
    try:
        changed = file.stat().st_mtime_ns // 1000
    except FileNotFoundError:
        return set()
    deployed = in_force(file)
    if deployed is None or changed + LEAST > clock.now():
        # A server may still run an earlier deployment.
        return every
    needed = set()
    for deployment in deployed.loaded(clock.now() - LEAST):
        try:
            package = open_package(Path(deployment.package))
            contract = generations.of_model(read_contract(package), package.manifest.service)
        except (IsthmusError, OSError):
            # The package is unreadable now, but a server may have loaded it earlier under any contract.
            return every
        if contract is not None:
            needed.add(contract.hash)
    return needed
