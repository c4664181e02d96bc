import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from isthmus.features.contract.diff import differences
from isthmus.features.contract.schema import Column, Contract
from isthmus.features.definition.checks import Declaration
from isthmus.features.definition.compile import compile_contract
from isthmus.features.definition.spec import Entity, FeatureService, FeatureView, Field, RequestSource, Source, Spine
from isthmus.features.definition.streams import Avro, FileStream, Format, Json, Kafka, Protobuf
from isthmus.features.errors import ConfigurationError, ContractMismatch, RequestError
from isthmus.features.types import (
    TYPES,
    Array,
    Bool,
    Bytes,
    DataType,
    Float32,
    Float64,
    Int32,
    Int64,
    String,
    UnixTimestamp,
)


def punctuality(flights: Any) -> Any:
    return flights


def other_code(flights: Any) -> Any:
    return flights.distinct()


def with_weather(flights: Any, weather: Any) -> Any:
    return flights.join(weather)


FLIGHTS = Source("flights", path="data/flights.parquet", timestamp="departed_at", known="landed_at")
WEATHER = Source("weather", path="data/weather.csv", timestamp="at")
CARRIER = Entity("carrier", join_keys={"carrier": String})
DAY = timedelta(days=1)
AIRPORT = Entity("airport", join_keys={"airport": String})
DELAYS = FeatureView(
    "delays", [CARRIER], [Field("late_rate", Float32), Field("flights", Int64, "device")], [FLIGHTS],
    ttl=timedelta(days=7), function=punctuality,
)  # fmt: skip
SKY = FeatureView("sky", [AIRPORT], [Field("wind", Float64)], [FLIGHTS, WEATHER], ttl=None, function=with_weather)
REQUEST = RequestSource("request", [Field("distance", Float32), Field("seats", Int32)])
SERVICE = FeatureService("late", [SKY, DELAYS[["flights", "late_rate"]], REQUEST])
SPINE = Spine("departures", [CARRIER, AIRPORT], Field("late", Int64), [FLIGHTS], REQUEST, punctuality)
ALL: list[Declaration] = [FLIGHTS, WEATHER, CARRIER, AIRPORT, DELAYS, SKY, REQUEST, SERVICE, SPINE]


def _compiled(*changes: Declaration, project: str = "prod") -> Contract:
    """All declarations, with those named like a change replaced, also inside the others."""

    def swap(declaration: Any) -> Any:
        for change in changes:
            if type(change) is type(declaration) and change.name == declaration.name:
                return change
        match declaration:
            case FeatureView() | Spine():
                request = {"request": swap(declaration.request)} if isinstance(declaration, Spine) else {}
                return replace(declaration, entities=[swap(e) for e in declaration.entities],
                               sources=[swap(s) for s in declaration.sources], **request)  # fmt: skip
        return declaration

    views = {view.name: swap(view) for view in (DELAYS, SKY)}
    service = replace(SERVICE, features=[views["sky"], views["delays"][["flights", "late_rate"]], swap(REQUEST)])
    declared = [swap(d) for d in (FLIGHTS, WEATHER, CARRIER, AIRPORT)] + [*views.values(), swap(REQUEST), swap(SPINE)]
    return compile_contract(project, [*declared, swap(service)])


BASE = compile_contract("prod", ALL)


def test_order_and_repetition_of_declarations_do_not_matter() -> None:
    orders: list[list[Declaration]] = [
        ALL[::-1], ALL * 2, [SERVICE, SPINE], [SPINE, SERVICE, DELAYS], ALL[3:] + ALL[:3],
    ]  # fmt: skip
    for declared in orders:
        assert compile_contract("prod", declared).dumps() == BASE.dumps()
    assert _compiled().dumps() == BASE.dumps()


