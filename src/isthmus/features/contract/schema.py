"""The contract: the canonical form of all declarations, with hashes. `definition.compile` creates it.

Settings that later releases added are omitted where they are not used, so that earlier contracts keep their hashes.
"""

import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from isthmus.features.errors import ContractMismatch, RequestError, one_of
from isthmus.features.types import TYPES, DataType

T = TypeVar("T")

FORMAT = 1
RESERVED = ("event_timestamp", "known_at", "content_hash")
SEPARATOR = "__"
STATUS = "status"
"""The column with the status of a view's values in training sets and verdicts. No feature can have this name."""


class _Canonical:
    name: str

    def as_dict(self) -> dict[str, Any]:
        """Return the canonical form as plain data; the hash covers it."""
        raise NotImplementedError

    @cached_property
    def hash(self) -> str:
        return sha256(self.as_dict())

    def full_name(self, feature: str) -> str:
        """Return a feature's column name in training sets, `view__feature`. Responses may use it, too."""
        return f"{self.name}{SEPARATOR}{feature}"


@dataclass(frozen=True, slots=True)
class Column:
    """A named, typed value. `available` is "server", "device" or "request"; `size` is an array's size, None for any."""

    name: str
    dtype: DataType
    available: str = "server"
    size: int | None = None

    def listed(self, *more: Any) -> list[Any]:
        return [self.name, self.dtype.name, *more, *([] if self.size is None else [self.size])]


