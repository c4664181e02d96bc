"""From one contract to the next: current is a contract whose rows are there, and retired ones are forgotten in time."""

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from isthmus.features import clock
from isthmus.features.contract.contract import Contract, ViewContract
from isthmus.features.contract.generations import Generations
from isthmus.features.errors import IsthmusError
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.package.manifest import open_package, read_contract
from isthmus.features.publishing.readback import is_published, read_back
from isthmus.features.values.columns import Values, from_python
from isthmus.features.values.entitykey import entity_keys
from isthmus.features.values.rows import RowCodec
from isthmus.orchestration.extras import extra
from isthmus.orchestration.project import Project
from isthmus.serving.rollout.rollout import in_force

HOUR = 3600 * 1_000_000


@contextmanager
def changing(project: Project) -> Iterator[None]:
    """A lock: no other process changes the contracts of the project within the block."""
    project.state.mkdir(parents=True, exist_ok=True)
    with (project.state / "contract.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def register(project: Project, contract: Contract) -> list[str]:
    """Makes Feast's registry that of a contract; returns the names of the registered objects.

    Raises:
        DependencyError: feast is not installed, or its registry cannot be used.
    """
    with extra("orchestration"):
        from isthmus.features.feast import registry
    definitions, server = project.definitions, project.settings.server
    return registry.register(
        contract,
        definitions.views,
        definitions.services,
        folder=project.state / "feast",
        offline=project.offline,
        server=f"http://{server.host}:{server.port}",
    )


def waiting_for(generations: Generations, store: OnlineStore) -> list[str]:
    """The views of the next contract whose rows Redis lacks."""
    if generations.next is None:
        return []
    return [view.name for view in _changed(generations, generations.next) if not is_published(store, view)]


def switch(project: Project, store: OnlineStore) -> bool:
    """Makes the next contract current if Redis has all of its rows, compared with their tables; returns whether.

    Rows that were pushed under the current contract and are in no table yet come along.

    Raises:
        DataError: rows in Redis are not those of their tables; the current contract stays.
    """
    with changing(project):
        generations = project.generations()
        contract = generations.next
        if contract is None or contract.hash != store.contract.hash or waiting_for(generations, store):
            return False
        offline = OfflineStore(project.offline)
        for view in _changed(generations, contract):
            read_back(store, offline, view)
            before = generations.current and generations.current.views.get(view.name)
            if before:
                _carry(store, before, view)
        register(project, contract)
        generations.switch(contract, clock.now()).write(project.contract_file)
        return True


def forget(project: Project, store: OnlineStore) -> None:
    """Forgets contracts that were retired long enough ago and that no deployed model needs, with their rows."""
    keep = project.settings.stores.keep_contracts_hours * HOUR
    with changing(project):
        generations = project.generations()
        needed = _needed(project, generations)
        retired = tuple(
            item for item in generations.retired if item.at + keep > clock.now() or item.contract.hash in needed
        )
        if retired == generations.retired:
            return
        left = replace(generations, retired=retired)
        # Servers learn of it first.
        left.write(project.contract_file)
        for view in generations.abandoned(left):
            store.drop(view)


def _changed(generations: Generations, contract: Contract) -> list[ViewContract]:
    known = generations.current.views.values() if generations.current else ()
    return [view for view in contract.views.values() if view not in known]


def _carry(store: OnlineStore, before: ViewContract, view: ViewContract) -> None:
    """Writes pushed rows of one definition of a view under another, as far as their columns are the same."""
    record = store.published(view)
    if record is None or {(c.name, c.dtype) for c in before.keys} != {(c.name, c.dtype) for c in view.keys}:
        return
    shared, codec = {(column.name, column.dtype, column.size) for column in before.fields}, RowCodec(view)
    for keys, rows in store.pushed(before, record.horizon):
        there = codec.decode(store.rows(view, entity_keys(store.contract.project, view.keys, keys)))
        # A push that reached both has more columns there.
        later = (rows.event > there.event) | ((rows.event == there.event) & (rows.known > there.known))
        places = np.flatnonzero(later | ~there.present)
        nothing = [None] * len(places)
        columns: Mapping[str, Values] = {
            column.name: rows.columns[column.name].take(places)
            if (column.name, column.dtype, column.size) in shared
            else from_python(nothing, column.dtype)
            for column in view.fields
        }
        chosen = {name: [values[place] for place in places] for name, values in keys.items()}
        store.write(view, chosen, rows.event[places], rows.known[places], columns)


def _needed(project: Project, generations: Generations) -> set[str]:
    """The hashes of the contracts that deployed models run under."""
    deployed = in_force(project.deployment_file)
    needed = set()
    for deployment in [] if deployed is None else deployed.loaded(clock.now()):
        try:
            package = open_package(Path(deployment.package))
            contract = generations.of_model(read_contract(package), package.manifest.service)
        except (IsthmusError, OSError):
            # A server may have loaded it before, under any of them.
            return {item.contract.hash for item in generations.retired}
        if contract is not None:
            needed.add(contract.hash)
    return needed