@pytest.mark.parametrize(
    "change",
    [
        replace(FLIGHTS, path="s3://elsewhere/flights"),
        # Models and training sets outlive a declaration of what earlier versions guessed.
        replace(WEATHER, types={"wind": Float64}),
        replace(CARRIER, description="who flies"),
        replace(DELAYS, description="how late"),
        replace(DELAYS, schema=[replace(field, description="x") for field in DELAYS.schema]),
        replace(REQUEST, description="x"),
    ],
)
def test_words_and_paths_do_not_change_the_hash(change: Declaration) -> None:
    assert _compiled(change).hash == BASE.hash
    assert differences(BASE, _compiled(change)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace(DELAYS, ttl=timedelta(days=8)), "view delays: ttl was 7 days, is 8 days"),
        (replace(DELAYS, ttl=None), "view delays: ttl was 7 days, is unlimited"),
        (replace(DELAYS, delay=timedelta(seconds=1)), "view delays: delay was none, is 1 second"),
        (replace(DELAYS, schema=DELAYS.schema[::-1]), "view delays: the order of its features changed"),
        (
            replace(DELAYS, schema=[Field("late_rate", Float64), DELAYS.schema[1]]),
            "view delays: feature late_rate was Float32, is Float64",
        ),
        (
            replace(DELAYS, schema=[Field("late_rate", Float32, "device"), DELAYS.schema[1]]),
            "view delays: feature late_rate was on the server only, is on devices, too",
        ),
        (replace(DELAYS, function=other_code), "view delays: its code changed"),
        (
            replace(DELAYS, entities=[AIRPORT]),
            "view delays: entities were carrier, are airport; key carrier is gone; key airport is new",
        ),
        (replace(CARRIER, join_keys={"carrier": Int64}), "view delays: key carrier was String, is Int64"),
    ],
)
def test_what_decides_values_changes_the_hashes(change: Declaration, said: str) -> None:
    new = _compiled(change)
    assert new.hash != BASE.hash
    assert new.views["delays"].hash != BASE.views["delays"].hash
    assert new.views["delays"].prefix != BASE.views["delays"].prefix
    assert new.services["late"].hash != BASE.services["late"].hash
    assert said in differences(BASE, new)
    assert new.views["sky"].hash == BASE.views["sky"].hash


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace(SPINE, label=Field("late", Bool)), "spine departures: label was late Int64, is late Bool"),
        (replace(SPINE, function=other_code), "spine departures: its code changed"),
        (replace(FLIGHTS, known=None), "source flights: known was landed_at, is none"),
    ],
)
def test_the_contract_covers_spines_and_sources(change: Declaration, said: str) -> None:
    new = _compiled(change)
    assert new.hash != BASE.hash
    assert said in differences(BASE, new)


def test_a_service_stands_on_its_own_views_only() -> None:
    extra = FeatureView("extra", [CARRIER], [Field("x", Int64)], [FLIGHTS], ttl=None, function=other_code)
    more = compile_contract("prod", [*ALL, extra])
    assert more.hash != BASE.hash
    assert more.services["late"].hash == BASE.services["late"].hash
    assert differences(BASE, more) == ["view extra is new"]
    assert differences(more, BASE) == ["view extra is gone"]
    request = replace(REQUEST, schema=REQUEST.schema[::-1])
    assert _compiled(request).services["late"].hash != BASE.services["late"].hash


def test_another_project_is_a_difference() -> None:
    other = _compiled(project="preprod")
    assert other.hash != BASE.hash
    assert differences(BASE, other) == ["project prod is now preprod"]


def test_inputs_are_the_stored_features_in_order_then_the_request() -> None:
    assert BASE.inputs("late") == (
        Column("sky__wind", Float64),
        Column("delays__flights", Int64, "device"),
        Column("delays__late_rate", Float32),
        Column("distance", Float32, "request"),
        Column("seats", Int32, "request"),
    )
    with pytest.raises(RequestError, match=r"service 'nothing'.*expected late"):
        BASE.inputs("nothing")
    with pytest.raises(RequestError, match=r"view 'nothing'.*one of delays, sky"):
        BASE.view("nothing")


def test_loads_is_the_inverse_of_dumps() -> None:
    read = Contract.loads(BASE.dumps())
    assert read == BASE
    assert read.dumps() == BASE.dumps()
    assert (read.hash, read.services["late"].hash) == (BASE.hash, BASE.services["late"].hash)
    assert {name: view.hash for name, view in read.views.items()} == {
        name: view.hash for name, view in BASE.views.items()
    }


def test_every_type_has_a_text_that_is_read_again() -> None:
    keys: dict[str, DataType] = {"b": Bool, "i": Int32, "j": Int64, "t": UnixTimestamp, "s": String, "y": Bytes}
    schema = [Field(f"f{n}", dtype) for n, dtype in enumerate(TYPES.values())]
    declared = compile_contract("prod", [_view(entities=[Entity("all", keys)], schema=schema)])
    read = Contract.loads(declared.dumps())
    assert read == declared
    assert [column.dtype for column in read.views["v"].fields] == list(TYPES.values())
    assert ["f11", "Array(Float32)", "server"] in json.loads(declared.dumps())["views"]["v"]["fields"]


