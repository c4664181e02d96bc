"""Expectations: their declaration, and what they find in rows, beside plain Python."""

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus import ConfigurationError, Entity, Expect, FeatureView, Field, Source
from isthmus.features import clock
from isthmus.features.definition.compile import compile_contract
from isthmus.features.definition.expectations import Expectation
from isthmus.features.quality.statistics import view_statistics
from isthmus.features.quality.validation import Finding, ReferenceStatistics, check
from isthmus.features.types import Array, Bool, Bytes, DataType, Float32, Float64, Int32, Int64, String, UnixTimestamp
from isthmus.features.values.arrow import ARROW
from tests.features.support import DAY, make_view

SCHEMA: dict[str, DataType] = {
    "n": Int32, "x": Float32, "y": Float64, "s": String, "b": Bytes, "t": UnixTimestamp, "a": Array(Float32), "f": Bool,
}  # fmt: skip
VIEW = make_view(SCHEMA)
NOW = 10 * DAY
UTC_TIME = pa.timestamp("us", tz="UTC")


def view_of(source: Any) -> Any:
    return source


def compiled(*expectations: Expectation) -> Any:
    fields = [Field(name, dtype) for name, dtype in SCHEMA.items()]
    view = FeatureView("v", [Entity("e", {"k": Int64})], fields, [Source("source", "a.parquet")], None,
                       function=view_of, expectations=expectations)  # fmt: skip
    return compile_contract("p", [view])


def rows(**columns: list[Any]) -> pa.Table:
    count = len(next(iter(columns.values())))
    table = {"k": pa.array(range(count), pa.int64()), "event_timestamp": pa.array([DAY] * count, pa.int64())}
    for name, dtype in SCHEMA.items():
        values = columns.get(name, [None] * count)
        table[name] = pa.array(values, pa.int64() if dtype == UnixTimestamp else ARROW[dtype.name])
        table[name] = table[name].cast(ARROW[dtype.name])
    if "event_timestamp" in columns:
        table["event_timestamp"] = pa.array(columns["event_timestamp"], pa.int64())
    table["event_timestamp"] = table["event_timestamp"].cast(UTC_TIME)
    return pa.table(table)


def found(expectation: Expectation, references: Any = (), **columns: list[Any]) -> Finding:
    compiled(expectation)
    (finding,) = check(VIEW, [expectation], rows(**columns), now=NOW, references=references)
    return finding


WRONG: list[tuple[Expectation, str]] = [
    (Expect.present("z"), "Expect.present('z'): no such feature; expected one of a, b, f, n"),
    (Expect.present("k"), "no such feature"),
    (Expect.present(["n"]), "no such feature"),  # type: ignore[arg-type]
    (Expect.present("n", share=1.5), "share=1.5; expected more than 0, at most 1"),
    (Expect.present("n", share="all"), "share='all'"),  # type: ignore[arg-type]
    (Expect.between("n"), "no bound is set"),
    (Expect.between("n", 2, 1), "2 is greater than 1"),
    (Expect.between("n", "1"), "bound '1'; expected a number"),
    (Expect.between("x", math.nan), "bound nan; expected a number"),
    (Expect.between("s", 1, 2), "the feature has type String"),
    (Expect.between("f", 0, 1), "the feature has type Bool"),
    (Expect.between("t", 1, 2), "bound 1; expected a datetime with a time zone"),
    (Expect.between("t", datetime(2024, 1, 1)), "a datetime with a time zone"),  # noqa: DTZ001
    (Expect.length("n", 1, 2), "the feature has type Int32; expected String, Bytes or an Array"),
    (Expect.length("a", -1), "bound -1; expected a whole number, 0 or more"),
    (Expect.one_of("n", []), "the list is empty"),
    (Expect.one_of("n", ["1"]), "value '1'; expected values of Int32"),
    (Expect.one_of("n", [True]), "value True; expected values of Int32"),
    (Expect.one_of("n", [1 << 31]), "value 2147483648"),
    (Expect.one_of("a", [1.0]), "a type that is not an Array"),
    (Expect.unique("a"), "a type that is not an Array"),
    (Expect.rows(at_least=3, at_most=2), "3 is greater than 2"),
    (Expect.rows(at_least=0.5), "bound 0.5"),  # type: ignore[arg-type]
    (Expect.fresh(within=timedelta(0)), "expected a positive timedelta"),
    (Expect.drift("x", psi=0), "psi=0; expected a positive number"),
]


