"""The contract: the canonical form of all declarations, and its hashes.

A server, a table, a row and a package need no definitions: they carry a contract, or its hash. The hash of a view
covers everything that decides its values; the hash of a service covers the hashes of its views; the hash of the
contract covers everything. `declarations.compile_contract` makes it.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from isthmus.features.errors import ContractMismatch, RequestError
from isthmus.features.types import TYPES, DataType

FORMAT = 1
RESERVED = ("event_timestamp", "known_at", "content_hash")
SEPARATOR = "__"
STATUS = "status"
"""Under this name a training set and a verdict say of each view what it answered: no feature can have it."""


@dataclass(frozen=True, slots=True)
class Column:
    """A named, typed value of the contract."""

    name: str
    dtype: DataType
    available: str = "server"


@dataclass(frozen=True)
class ViewContract:
    """What a reader must know of a view.

    Attributes:
        name: the view.
        entities: names of its entities, in order.
        keys: join keys of all its entities, in order.
        fields: its features, in order.
        ttl: microseconds, or None.
        delay: microseconds from event time to known time, where the transform gives no `known_at`.
        sources: names of what it reads.
        code: digest of the transform and of how its sources are read.
        lookback: microseconds from a row's event time within which its sources lie, or None for all they hold.
        version: which of the view's tables it is.
    """

    name: str
    entities: tuple[str, ...]
    keys: tuple[Column, ...]
    fields: tuple[Column, ...]
    ttl: int | None
    delay: int
    sources: tuple[str, ...]
    code: str
    lookback: int | None = None
    version: int = 1

    @property
    def table(self) -> str:
        """Name of its offline table. No view can have the name of another one's version: names hold no dot."""
        return self.name if self.version == 1 else f"{self.name}.v{self.version}"

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the view's canonical form, in hex."""
        return sha256(self.as_dict())

    @cached_property
    def prefix(self) -> bytes:
        """The first eight bytes of the hash: what every online row of the view carries."""
        return bytes.fromhex(self.hash[:16])

    def full_name(self, feature: str) -> str:
        """The feature's column name in a training set and in an answer with full names."""
        return f"{self.name}{SEPARATOR}{feature}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, in canonical order."""
        data = {
            "entities": list(self.entities),
            "keys": [[column.name, column.dtype.name] for column in self.keys],
            "fields": [[column.name, column.dtype.name, column.available] for column in self.fields],
            "ttl": self.ttl,
            "delay": self.delay,
            "sources": list(self.sources),
            "code": self.code,
        }
        # Only where they are declared: what was made before they existed keeps its hash.
        if self.lookback is not None:
            data["lookback"] = self.lookback
        if self.version != 1:
            data["version"] = self.version
        return data

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> "ViewContract":
        """The inverse of `as_dict`."""
        return cls(
            name=name,
            entities=tuple(data["entities"]),
            keys=tuple(Column(key, TYPES[dtype]) for key, dtype in data["keys"]),
            fields=tuple(Column(field, TYPES[dtype], available) for field, dtype, available in data["fields"]),
            ttl=data["ttl"],
            delay=data["delay"],
            sources=tuple(data["sources"]),
            code=data["code"],
            lookback=data.get("lookback"),
            version=data.get("version", 1),
        )


@dataclass(frozen=True, slots=True)
class ServiceContract:
    """The features of one model, in order: stored features as (view, feature) and request fields.

    Attributes:
        name: the service.
        features: (view, feature) pairs.
        request: request fields.
        hash: SHA-256 over the features, the request fields and the hashes of the views.
    """

    name: str
    features: tuple[tuple[str, str], ...]
    request: tuple[Column, ...]
    hash: str

    @classmethod
    def of(
        cls,
        name: str,
        features: tuple[tuple[str, str], ...],
        request: tuple[Column, ...],
        views: Mapping[str, ViewContract],
    ) -> "ServiceContract":
        """The contract of a service over these views."""
        covered = {
            "features": [list(pair) for pair in features],
            "request": [[column.name, column.dtype.name] for column in request],
            "views": {view: views[view].hash for view, _ in features},
        }
        return cls(name, features, request, sha256(covered))


