"""The difference between two contracts: nothing of what changed goes unsaid, and what is said decides who goes on."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.contract.diff import (
    changes,
    differences,
    duration_text,
    require_service,
    service_changes,
    service_differences,
    summary,
)
from isthmus.features.contract.schema import (
    RESERVED,
    Column,
    Contract,
    ServiceContract,
    SpineContract,
    ViewContract,
    request_column,
)
from isthmus.features.errors import ContractMismatch, RequestError
from isthmus.features.types import SCALARS, TYPES, Bool, Float32, Int64, String

MICROS = st.integers(1, 400 * 86_400_000_000)
NAMES = st.text("abcs_1", min_size=1, max_size=4).filter(lambda name: name not in RESERVED)
COLUMNS = st.builds(Column, NAMES, st.sampled_from(list(TYPES.values())), st.sampled_from(["server", "device"]),
                    st.none() | st.integers(1, 3))  # fmt: skip
KEYS = st.builds(Column, NAMES, st.sampled_from(SCALARS))
TEXTS = st.text(max_size=3)


def distinct(items: st.SearchStrategy[Any], least: int = 1) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, min_size=least, max_size=4, unique_by=lambda item: getattr(item, "name", item)).map(tuple)


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    """A contract with every kind of declaration."""
    sources = {
        name: {
            "timestamp": draw(st.none() | NAMES),
            "known": draw(st.none() | NAMES),
            "null_values": draw(st.lists(TEXTS, max_size=2)),
        }
        for name in draw(distinct(NAMES))
    }
    some_sources = st.lists(st.sampled_from(sorted(sources)), max_size=3, unique=True).map(tuple)
    views = {
        name: ViewContract(
            name, draw(distinct(NAMES)), draw(distinct(KEYS)), draw(distinct(COLUMNS)), draw(st.none() | MICROS),
            draw(st.just(0) | MICROS), draw(some_sources), draw(TEXTS), draw(st.none() | MICROS),
            draw(st.integers(1, 3)),
        )
        for name in draw(distinct(NAMES))
    }  # fmt: skip
    pairs = [(view.name, field.name) for view in views.values() for field in view.fields]
    services = {
        name: ServiceContract.of(
            name,
            draw(st.lists(st.sampled_from(pairs), max_size=4, unique=True).map(tuple)),
            tuple(request_column(c.name, c.dtype, c.size) for c in draw(distinct(COLUMNS, 0))),
            views,
        )
        for name in draw(distinct(NAMES))
    }
    spines = {
        name: SpineContract(
            draw(distinct(KEYS)),
            tuple(request_column(c.name, c.dtype, c.size) for c in draw(distinct(COLUMNS, 0))),
            Column(draw(NAMES), draw(st.sampled_from([Int64, Bool]))),
            draw(some_sources),
            draw(TEXTS),
        )
        for name in draw(distinct(NAMES))
    }
    return Contract("shop", views, services, sources, spines)


def made(base: Contract, **parts: Any) -> Contract:
    """A contract with other parts, whose services have the hashes that follow; None if a service lost what it reads."""
    contract = replace(base, **parts)
    known = {(view.name, field.name) for view in contract.views.values() for field in view.fields}
    services = {
        name: ServiceContract.of(
            name, tuple(pair for pair in one.features if pair in known), one.request, contract.views
        )
        for name, one in contract.services.items()
    }
    return replace(contract, services=services)


@st.composite
def changed(draw: st.DrawFn) -> tuple[Contract, Contract, str, str, str | None]:
    """Two contracts that differ in one part of one declaration: both, its kind, its name, and that part."""
    base, kind = draw(contracts()), draw(st.sampled_from(["sources", "views", "services", "spines"]))
    declared: dict[str, Any] = dict(getattr(base, kind))
    name = draw(st.sampled_from(sorted(declared)))
    how = draw(st.sampled_from(["gone", "new", "part"]))
    part = None
    if how == "new":
        name = draw(NAMES.filter(lambda name: name not in declared))
        other = next(iter(declared.values()))
        named = {"name": name} if hasattr(other, "name") else {}
        declared[name] = dict(other) if isinstance(other, Mapping) else replace(other, **named)
    elif how == "gone":
        del declared[name]
    else:
        donor = getattr(draw(contracts()), kind)
        other = donor[draw(st.sampled_from(sorted(donor)))]
        if isinstance(other, Mapping):
            part = draw(st.sampled_from(sorted(other)))
            declared[name] = {**declared[name], part: other[part]}
        elif isinstance(other, SpineContract):
            part = draw(st.sampled_from([field.name for field in fields(other)]))
            declared[name] = replace(declared[name], **{part: getattr(other, part)})
        else:
            parts = set(vars(other) if kind == "views" else ("features", "request"))
            part = draw(st.sampled_from(sorted(parts & {*ViewContract.__match_args__, "features", "request"})))
            values = getattr(other, part)
            if part == "features":
                values = declared[name].features[::-1]
            if part == "fields" and draw(st.booleans()):
                values = declared[name].fields[::-1]
            if part != "name":
                declared[name] = replace(declared[name], **{part: values})
    return base, made(base, **{kind: declared}), kind[:-1], name, part


@given(contracts())
def test_a_contract_does_not_differ_from_itself(contract: Contract) -> None:
    again = Contract.loads(contract.dumps())
    assert differences(contract, again) == []
    assert {service.outcome for service in service_changes(contract, again)} <= {"same"}


@given(changed())
def test_any_single_change_is_told_by_its_name_and_part(
    both: tuple[Contract, Contract, str, str, str | None],
) -> None:
    old, new, kind, name, part = both
    lines = differences(old, new)
    assert (lines == []) == (old.hash == new.hash)
    if old.hash == new.hash:
        return
    own = [change for change in changes(old, new) if (change.kind, change.name) == (kind, name)]
    assert len(own) == 1, lines
    said = str(own[0])
    assert said.startswith(f"{kind} {name}")
    words = {"fields": "feature", "keys": "key", "request": "request field", "features": "feature", "code": "its code"}
    assert {"new": "is new", "gone": "is gone"}.get(
        own[0].outcome, words.get(part or "", str(part).replace("_", " "))
    ) in said
    for told in own[0].parts:
        before, was, after = told.partition(" was ")
        if was:
            one, _, other = after.partition(", is ")
            assert one != other, f"{before} did not change"


@given(changed())
def test_a_service_goes_on_exactly_if_its_hash_is_the_same(
    both: tuple[Contract, Contract, str, str, str | None],
) -> None:
    old, new, *_ = both
    outcomes = {service.service: service for service in service_changes(old, new)}
    assert set(outcomes) == {*old.services, *new.services}
    for name, service in outcomes.items():
        before, after = old.services.get(name), new.services.get(name)
        assert (service.outcome == "same") == (before is not None and after is not None and before.hash == after.hash)
        assert (service.outcome == "same") == (not service.because)
        assert set(service.because) <= set(differences(old, new))


def view(name: str, **parts: Any) -> ViewContract:
    column = Column("x", Int64)
    return replace(ViewContract(name, ("e",), (Column("k", String),), (column,), None, 0, ("raw",), "code"), **parts)


def contract(*views: ViewContract, **parts: Any) -> Contract:
    known = {one.name: one for one in views}
    service = ServiceContract.of("s", (("a", "x"),), (), known)
    source = {"timestamp": "at", "known": None, "null_values": [""]}
    return replace(Contract("shop", known, {"s": service}, {"raw": source}, {}), **parts)


BASE = contract(view("a"), view("b"))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (contract(view("a"), view("b", ttl=604_800_000_000, delay=1, lookback=7_200_000_000)),
         "view b: ttl was unlimited, is 7 days; delay was none, is 1 µs; lookback was unlimited, is 2 hours"),
        (contract(view("a"), view("b", fields=(Column("y", Int64), Column("x", Float32)), code="", version=2)),
         "view b: feature y is new; feature x was Int64, is Float32; its code changed; version was 1, is 2"),
        (contract(view("a"), view("b", fields=(Column("x", Int64, "device"),))),
         "view b: feature x was on the server only, is on devices, too"),
        (contract(view("a"), view("b", sources=("raw", "more"), keys=(Column("i", Int64),))),
         "view b: key k is gone; key i is new; sources were raw, are raw, more"),
        (replace(BASE, services={"s": ServiceContract.of("s", (("b", "x"),), (Column("r", Int64),), BASE.views)}),
         "service s: feature a.x is gone; feature b.x is new; request field r is new"),
        (replace(BASE, sources={"raw": {"timestamp": "none", "known": "at", "null_values": []}}),
         'source raw: timestamp was at, is "none"; known was none, is at; null values were "", are none'),
    ],
)  # fmt: skip
def test_words(other: Contract, said: str) -> None:
    assert differences(BASE, other) == [said]


def test_a_view_whose_source_is_read_otherwise_says_so() -> None:
    source = {"timestamp": "at", "known": "later", "null_values": [""]}
    other = contract(view("a", code="2"), view("b", code="2", sources=()), sources={"raw": source})
    assert differences(BASE, other) == [
        "source raw: known was none, is later",
        "view a: its code changed, or how its sources are read",
        "view b: sources were raw, are none; its code changed, or how its sources are read",
    ]
    assert service_differences(BASE, other, "s") == differences(BASE, other)[:2], "view b is none of its views"


def test_a_service_that_stands_on_something_else_is_told_everything() -> None:
    """A new kind of declaration may decide the hash of a service before this module knows of it."""
    service = replace(BASE.services["s"], hash="other")
    other = replace(contract(view("a"), view("b"), view("c")), services={"s": service})
    assert service_differences(BASE, other, "s") == ["view c is new"]


class _More(Contract):
    """A contract with a kind of declaration that the difference has not heard of."""

    more: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "transforms": self.more}


def more(**declared: Any) -> Contract:
    made = _More(BASE.project, BASE.views, BASE.services, BASE.sources, BASE.spines)
    object.__setattr__(made, "more", declared)
    return made


def test_a_new_kind_of_declaration_needs_no_words_of_its_own() -> None:
    one = {"fields": [["y", "Int64", "device"]], "inputs": ["a", "b"], "code": "1"}
    other = {"fields": [["y", "Float32", "device"]], "inputs": ["a"], "code": "2"}
    assert differences(BASE, more(t=one)) == ["transform t is new"]
    assert differences(more(t=one), BASE) == ["transform t is gone"]
    said = "transform t: feature y was Int64, is Float32; inputs were a, b, are a; its code changed"
    assert differences(more(t=one), more(t=other)) == [said]


def test_another_project_is_another_store() -> None:
    other = replace(BASE, project="market")
    assert differences(BASE, other) == ["project shop is now market"]
    with pytest.raises(ContractMismatch, match=r"model m: its service has changed .* \(project shop is now market\)"):
        require_service("model m", BASE, other, "s")


def test_a_service_that_neither_has_is_asked_for_in_vain() -> None:
    with pytest.raises(RequestError, match="service 'no': is not in the contract"):
        service_differences(BASE, BASE, "no")
    assert service_differences(BASE, replace(BASE, services={}), "s") == ["service s is gone"]
    assert service_differences(replace(BASE, services={}), BASE, "s") == ["service s is new"]


def test_a_message_names_the_first_differences() -> None:
    assert summary(["a", "b"]) == "a; b"
    assert summary(list("abcdefg")) == "a; b; c; d; e; and 2 more"


@given(st.integers(0, 10**17), st.integers(0, 10**17))
def test_a_duration_is_exact(one: int, other: int) -> None:
    assert (duration_text(one) == duration_text(other)) == (one == other)
    assert duration_text(28 * 86_400_000_000) == "28 days"