def test_a_damaged_contract_is_refused() -> None:
    text = BASE.dumps()
    for size in range(0, len(text) - 2, 7):
        with pytest.raises(ContractMismatch, match=r"here\.json.*isthmus apply"):
            Contract.loads(text[:size], "here.json")
    for position in range(0, len(text), 3):
        damaged = bytearray(text)
        damaged[position] ^= 1
        try:
            read = Contract.loads(bytes(damaged))
        except ContractMismatch:
            continue
        assert read == BASE


def _edited(**parts: Any) -> bytes:
    return json.dumps({**json.loads(BASE.dumps()), **parts}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"", b"null", b"[]", b"7", b"\xff", b"{}", b"[" * 100_000,
        _edited(format=2), _edited(hash="0" * 64), _edited(hash=None), _edited(project="other"), _edited(sources=None),
        _edited(sources=[1]), _edited(sources={"flights": 3}), _edited(spines=[]), _edited(views=[]),
        _edited(views={"a": 1}),
        _edited(services={"s": {"features": [["no", "view"]], "request": []}}),
    ],
)  # fmt: skip
def test_what_is_no_contract_is_refused(text: bytes) -> None:
    with pytest.raises(ContractMismatch):
        Contract.loads(text)


def _problems(*declared: Any, project: str = "prod") -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        compile_contract(project, declared)
    return [str(problem) for problem in caught.value.problems]


def test_a_size_is_of_arrays_and_changes_nothing_where_it_is_not_declared() -> None:
    plain = replace(DELAYS, schema=[Field("late_rate", Float32), Field("rates", Array(Float32))])
    sized = replace(plain, schema=[Field("late_rate", Float32), Field("rates", Array(Float32), size=8)])
    one, other = (compile_contract("prod", [view]) for view in (plain, sized))
    assert one.views["delays"].as_dict()["fields"] == [
        ["late_rate", "Float32", "server"], ["rates", "Array(Float32)", "server"],
    ]  # fmt: skip
    assert other.views["delays"].as_dict()["fields"][1] == ["rates", "Array(Float32)", "server", 8]
    assert Contract.loads(other.dumps()) == other
    assert differences(one, other) == ["view delays: the size of feature rates was any, is 8"]
    for dtype, size, found in (
        (Float32, 8, "view delays, field 'rates': size=8; expected no size: Float32 is not an Array"),
        (Array(Float32), 0, "view delays, field 'rates': size=0; expected a whole number, 1 or more"),
        (Array(Float32), True, "view delays, field 'rates': size=True; expected a whole number, 1 or more"),
        (Array(Float32), 2.0, "view delays, field 'rates': size=2.0; expected a whole number, 1 or more"),
    ):
        wrong: Any = replace(DELAYS, schema=[Field("rates", dtype, size=size)])  # type: ignore[arg-type]
        assert _problems(wrong) == [found]


def test_every_problem_is_reported_at_once() -> None:
    keyless = Entity("keyless", join_keys={})
    weather_view = replace(SKY, name="bad view", ttl=timedelta(0), function=punctuality)
    double = replace(
        DELAYS, schema=[Field("x", Int64), Field("x", Int64), Field("carrier", Int64), Field("known_at", Int64)]
    )
    service = FeatureService("late", [DELAYS[["nothing"]], REQUEST, REQUEST])
    empty = FeatureView("empty", [keyless], [], [Source("nowhere", path="")], ttl=None, delay=timedelta(seconds=-1))
    odd, alone = Entity("odd", join_keys={"k": Float64}), replace(SKY, name="alone", entities=[])
    found = _problems(weather_view, double, service, empty, odd, alone, project="Prod!")
    for sentence in (
        "project 'Prod!'", "entity keyless: has no join key", "entity odd, join key k: type Float64",
        "source nowhere: has no path", "'bad view' is not a usable name", "its function takes (flights)",
        "view bad view, ttl: 0:00:00", "field 'x': appears twice", "field 'carrier': has the name of a join key",
        "'known_at' is a reserved name", "view empty: has no feature", "view empty: has no function",
        "view alone: has no entity; expected at least one Entity in its entities",
        "view empty, delay: -1 day, 23:59:59", "no feature 'nothing'", "distance appears twice",
        "a second view has this name",
    ):  # fmt: skip
        assert [problem for problem in found if sentence in problem], sentence
    assert len(found) == len(set(found))


FIELD = Field("x", Int64)