@dataclass(frozen=True)
class ViewContract(_Canonical):
    """The definition of a view in canonical form. Its hash covers everything that determines the view's values.

    Attributes:
        ttl: microseconds, or None for no limit.
        delay: microseconds from event time to known time, if the transform returns no `known_at`.
        code: digest of the transform and of how its sources are read.
        lookback: microseconds before and after a row's event time that the transform reads; None for everything.
        version: version of the offline table.
        slot: suffix that separates the online rows of this definition from other definitions; not in the hash.
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
    slot: str = ""

    @property
    def online_name(self) -> str:
        return self.name + self.slot

    @property
    def table(self) -> str:
        return self.name if self.version == 1 else f"{self.name}.v{self.version}"

    @cached_property
    def prefix(self) -> bytes:
        """The first eight bytes of the view's hash, which each online row repeats after its version byte.

        They tell a reader that the row was written for another schema of the view.
        """
        return bytes.fromhex(self.hash[:16])

    def as_dict(self) -> dict[str, Any]:
        data = {
            "entities": list(self.entities),
            "keys": [column.listed() for column in self.keys],
            "fields": [column.listed(column.available) for column in self.fields],
            "ttl": self.ttl,
            "delay": self.delay,
            "sources": list(self.sources),
            "code": self.code,
        }
        if self.lookback is not None:
            data["lookback"] = self.lookback
        if self.version != 1:
            data["version"] = self.version
        return data

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> "ViewContract":
        return cls(
            name=name,
            entities=tuple(data["entities"]),
            keys=tuple(Column(key, TYPES[dtype]) for key, dtype in data["keys"]),
            fields=tuple(Column(field, TYPES[dtype], *more) for field, dtype, *more in data["fields"]),
            ttl=data["ttl"],
            delay=data["delay"],
            sources=tuple(data["sources"]),
            code=data["code"],
            lookback=data.get("lookback"),
            version=data.get("version", 1),
        )


@dataclass(frozen=True, slots=True)
class FieldRule:
    """The rule of a request field, in words: its expectations, and its default (None if the field is required)."""

    source: str
    expected: str
    default: str | None

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.expected, "" if self.default is None else f"else {self.default}")))


@dataclass(frozen=True)
class TransformContract(_Canonical):
    """A request transform in canonical form, with everything needed to compute it, such as its ONNX graph.

    A request source with expectations or defaults has a transform of the same name, which computes its fields. `stored`
    has the (view, feature) pairs that the transform reads. `rules` has only the request fields with a rule.
    """

    name: str
    stored: tuple[tuple[str, str], ...]
    request: tuple[Column, ...]
    fields: tuple[Column, ...]
    graph: bytes = field(repr=False)
    rules: Mapping[str, FieldRule] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*(SEPARATOR.join(pair) for pair in self.stored), *(column.name for column in self.request))

    def as_dict(self) -> dict[str, Any]:
        return {
            "stored": [list(pair) for pair in self.stored],
            "request": [column.listed() for column in self.request],
            "fields": [column.listed(column.available) for column in self.fields],
            "graph": b64encode(self.graph).decode(),
            **({"rules": [[name, *astuple(rule)] for name, rule in self.rules.items()]} if self.rules else {}),
        }

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any]) -> "TransformContract":
        return cls(
            name=name,
            stored=_pairs(data["stored"]),
            request=_request(data["request"]),
            fields=tuple(Column(name, TYPES[dtype], available) for name, dtype, available in data["fields"]),
            graph=b64decode(data["graph"], validate=True),
            rules={name: FieldRule(*rule) for name, *rule in data.get("rules", ())},
        )


def optional_fields(transforms: Iterable[TransformContract]) -> set[str]:
    """Return the names of request fields that a request may omit.

    A request may omit a field if every transform that reads the field declares a default for it.
    """
    rules = [(field.name, transform.rules.get(field.name)) for transform in transforms for field in transform.request]
    return {name for name, _ in rules} - {name for name, rule in rules if rule is None or rule.default is None}


def request_column(name: str, dtype: DataType, size: int | None = None) -> Column:
    return Column(name, dtype, "request", size)


@dataclass(frozen=True, slots=True)
class ServiceContract:
    """The features of a model, in order: stored (view, feature), request fields, and computed (transform, field).

    `hash` covers these features, the transforms that compute them, and all views that the service or a transform reads.
    """

    name: str
    features: tuple[tuple[str, str], ...]
    request: tuple[Column, ...]
    hash: str
    computed: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        features: tuple[tuple[str, str], ...],
        request: tuple[Column, ...],
        views: Mapping[str, ViewContract],
        computed: tuple[tuple[str, str], ...] = (),
        transforms: Mapping[str, TransformContract] | None = None,
    ) -> "ServiceContract":
        used = {transform: (transforms or {})[transform] for transform, _ in computed}
        read = [*features, *(pair for transform in used.values() for pair in transform.stored)]
        service = cls(name, features, request, "", computed)
        covered = {**service.as_dict(), "views": {view: views[view].hash for view, _ in read}}
        if used:
            covered["transforms"] = {name: transform.hash for name, transform in used.items()}
        return replace(service, hash=sha256(covered))

    def as_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "features": [list(pair) for pair in self.features],
            "request": [column.listed() for column in self.request],
        }
        if self.computed:
            data["computed"] = [list(pair) for pair in self.computed]
        return data


@dataclass(frozen=True, slots=True)
class SpineContract:
    """The columns of a spine (training examples), and the digest of its function and of how its sources are read."""

    keys: tuple[Column, ...]
    request: tuple[Column, ...]
    label: Column
    sources: tuple[str, ...]
    code: str

    @property
    def key_names(self) -> list[str]:
        return [column.name for column in self.keys]

    def as_dict(self) -> dict[str, Any]:
        return {
            "keys": [column.listed() for column in self.keys],
            "request": [column.listed() for column in self.request],
            "label": self.label.listed(),
            "sources": list(self.sources),
            "code": self.code,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "SpineContract":
        keys = tuple(Column(name, TYPES[dtype]) for name, dtype in data["keys"])
        name, dtype = data["label"]
        label = Column(name, TYPES[dtype])
        return cls(keys, _request(data["request"]), label, tuple(data["sources"]), data["code"])


@dataclass(frozen=True)
class Contract:
    """All declarations of a project in canonical form. Methods raise RequestError for an unknown service."""

    project: str
    views: Mapping[str, ViewContract]
    services: Mapping[str, ServiceContract]
    sources: Mapping[str, Mapping[str, Any]]
    spines: Mapping[str, SpineContract]
    transforms: Mapping[str, TransformContract] = field(default_factory=dict)

    @cached_property
    def hash(self) -> str:
        return sha256(self.as_dict())

    def view(self, name: str) -> ViewContract:
        return _declared("view", self.views, name)

    def service(self, name: str) -> ServiceContract:
        return _declared("service", self.services, name)

    def inputs(self, service: str) -> tuple[Column, ...]:
        """Return the input columns of a service's models, in the order that models expect.

        First come the stored features, then the request fields, then the computed features. Features have full names,
        such as `view__feature`.
        """
        declared = self.service(service)
        return (*map(self.stored, declared.features), *declared.request, *map(self.computed, declared.computed))

    def raw_inputs(self, service: str) -> tuple[Column, ...]:
        """Return the columns that request transforms and a model read: stored features, then request fields.

        A caller must get these values for a prediction. In both groups, columns that only the transforms read come
        last. Computed features are not included.
        """
        used = self.transforms_of(service)
        request = (*self.service(service).request, *(column for transform in used for column in transform.request))
        return (*map(self.stored, self.stored_features(service)), *dict.fromkeys(request))

    def transforms_of(self, service: str) -> list[TransformContract]:
        return [self.transforms[name] for name in dict.fromkeys(name for name, _ in self.service(service).computed)]

    def stored_features(self, service: str) -> list[tuple[str, str]]:
        transformed = (pair for transform in self.transforms_of(service) for pair in transform.stored)
        return list(dict.fromkeys((*self.service(service).features, *transformed)))

    def stored(self, pair: tuple[str, str]) -> Column:
        return _full(self.views[pair[0]], pair[1])

    def computed(self, pair: tuple[str, str]) -> Column:
        return _full(self.transforms[pair[0]], pair[1])

    def transform_inputs(self, transform: TransformContract) -> list[Column]:
        return [*map(self.stored, transform.stored), *transform.request]

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "project": self.project,
            "sources": {name: dict(source) for name, source in sorted(self.sources.items())},
            "views": {name: view.as_dict() for name, view in sorted(self.views.items())},
            "services": {name: service.as_dict() for name, service in sorted(self.services.items())},
            "spines": {name: spine.as_dict() for name, spine in sorted(self.spines.items())},
            **({"transforms": {name: transform.as_dict() for name, transform in sorted(self.transforms.items())}}
               if self.transforms else {}),
        }  # fmt: skip

    def dumps(self) -> bytes:
        slots = {name: view.slot for name, view in self.views.items() if view.slot}
        data = {"hash": self.hash, **self.as_dict(), **({"slots": slots} if slots else {})}
        return json.dumps(data, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def loads(cls, text: bytes, where: str = "contract.json") -> "Contract":
        """Parse the content of a `contract.json`. `where` names the file in error messages.

        Raise ContractMismatch if the content is damaged, has an unknown format, or does not match the hash in it.
        """
        remedy = "run `isthmus apply` to write it again"
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise ContractMismatch(where, f"format {data['format']}", expected=f"format {FORMAT}", remedy=remedy)
            slots = data.get("slots", {})
            views = {
                name: replace(ViewContract.from_dict(name, view), slot=slots.get(name, ""))
                for name, view in data["views"].items()
            }
            transforms = {
                name: TransformContract.from_dict(name, form) for name, form in data.get("transforms", {}).items()
            }
            services = {
                name: ServiceContract.of(name, _pairs(form["features"]), _request(form["request"]), views,
                                         _pairs(form.get("computed", ())), transforms)
                for name, form in data["services"].items()
            }  # fmt: skip
            spines = {name: SpineContract.from_dict(spine) for name, spine in data["spines"].items()}
            contract = cls(data["project"], views, services, data["sources"], spines, transforms)
            actual, stated = contract.hash, str(data["hash"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ContractMismatch(where, f"is not a contract ({error})", remedy=remedy) from error
        if actual != stated:
            raise ContractMismatch(where, f"its content has hash {actual[:12]}",
                                   expected=f"{stated[:12]}, the hash in the file", remedy=remedy)  # fmt: skip
        return contract


def _declared(kind: str, declarations: Mapping[str, T], name: str) -> T:
    if name not in declarations:
        raise RequestError(f"{kind} {name!r}", "is not in the contract", expected=one_of(declarations))
    return declarations[name]


def _pairs(items: Iterable[Iterable[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((group, name) for group, name in items)


def _request(items: Iterable[Iterable[Any]]) -> tuple[Column, ...]:
    return tuple(request_column(name, TYPES[dtype], *size) for name, dtype, *size in items)


def _full(declaration: ViewContract | TransformContract, name: str) -> Column:
    column = next(column for column in declaration.fields if column.name == name)
    return replace(column, name=declaration.full_name(name))


def sha256(data: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of plain data, to identify it or to notice a change.

    The data are hashed as JSON with sorted keys, so the order of keys does not matter.
    """
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
