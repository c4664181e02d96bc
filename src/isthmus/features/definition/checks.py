"""Check all declarations of a project together and report every problem at once."""

import dataclasses
import math
import re
from collections.abc import Iterable
from types import FunctionType, NoneType
from typing import Any

from isthmus.features.clock import MICROSECOND
from isthmus.features.contract.schema import RESERVED, SEPARATOR, STATUS, Column
from isthmus.features.definition import codehash, expectations
from isthmus.features.definition.devices import snapshot_problems
from isthmus.features.definition.failure import type_problems
from isthmus.features.definition.spec import (
    OWNER,
    Entity,
    FeatureProjection,
    FeatureService,
    FeatureView,
    Field,
    RequestSource,
    RequestTransform,
    Source,
    Spine,
    is_owner,
)
from isthmus.features.definition.streams import USER, VARIABLE, stream_problems, view_problems
from isthmus.features.definition.tiles import Tiling
from isthmus.features.errors import Problem, did_you_mean, one_of
from isthmus.features.types import INPUTS, KEY_TYPES, SCALARS, TYPES, Array, Bytes, DataType, String, UnixTimestamp

Declaration = Entity | Source | FeatureView | RequestSource | RequestTransform | FeatureService | Spine

_ANY_TYPE = one_of(map(repr, SCALARS)) + ", or Array of these"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
_KINDS = ("path", "delta", "iceberg", "sql")
_TABLE = re.compile(r"[^.\s]+(\.[^.\s]+){2,}")

_TITLES: dict[type, str] = {
    Entity: "entity", Source: "source", FeatureView: "view", RequestSource: "request source",
    RequestTransform: "request transform", FeatureService: "service", Spine: "spine",
}  # fmt: skip

_CHECKED_ELSEWHERE = ("dtype", "available", "description", "tolerance", "size")
"""Attributes of a field that `type_problems` skips: `_schema` and `_transform` check them, or they may be anything."""


