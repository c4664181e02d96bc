"""From one contract to the next: current is a contract whose rows are there."""

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path

import numpy as np

from isthmus.features import clock
from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import Contract, ViewContract, sha256
from isthmus.features.errors import extra
from isthmus.features.files import write_atomically
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.readback import is_published, read_back
from isthmus.features.values.columns import Values, from_python
from isthmus.features.values.entitykey import entity_keys
from isthmus.features.values.rows import RowCodec
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import FEAST_SERVER, address


def register(project: Project, contract: Contract) -> list[str]:
    """Makes Feast's registry that of a contract; returns the names of the registered objects.

    Raises:
        DependencyError: feast is not installed, or its registry cannot be used.
    """
    folder, note = project.state / "feast", project.state / "feast" / "registered.json"
    settings, digest = address(project), _registration(project, contract)
    server = settings
    with suppress(OSError, ValueError, KeyError, TypeError):
        before = json.loads(note.read_bytes())
        if before["server"] == settings:
            # Since then, a server may have been started at another port.
            server = _server(folder) or settings
            # Importing Feast takes longer than all else that `apply` does.
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
        server=server,
        offline=project.offline_store(),
    )
    text = json.dumps({"digest": digest, "server": settings, "files": _files(folder), "objects": names}, indent=1)
    write_atomically(note, text.encode() + b"\n")
    return names


def _server(folder: Path) -> str | None:
    """The address of the server in Feast's configuration."""
    found = FEAST_SERVER.search((folder / "feature_store.yaml").read_bytes())
    return found and found[1].decode()


def _registration(project: Project, contract: Contract) -> str:
    """The digest of all that Feast is told of a contract."""
    views = {
        name: [
            view.description, view.owner, contract.views[name].slot,
            [(field.name, field.description) for field in view.schema],
            [(entity.name, entity.description) for entity in view.entities],
        ]
        for name, view in project.definitions.views.items()
    }  # fmt: skip
    services = {name: service.description for name, service in project.definitions.services.items()}
    versions = [found.version for package in ("isthmus", "feast") for found in distributions(name=package)]
    places = [str(project.state), str(project.offline), *sorted(project.storage_options.items())]
    return sha256({"contract": contract.hash, "places": places, "views": views, "services": services,
                   "versions": versions})  # fmt: skip


def _files(folder: Path) -> list[str]:
    """Digests of Feast's registry and configuration: whoever writes there makes the next `apply` write again."""
    names = ("registry.pb", "feature_store.yaml", "client/feature_store.yaml")
    return [sha256({"content": FEAST_SERVER.sub(b"", (folder / name).read_bytes()).hex()}) for name in names]


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
    with project.locked("contract"):
        generations = project.generations()
        contract = generations.next
        if contract is None or contract.hash != store.contract.hash or waiting_for(generations, store):
            return False
        offline = project.offline_store()
        for view in _changed(generations, contract):
            read_back(store, offline, view)
            before = generations.current and generations.current.views.get(view.name)
            if before:
                _carry(store, before, view)
        register(project, contract)
        generations.switch(contract, clock.now()).write(project.contract_file)
        return True


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