@dataclass(frozen=True)
class Contract:
    """All declarations of a project in canonical form."""

    project: str
    views: Mapping[str, ViewContract]
    services: Mapping[str, ServiceContract]
    sources: Mapping[str, Mapping[str, Any]]
    spines: Mapping[str, Mapping[str, Any]]

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the whole contract, in hex."""
        return sha256(self.as_dict())

    def view(self, name: str) -> ViewContract:
        """The view of this name.

        Raises:
            RequestError: there is none.
        """
        try:
            return self.views[name]
        except KeyError:
            raise RequestError(f"view {name!r}", "is not in the contract", expected=one_of(self.views)) from None

    def service(self, name: str) -> ServiceContract:
        """The service of this name.

        Raises:
            RequestError: there is none.
        """
        try:
            return self.services[name]
        except KeyError:
            raise RequestError(f"service {name!r}", "is not in the contract", expected=one_of(self.services)) from None

    def inputs(self, service: str) -> tuple[Column, ...]:
        """The columns a service's model reads: its features by their full names, then its request fields.

        Both parts are in the order of the declaration.
        """
        chosen = self.service(service)
        stored = []
        for name, feature in chosen.features:
            view = self.views[name]
            column = next(column for column in view.fields if column.name == feature)
            stored.append(Column(view.full_name(feature), column.dtype, column.available))
        return (*stored, *chosen.request)

    def as_dict(self) -> dict[str, Any]:
        """Plain data: what `contract.json` holds and what the hash covers."""
        return {
            "format": FORMAT,
            "project": self.project,
            "sources": {name: dict(source) for name, source in sorted(self.sources.items())},
            "views": {name: view.as_dict() for name, view in sorted(self.views.items())},
            "services": {
                name: {
                    "features": [list(pair) for pair in service.features],
                    "request": [[column.name, column.dtype.name] for column in service.request],
                }
                for name, service in sorted(self.services.items())
            },
            "spines": {name: dict(spine) for name, spine in sorted(self.spines.items())},
        }

    def dumps(self) -> bytes:
        """`contract.json`: the canonical form with its hash, the same bytes for the same contract."""
        return json.dumps({"hash": self.hash, **self.as_dict()}, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str = "contract.json") -> "Contract":
        """The inverse of `dumps`.

        Raises:
            ContractMismatch: the text is damaged, of another format, or its hash is not the hash of its content.
        """
        remedy = "run `isthmus apply` to write it again"
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ContractMismatch(where, f"format {data['format']}", expected=f"format {FORMAT}", remedy=remedy)
            views = {name: ViewContract.from_dict(name, view) for name, view in data["views"].items()}
            services = {
                name: ServiceContract.of(
                    name,
                    tuple((view, feature) for view, feature in service["features"]),
                    tuple(Column(field, TYPES[dtype], "device") for field, dtype in service["request"]),
                    views,
                )
                for name, service in data["services"].items()
            }
            contract = cls(data["project"], views, services, data["sources"], data["spines"])
            found, stated = contract.hash, str(data["hash"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ContractMismatch(where, f"is not a contract ({error})", remedy=remedy) from error
        if found != stated:
            raise ContractMismatch(
                where,
                f"its content has hash {found[:12]}",
                expected=f"{stated[:12]}, which it states",
                remedy=remedy,
            )
        return contract


def sha256(data: Mapping[str, Any]) -> str:
    """SHA-256 of plain data in canonical form, in hex."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def one_of(names: Iterable[str]) -> str:
    """What would have been accepted, for a message."""
    return "one of " + (", ".join(sorted(names)) or "none: nothing is declared")
