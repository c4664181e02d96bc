"""`apply`: compiles the definitions, writes the contract, registers the Feast objects."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from isthmus.features.contract.contract import Contract
from isthmus.features.contract.diff import differences
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError, DependencyError
from isthmus.features.files import write_atomically
from isthmus.features.offline.store import NEW_VERSION, OfflineStore
from isthmus.orchestration.project import Project


@dataclass(frozen=True)
class Applied:
    """What an apply did.

    Attributes:
        contract: hash of the contract.
        changes: what is different from the contract before, a sentence each.
        registered: the Feast objects.
    """

    contract: str
    changes: list[str]
    registered: list[str]

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {"contract": self.contract, "changes": self.changes, "registered": self.registered}


def apply(project: Project) -> Applied:
    """Checks the whole project and makes its contract the one in force.

    Raises:
        ConfigurationError: with every problem of the definitions, or a feature has another type than its table.
        DependencyError: feast is not installed.
    """
    definitions = project.definitions
    contract = definitions.contract
    changes = _changes(project, contract)
    _refuse_types(project, contract)
    try:
        from isthmus.features.feast import registry
    except ImportError as error:
        raise DependencyError("apply", f"feast cannot be imported ({error})",
                              remedy="install it with: pip install 'isthmus[orchestration]'") from error  # fmt: skip
    server = project.settings.server
    registered = registry.register(
        contract,
        definitions.views,
        definitions.services,
        folder=project.state / "feast",
        offline=project.offline,
        server=f"http://{server.host}:{server.port}",
    )
    # Last, because from here on the contract is in force.
    write_atomically(project.contract_file, contract.dumps())
    return Applied(contract.hash, changes, registered)


def _refuse_types(project: Project, contract: Contract) -> None:
    """A contract that no build could fulfill does not come into force."""
    store, problems = OfflineStore(project.offline), []
    for view in contract.views.values():
        # Whether a table is damaged is for those to say who read its rows.
        with suppress(DataError):
            problems += store.retyped(view)
    if problems:
        raise ConfigurationError("definitions.py", problems, remedy=NEW_VERSION)


def _changes(project: Project, contract: Contract) -> list[str]:
    if not project.contract_file.exists():
        return []
    try:
        return differences(Contract.loads(project.contract_file.read_bytes()), contract)
    except ContractMismatch:
        return ["the contract before was not readable"]
