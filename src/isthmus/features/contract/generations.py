"""The contracts of a project: the current one, the next one, and earlier ones (retired and forgotten)."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TypeVar

from isthmus.features.contract.diff import require_service, service_differences
from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.errors import ContractMismatch
from isthmus.features.files import write_atomically

T = TypeVar("T")

NEXT, RETIRED, FORGOTTEN = "contract.next.json", "contract.retired.json", "contract.forgotten.json"
"""Files next to `contract.json`."""


@dataclass(frozen=True)
class Retired:
    contract: Contract
    at: int  # microseconds since 1970 UTC


@dataclass(frozen=True)
class Generations:
    """The contracts (schemas with a hash) of a project. Methods return changed copies; only `write` writes files.

    Attributes:
        current: contract that servers use; None before any contract became current.
        next: contract whose rows are still being built and written; None if the newest contract is current.
        retired: replaced contracts that are still served, for models trained for them and for rolling back.
        forgotten: contracts that are no longer served, and whose rows can be deleted from the online store.
    """

    current: Contract | None = None
    next: Contract | None = None
    retired: tuple[Retired, ...] = ()  # latest first
    forgotten: tuple[Contract, ...] = ()

    @classmethod
    def read(cls, current: Path) -> "Generations":
        """Read all contracts of a project: the current one from the file `current`, the others from files beside it.

        A missing file counts as empty. Raise ContractMismatch if a file is damaged.
        """
        # In the reverse order of `write`: a contract that has just stopped being the next one is then read as current.
        upcoming = _read(current.with_name(NEXT), Contract.loads)
        contract = _read(current, Contract.loads)
        if contract is not None and upcoming is not None and upcoming.hash == contract.hash:
            # The process that made it current was killed before it removed the file.
            upcoming = None
        retired = _read(current.with_name(RETIRED), loads_retired) or ()
        retired = tuple(item for item in retired if contract is None or item.contract.hash != contract.hash)
        forgotten = _read(current.with_name(FORGOTTEN), loads_retired) or ()
        return cls(contract, upcoming, retired, tuple(item.contract for item in forgotten))

    def write(self, current: Path) -> None:
        """Write the current contract to the file `current`, and the other contracts to files beside it.

        The others are the next one, the retired ones, which servers still use, and the forgotten ones, whose rows are
        to be deleted. If there is no next contract, or no forgotten one, delete its file. A contract is written to its
        new file before it is removed from its old one, so a killed process loses no contract.
        """
        # In this order, each contract is in its new file before it leaves its old one.
        if self.forgotten:
            write_atomically(
                current.with_name(FORGOTTEN), _dumps_retired(Retired(contract, 0) for contract in self.forgotten)
            )
        else:
            current.with_name(FORGOTTEN).unlink(missing_ok=True)
        write_atomically(current.with_name(RETIRED), _dumps_retired(self.retired))
        if self.next is not None:
            write_atomically(current.with_name(NEXT), self.next.dumps())
        if self.current is not None:
            write_atomically(current, self.current.dumps())
        if self.next is None:
            current.with_name(NEXT).unlink(missing_ok=True)

    def newest(self) -> Contract | None:
        return self.next or self.current

    def served(self) -> tuple[Contract, ...]:
        return (*([self.current] if self.current else ()), *(item.contract for item in self.retired))

    def contracts(self) -> Iterator[Contract]:
        yield from self.served()
        if self.next is not None:
            yield self.next

    def views(self) -> dict[str, ViewContract]:
        return {view.hash: view for contract in self.contracts() for view in contract.views.values()}

    def compatible_contract(self, exported: Contract, service: str) -> Contract | None:
        for contract in self.served():
            if service in contract.services and not service_differences(exported, contract, service):
                return contract
        return None

    def require_compatible(self, where: str, exported: Contract, service: str) -> Contract:
        """Return a contract that servers use now and under which a model runs, before the model is deployed.

        Args:
            where: name of the model or package, to begin an error message.
            exported: contract for which the model was made.
            service: name of the model's service.

        Raises:
            ContractMismatch: the model runs under none of the served contracts.
            RequestError: neither `exported` nor the current contract has the service.
        """
        contract = self.compatible_contract(exported, service)
        if contract is not None:
            return contract
        if self.current is None:
            raise ContractMismatch(where, "nothing has been applied", remedy="run `isthmus apply`")
        if self.next is not None and not service_differences(exported, self.next, service):
            raise ContractMismatch(
                where, f"needs contract {self.next.hash[:12]}, whose rows are not all in the online store yet",
                remedy="run `isthmus build` and `isthmus materialize` to make that contract current",
            )  # fmt: skip
        require_service(where, exported, self.current, service)
        raise AssertionError("the service has not changed")

    def definitions(self, view: str) -> list[ViewContract]:
        return list({item.slot: item for c in self.contracts() if (item := c.views.get(view)) is not None}.values())

    def with_slots(self, contract: Contract) -> Contract:
        """Return a copy of a new contract with a slot for each view: a suffix of the view's name in the online store.

        So rows of a new definition do not overwrite the rows that servers still read. A definition in the current, the
        next or a retired contract keeps its slot.
        """

        def place(view: ViewContract) -> ViewContract:
            known = self.definitions(view.name)
            if slots := [item.slot for item in known if item.hash == view.hash]:
                return replace(view, slot=slots[0])
            # Do not reuse slots of forgotten contracts: their rows are being deleted.
            forgotten = [contract.views[view.name] for contract in self.forgotten if view.name in contract.views]
            used = {item.slot for item in (*known, *forgotten)}
            slot = f".{view.hash[:8]}" if used else ""
            return replace(view, slot=next(new for n in count() if (new := f"{slot}.{n}" if n else slot) not in used))

        return replace(contract, views={name: place(view) for name, view in contract.views.items()})

    def prepare(self, contract: Contract, at: int) -> "Generations":
        """Return a copy with `contract` as the next contract, whose rows are still to be built and written.

        If `contract` is already current, the copy has no next contract. A different contract that was next before is
        retired. `at` is the time of retiring, in microseconds since 1970 UTC. `contract` comes from `with_slots`.
        """
        replaced = [self.next] if self.next is not None and self.next.hash != contract.hash else []
        upcoming = None if self.current is not None and self.current.hash == contract.hash else contract
        # A contract that was current before also stays retired: models run under it until it is current again.
        retired = _retire(self.retired, replaced, at, [self.current])
        return replace(self, next=upcoming, retired=retired)

    def switch(self, contract: Contract, at: int) -> "Generations":
        """Return a copy in which `contract` is current and there is no next one. Call this once its rows are written.

        The contracts that were current and next before are retired, unless they are `contract` itself. `at` is the time
        of retiring, in microseconds since 1970 UTC.
        """
        replaced = [item for item in (self.current, self.next) if item is not None and item.hash != contract.hash]
        # If the contract was retired, it stays in that file, which is written before `contract.json`.
        return replace(self, current=contract, next=None, retired=_retire(self.retired, replaced, at, []))

    def deletable_views(self) -> list[ViewContract]:
        used = {(view.name, view.slot) for contract in self.contracts() for view in contract.views.values()}
        views = {(view.name, view.slot): view for contract in self.forgotten for view in contract.views.values()}
        return [view for place, view in views.items() if place not in used]


def _retire(
    before: Iterable[Retired], replaced: Iterable[Contract], at: int, used: Iterable[Contract | None]
) -> tuple[Retired, ...]:
    hashes = {contract.hash for contract in used if contract is not None}
    retired = [*(Retired(contract, at) for contract in replaced), *before]
    by_hash = {item.contract.hash: item for item in reversed(retired) if item.contract.hash not in hashes}
    return tuple(sorted(by_hash.values(), key=lambda item: -item.at))


def _read(file: Path, loads: Callable[[bytes, str], T]) -> T | None:
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    return loads(text, str(file))


def loads_retired(text: bytes, where: str) -> tuple[Retired, ...]:
    try:
        items = json.loads(text)
        return tuple(
            Retired(Contract.loads(json.dumps(item["contract"]).encode(), where), int(item["at"])) for item in items
        )
    except (ValueError, KeyError, TypeError) as error:
        remedy = "delete the file; models of earlier contracts will then not run"
        raise ContractMismatch(where, f"is not a list of contracts ({error})", remedy=remedy) from error


def _dumps_retired(retired: Iterable[Retired]) -> bytes:
    items = [{"at": item.at, "contract": json.loads(item.contract.dumps())} for item in retired]
    return json.dumps(items, indent=1, sort_keys=True).encode() + b"\n"
