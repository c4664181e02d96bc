"""The measures of drift against their definitions, and against planted faults."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.contract.schema import Column
from isthmus.features.quality.drift import BINS, CATEGORIES, LEAST, drift, psi, windows
from isthmus.features.quality.statistics import POINTS, FeatureStatistics
from isthmus.features.types import Float64, Int64, String
from tests.features.quality.test_statistics import measured
from tests.features.support import DAY

NUMBERS = st.none() | st.integers(-5, 5).map(float) | st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf])


def naive_psi(before: list[Any], after: list[Any]) -> float:
    """The index of few values, as its definition reads."""

    def shares(values: list[Any]) -> list[float]:
        counts = [sum(inside(value) for value in values) for inside in bins]
        return [max(count / len(values), 0.5 / min(len(before), len(after), POINTS)) for count in counts]

    ordered = sorted(v for v in before if v is not None and math.isfinite(v))
    deciles = [ordered[min(n * len(ordered) // BINS, len(ordered) - 1)] for n in range(1, BINS)] if ordered else []
    bins: list[Any] = [lambda v: v is None, lambda v: v is not None and not math.isfinite(v)]
    edges = sorted(set(deciles))
    previous = -math.inf
    for edge in edges:
        alone = deciles.count(edge) > 1
        if alone:
            bins.append(lambda v, low=previous, high=edge: v is not None and math.isfinite(v) and low < v < high)
            bins.append(lambda v, high=edge: v == high)
        else:
            bins.append(lambda v, low=previous, high=edge: v is not None and math.isfinite(v) and low < v <= high)
        previous = edge
    bins.append(lambda v, low=previous: v is not None and math.isfinite(v) and v > low)
    pairs = zip(shares(before), shares(after), strict=True)
    return sum((p - q) * math.log(p / q) for p, q in pairs)


def naive_gap(before: list[float], after: list[float]) -> float:
    def below(values: list[float], at: float) -> float:
        return sum(value <= at for value in values) / len(values)

    return max(abs(below(before, at) - below(after, at)) for at in [*before, *after])


def naive_distance(before: list[float], after: list[float]) -> float:
    """The area between the two distribution functions."""
    places = sorted({*before, *after})
    return sum(
        (right - left) * abs(sum(v <= left for v in before) / len(before) - sum(v <= left for v in after) / len(after))
        for left, right in pairwise(places)
    )


@given(st.lists(NUMBERS, min_size=1, max_size=40), st.lists(NUMBERS, min_size=1, max_size=40))
def test_the_measures_are_their_definitions(before: list[Any], after: list[Any]) -> None:
    reference, new = measured(before, Float64), measured(after, Float64)
    found = drift(reference, new)
    assert found.psi == pytest.approx(naive_psi(before, after), abs=1e-9)
    assert found.psi >= 0
    old, fresh = ([v for v in side if v is not None and math.isfinite(v)] for side in (before, after))
    assert (found.ks is None) == (not old or not fresh)
    if old and fresh:
        assert found.ks == pytest.approx(naive_gap(old, fresh))
        if reference.deviation:
            expected = naive_distance(old, fresh) / reference.deviation
            assert found.wasserstein == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(st.lists(st.none() | st.sampled_from("abcd"), min_size=1, max_size=40),
       st.lists(st.none() | st.sampled_from("abcde"), min_size=1, max_size=40))  # fmt: skip
def test_the_index_of_categories_is_its_definition(before: list[Any], after: list[Any]) -> None:
    known = {value for value in before if value is not None}
    total = 0.0
    for name in [None, *sorted(known), "another"]:
        p, q = (sum(v == name if name != "another" else v not in (None, *known) for v in side) / len(side)
                for side in (before, after))  # fmt: skip
        least = 0.5 / min(len(before), len(after), POINTS)
        p, q = max(p, least), max(q, least)
        total += (p - q) * math.log(p / q)
    found = drift(measured(before, String), measured(after, String))
    assert found.psi == pytest.approx(total, abs=1e-9)
    assert (found.ks, found.wasserstein) == (None, None)
    assert set(found.unseen) == {value for value in after if value is not None} - known


@given(st.lists(NUMBERS, min_size=1, max_size=60))
def test_nothing_has_moved_from_itself(values: list[Any]) -> None:
    one = measured(values, Float64)
    assert drift(one, one).exceeded == ()
    assert drift(one, one).psi == 0


CHANCE = np.random.default_rng(3)
BEFORE = CHANCE.gamma(2.0, 10.0, 20_000)


def numbers(rows: int = 5_000) -> list[Any]:
    return list(np.random.default_rng(rows).gamma(2.0, 10.0, rows).tolist())


@pytest.mark.parametrize(
    ("fault", "measure"),
    [
        (lambda v: v * 1000, "wasserstein"),
        (lambda v: v / 1000, "psi"),
        (lambda v: -v, "ks"),
        (lambda v: v * 0, "ks"),
        (lambda v: None if v < 9 else v, "psi"),
        (lambda v: math.nan if v < 9 else v, "psi"),
        (lambda v: v + 14.2 / 2 * 1.2, "ks"),
    ],
)  # fmt: skip
def test_planted_faults_are_found(fault: Any, measure: str) -> None:
    reference = measured(BEFORE.tolist(), Float64)
    assert drift(reference, measured(numbers(), Float64)).exceeded == ()
    assert measure in drift(reference, measured(list(map(fault, numbers())), Float64)).exceeded


def test_a_shift_of_categories_is_found() -> None:
    reference = measured(["a"] * 700 + ["b"] * 300, String)
    assert drift(reference, measured(["a"] * 690 + ["b"] * 310, String)).exceeded == ()
    assert drift(reference, measured(["a"] * 300 + ["b"] * 700, String)).exceeded == ("psi",)
    renamed = drift(reference, measured(["A"] * 700 + ["b"] * 300, String))
    assert (renamed.exceeded, renamed.unseen) == (("psi",), ("A",))


def test_many_categories_have_a_bin_together() -> None:
    names = [f"n{n}" for n in range(5_000)]
    reference = measured(names * 2, String)
    assert len(reference.top) == 256
    assert reference.distinct == pytest.approx(5_000, rel=0.06)
    assert CATEGORIES < 256
    assert drift(reference, measured(names, String)).exceeded == ()


def test_a_constant_that_moves_is_found() -> None:
    reference = measured([4] * 1_000, Int64)
    for other in (3, 5):
        found = drift(reference, measured([other] * 1_000, Int64))
        assert (found.exceeded, found.wasserstein) == (("psi", "ks"), None)


@pytest.mark.parametrize("rows", [1, 5, 20, 100, 1_000])
def test_rows_of_one_distribution_are_rarely_flagged(rows: int) -> None:
    """Of independent rows about three in a thousand, for three measures that are each beyond chance in one."""
    chance = np.random.default_rng(rows)
    reference = measured(chance.normal(size=50_000).tolist(), Float64)
    flagged = sum(
        bool(drift(reference, measured(chance.normal(size=rows).tolist(), Float64)).exceeded) for _ in range(200)
    )
    assert flagged <= 4


def test_the_thresholds_are_a_shift_of_half_a_deviation() -> None:
    chance = np.random.default_rng(4)
    base = chance.normal(size=60_000)
    reference = measured(base.tolist(), Float64)
    moved = drift(reference, measured((base + 0.5).tolist(), Float64))
    assert moved.psi == pytest.approx(0.25, abs=0.03)
    assert moved.ks == pytest.approx(0.2, abs=0.01)
    assert moved.wasserstein == pytest.approx(0.5, abs=0.02)
    assert drift(reference, measured((base + 0.4).tolist(), Float64)).exceeded == ()
    assert set(drift(reference, measured((base + 0.6).tolist(), Float64)).exceeded) == {"psi", "ks", "wasserstein"}


def walk(days: int) -> pa.Table:
    """A value that repeats every week and hardly moves within an hour."""
    hours = np.arange(days * 24)
    values = np.sin(hours / 168 * 2 * np.pi) + np.random.default_rng(0).normal(scale=0.01, size=len(hours))
    times = pa.array(hours * (DAY // 24), pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    return pa.table({"x": values, "event_timestamp": times})


def test_a_few_hours_are_not_held_against_a_year() -> None:
    table, column = walk(200), Column("x", Float64)
    until = 190 * DAY
    reference = measured(table["x"].slice(0, 190 * 24 + 1).to_pylist(), Float64)
    parts = windows([column], table, until, 5 * DAY)["x"]
    assert len(parts) == 38
    assert {part.rows for part in parts} == {120}
    later = table["x"].slice(191 * 24, 120).to_pylist()
    quiet = measured(later, Float64)
    assert drift(reference, quiet).exceeded != ()
    assert drift(reference, quiet, windows=parts).exceeded == ()
    loud = measured([v * 1000 for v in later], Float64)
    assert "wasserstein" in drift(reference, loud, windows=parts).exceeded
    few = drift(reference, measured([v * 1000 for v in later[: LEAST - 1]], Float64), windows=parts)
    assert (few.wasserstein or 0) > 100
    assert few.exceeded == ()


def test_windows_hold_every_row_once() -> None:
    table = walk(10)
    parts: list[FeatureStatistics] = windows([Column("x", Float64)], table, 10 * DAY, DAY)["x"]
    # The row at the very beginning is the end of a window before it, which is not whole.
    assert sum(part.rows for part in parts) == len(table) - 1
    assert windows([Column("x", Float64)], table, 10 * DAY, 6 * DAY)["x"] == []


def test_the_index_is_symmetric_where_the_bins_are() -> None:
    one, other = measured([1, 1, 2], Int64), measured([2, 1, 2], Int64)
    assert psi(one, other)[0] == pytest.approx(psi(other, one)[0])
