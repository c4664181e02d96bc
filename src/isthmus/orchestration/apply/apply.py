"""`apply`: compiles the definitions, writes the contract, registers the Feast objects."""

from contextlib import suppress
from dataclasses import dataclass

from isthmus.features import clock
from isthmus.features.contract.diff import differences
from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import Contract
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, Problem
from isthmus.features.offline.log import MaterializationLog
from isthmus.orchestration.apply.analysis import local_sources, remember, unbuildable
from isthmus.orchestration.apply.switch import register
from isthmus.orchestration.project import Project
from isthmus.package.snapshot.selection import disclosed, kept_views
from isthmus.package.snapshot.store import Shelf
from isthmus.transforms.sources import columns


@dataclass(frozen=True)
class Applied:
    """The hash of the new contract, what changed, a sentence each, and the registered Feast objects.

    `current` is the hash of the contract that servers answer under. If it is another, the new contract follows it once
    `build` and `materialize` have written its rows, and Feast's objects are registered then. `sources` has the columns
    of each local source with their types.
    """

    contract: str
    changes: list[str]
    registered: list[str]
    current: str
    sources: dict[str, dict[str, str]]


def apply(project: Project) -> Applied:
    """Checks the project and puts its contract in force: at once if no rows need to be written first.

    Raises:
        ConfigurationError: with every problem of the definitions; or of objectives for views that there are not; or of
            sources and functions, as far as `unbuildable` sees them, and of features that have another type than the
            table.
        DependencyError: feast is not installed.
    """
    definitions = project.definitions
    project.require_objectives_of(definitions.contract.views)
    problems, digest = unbuildable(project)
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
            changes = ["the contract before was not readable"]
        problems += _retyped(project, contract)
        if problems:
            raise ConfigurationError(f"{project.settings.project.definitions}.py", problems)
        if _has_rows(project, generations, contract):
            registered = register(project, contract)
            generations = generations.switch(contract, clock.now())
        else:
            registered = []
            generations = generations.prepare(contract, clock.now())
        # Last, because from here on the contract is in force.
        generations.write(project.contract_file)
    remember(project, digest)
    _withdraw(project, contract)
    current = generations.current or contract
    return Applied(contract.hash, changes, registered, current.hash, types)


def _withdraw(project: Project, contract: Contract) -> None:
    """Removes the snapshots that disclose what devices may keep no longer: a server would go on offering them."""
    for folder in project.snapshots.glob("*/"):
        service, shelf = project.definitions.services.get(folder.name), Shelf(folder)
        device = None if service is None else service.device
        allowed = disclosed(kept_views(contract, folder.name), device) if device else ()
        # A snapshot that is being written may be of the contract before.
        with shelf.locked():
            before = shelf.before()
            if device is None or (before is not None and not {*before.discloses} <= {*allowed}):
                shelf.clear()


def _has_rows(project: Project, generations: Generations, contract: Contract) -> bool:
    """Whether a contract can be current at once: its rows are those of the current one, or there are none at all."""
    current = generations.current
    if current is None or all(view in current.views.values() for view in contract.views.values()):
        return True
    served = MaterializationLog(project.offline, project.storage_options).contracts()
    return not served.intersection(view.hash for before in generations.every() for view in before.views.values())


def _retyped(project: Project, contract: Contract) -> list[Problem]:
    """Features of another type than in the table: no build could fulfill such a contract."""
    store, problems = project.offline_store(), []
    for view in contract.views.values():
        # A damaged table is for the readers of its rows to report.
        with suppress(DataError):
            problems += store.retyped(view)
    return problems
