"""Retired contracts are forgotten in time, with their rows."""

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

LEAST = 60 * 1_000_000
"""Microseconds that every server has to learn of another contract or deployment before rows go, even over NFS."""


def forget(project: Project, store: OnlineStore) -> None:
    """Forgets contracts that were retired long enough ago and that no deployed model needs, with their rows.

    It also drops the rows that an earlier call was killed before. Beside another process that does so it does nothing.
    """
    with _alone(project) as alone:
        if not alone:
            return
        with project.locked("contract"), project.locked("retirement"):
            before = project.generations()
            left = _without_old(project, before)
            if left != before:
                # Servers learn of it first.
                left.write(project.contract_file)
        if not left.forgotten:
            return
        # This may take a while, and other commands change contracts meanwhile: no other contract uses these slots.
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
    """The hashes of the contracts that servers may run models under."""
    file, every = project.deployment_file, {item.contract.hash for item in generations.retired}
    try:
        changed = file.stat().st_mtime_ns // 1000
    except FileNotFoundError:
        return set()
    deployed = in_force(file)
    if deployed is None or changed + LEAST > clock.now():
        # A server may have another deployment: that before the file was damaged, or the one before this.
        return every
    needed = set()
    for deployment in deployed.loaded(clock.now() - LEAST):
        try:
            package = open_package(Path(deployment.package))
            contract = generations.of_model(read_contract(package), package.manifest.service)
        except (IsthmusError, OSError):
            # A server may have loaded it before, under any of them.
            return every
        if contract is not None:
            needed.add(contract.hash)
    return needed
