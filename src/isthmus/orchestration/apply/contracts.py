"""`isthmus contract`: find a contract, and compare two contracts."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from isthmus.features.contract.diff import ContractChange, ServiceChange, changes, service_changes
from isthmus.features.contract.schema import Contract, ServiceContract, TransformContract, ViewContract
from isthmus.features.errors import PackageError, RequestError
from isthmus.orchestration.project import Project
from isthmus.orchestration.settings import FILE
from isthmus.package.checksums import REMEDY
from isthmus.transforms.preparation.fit import LEARNED, Preparation

APPLIED, DEFINITIONS = "applied", "definitions"
_FILE = "contract.json"


@dataclass(frozen=True)
class LocatedContract:
    """A contract (schema with a hash) that the user named, and the place where it was found.

    `place` is the file, or names the definitions. `learned` describes the fitted preparation of each model input by
    name. It is empty unless the contract is in a package.
    """

    place: str
    contract: Contract
    learned: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        contract, data = self.contract, self.contract.as_dict()
        kinds: dict[str, Mapping[str, ViewContract | TransformContract | ServiceContract]]
        kinds = {"views": contract.views, "transforms": contract.transforms, "services": contract.services}
        for kind in kinds.keys() & data.keys():
            data[kind] = {name: {**part, "hash": kinds[kind][name].hash} for name, part in data[kind].items()}
        return {"place": self.place, "hash": self.contract.hash, **data, "learned": dict(self.learned)}


@dataclass(frozen=True)
class ContractDifference:
    """Differences between two contracts, as `isthmus contract diff` shows them.

    `learned` names model inputs whose fitted preparation differs; empty unless both contracts are in packages.
    """

    before: LocatedContract
    after: LocatedContract
    changes: list[ContractChange]
    services: list[ServiceChange]
    learned: list[str]

    def as_dict(self) -> dict[str, Any]:
        return {
            "before": {"place": self.before.place, "hash": self.before.contract.hash},
            "after": {"place": self.after.place, "hash": self.after.contract.hash},
            "changes": [{**asdict(change), "said": str(change)} for change in self.changes],
            "services": {change.service: {"outcome": change.outcome, "because": list(change.because)}
                         for change in self.services},
            "learned": self.learned,
        }  # fmt: skip


def find(name: str, project: Callable[[], Project]) -> LocatedContract:
    """Read the contract (compiled schema with a hash) that the user named in `isthmus contract`.

    `name` is "applied", "definitions" or a path to a contract.json, a package folder or a project folder. A project
    folder gives its applied contract. `project` opens the current project for "applied" and "definitions". Raise
    RequestError if the file cannot be read, and ContractMismatch if it is not a contract or nothing was applied. Raise
    ConfigurationError or PackageError if the definitions or the package are invalid.
    """
    if name == DEFINITIONS:
        opened = project()
        return LocatedContract(f"definitions of {opened.name}", opened.definitions.contract)
    path = Path(name)
    if name == APPLIED or (path / FILE).is_file():
        opened = project() if name == APPLIED else Project(path)
        return LocatedContract(str(opened.contract_file), opened.last_applied())
    file = path / _FILE if path.is_dir() else path
    try:
        contract = Contract.loads(file.read_bytes(), str(file))
        return LocatedContract(str(file), contract, _learned(file.with_name(LEARNED)))
    except OSError as error:
        expected = f"a {_FILE}, a package folder, a project folder, {APPLIED} or {DEFINITIONS}"
        raise RequestError(f"contract {name!r}", f"cannot be read ({error.strerror})", expected=expected) from error


def compare(before: LocatedContract, after: LocatedContract) -> ContractDifference:
    contracts = before.contract, after.contract
    names = before.learned.keys() | after.learned.keys() if before.learned and after.learned else set()
    learned = sorted(name for name in names if before.learned.get(name) != after.learned.get(name))
    return ContractDifference(before, after, changes(*contracts), service_changes(*contracts), learned)


def _learned(file: Path) -> dict[str, str]:
    if not file.exists():
        return {}
    try:
        preparation = msgspec.json.decode(file.read_bytes(), type=Preparation)
        numbers = {item.name: str(item) for item in preparation.numbers}
        return numbers | {item.name: str(item) for item in preparation.texts}
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        raise PackageError(str(file), f"cannot be read ({error})", remedy=REMEDY) from error
