"""What a request field must keep: engine, graph and plain Python give the same value, or all refuse the row.

TEST_REQUESTS says how many drawn sources are compared, of forty rows each.
"""

import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name every PySpark user knows

from isthmus.features.contract.diff import differences
from isthmus.features.contract.schema import Contract, optional_fields
from isthmus.features.definition.compile import compile_contract
from isthmus.features.definition.expectations import Between, Expect, Expectation, Length, OneOf, Present
from isthmus.features.definition.spec import FeatureService, Field, RequestSource, RequestTransform
from isthmus.features.errors import ConfigurationError, DataError, RequestError
from isthmus.features.request.graph import RowGraph
from isthmus.features.types import Array, Bool, DataType, Float32, Float64, Int32, Int64, String, UnixTimestamp
from isthmus.features.values.arrow import ARROW, from_arrow, to_arrow
from isthmus.features.values.columns import Values
from isthmus.transforms import engine
from isthmus.transforms.request.compute import append_fields, compiled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NAIVE = datetime(2024, 1, 1)  # noqa: DTZ001 - that is what is wrong with it
SMALL = float(np.float32(0.1))
EDGES: dict[DataType, list[Any]] = {
    Bool: [True, False],
    Int32: [0, 1, -1, 7, 2**31 - 1, -(2**31)],
    Int64: [0, 1, -1, 7, 2**53 + 1, 2**53, 2**63 - 1, -(2**63)],
    Float32: [0.0, -0.0, SMALL, 1.0, -1.0, 7.5, math.nan, math.inf, -math.inf],
    Float64: [0.0, -0.0, 0.1, 1.0, -1.0, 5e-324, 1e300, math.nan, math.inf, -math.inf],
    UnixTimestamp: [EPOCH + timedelta(microseconds=n) for n in (0, 1, -1, 10**15, 1_709_251_199_999_999)],
    String: ["", "a", "ab", "é", "😀x", "a\nb", "%", "_", "\\", "it's", "x" * 60],
}
REFUSED = "refused"


def expected(value: Any, rules: Sequence[Expectation], default: Any) -> Any:
    """What becomes of a value, as the declaration says it."""
    if value is None:
        broken = any(isinstance(rule, Present) for rule in rules) or default is not None
    else:
        broken = not all(kept(value, rule) for rule in rules)
    if not broken:
        return value
    return REFUSED if default is None else default


def kept(value: Any, rule: Expectation) -> bool:
    match rule:
        case Between(low=low, high=high):
            return (low is None or value >= low) and (high is None or value <= high)
        case Length(low=low, high=high):
            return (low is None or len(value) >= low) and (high is None or len(value) <= high)
        case OneOf(values=values):
            return any(value == one or (value != value and one != one) for one in values)
    return True


Rule = Present | Between | OneOf | Length


def _ruled(chance: random.Random, name: str, dtype: DataType) -> tuple[list[Rule], Any]:
    """Rules of a field by chance, and a default that keeps them, or None."""
    some = [value for value in EDGES[dtype] if value == value]
    rules: list[Rule] = [Expect.present(name)] if chance.random() < 0.3 else []
    if dtype not in (Bool, String) and chance.random() < 0.7:
        low, high = sorted(chance.choices(some, k=2))
        rules.append(Expect.between(name, *chance.choice([(low, high), (low, None), (None, high)])))
    if dtype == String and chance.random() < 0.7:
        low, high = sorted(chance.choices(range(5), k=2))
        rules.append(Expect.length(name, *chance.choice([(low, high), (low, None), (None, high)])))
    if chance.random() < 0.3:
        rules.append(Expect.one_of(name, chance.choices(EDGES[dtype], k=3)))
    able = [value for value in EDGES[dtype] if all(kept(value, rule) for rule in rules)]
    return rules, chance.choice(able) if able and chance.random() < 0.5 else None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return (one != one and other != other) or (one == other and math.copysign(1, one) == math.copysign(1, other))
    return one is other or bool(one == other)