class Declarations:
    """The declarations of a project. Call `add` for each, then `check`; both append to `problems` and raise nothing."""

    def __init__(self, project: str) -> None:
        self._by_type: dict[type, dict[str, Any]] = {kind: {} for kind in _TITLES}
        self.entities: dict[str, Entity] = self._by_type[Entity]
        self.sources: dict[str, Source] = self._by_type[Source]
        self.views: dict[str, FeatureView] = self._by_type[FeatureView]
        self.requests: dict[str, RequestSource] = self._by_type[RequestSource]
        self.transforms: dict[str, RequestTransform] = self._by_type[RequestTransform]
        self.services: dict[str, FeatureService] = self._by_type[FeatureService]
        self.spines: dict[str, Spine] = self._by_type[Spine]
        self.problems: list[Problem] = []
        if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", project):
            self._wrong(f"project {project!r}", "is not a usable name", "lower-case letters, digits, _ and -")

    def add(self, declaration: Declaration) -> bool:
        """Add a declaration, and all declarations that it refers to.

        If one of them has a wrong type, or attributes of wrong types, append the problems to `problems`, leave the
        declaration out, and return False. Otherwise return True.
        """
        title = _TITLES.get(type(declaration))
        if title is None:
            where = f"declaration {declaration!r}"
            self._wrong(where, f"is of type {type(declaration).__name__}", one_of(_TITLES.values()))
            return False
        wrong = type_problems(declaration, f"{title} {declaration.name}, ", ("description",))
        function = getattr(declaration, "function", None)
        if not isinstance(function, FunctionType | NoneType):
            actual = f"its function is a {type(function).__name__}"
            wrong.append(Problem(f"{title} {declaration.name}", actual, "a def that calls it"))
        values = [getattr(declaration, field.name) for field in dataclasses.fields(declaration)]
        items = [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
        nested = [item for item in items if isinstance(item, Field)]
        wrong += [
            problem
            for field in nested
            for problem in type_problems(field, f"{title} {declaration.name}, field ", _CHECKED_ELSEWHERE)
        ]
        self.problems += [problem for problem in wrong if problem not in self.problems]
        parts = [item.view if isinstance(item, FeatureProjection) else item for item in items]
        # A list, not a generator: check the next part even if this one has a problem.
        added = [self.add(part) for part in parts if type(part) in _TITLES]
        if not all(added) or wrong:
            return False
        self._put(self._by_type[type(declaration)], declaration)
        return True

    def check(self) -> None:
        for entity in self.entities.values():
            if not entity.join_keys:
                self._wrong(f"entity {entity.name}", "has no join key", "at least one")
            for key, dtype in entity.join_keys.items():
                self._name(f"entity {entity.name}, join key {key!r}", key)
                if dtype not in KEY_TYPES:
                    place = f"entity {entity.name}, join key {key}"
                    self._wrong(place, f"type {dtype!r}", one_of(map(repr, KEY_TYPES)))
        self._key_types()
        for source in self.sources.values():
            self._place(source)
        for view in self.views.values():
            self._unlike(f"view {view.name!r}", view.name, self.views)
            self._function(f"view {view.name}", view)
            self._schema(f"view {view.name}", view.schema, self._keys(f"view {view.name}", view), (*RESERVED, STATUS))
            if not view.schema:
                self._wrong(f"view {view.name}", "has no feature", "at least one Field in its schema")
            if not view.entities:
                self._wrong(f"view {view.name}", "has no entity", "at least one Entity in its entities")
            if view.ttl is not None and view.ttl <= MICROSECOND * 0:
                self._wrong(f"view {view.name}, ttl", str(view.ttl), "a positive time, or None")
            if view.delay < MICROSECOND * 0:
                self._wrong(f"view {view.name}, delay", str(view.delay), "zero or a positive time")
            fields = {field.name: field.dtype for field in view.schema}
            self.problems += expectations.problems(f"view {view.name}", fields, view.expectations)
            if view.lookback is not None and view.lookback < MICROSECOND * 0:
                self._wrong(f"view {view.name}, lookback", str(view.lookback), "zero or a positive time, or None")
            streams = [source.name for source in view.streams]
            self.problems += view_problems(f"view {view.name}", streams, bounded=view.lookback is not None)
            if view.tiling is not None:
                self._tiling(f"view {view.name}", view, view.tiling)
            if view.lateness < MICROSECOND * 0:
                self._wrong(f"view {view.name}, lateness", str(view.lateness), "zero or a positive time")
            if view.version < 1:
                self._wrong(f"view {view.name}, version", repr(view.version), "1 or a later number")
            if not is_owner(view.owner):
                self._wrong(f"view {view.name}, owner", repr(view.owner), OWNER)
        for request in self.requests.values():
            self._schema(f"request source {request.name}", request.schema, set())
            for field in request.schema:
                self._request_field(f"request source {request.name}, field {field.name!r}", field)
            if request.checked:
                self._checked(f"request source {request.name}", request)
        for transform in self.transforms.values():
            if (same := _same_but_case(transform.name, self.views)) is not None:
                self._wrong(f"request transform {transform.name!r}", f"has the name of view {same!r}", "another name")
            self._unlike(f"request transform {transform.name!r}", transform.name, self.transforms)
            self._transform(f"request transform {transform.name}", transform)
        for spine in self.spines.values():
            self._function(f"spine {spine.name}", spine)
            self._schema(f"spine {spine.name}", [spine.label], self._keys(f"spine {spine.name}", spine))
            if spine.label.dtype != Array(String):  # else any number of classes
                self._input(f"spine {spine.name}, label {spine.label.name!r}", spine.label)
            if spine.request and spine.label.name in [field.name for field in spine.request.schema]:
                self._wrong(f"spine {spine.name}, label {spine.label.name!r}", "is a request field too",
                            "a label that is not part of the request")  # fmt: skip
        for service in self.services.values():
            self._service(service)

    def _tiling(self, where: str, view: FeatureView, tiling: Tiling) -> None:
        self.problems += (problems := tiling.problems(f"{where}, "))
        if problems:
            return
        for column in {*tiling.columns} & {key.name for key in join_keys(view.entities)}:
            self._wrong(f"{where}, tiles", f"aggregate the join key {column}", "another column")
        shortest = max(tiling.windows) + tiling.tick
        if view.lookback is not None and view.lookback < shortest:
            self._wrong(f"{where}, lookback", str(view.lookback), f"the longest window and a tick, {shortest}, or more")

    def _place(self, source: Source) -> None:
        where = f"source {source.name}"
        kinds = [kind for kind in _KINDS if getattr(source, kind)]
        if len(kinds) != 1:
            actual = f"has {' and '.join(kinds)}" if kinds else "has no path, table or query"
            self._wrong(where, actual, f"one of {', '.join(_KINDS)}")
        if any(USER.match(address) for address in (source.path, source.delta)):
            # The message must not repeat the URL, which may hold a password.
            self._wrong(where, "has a user in its URL", "no user: put the credentials into environment variables")
        if source.iceberg and not _TABLE.fullmatch(source.iceberg):
            self._wrong(f"{where}, iceberg", repr(source.iceberg), "CATALOG.NAMESPACE.TABLE")
        for name in ("connection", "version_sql"):
            if getattr(source, name) and not source.sql:
                self._wrong(f"{where}, {name}", "is set without a query", f"sql= too, or no {name}=")
        if source.sql and not VARIABLE.fullmatch(source.connection):
            actual = "is not the name of an environment variable" if source.connection else "is missing"
            expected = "the environment variable with the address of the database; its name cannot begin with ISTHMUS_"
            self._wrong(f"{where}, connection", actual, expected)
        if source.types and not source.csv:
            self._wrong(f"{where}, types", "the data already have types",
                        "types= only for a CSV file: cast other columns in the transform")  # fmt: skip
        for column, dtype in source.types.items():
            if dtype not in SCALARS:
                self._wrong(f"{where}, types, column {column}", repr(dtype), one_of(map(repr, SCALARS)))
        for role in ("timestamp", "known"):
            dtype = source.types.get(getattr(source, role), UnixTimestamp)
            if dtype != UnixTimestamp:
                self._wrong(f"{where}, types, column {getattr(source, role)}", repr(dtype),
                            f"UnixTimestamp, or a source without {role}=")  # fmt: skip
        if source.stream is not None:
            if source.timestamp is None:
                self._wrong(f"{where}, stream", "the source has no timestamp=", "the column with the time of an event")
            if source.lateness < MICROSECOND * 0:
                self._wrong(f"{where}, stream", f"lateness is {source.lateness}", "zero or more")
            for problem in stream_problems(f"{where}, stream", source.stream):
                self._wrong(problem.where, problem.found, problem.expected)

    def _key_types(self) -> None:
        # Entities may share a join key, but a request has a single column for it.
        types: dict[str, tuple[str, DataType]] = {}
        for entity in self.entities.values():
            for key, dtype in entity.join_keys.items():
                first, expected = types.setdefault(key, (entity.name, dtype))
                if expected != dtype:
                    place = f"entity {entity.name}, join key {key}"
                    self._wrong(place, f"type {dtype!r}", f"{expected!r}, as in {first}")
        # A request field with the name of a join key is that key's value.
        for request in self.requests.values():
            for field in request.schema:
                first, expected = types.get(field.name, ("", field.dtype))
                if expected != field.dtype:
                    self._wrong(f"request source {request.name}, field {field.name!r}", f"type {field.dtype!r}",
                                f"{expected!r}, as the join key of {first}")  # fmt: skip

    def _function(self, where: str, declaration: FeatureView | Spine) -> None:
        parameters = self._parameters(where, declaration)
        sources = [source.name for source in declaration.sources]
        if declaration.function is None:
            return
        if sorted(parameters) != sorted(sources):
            self._wrong(
                f"{where} ({codehash.location(declaration.function)})",
                f"its function takes ({', '.join(parameters)})",
                f"one parameter per source: ({', '.join(sources)})",
            )
        try:
            codehash.digest(declaration.function)
        except (OSError, SyntaxError) as error:
            self._wrong(where, f"the source of its function cannot be read ({error})", "a function in a file")

    def _parameters(self, where: str, declaration: FeatureView | Spine | RequestTransform) -> list[str]:
        if declaration.function is None:
            self._wrong(where, "has no function", "a PySpark function: use the decorator")
            return []
        return codehash.parameters(declaration.function)

    def _transform(self, where: str, transform: RequestTransform) -> None:
        self._schema(where, transform.schema, set())
        for field in transform.schema:
            self._input(f"{where}, field {field.name!r}", field)
            if not 0 <= field.tolerance < math.inf:
                self._wrong(f"{where}, field {field.name!r}", f"tolerance={field.tolerance!r}", "zero or more")
            if field.available != "server":
                self._wrong(f"{where}, field {field.name!r}", f"available={field.available!r}",
                            "no available=: it follows from the inputs of the function")  # fmt: skip
        if not transform.schema:
            self._wrong(where, "has no field", "at least one Field in its schema")
        known = [name for part in transform.inputs for name in self._columns(where, part)]
        for name in sorted({name for name in known if known.count(name) > 1}):
            self._wrong(f"{where}, inputs", f"{name} appears twice", "each column once")
        parameters = self._parameters(where, transform)
        if transform.function is not None:
            place = f"{where} ({codehash.location(transform.function)})"
            if not parameters:
                self._wrong(
                    place, "its function has no parameters", f"parameters named like its inputs: {one_of(known)}"
                )
            for name in parameters:
                if name not in known:
                    self._wrong(place, f"its function takes {name!r}{did_you_mean(name, known)}", one_of(known))

    def _checked(self, where: str, request: RequestSource) -> None:
        # A checked request source has columns `source__field` in a training set, like a view.
        if (same := _same_but_case(request.name, self.views)) is not None:
            self._wrong(where, f"has the name of view {same!r}", "another name, since it has expectations or defaults")
        if (same := _same_but_case(request.name, self.transforms)) is not None:
            self._wrong(where, f"has the name of request transform {same!r}", "another name")
        self._unlike(where, request.name, (name for name, source in self.requests.items() if source.checked))
        fields = {field.name: field.dtype for field in request.schema}
        if all(isinstance(dtype, DataType) for dtype in fields.values()):
            self.problems += expectations.request_problems(where, fields, request.expectations, request.defaults)

    def _unlike(self, where: str, name: str, names: Iterable[str]) -> None:
        # Otherwise columns of a training set would differ only in case.
        if (first := _same_but_case(name, names)) != name:
            self._wrong(where, f"differs from {first!r} only in case", "another name")

    def _columns(self, where: str, part: FeatureView | FeatureProjection | RequestSource) -> list[str]:
        match part:
            case RequestSource():
                return [field.name for field in part.schema]
            case FeatureProjection(RequestTransform()):
                self._wrong(f"{where}, inputs", f"request transform {part.view.name}", "views and request sources")
                return []
        return self._full_names(where, part)

    def _full_names(self, where: str, part: FeatureView | FeatureProjection | RequestTransform) -> list[str]:
        view = part.view if isinstance(part, FeatureProjection) else part
        known = [field.name for field in view.schema]
        names = list(part.features) if isinstance(part, FeatureProjection) else known
        for name in names:
            if name not in known:
                self._wrong(f"{where}, {view.name}", f"no feature {name!r}{did_you_mean(name, known)}", one_of(known))
        return [f"{view.name}{SEPARATOR}{name}" for name in names]

    def _service(self, service: FeatureService) -> None:
        where = f"service {service.name}"
        if not service.features:
            self._wrong(where, "has no feature", "at least one view")
        seen: set[str] = set()
        for part in service.features:
            if isinstance(part, RequestSource):
                names = [f"{part.name}{SEPARATOR}{f.name}" if part.checked else f.name for f in part.schema]
            else:
                names = self._full_names(where, part)
            for name in names:
                if name in seen:
                    self._wrong(where, f"{name} appears twice", "each feature once")
                seen.add(name)
        self.problems += snapshot_problems(f"{where}, device", service)

    def _keys(self, where: str, declaration: FeatureView | Spine) -> set[str]:
        seen: set[str] = set()
        for column in join_keys(declaration.entities):
            if column.name.lower() in seen:
                self._wrong(f"{where}, join key {column.name!r}", "appears twice", "each join key once")
            seen.add(column.name.lower())
        return seen

    def _schema(
        self, where: str, schema: Iterable[Field], keys: set[str], reserved: tuple[str, ...] = RESERVED
    ) -> None:
        # DuckDB, Delta and Spark ignore case in names.
        seen: set[str] = set()
        for field in schema:
            place = f"{where}, field {field.name!r}"
            self._name(place, field.name, reserved)
            folded = str(field.name).lower()
            if not isinstance(field.dtype, DataType) or field.dtype not in TYPES.values():
                self._wrong(place, f"type {field.dtype!r}", _ANY_TYPE)
            elif field.size is not None and field.dtype.element is None:
                self._wrong(place, f"size={field.size!r}", f"no size: {field.dtype!r} is not an Array")
            if field.size is not None and (type(field.size) is not int or field.size < 1):
                self._wrong(place, f"size={field.size!r}", "a whole number, 1 or more")
            if field.available not in ("server", "device"):
                self._wrong(place, f"available={field.available!r}", "'server' or 'device'")
            if folded in seen:
                self._wrong(place, "appears twice", "each field once")
            if folded in keys:
                self._wrong(place, "has the name of a join key", "another name")
            seen.add(folded)

    def _input(self, where: str, field: Field) -> None:
        if field.dtype in TYPES.values() and field.dtype not in INPUTS:
            self._wrong(where, f"type {field.dtype!r}", "a type that a model can read: neither Bytes nor an Array")

    def _request_field(self, where: str, field: Field) -> None:
        # A model reads scalars; only request transforms read arrays.
        if field.dtype not in TYPES.values() or field.dtype.element is None:
            self._input(where, field)
        elif field.dtype.element == Bytes:
            self._wrong(where, f"type {field.dtype!r}", "an Array of a type that a model can read, not of Bytes")
        elif field.size is None:
            self._wrong(
                where, f"type {field.dtype!r} of any size", f"a declared size: {size_hint(field.name, field.dtype)}"
            )
        elif any(field.name in entity.join_keys for entity in self.entities.values()):
            self._wrong(where, "is an Array with the name of a join key", "another name: it would be that key's value")

    def _name(self, where: str, name: str, reserved: tuple[str, ...] = RESERVED) -> None:
        if not isinstance(name, str) or not _NAME.match(name):
            self._wrong(where, f"{name!r} is not a usable name", "letters, digits and _, a letter first")
        elif name.lower() in reserved:
            self._wrong(where, f"{name!r} is a reserved name", f"anything but {', '.join(reserved)}")
        elif SEPARATOR in name:
            self._wrong(where, f"{name!r} holds {SEPARATOR!r}", "a name without it: it joins view and feature")

    def _put(self, kind: dict[str, Any], declaration: Any) -> None:
        known = kind.setdefault(declaration.name, declaration)
        title = _TITLES[type(declaration)]
        if known is declaration:
            if title != "source":
                self._name(f"{title} {declaration.name!r}", declaration.name)
        elif known != declaration or isinstance(declaration, FeatureView | RequestTransform):
            place = f" ({codehash.location(declaration.function)})" if getattr(declaration, "function", None) else ""
            self._wrong(f"{title} {declaration.name!r}{place}", f"a second {title} has this name", "one name each")

    def _wrong(self, where: str, error: str, expected: str) -> None:
        problem = Problem(where, error, expected)
        if problem not in self.problems:
            self.problems.append(problem)


def _same_but_case(name: str, names: Iterable[str]) -> str | None:
    return next((known for known in names if str(known).lower() == str(name).lower()), None)


def size_hint(name: str, dtype: DataType) -> str:
    return f'declare Field("{name}", {dtype}, size=n)'


def join_keys(entities: Iterable[Entity]) -> tuple[Column, ...]:
    return tuple(Column(key, dtype) for entity in entities for key, dtype in entity.join_keys.items())
