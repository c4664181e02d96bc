"""`contract show` and `contract diff`: a contract, wherever it is, explained, and what changes from one to another."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from isthmus.features.contract import Column, Contract, ServiceContract, TransformContract, ViewContract
from isthmus.features.contractdiff import AVAILABLE, Change, ServiceChange, changes, consequences, duration
from isthmus.features.errors import ContractMismatch, RequestError
from isthmus.orchestration.project import Project
from isthmus.orchestration.settings import FILE

APPLIED, DEFINITIONS = "applied", "definitions"
_FILE = "contract.json"


@dataclass(frozen=True)
class Found:
    """A contract, and where it was found."""

    place: str
    contract: Contract

    def as_dict(self) -> dict[str, Any]:
        """Everything that is in the contract, with all hashes."""
        data = self.contract.as_dict()
        for kind, declared in _hashed(self.contract).items():
            if declared:
                data[kind] = {name: {**form, "hash": declared[name].hash} for name, form in data[kind].items()}
        return {"place": self.place, "hash": self.contract.hash, **data}


@dataclass(frozen=True)
class ContractDifference:
    """From one contract to another.

    Attributes:
        before: the one.
        after: the other.
        changes: what became of every declaration that is not the same in both.
        services: what follows for the models of each service.
    """

    before: Found
    after: Found
    changes: list[Change]
    services: list[ServiceChange]

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable form."""
        return {
            "before": {"place": self.before.place, "hash": self.before.contract.hash},
            "after": {"place": self.after.place, "hash": self.after.contract.hash},
            "changes": [{**asdict(change), "said": str(change)} for change in self.changes],
            "services": {change.service: {"outcome": change.outcome, "because": list(change.because)}
                         for change in self.services},
        }  # fmt: skip


def find(name: str, project: Callable[[], Project]) -> Found:
    """The contract of this name.

    Args:
        name: a contract.json, the folder of a package or of a project, "applied" or "definitions".
        project: opens the project at hand, if it is needed.

    Raises:
        RequestError: there is nothing of this name, or it is something else.
        ContractMismatch: the file is no contract, or nothing has been applied.
        ConfigurationError: with every problem of the definitions.
    """
    if name == DEFINITIONS:
        opened = project()
        return Found(f"definitions of {opened.name}", opened.definitions.contract)
    path = Path(name)
    if name == APPLIED or (path / FILE).is_file():
        opened = project() if name == APPLIED else Project(path)
        file = opened.contract_file
        if not file.exists():
            raise ContractMismatch(f"project {opened.name}", "nothing has been applied", remedy="run `isthmus apply`")
    else:
        file = path / _FILE if path.is_dir() else path
    try:
        return Found(str(file), Contract.loads(file.read_bytes(), str(file)))
    except OSError as error:
        expected = f"a {_FILE}, the folder of a package or of a project, {APPLIED} or {DEFINITIONS}"
        raise RequestError(f"contract {name!r}", f"cannot be read ({error.strerror})", expected=expected) from error


def _hashed(contract: Contract) -> dict[str, Mapping[str, ViewContract | ServiceContract | TransformContract]]:
    """The declarations that have a hash of their own, by kind."""
    return {"views": contract.views, "services": contract.services, "transforms": contract.transforms}


def compare(before: Found, after: Found) -> ContractDifference:
    """What changes from one contract to another."""
    one, other = before.contract, after.contract
    return ContractDifference(before, after, changes(one, other), consequences(one, other))


def view_lines(view: ViewContract) -> dict[str, str]:
    """What there is to say of a view beside its features."""
    return {
        "keys": ", ".join(map(_column, view.keys)),
        "entities": ", ".join(view.entities),
        "ttl": duration(view.ttl),
        "delay": duration(view.delay),
        "lookback": duration(view.lookback),
        "sources": ", ".join(view.sources) or "none",
        "version": str(view.version),
        "table": view.table,
        "code": view.code[:12],
        "hash": view.hash[:12],
    }


def transform_lines(transform: TransformContract) -> dict[str, str]:
    """What there is to say of a request transform, or of a checked request source, beside its fields."""
    expects = [
        f"{name}: {', '.join(filter(None, (rule.expected, 'with a default' if rule.optional else '')))}"
        for name, rule in transform.rules.items()
    ]
    return {
        "stored features": _grouped(transform.stored),
        "request fields": ", ".join(map(_column, transform.request)) or "none",
        "expects": "; ".join(expects) or "nothing",
        "hash": transform.hash[:12],
    }


def feature_rows(view: ViewContract | TransformContract) -> list[tuple[str, str, str]]:
    """Name, type and place of each feature of a view, or field of a request transform."""
    return [(column.name, column.dtype.name, AVAILABLE[column.available]) for column in view.fields]


def service_lines(service: ServiceContract) -> dict[str, str]:
    """What a model of the service is fed."""
    computed = {"computed": _grouped(service.computed)} if service.computed else {}
    request = ", ".join(map(_column, service.request)) or "none"
    return {"features": _grouped(service.features), "request fields": request, **computed, "hash": service.hash[:12]}


def _grouped(pairs: Sequence[tuple[str, str]]) -> str:
    """Features by their view, or fields by their request transform."""
    groups = groupby(pairs, key=lambda pair: pair[0])
    return "; ".join(f"{view}: {', '.join(name for _, name in part)}" for view, part in groups) or "none"


def _column(column: Column) -> str:
    return f"{column.name} {column.dtype}"