@pytest.fixture(scope="module", params=["sail", pytest.param("spark", marks=pytest.mark.accept)])
def anywhere(request: pytest.FixtureRequest) -> "Iterator[SparkSession]":
    """One engine after the other: to end a session on Sail ends an Apache Spark beside it."""
    with engine.session(request.param) as spark:
        yield spark


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=int(os.environ.get("TEST_REQUESTS", "10")))
def test_engine_graph_and_plain_python_agree(anywhere: "SparkSession", seed: int) -> None:
    chance = random.Random(seed)
    types = {f"{dtype.name}_{n}": dtype for dtype in EDGES for n in "ab"}
    ruled = {name: _ruled(chance, name, dtype) for name, dtype in types.items()}
    source = RequestSource(
        "asked",
        [Field(name, dtype) for name, dtype in types.items()],
        expectations=[rule for rules, _ in ruled.values() for rule in rules],
        defaults={name: default for name, (_, default) in ruled.items() if default is not None},
    )
    contract = compile_contract("shop", [source], compiler=compiled).transforms["asked"]
    rows = {name: [chance.choice([*EDGES[dtype], None]) for _ in range(40)] for name, dtype in types.items()}
    wanted = {name: [expected(value, *ruled[name]) for value in values] for name, values in rows.items()}

    batch = _batch(rows, types)
    graph, columns = RowGraph(contract), {name: from_arrow(batch[name], dtype) for name, dtype in types.items()}
    found = graph.run(columns)
    for name, dtype in types.items():
        refused = found.refused.get(name, np.zeros(40, bool)).tolist()
        values = to_arrow(found.values[name], dtype).to_pylist()
        values = [REFUSED if wrong else value for wrong, value in zip(refused, values, strict=True)]
        assert all(map(_same, wanted[name], values)), (name, ruled[name], wanted[name], values)

    for n in range(40):
        alone = graph.run({name: Values(one.data[n : n + 1], one.valid[n : n + 1]) for name, one in columns.items()})
        for name, dtype in types.items():
            (value,) = to_arrow(alone.values[name], dtype).to_pylist()
            assert _same(wanted[name][n], REFUSED if name in alone.refused else value), (name, ruled[name], n)

    able = {name: [n for n, value in enumerate(values) if value is not REFUSED] for name, values in wanted.items()}
    assume(all(able.values()))
    places = {name: [chance.choice(able[name]) if n not in able[name] else n for n in range(40)] for name in rows}
    good = {name: [values[n] for n in places[name]] for name, values in rows.items()}
    (answer,) = append_fields(anywhere, [(source, contract)], [_batch(good, types)])
    for name in types:
        values = answer[f"asked__{name}"].to_pylist()
        one = [wanted[name][n] for n in places[name]]
        assert all(map(_same, one, values)), (name, ruled[name], one, values)
    broken = [(name, n) for name, values in wanted.items() for n, value in enumerate(values) if value is REFUSED]
    for name, n in chance.sample(broken, min(len(broken), 3)):
        bad = {other: values[:1] for other, values in good.items()} | {name: [rows[name][n]]}
        with pytest.raises(DataError, match=f"request source asked: .*field {name} of"):
            list(append_fields(anywhere, [(source, contract)], [_batch(bad, types)]))