def _view(**parts: Any) -> FeatureView:
    full: Mapping[str, Any] = {"name": "v", "entities": [CARRIER], "schema": [FIELD], "sources": [FLIGHTS],
                               "ttl": None, "function": punctuality, **parts}  # fmt: skip
    return FeatureView(**full)


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        # Names that differ in case only are one name to DuckDB, Delta and Spark.
        (_view(schema=[FIELD, Field("X", Int64)]), "field 'X': appears twice"),
        (_view(schema=[Field("Carrier", Int64)]), "field 'Carrier': has the name of a join key"),
        (_view(schema=[Field("Event_Timestamp", Int64)]), "'Event_Timestamp' is a reserved name"),
        # `v__status` is the column that says what the view answered.
        (_view(schema=[Field("status", Int64)]), "'status' is a reserved name"),
        (_view(entities=[CARRIER, CARRIER]), "view v, join key 'carrier': appears twice"),
        (_view(entities=[CARRIER, Entity("other", {"carrier": String})]), "view v, join key 'carrier': appears twice"),
        (_view(entities=[Entity("ids", {"event_timestamp": Int64})]), "'event_timestamp' is a reserved name"),
        # What a Feast user writes by habit.
        (Entity("carrier", join_keys=["carrier"]), "entity carrier, join_keys: ['carrier']"),  # type: ignore[arg-type]
        (_view(entities=["carrier"]), "view v, entities: ['carrier']; expected a list, each item an Entity"),
        (_view(schema=["x"]), "view v, schema: ['x']; expected a list, each item a Field"),
        (_view(sources=["flights"]), "view v, sources: ['flights']; expected a list, each item a Source"),
        (_view(ttl=7), "view v, ttl: 7"),
        (_view(delay=None), "view v, delay: None"),
        (_view(schema=[Field("x", "Int64")]), "view v, field 'x': type 'Int64'"),  # type: ignore[arg-type]
        (_view(schema=[Field("x", Array(Array(Int32)))]), "type Array(Array(Int32)); expected one of Bool, Bytes"),
        (_view(schema=[Field("x", Array(int))]), "type Array(<class 'int'>)"),  # type: ignore[arg-type]
        (Entity("e", join_keys={"k": Array(Int64)}), "entity e, join key k: type Array(Int64)"),
        (replace(SPINE, label=Field("late", Array(Int64))), "spine departures, label 'late': type Array(Int64)"),
        (replace(SPINE, label=Field("late", Bytes)), "spine departures, label 'late': type Bytes"),
        (RequestSource("r", [Field("x", Array(Int64))]), "request source r, field 'x': type Array(Int64)"),
        (_view(function=len), "view v"),
        (_view(name=None), "view None, name: None; expected a text"),
        (FeatureService("s", ["v"]), "service s, features: ['v']; expected a list"),  # type: ignore[list-item]
        (FeatureService("s", []), "service s: has no feature"),
        (FeatureService("s", [_view()[[0]]]), "service s, v: no feature 0"),  # type: ignore[list-item]
        (RequestSource("r", [FIELD], defaults={0: 1}), "request source r, default of 0: no such field"),  # type: ignore[dict-item]
        (_view(sources=[replace(FLIGHTS, types={"n": Int64})]), "source flights, types: the data already have types"),
        (
            replace(SKY, sources=[FLIGHTS, replace(WEATHER, types={"n": "Int64"})]),  # type: ignore[dict-item]
            "source weather, types, column n: 'Int64'; expected one of Bool",
        ),
        (
            replace(SKY, sources=[FLIGHTS, replace(WEATHER, types={"at": Int64})]),
            "source weather, types, column at: Int64; expected UnixTimestamp, or a source without timestamp=",
        ),
        (_view(sources=[replace(FLIGHTS, null_values="NA")]), "source flights, null_values: 'NA'; expected a list"),
        (
            _view(sources=[replace(FLIGHTS, delta="flights")]),
            "source flights: has path and delta; expected one of path,",
        ),
        (_view(sources=[Source("flights", delta=7)]), "source flights, delta: 7"),  # type: ignore[arg-type]
        (
            _view(sources=[Source("flights", iceberg="shop.flights")]),
            "'shop.flights'; expected CATALOG.NAMESPACE.TABLE",
        ),
        (
            _view(sources=[Source("flights", sql="SELECT 1")]),
            "source flights, connection: is missing; expected the env",
        ),
        (_view(sources=[replace(FLIGHTS, connection="DB")]), "source flights, connection: is set without a query"),
        (
            _view(sources=[replace(FLIGHTS, version_sql="SELECT 1")]),
            "source flights, version_sql: is set without a query",
        ),
        # What holds a secret is not repeated.
        (
            _view(sources=[Source("flights", sql="SELECT 1", connection="postgresql://u:sesame@h/d")]),
            "source flights, connection: is not the name of an environment variable; expected the env",
        ),
        (
            _view(sources=[Source("flights", sql="SELECT 1", connection="ISTHMUS_DB")]),
            "connection: is not the name of an env",
        ),
        (_view(sources=[Source("flights", delta="s3://key:sesame@b/t")]), "source flights: has a user in its URL"),
        (_view(sources=[Source("flights", path="abfss://c:sesame@a.b/t")]), "source flights: has a user in its URL"),
        ("flights", "'flights'"),
    ],
)
def test_a_mistake_is_a_problem_and_no_traceback(declared: Any, sentence: str) -> None:
    found = _problems(declared)
    assert len(found) == 1, found
    assert sentence in found[0]


