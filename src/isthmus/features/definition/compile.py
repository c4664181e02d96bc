"""Compile declarations to a contract, their canonical form."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from isthmus.features.clock import MICROSECOND
from isthmus.features.contract.schema import (
    Column,
    Contract,
    FieldRule,
    ServiceContract,
    SpineContract,
    TransformContract,
    ViewContract,
    request_column,
    sha256,
)
from isthmus.features.definition import codehash
from isthmus.features.definition.checks import Declaration, Declarations, join_keys
from isthmus.features.definition.spec import (
    AtRequest,
    FeatureProjection,
    FeatureService,
    FeatureView,
    RequestSource,
    RequestTransform,
    Source,
    Spine,
)
from isthmus.features.errors import ConfigurationError, Problem

Compiler = Callable[[AtRequest, Sequence[Column]], tuple[bytes, list[Problem]]]
"""A function that compiles a request transform or a checked request source with these columns to a graph, or returns
problems."""


def compile_contract(
    project: str, declarations: Iterable[Declaration], where: str = "definitions.py", compiler: Compiler | None = None
) -> Contract:
    """Check all declarations of a project, and compile them to a contract: their canonical form, which has a hash.

    `where` is the name of the definitions file, for error messages. `compiler` compiles request transforms, and may be
    None if none is declared.

    Raises:
        ConfigurationError: declarations are wrong. The error has all problems that were found.
        TypeError: a request transform or a checked request source is declared, but `compiler` is None.
    """
    declared = Declarations(project)
    for declaration in declarations:
        declared.add(declaration)
    declared.check()
    if declared.problems:
        raise ConfigurationError(where, declared.problems)
    views = {name: _view(view) for name, view in declared.views.items()}
    transforms, problems = {}, []
    computed: dict[str, AtRequest] = {name: request for name, request in declared.requests.items() if request.checked}
    computed |= declared.transforms
    for name, transform in computed.items():
        if compiler is None:
            raise TypeError(f"no compiler for request transform {name}")
        if isinstance(transform, RequestSource):
            transforms[name], wrong = _checked(transform, compiler)
        else:
            transforms[name], wrong = _transform(transform, views, compiler)
        problems += wrong
    if problems:
        raise ConfigurationError(where, problems)
    services = {name: _service(service, views, transforms) for name, service in declared.services.items()}
    sources = {name: _source(source) for name, source in declared.sources.items()}
    spines = {name: _spine(spine) for name, spine in declared.spines.items()}
    contract = Contract(project, views, services, sources, spines, transforms)
    if problems := [problem for name in services for problem in _several_types(contract, name)]:
        raise ConfigurationError(where, problems)
    return contract


def _view(view: FeatureView) -> ViewContract:
    return ViewContract(
        name=view.name,
        entities=tuple(entity.name for entity in view.entities),
        keys=join_keys(view.entities),
        fields=tuple(Column(field.name, field.dtype, field.available, field.size) for field in view.schema),
        ttl=None if view.ttl is None else view.ttl // MICROSECOND,
        delay=view.delay // MICROSECOND,
        sources=tuple(source.name for source in view.sources),
        code=_code(view),
        lookback=None if view.lookback is None else view.lookback // MICROSECOND,
        version=view.version,
    )


def _transform(
    transform: RequestTransform, views: Mapping[str, ViewContract], compiler: Compiler
) -> tuple[TransformContract, list[Problem]]:
    columns: dict[str, tuple[tuple[str, str] | None, Column]] = {}
    rules: dict[str, FieldRule] = {}
    for part in transform.inputs:
        if isinstance(part, RequestSource):
            columns |= {f.name: (None, request_column(f.name, f.dtype, f.size)) for f in part.schema}
            rules |= _rules(part)
        else:
            view = views[part.view.name if isinstance(part, FeatureProjection) else part.name]
            columns |= {view.full_name(c.name): ((view.name, c.name), c) for c in view.fields}
    assert transform.function is not None  # noqa: S101 - `Declarations` has checked it
    inputs = {name: columns[name] for name in codehash.parameters(transform.function)}
    graph, problems = compiler(transform, [replace(column, name=name) for name, (_, column) in inputs.items()])
    # A computed field is available only where all of its inputs are.
    places = {column.available for _, column in inputs.values()}
    available = next(place for place in ("server", "device", "request") if place in places)
    return TransformContract(
        name=transform.name,
        stored=tuple(pair for pair, _ in inputs.values() if pair is not None),
        request=tuple(column for pair, column in inputs.values() if pair is None),
        fields=tuple(Column(field.name, field.dtype, available) for field in transform.schema),
        graph=graph,
        rules={name: rule for name, rule in rules.items() if name in inputs},
    ), problems


def _checked(request: RequestSource, compiler: Compiler) -> tuple[TransformContract, list[Problem]]:
    # Only request transforms read arrays: no computed field is an array.
    columns = tuple(request_column(f.name, f.dtype) for f in request.schema if f.dtype.element is None)
    graph, problems = compiler(request, columns)
    return TransformContract(request.name, (), columns, columns, graph, _rules(request)), problems


def _rules(request: RequestSource) -> dict[str, FieldRule]:
    expected = {field.name: [str(e) for e in request.expectations if e.feature == field.name]
                for field in request.schema}  # fmt: skip
    return {
        name: FieldRule(request.name, ", ".join(words), _in_words(request.defaults.get(name)))
        for name, words in expected.items()
        if words or name in request.defaults
    }


def _in_words(default: Any) -> str | None:
    return None if default is None else str(default) if isinstance(default, datetime) else repr(default)


def _spine(spine: Spine) -> SpineContract:
    request = spine.request.schema if spine.request else ()
    return SpineContract(
        keys=join_keys(spine.entities),
        request=tuple(request_column(field.name, field.dtype, field.size) for field in request),
        label=Column(spine.label.name, spine.label.dtype),
        sources=tuple(source.name for source in spine.sources),
        code=_code(spine),
    )


def _code(declaration: FeatureView | Spine) -> str:
    assert declaration.function is not None  # noqa: S101 - `Declarations` has checked it
    read = {source.name: _source(source) for source in declaration.sources}
    tiles = declaration.tiling if isinstance(declaration, FeatureView) else None
    aggregated = {} if tiles is None else {"tiles": tiles.identity()}
    return sha256({"function": codehash.digest(declaration.function), "sources": read, **aggregated})


def _several_types(contract: Contract, service: str) -> list[Problem]:
    # A service may take fields of the same name from several request sources, but a request has a single column.
    types: dict[str, list[str]] = {}
    for column in contract.raw_inputs(service):
        size = f" of {column.size}" if column.size else ""
        types.setdefault(column.name, []).append(f"of type {column.dtype}{size}")
    return [
        Problem(f"service {service}", f"request field {name} is {' and '.join(names)}", "one type, or another name")
        for name, names in types.items()
        if len(names) > 1
    ]


def _source(source: Source) -> dict[str, Any]:
    # The address differs between environments and does not count. A query does: it determines the values.
    read = {"timestamp": source.timestamp, "known": source.known, "null_values": list(source.null_values)}
    return {**read, "sql": source.sql} if source.sql else read


def _service(
    service: FeatureService, views: Mapping[str, ViewContract], transforms: Mapping[str, TransformContract]
) -> ServiceContract:
    features: list[tuple[str, str]] = []
    computed: list[tuple[str, str]] = []
    request: list[Column] = []
    for part in service.features:
        match part:
            case RequestSource() if part.checked:
                computed += [(part.name, field.name) for field in part.schema if field.dtype.element is None]
            case RequestSource():
                request += [request_column(field.name, field.dtype, field.size) for field in part.schema]
            case FeatureProjection(view, names):
                kind = computed if isinstance(view, RequestTransform) else features
                kind += [(view.name, name) for name in names]
            case RequestTransform():
                computed += [(part.name, field.name) for field in part.schema]
            case FeatureView():
                features += [(part.name, field.name) for field in part.schema]
    return ServiceContract.of(service.name, tuple(features), tuple(request), views, tuple(computed), transforms)
