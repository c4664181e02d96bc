"""Switches servers to the next contract once all of its rows are in Redis, and removes retired contracts."""

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import numpy as np

from isthmus.features import clock
from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import Contract, ViewContract, sha256
from isthmus.features.errors import IsthmusError, extra
from isthmus.features.files import write_atomically
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.readback import is_published, read_back
from isthmus.features.values.columns import Values, from_python
from isthmus.features.values.entitykey import entity_keys
from isthmus.features.values.rows import RowCodec
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import FEAST_SERVER, address
from isthmus.package.manifest import open_package, read_contract
from isthmus.serving.rollout.releases import current_deployment


def register(project: Project, contract: Contract) -> list[str]:
    """Register a contract's views and services with Feast, so that Feast's SDK can use them.

    Return kind and name of each object, such as "FeatureView flights". This writes Feast's registry and
    configuration to the state folder, unless nothing has changed since the last call. Raise DependencyError if
    something has changed and Feast is not installed.
    """
    folder, note = project.state / "feast", project.state / "feast" / "registered.json"
    settings, digest = address(project), _registration(project, contract)
    server = settings
    with suppress(OSError, ValueError, KeyError, TypeError):
        before = json.loads(note.read_bytes())
        if before["server"] == settings:
            # A server may have been started at another port since, and written it to the configuration.
            server = _server(folder) or settings
            # Skip Feast if nothing has changed: its import takes longer than everything else in `apply`.
            if before["digest"] == digest and before["files"] == _files(folder):
                names: list[str] = before["objects"]
                return names
    with extra("orchestration"):
        from isthmus.features.feast import registry
    definitions = project.definitions
    names = registry.register(
        contract,
        definitions.views,
        definitions.services,
        folder=folder,
        lookup_url=server,
        offline=project.offline_store(),
    )
    text = json.dumps({"digest": digest, "server": settings, "files": _files(folder), "objects": names}, indent=1)
    write_atomically(note, text.encode() + b"\n")
    return names


def _server(folder: Path) -> str | None:
    match = FEAST_SERVER.search((folder / "feature_store.yaml").read_bytes())
    return match and match[1].decode()


def _registration(project: Project, contract: Contract) -> str:
    views = {
        name: [
            view.description, view.owner, contract.views[name].slot,
            [(field.name, field.description) for field in view.schema],
            [(entity.name, entity.description) for entity in view.entities],
        ]
        for name, view in project.definitions.views.items()
    }  # fmt: skip
    services = {name: service.description for name, service in project.definitions.services.items()}
    versions = [installed.version for package in ("isthmus", "feast") for installed in distributions(name=package)]
    places = [str(project.state), str(project.offline), *sorted(project.storage_options.items())]
    return sha256({"contract": contract.hash, "places": places, "views": views, "services": services,
                   "versions": versions})  # fmt: skip


def _files(folder: Path) -> list[str]:
    names = ("registry.pb", "feature_store.yaml", "client/feature_store.yaml")
    return [sha256({"content": FEAST_SERVER.sub(b"", (folder / name).read_bytes()).hex()}) for name in names]


def missing_views(generations: Generations, store: OnlineStore) -> list[str]:
    if generations.next is None:
        return []
    return [view.name for view in _changed(generations, generations.next) if not is_published(store, view)]


def switch(project: Project, store: OnlineStore) -> bool:
    """Make servers use the next contract (the applied definitions) if Redis has all of its rows.

    Return True if servers now use it. `materialize` calls this after it has written rows. `store` must be opened with
    the next contract; otherwise the result is False. Also copies pushed rows to the new views, and registers the new
    Feast objects. Waits for other processes that change contracts. Raise DataError if the new rows in Redis differ from
    their tables, and DependencyError if Feast cannot be used. The current contract then stays.
    """
    with project.locked("contract"):
        generations = project.generations()
        contract = generations.next
        if contract is None or contract.hash != store.contract.hash or missing_views(generations, store):
            return False
        offline = project.offline_store()
        for view in _changed(generations, contract):
            read_back(store, offline, view)
            before = generations.current and generations.current.views.get(view.name)
            if before:
                _copy_pushed_rows(store, before, view)
        register(project, contract)
        generations.switch(contract, clock.now()).write(project.contract_file)
        return True


def _changed(generations: Generations, contract: Contract) -> list[ViewContract]:
    known = generations.current.views.values() if generations.current else ()
    return [view for view in contract.views.values() if view not in known]


def _copy_pushed_rows(store: OnlineStore, before: ViewContract, view: ViewContract) -> None:
    """Copy the rows that clients pushed to a view from its old definition in Redis to its new one.

    Fields whose name, type or size has changed become null. Nothing is copied if the join keys have changed. A row is
    skipped if the new definition already has the same row or a newer one.
    """
    record = store.published(view)
    if record is None or {(c.name, c.dtype) for c in before.keys} != {(c.name, c.dtype) for c in view.keys}:
        return
    shared, codec = {(column.name, column.dtype, column.size) for column in before.fields}, RowCodec(view)
    for keys, rows in store.pushed(before, record.horizon):
        there = codec.decode(store.rows(view, entity_keys(store.contract.project, view.keys, keys)))
        # Skip rows that are already there: a row pushed under both definitions has more columns.
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


HOUR = 3600 * 1_000_000
# Minimum microseconds before rows are removed. Every server must have seen the new contract or deployment by then, even
# over NFS.
LEAST = 60 * 1_000_000


def forget(project: Project, store: OnlineStore) -> None:
    """Delete contracts that servers no longer use, and their rows in Redis. `materialize` calls this last.

    A contract that was replaced is kept for the hours that `keep_contracts_hours` in `[stores]` sets, at least for a
    minute, and while a deployed model needs it. Does nothing while another process deletes contracts. If a call is
    killed, the next call finishes it.
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
        for view in left.deletable_views():
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
    deployed = current_deployment(file)
    if deployed is None or changed + LEAST > clock.now():
        # A server may still run an earlier deployment.
        return every
    needed = set()
    for deployment in deployed.to_load(clock.now() - LEAST):
        try:
            package = open_package(Path(deployment.package))
            contract = generations.compatible_contract(read_contract(package), package.manifest.service)
        except (IsthmusError, OSError):
            # The package is unreadable now, but a server may have loaded it earlier under any contract.
            return every
        if contract is not None:
            needed.add(contract.hash)
    return needed