def test_a_container_of_azure_is_no_user() -> None:
    compile_contract("prod", [_view(sources=[Source("flights", path="abfss://c@a.dfs.core.windows.net/t")])])


URL = "http://registry:8081"


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        (Json(schema="a.json", registry=URL), "Json: has a schema file and a registry; expected schema= or registry="),
        (Avro("a.avsc", URL), "Avro: has a schema file and a registry; expected schema= or registry="),
        (Avro(), "Avro: has no schema; expected schema= or registry="),
        (Protobuf("a.pb", "A", registry=URL), "has a schema file and a registry; expected descriptors= or registry="),
        (Protobuf(message="A"), "Protobuf: has no schema; expected descriptors= or registry="),
        (Protobuf("a.pb"), "Protobuf: has no message"),
        (Avro(registry="http://me:sesame@registry"), "Avro, registry: has a user in its URL; expected environment"),
        (Avro(registry=7), "registry: 7"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_format_of_events_is_a_problem(form: Format, sentence: str) -> None:
    found = _problems(
        _view(lookback=DAY, sources=[replace(FLIGHTS, timestamp="at", stream=Kafka("a", "host:9092", form))])
    )
    assert len(found) == 1, found
    assert sentence in found[0]
    assert "sesame" not in found[0]


def test_files_of_events_have_no_registry() -> None:
    source = replace(FLIGHTS, timestamp="at", stream=FileStream("in", Json(registry=URL)))
    assert "expected no registry=" in _problems(_view(lookback=DAY, sources=[source]))[0]


@pytest.mark.parametrize("form", [Json(registry=URL), Avro(registry="http://${USER}:${WORD}@host"), Protobuf("a", "A")])
def test_a_schema_may_be_in_a_registry_or_a_file(form: Format) -> None:
    source = replace(FLIGHTS, timestamp="at", stream=Kafka("a", "host:9092", form))
    assert compile_contract("shop", [CARRIER, _view(lookback=DAY, sources=[source])])


def both(flights: Any, rain: Any) -> Any:
    """Rows of two sources."""


def test_a_view_reads_one_stream_within_a_lookback() -> None:
    flights, weather = (
        Source(name, path=name, timestamp="at", stream=FileStream(name)) for name in ("flights", "rain")
    )
    (found,) = _problems(_view(sources=[flights]))
    assert "view v: reads the stream of flights without a lookback; expected lookback=timedelta(...). Declare" in found
    (found,) = _problems(_view(lookback=DAY, sources=[flights, weather], function=both))
    assert "reads several streams (of flights and rain); expected one source with a stream. Declare a view" in found
    assert compile_contract(
        "shop", [CARRIER, _view(lookback=DAY, sources=[flights, replace(weather, stream=None)], function=both)]
    )


def test_one_join_key_has_one_type_in_all_entities() -> None:
    found = _problems(CARRIER, Entity("other", {"carrier": Int64}))
    assert found == ["entity other, join key carrier: type Int64; expected String, as in carrier"]


@pytest.mark.parametrize("name", ["", "1a", "a b", "a__b", "_a", "a-b", "é", "a\n", "event_timestamp", "content_hash"])
def test_names_that_cannot_be(name: str) -> None:
    assert _problems(_view(schema=[Field(name, Int64)]))
    assert _problems(_view(name=name))


@pytest.mark.parametrize("project", ["", "A", "a:b", "-a", "a b", "ü", "a\n"])
def test_projects_that_cannot_be(project: str) -> None:
    assert "is not a usable name" in _problems(*ALL, project=project)[0]
