"""From one contract to the next: current is a contract whose rows are there."""

from collections.abc import Mapping

import numpy as np

from isthmus.features import clock
from isthmus.features.contract.contract import Contract, ViewContract
from isthmus.features.contract.generations import Generations
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.readback import is_published, read_back
from isthmus.features.values.columns import Values, from_python
from isthmus.features.values.entitykey import entity_keys
from isthmus.features.values.rows import RowCodec
from isthmus.orchestration.extras import extra
from isthmus.orchestration.project import Project


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
    with project.locked("contract"):
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
