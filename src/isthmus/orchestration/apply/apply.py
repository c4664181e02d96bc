"""`apply`: compiles the definitions, writes the contract, registers the Feast objects."""

from contextlib import suppress
from dataclasses import dataclass

from isthmus.features.contract.contract import Contract
from isthmus.features.contract.diff import differences
from isthmus.features.errors import ConfigurationError, DataError
from isthmus.features.files import write_atomically
from isthmus.features.offline.store import NEW_VERSION, OfflineStore
from isthmus.orchestration.apply.diff import in_force
from isthmus.orchestration.extras import extra
from isthmus.orchestration.project import Project


@dataclass(frozen=True)
class Applied:
    """The hash of the new contract, what changed, a sentence each, and the registered Feast objects."""

    contract: str
    changes: list[str]
    registered: list[str]


def apply(project: Project) -> Applied:
    """Checks the project and puts its contract in force.

    Raises:
        ConfigurationError: with every problem of the definitions, or of features that have another type than the table.
        DependencyError: feast is not installed.
    """
    definitions = project.definitions
    contract = definitions.contract
    before = in_force(project)
    changes = differences(before, contract) if before else []
    if before is None and project.contract_file.exists():
        changes = ["the contract before was not readable"]
    _refuse_types(project, contract)
    with extra("orchestration"):
        from isthmus.features.feast import registry
    server = project.settings.server
    folder, offline, address = project.state / "feast", project.offline, f"http://{server.host}:{server.port}"
    registered = registry.register(
        contract, definitions.views, definitions.services, folder=folder, offline=offline, server=address
    )
    # Last, because from here on the contract is in force.
    write_atomically(project.contract_file, contract.dumps())
    return Applied(contract.hash, changes, registered)


def _refuse_types(project: Project, contract: Contract) -> None:
    """No build could fulfill a contract with another type than the table."""
    store, problems = OfflineStore(project.offline), []
    for view in contract.views.values():
        # A damaged table is for the readers of its rows to report.
        with suppress(DataError):
            problems += store.retyped(view)
    if problems:
        raise ConfigurationError("definitions.py", problems, remedy=NEW_VERSION)