def _batch(rows: Mapping[str, Sequence[Any]], types: Mapping[str, DataType]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({name: pa.array(rows[name], ARROW[dtype.name]) for name, dtype in types.items()})


def asked(**changes: Any) -> RequestSource:
    fields = [Field("n", Int64), Field("x", Float32), Field("s", String), Field("at", UnixTimestamp), Field("b", Bool)]
    return RequestSource(**{"name": "asked", "schema": fields, **changes})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"expectations": [Expect.unique("n")]}, "Unique.*each item a Present or a Between"),
    "a share": ({"expectations": [Expect.present("n", share=0.5)]}, "share=0.5; expected no share"),
    "no such field": ({"expectations": [Expect.present("m")]}, "no such feature; expected one of at, b, n"),
    "a fraction": ({"expectations": [Expect.between("n", 0.5)]}, "value 0.5; expected values of Int64"),
    "a naive time": ({"expectations": [Expect.between("at", NAIVE)]}, "a datetime with a time zone"),
    "too long a text": ({"expectations": [Expect.length("s", 0, 1001)]}, "1000 characters at most"),
    "a default for nothing": ({"defaults": {"m": 1}}, "default of 'm': no such field"),
    "a default of another type": ({"defaults": {"n": "1"}}, "default of 'n': value '1'; expected values of Int64"),
    "a null as default": ({"defaults": {"n": None}}, "value None; expected values of Int64"),
    "a naive default": ({"defaults": {"at": NAIVE}}, "expected values of UnixTimestamp"),
    "a default that is refused": (
        {"expectations": [Expect.between("n", 0, 9)], "defaults": {"n": 10}}, "of 'n': 10; expected from 0 to 9",
    ),
    "a default too short": (
        {"expectations": [Expect.length("s", 3, 3)], "defaults": {"s": "ab"}}, "'ab'; expected a length from 3 to 3",
    ),
    "a default unseen": ({"expectations": [Expect.one_of("s", ["a"])], "defaults": {"s": "b"}}, "expected one of 'a'"),
    "a type that is none": ({"schema": [Field("n", int)], "defaults": {"n": 1}}, "type <class 'int'>"),  # type: ignore[arg-type]  # that is what is wrong with it
    "NaN between": ({"expectations": [Expect.between("x", 0)], "defaults": {"x": math.nan}}, "nan; expected at least"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_in_a_declaration_is_named(case: str) -> None:
    changes, message = WRONG[case]
    with pytest.raises(ConfigurationError, match=f"request source asked.*{message}"):
        compile_contract("shop", [asked(**changes)], compiler=compiled)


def test_a_source_with_rules_stands_among_the_transforms() -> None:
    one, other = asked(defaults={"n": 1}), RequestSource("Asked", [Field("m", Int64)], defaults={"m": 1})
    taken = RequestTransform("ASKED", [one], [Field("y", Int64)], lambda n: {"y": n})
    with pytest.raises(ConfigurationError, match="has the name of request transform 'ASKED'"):
        compile_contract("shop", [other, taken], compiler=compiled)
    contract = compile_contract("shop", [one, asked(name="more")], compiler=compiled)
    assert list(contract.transforms) == ["asked"]  # the other one has no rules
    assert Contract.loads(contract.dumps()) == contract
    other = asked(defaults={"n": 1}, expectations=[Expect.between("n", 0, 9)])
    changed = compile_contract("shop", [other], compiler=compiled)
    assert differences(contract, changed) == [
        "transform asked: its computation changed; the rule for n was (else 1), is (from 0 to 9, else 1)"
    ]


TYPES: dict[str, tuple[str, pa.Array, str]] = {
    "a time without a zone": ("at", pa.array([0], pa.timestamp("us")), "UnixTimestamp with a time zone"),
    "half a microsecond": ("at", pa.array([1], pa.timestamp("ns", tz="UTC")), "would lose data"),
    "a number for a time": ("at", pa.array([1]), "has type int64"),
    "a text for a number": ("n", pa.array(["1"]), "has type string; expected values of type Int64"),
    "a fraction": ("n", pa.array([1.5]), "truncated"),
    "a truth value for a number": ("n", pa.array([True]), "has type bool"),
    "a number for a truth value": ("b", pa.array([1]), "has type int64"),
    "a number for a text": ("s", pa.array([1]), "has type int64; expected values of type String"),
    "a number that 32 bits do not hold": ("x", pa.array([1e39]), "a number is too large"),
}  # fmt: skip


@pytest.mark.parametrize("case", TYPES)
def test_a_spine_with_values_of_another_type_is_refused(anywhere: "SparkSession", case: str) -> None:
    name, values, message = TYPES[case]
    source = asked(defaults={"n": 1, "x": 1.0, "s": "a", "at": EPOCH, "b": True})
    contract = compile_contract("shop", [source], compiler=compiled).transforms["asked"]
    with pytest.raises(DataError, match=f"request source asked, column {name}: .*{message}"):
        list(append_fields(anywhere, [(source, contract)], [pa.RecordBatch.from_pydict({name: values})]))


def test_a_spine_may_have_narrower_types_and_leave_out_what_has_a_default(anywhere: "SparkSession") -> None:
    source = asked(defaults={"n": 7, "x": 0.5, "s": "a", "at": EPOCH, "b": True})
    contract = compile_contract("shop", [source], compiler=compiled).transforms["asked"]
    given = {"n": pa.array([1, None], pa.int16()), "x": pa.array([1, 2], pa.float64()), "s": pa.nulls(2)}
    (answer,) = append_fields(anywhere, [(source, contract)], [pa.RecordBatch.from_pydict(given)])
    assert answer.select([f"asked__{name}" for name in ("n", "x", "s", "at", "b")]).to_pydict() == {
        "asked__n": [1, 7], "asked__x": [1.0, 2.0], "asked__s": ["a", "a"], "asked__at": [EPOCH] * 2,
        "asked__b": [True, True],
    }  # fmt: skip


def test_a_checked_source_may_have_arrays_that_it_does_not_give(anywhere: "SparkSession") -> None:
    fields = [Field("n", Int64), Field("query", Array(Float32), size=2)]
    source = RequestSource("asked", fields, expectations=[Expect.between("n", 0, 9)])

    def summed(n: Column, query: Column) -> dict[str, Column]:
        return {"sum": n + query[0] + query[1]}

    declared = RequestTransform("summed", [source], [Field("sum", Float64)], summed)
    service = FeatureService("s", [source, declared])
    contract = compile_contract("shop", [source, declared, service], compiler=compiled)
    assert contract.services["s"].computed == (("asked", "n"), ("summed", "sum"))
    assert [column.size for column in contract.transforms["summed"].request] == [None, 2]
    graphs = {name: RowGraph(one) for name, one in contract.transforms.items()}
    columns = {"n": pa.array([1, None, 3]), "query": pa.array([[0.5, 0.25], [1, 2], None], pa.list_(pa.float32()))}
    batch = pa.RecordBatch.from_pydict(columns)
    pairs: list[Any] = [(source, contract.transforms["asked"]), (declared, contract.transforms["summed"])]
    (answer,) = append_fields(anywhere, pairs, [batch])
    assert answer["summed__sum"].to_pylist() == [1.75, None, None]
    given = {"n": from_arrow(batch["n"], Int64), "query": from_arrow(batch["query"], Array(Float32))}
    assert graphs["summed"].run(given).values["sum"].tolist(Float64) == [1.75, None, None]
    given["n"] = from_arrow(pa.array([1, 2, 10]), Int64)
    with pytest.raises(RequestError, match=r"n: is 10 in row 2; expected from 0 to 9"):
        graphs["summed"].require(given, graphs.__getitem__, str)


def test_a_transform_takes_what_is_checked_and_refuses_only_what_it_computes(anywhere: "SparkSession") -> None:
    rules = [Expect.between("n", 0, 9), Expect.one_of("s", [f"A{number}" for number in range(2000)])]
    source = asked(expectations=rules, defaults={"x": 0.5})

    def tenfold(b: Column, n: Column, x: Column, s: Column) -> dict[str, Column]:
        return {"n": F.when(b, n * 10), "share": x + x, "known": F.coalesce(F.when(b, s), F.lit("?"))}

    fields = [Field("n", Int64), Field("share", Float32), Field("known", String)]
    declared = RequestTransform("tenfold", [source], fields, tenfold)
    contract = compile_contract("shop", [source, declared], compiler=compiled)
    transform, graphs = contract.transforms["tenfold"], {n: RowGraph(one) for n, one in contract.transforms.items()}
    assert transform.rules == contract.transforms["asked"].rules
    assert optional_fields([transform]) == {"x"}
    types = {"b": Bool, "n": Int64, "x": Float32, "s": String}
    # Nothing is refused where nobody asks for it.
    rows: dict[str, list[Any]] = {
        "b": [True, False, False],
        "n": [3, 100, None],
        "x": [None, 1.0, 2.0],
        "s": ["A1999", "B", None],
    }
    batch = _batch(rows, types)
    given = {name: from_arrow(batch[name], dtype) for name, dtype in types.items()}
    wanted = {"n": [30, None, None], "share": [1.0, 2.0, 4.0], "known": ["A1999", "?", "?"]}
    found = graphs["tenfold"].require(given, graphs.__getitem__, str)
    assert {field.name: found[field.name].tolist(field.dtype) for field in fields} == wanted
    (answer,) = append_fields(anywhere, [(declared, transform)], [batch])
    assert {name: answer[f"tenfold__{name}"].to_pylist() for name in wanted} == wanted

    for name, value, words in (("n", 100, "is 100"), ("s", "B", "is 'B'")):
        batch = _batch({**rows, "b": [True] * 3, "n": [3, 4, 5], "s": ["A0"] * 3} | {name: [None, None, value]}, types)
        given = {name: from_arrow(batch[name], dtype) for name, dtype in types.items()}
        with pytest.raises(RequestError, match=rf"request\.{name}: {words} in row 2; expected"):
            graphs["tenfold"].require(given, graphs.__getitem__, "request.{}".format)
        with pytest.raises(DataError, match=rf"request transform tenfold \(.*field {name} of request source asked"):
            list(append_fields(anywhere, [(declared, transform)], [batch]))
