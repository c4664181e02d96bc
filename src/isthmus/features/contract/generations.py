"""The contracts of a project side by side: the current one, the next one, and those that were current before.

A contract becomes current when all of its rows are in the online store. Until then it is the next one: tables are
built and rows are written for it, and servers go on with the current one. The rows of different definitions of a view
lie side by side, each definition in a slot of its own; a view that did not change keeps its slot. A retired contract
keeps its rows for a while: for the models that were trained for it, and for the way back. It is forgotten before its
rows go, which may take a while.

Each is a file in the state folder, replaced as a whole. `contract.json` alone makes a contract current.
"""

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
"""The files beside `contract.json`."""


@dataclass(frozen=True)
class Retired:
    """A contract that others have replaced.

    Attributes:
        at: when, microseconds since 1970 UTC.
    """

    contract: Contract
    at: int


@dataclass(frozen=True)
class Generations:
    """The contracts of a project.

    Attributes:
        retired: the latest first.
        forgotten: nothing is served under them, and some of their rows may still be there.
    """

    current: Contract | None = None
    next: Contract | None = None
    retired: tuple[Retired, ...] = ()
    forgotten: tuple[Contract, ...] = ()

    @classmethod
    def read(cls, current: Path) -> "Generations":
        """The contracts beside the file of the current one.

        Raises:
            ContractMismatch: a file is damaged.
        """
        # Against the order of `write`: a contract that is no longer the next one is found to be current.
        following = _read(current.with_name(NEXT), Contract.loads)
        contract = _read(current, Contract.loads)
        if contract is not None and following is not None and following.hash == contract.hash:
            # The process that made it current was killed before it removed the file.
            following = None
        retired = _read(current.with_name(RETIRED), loads_retired) or ()
        retired = tuple(item for item in retired if contract is None or item.contract.hash != contract.hash)
        forgotten = _read(current.with_name(FORGOTTEN), loads_retired) or ()
        return cls(contract, following, retired, tuple(item.contract for item in forgotten))

    def write(self, current: Path) -> None:
        """Writes the files. A process that is killed in between loses no contract that has rows."""
        # In this order: what is forgotten is on record before it is no longer retired, and what is retired before it is
        # no longer current.
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
        """The contract that tables are built for."""
        return self.next or self.current

    def served(self) -> tuple[Contract, ...]:
        """The contracts that a server answers for: the current one, then the retired ones, the latest first."""
        return (*([self.current] if self.current else ()), *(item.contract for item in self.retired))

    def every(self) -> Iterator[Contract]:
        """All contracts but the forgotten ones."""
        yield from self.served()
        if self.next is not None:
            yield self.next

    def views(self) -> dict[str, ViewContract]:
        """Return all definitions of views by hash."""
        return {view.hash: view for contract in self.every() for view in contract.views.values()}

    def of_model(self, exported: Contract, service: str) -> Contract | None:
        """The contract that a model runs under: the latest served one whose service is that of the model's export."""
        for contract in self.served():
            if service in contract.services and not service_differences(exported, contract, service):
                return contract
        return None

    def require_model(self, where: str, exported: Contract, service: str) -> Contract:
        """The contract that a model, named by `where`, runs under.

        Raises:
            ContractMismatch: no served contract has its service as it was; or there is none at all.
        """
        contract = self.of_model(exported, service)
        if contract is not None:
            return contract
        if self.current is None:
            raise ContractMismatch(where, "nothing has been applied", remedy="run `isthmus apply`")
        if self.next is not None and not service_differences(exported, self.next, service):
            raise ContractMismatch(
                where, f"is of contract {self.next.hash[:12]}, whose online rows are not complete yet",
                remedy="run `isthmus build` and `isthmus materialize`, which make that contract current",
            )  # fmt: skip
        require_service(where, exported, self.current, service)
        raise AssertionError("the service has not changed")

    def places(self, view: str) -> list[ViewContract]:
        """The definitions of a view, one for each slot."""
        return list({item.slot: item for c in self.every() if (item := c.views.get(view)) is not None}.values())

    def placed(self, contract: Contract) -> Contract:
        """A contract with a slot for each view: its own if the view is known, else a new one."""

        def place(view: ViewContract) -> ViewContract:
            known = self.places(view.name)
            if slots := [item.slot for item in known if item.hash == view.hash]:
                return replace(view, slot=slots[0])
            # Rows in the slots of forgotten contracts are being dropped.
            forgotten = [contract.views[view.name] for contract in self.forgotten if view.name in contract.views]
            taken = {item.slot for item in (*known, *forgotten)}
            slot = f".{view.hash[:8]}" if taken else ""
            return replace(view, slot=next(new for n in count() if (new := f"{slot}.{n}" if n else slot) not in taken))

        return replace(contract, views={name: place(view) for name, view in contract.views.items()})

    def prepare(self, contract: Contract, at: int) -> "Generations":
        """With a placed contract as the next one. What was the next one before is retired: it may have rows."""
        left = [self.next] if self.next is not None and self.next.hash != contract.hash else []
        following = None if self.current is not None and self.current.hash == contract.hash else contract
        # A contract that was current before stays retired, too: models run under it until it is current again.
        retired = _retire(self.retired, left, at, [self.current])
        return replace(self, next=following, retired=retired)

    def switch(self, contract: Contract, at: int) -> "Generations":
        """With a placed contract as the current one."""
        left = [item for item in (self.current, self.next) if item is not None and item.hash != contract.hash]
        # If it was retired, it stays so in the file, which is written before that of the current contract.
        return replace(self, current=contract, next=None, retired=_retire(self.retired, left, at, []))

    def abandoned(self) -> list[ViewContract]:
        """The definitions of views whose slots only forgotten contracts use."""
        used = {(view.name, view.slot) for contract in self.every() for view in contract.views.values()}
        views = {(view.name, view.slot): view for contract in self.forgotten for view in contract.views.values()}
        return [view for place, view in views.items() if place not in used]


def _retire(
    before: Iterable[Retired], left: Iterable[Contract], at: int, used: Iterable[Contract | None]
) -> tuple[Retired, ...]:
    hashes = {contract.hash for contract in used if contract is not None}
    retired = [*(Retired(contract, at) for contract in left), *before]
    by_hash = {item.contract.hash: item for item in reversed(retired) if item.contract.hash not in hashes}
    return tuple(sorted(by_hash.values(), key=lambda item: -item.at))


def _read(file: Path, loads: Callable[[bytes, str], T]) -> T | None:
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return None
    return loads(text, str(file))


def loads_retired(text: bytes, where: str) -> tuple[Retired, ...]:
    """The retired contracts from their file.

    Raises:
        ContractMismatch: it is damaged.
    """
    try:
        items = json.loads(text)
        return tuple(
            Retired(Contract.loads(json.dumps(item["contract"]).encode(), where), int(item["at"])) for item in items
        )
    except (ValueError, KeyError, TypeError) as error:
        remedy = "remove that file: models of earlier contracts are then refused"
        raise ContractMismatch(where, f"is no list of contracts ({error})", remedy=remedy) from error


def _dumps_retired(retired: Iterable[Retired]) -> bytes:
    items = [{"at": item.at, "contract": json.loads(item.contract.dumps())} for item in retired]
    return json.dumps(items, indent=1, sort_keys=True).encode() + b"\n"
