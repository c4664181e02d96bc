"""`isthmus apply`: compile the definitions, write the contract and register the Feast objects."""

from contextlib import suppress
from dataclasses import dataclass

from isthmus.features import clock
from isthmus.features.contract.diff import differences
from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, Problem
from isthmus.features.offline.log import MaterializationLog
from isthmus.orchestration.apply.analysis import build_problems, local_sources, remember
from isthmus.orchestration.apply.switch import register
from isthmus.orchestration.project import Project
from isthmus.package.snapshot.selection import disclosed, kept_views
from isthmus.package.snapshot.store import Shelf
from isthmus.transforms.sources import columns


@dataclass(frozen=True)
class Applied:
    """Report of `apply`.

    Attributes:
        contract: hash of the new contract.
        changes: one sentence for each change from the contract before.
        registered: names of the registered Feast objects; empty if they are registered later.
        current: hash of the contract that servers use. If it is not the new contract, servers switch (and Feast objects
            are registered) after `build` and `materialize` have written the new rows.
        sources: column types of each local source.
    """

    contract: str
    changes: list[str]
    registered: list[str]
    current: str
    sources: dict[str, dict[str, str]]


def apply(project: Project) -> Applied:
    """Check the project and make its contract current: at once, or after its rows are written.

    Also removes device snapshots that disclose more than the new definitions allow.

    Raises:
        ConfigurationError: problems of definitions, freshness objectives, sources or functions, or features whose type
            differs from the table. All problems are listed.
        DependencyError: feast is not installed.
    """
    definitions = project.definitions
    project.require_objectives_of(definitions.contract.views)
    problems, digest = build_problems(project)
    types = {} if problems else {source.name: columns(source, project.root) for source in local_sources(project)}
    with project.locked("contract"):
        unreadable = False
        try:
            generations = project.generations()
        except ContractMismatch:
            generations, unreadable = Generations(), True
        before, contract = generations.newest(), generations.placed(definitions.contract)
        changes = differences(before, contract) if before else []
        if unreadable:
            changes = ["the previous contract cannot be read"]
        problems += _retyped(project, contract)
        if problems:
            raise ConfigurationError(f"{project.settings.project.definitions}.py", problems)
        if _has_rows(project, generations, contract):
            registered = register(project, contract)
            generations = generations.switch(contract, clock.now())
        else:
            registered = []
            generations = generations.prepare(contract, clock.now())
        # Write this file last: it makes the contract the applied one.
        generations.write(project.contract_file)
    remember(project, digest)
    _withdraw(project, contract)
    current = generations.current or contract
    return Applied(contract.hash, changes, registered, current.hash, types)


def _withdraw(project: Project, contract: Contract) -> None:
    """Remove snapshots that disclose features which devices may no longer have; servers would still offer them."""
    for folder in project.snapshots.glob("*/"):
        service, shelf = project.definitions.services.get(folder.name), Shelf(folder)
        device = None if service is None else service.device
        allowed = disclosed(kept_views(contract, folder.name), device) if device else ()
        # A snapshot that is being written may still use the previous contract, so take its lock.
        with shelf.locked():
            before = shelf.before()
            if device is None or (before is not None and not {*before.discloses} <= {*allowed}):
                shelf.clear()


def _has_rows(project: Project, generations: Generations, contract: Contract) -> bool:
    """Return whether a contract can become current now: its views are unchanged, or nothing was ever materialized."""
    current = generations.current
    if current is None or all(view in current.views.values() for view in contract.views.values()):
        return True
    served = MaterializationLog(project.offline, project.storage_options).contracts()
    return not served.intersection(view.hash for before in generations.every() for view in before.views.values())


def _retyped(project: Project, contract: Contract) -> list[Problem]:
    store, problems = project.offline_store(), []
    for view in contract.views.values():
        # Damaged tables are reported by the steps that read them.
        with suppress(DataError):
            problems += store.retyped(view)
    return problems