@pytest.mark.parametrize(("expectation", "problem"), WRONG)
def test_an_expectation_that_makes_no_sense(expectation: Expectation, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        compiled(expectation)
    assert problem in str(caught.value)
    assert "view v, Expect." in str(caught.value)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        compiled(*(expectation for expectation, _ in WRONG))
    assert len(caught.value.problems) == len(WRONG)


def test_what_is_no_expectation() -> None:
    with pytest.raises(ConfigurationError, match=r"view v, expectations: \['x > 0'\]; expected a list, each item an E"):
        compiled("x > 0")  # type: ignore[arg-type]


def test_expectations_are_no_part_of_the_contract() -> None:
    assert compiled(Expect.present("n")).hash == compiled().hash


GOOD_AND_BAD: list[tuple[Expectation, str, list[Any], list[Any], str]] = [
    (Expect.present("n"), "n", [1, 2], [1, None], "1 of 2 rows have no value"),
    (Expect.present("n", share=0.5), "n", [1, None], [1, None, None], "2 of 3 rows have no value"),
    (Expect.between("n", 0, 9), "n", [0, 9, None], [5, 10], "1 of 2 rows do not fit"),
    (Expect.between("n", 0, 1e6), "n", [7], [-1], "1 of 1 rows do not fit"),
    (Expect.between("n", -(1 << 70), 1 << 70), "n", [7], [], ""),
    (Expect.between("x", high=0.1), "x", [0.1, -math.inf], [0.2, math.nan], "2 of 2 rows"),
    (Expect.between("y", low=0), "y", [0.0, -0.0, math.inf], [-1e-300], "1 of 1 rows"),
    (Expect.between("t", clock.moment(0)), "t", [0, 1, None], [-1], "1 of 1 rows"),
    (Expect.length("s", 1, 2), "s", ["é", "ab", None], ["", "abc"], "2 of 2 rows"),
    (Expect.length("b", high=1), "b", [b"a"], [b"ab"], "1 of 1 rows"),
    (Expect.length("a", 2, 2), "a", [[1.0, 2.0], None], [[1.0], []], "2 of 2 rows"),
    (Expect.one_of("s", ["a", "b"]), "s", ["a", None], ["a", "A"], "1 of 2 rows"),
    (Expect.one_of("n", [1, 2]), "n", [1, 2], [3], "1 of 1 rows"),
    (Expect.one_of("x", [0.1]), "x", [0.1], [0.2], "1 of 1 rows"),
    (Expect.one_of("f", [True]), "f", [True, None], [False], "1 of 1 rows"),
    (Expect.one_of("t", [clock.moment(5)]), "t", [5], [6], "1 of 1 rows"),
    (Expect.unique("s"), "s", ["a", "b", None, None], ["a", "b", "a"], "1 values occur in 2 rows"),
    (Expect.unique("n"), "n", [1, 2], [1, 1, 2, 2, 2], "2 values occur in 5 rows"),
    (Expect.rows(at_least=2, at_most=3), "n", [1, 2], [1, 2, 3, 4], "4 rows"),
    (Expect.fresh(within=timedelta(days=2)), "event_timestamp", [DAY, 8 * DAY], [8 * DAY - 1], "before the project's"),
]  # fmt: skip


@pytest.mark.parametrize(("expectation", "name", "good", "bad", "sentence"), GOOD_AND_BAD)
def test_what_holds_and_what_does_not(
    expectation: Expectation, name: str, good: list[Any], bad: list[Any], sentence: str
) -> None:
    assert found(expectation, **{name: good}).passed
    if bad:
        finding = found(expectation, **{name: bad})
        assert not finding.passed
        assert sentence in finding.found
        assert str(expectation) in str(finding)


def test_the_first_offending_keys_are_named() -> None:
    finding = found(Expect.between("n", 0, 9), n=[1, 10, 2, None, 11, 12, 13])
    assert finding.examples == tuple(
        f"{value} at k={key}, event_timestamp=1970-01-02T00:00:00Z" for value, key in ((10, 1), (11, 4), (12, 5))
    )
    assert str(finding).startswith("view traffic, feature n: 4 of 7 rows do not fit, first 10 at k=1, event_timestamp=")
    doubled = found(Expect.unique("s"), s=["x", "a", "y", "a"])
    assert [example.split(",")[0] for example in doubled.examples] == ["a at k=1", "a at k=3"]


@given(st.lists(st.none() | st.integers(-3, 3), min_size=1, max_size=30), st.integers(-3, 0), st.integers(0, 3))
def test_rows_are_counted_as_plain_python_counts(values: list[int | None], low: int, high: int) -> None:
    outside = [n for n, value in enumerate(values) if value is not None and not low <= value <= high]
    between = found(Expect.between("n", low, high), n=values)
    assert between.passed == (not outside)
    assert between.found.startswith(f"{len(outside)} of {len(values)} ")
    assert [int(example.split("k=")[1].split(",")[0]) for example in between.examples] == outside[:3]
    there = [value for value in values if value is not None]
    assert found(Expect.one_of("n", list(range(low, high + 1))), n=values).passed == (not outside)
    assert found(Expect.unique("n"), n=values).passed == (len(there) == len(set(there)))
    assert found(Expect.present("n", share=0.7), n=values).passed == (len(there) / len(values) >= 0.7)


def reference(table: pa.Table, last: int) -> ReferenceStatistics:
    features = view_statistics(VIEW, table, 0, "", until=last).features
    return ReferenceStatistics(name="late", training_set="abc", last=last, features=features)


def test_drift_of_new_rows_is_found_and_named() -> None:
    old, times = [float(n % 100) for n in range(2000)], [DAY + n for n in range(2000)]
    then = reference(rows(y=old, event_timestamp=times), times[-1])
    later = [times[-1] + 1 + n for n in range(500)]
    for new, passed in ((old[:500], True), ([value * 1000 for value in old[:500]], False)):
        finding = found(Expect.drift("y", psi=0.2), [then], y=old + new, event_timestamp=times + later)
        assert finding.passed == passed
        assert "of 500 rows after training set abc of late" in finding.found
    nothing = found(Expect.drift("y"), [then], y=old, event_timestamp=times)
    assert (nothing.passed, nothing.found) == (True, "no training set, or no row after it")
    assert found(Expect.drift("y"), y=old).passed


def test_nothing_is_read_where_nothing_is_expected() -> None:
    assert check(VIEW, [], pa.table({}), now=NOW) == []


def test_a_moment_is_told_in_utc() -> None:
    finding = found(Expect.fresh(within=timedelta(hours=1)), event_timestamp=[DAY])
    assert "the latest event is at 1970-01-02 00:00:00Z, 9 days, 0:00:00 before" in finding.found
    future = found(Expect.fresh(within=timedelta(hours=1)), event_timestamp=[NOW + 1, DAY])
    assert (future.passed, future.found) == (False, finding.found)
    assert datetime.fromtimestamp(DAY / 1e6, UTC).day == 2
