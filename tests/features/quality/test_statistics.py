"""Statistics against what plain Python says of the same values."""

import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.contract.schema import Column
from isthmus.features.quality import statistics
from isthmus.features.quality.statistics import FeatureStatistics, category, measure
from isthmus.features.types import TYPES, DataType, Float64, Int64, String
from isthmus.features.values.arrow import ARROW
from tests.features.support import DTYPES, VALUES


def rows_of(values: list[Any], dtype: DataType) -> pa.Table:
    array = pa.array(values, pa.int64()) if dtype.name == "UnixTimestamp" else pa.array(values, ARROW[dtype.name])
    return pa.table({"x": array.cast(ARROW[dtype.name])})


def measured(values: list[Any], dtype: DataType, batch: int = 1000) -> FeatureStatistics:
    rows, features = measure([Column("x", dtype)], rows_of(values, dtype).to_batches(max_chunksize=batch))
    assert rows == len(values)
    return features["x"]


def naive(values: list[Any], dtype: DataType) -> dict[str, Any]:
    """The statistics as their definition reads."""
    there = [value for value in values if value is not None]
    if dtype.element is not None:
        numbers: list[Any] = [len(value) for value in there]
    elif dtype.name in ("Bool", "String", "Bytes"):
        counts = Counter(category(value) for value in there)
        top = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        return {"nulls": len(values) - len(there), "distinct": len(set(there)), "top": top}
    else:
        numbers = [float(np.float32(value)) if dtype.name == "Float32" else value for value in there]
    finite = sorted(value for value in numbers if math.isfinite(value))
    return {
        "nulls": len(values) - len(there),
        "distinct": len({"nan" if value != value else value for value in numbers}),
        "not_finite": len(numbers) - len(finite),
        "low": min(finite, default=None),
        "high": max(finite, default=None),
        "points": tuple(map(float, finite)),
    }


@given(data=st.data(), dtype=DTYPES, batch=st.integers(1, 7))
def test_statistics_are_what_plain_python_says(data: st.DataObject, dtype: DataType, batch: int) -> None:
    if dtype.element is None:
        values = data.draw(st.lists(st.none() | VALUES[dtype.name], max_size=30))
    else:
        # The statistics see lengths alone, whatever the elements are.
        lengths = data.draw(st.lists(st.none() | st.integers(0, 3), max_size=20))
        values = [None if length is None else [_some(dtype)] * length for length in lengths]
    found, expected = measured(values, dtype, batch), naive(values, dtype)
    top = expected.pop("top", None)
    assert {name: getattr(found, name) for name in expected} == expected
    if top is not None:
        assert list(found.top.items()) == [(name, count / len(values)) for name, count in top]
    elif expected["points"] and max(map(abs, expected["points"])) < 1e150:
        points = expected["points"]
        scale = max(map(abs, points))
        assert found.mean == pytest.approx(np.mean(points), rel=1e-9, abs=1e-9 * scale)
        assert found.deviation == pytest.approx(np.std(points), rel=1e-6, abs=1e-6 * scale)
    # No NaN or infinity can hide in the file: JSON would make null of it.
    assert msgspec.json.decode(msgspec.json.encode(found), type=FeatureStatistics) == found


def _some(dtype: DataType) -> Any:
    assert dtype.element is not None
    return {"String": "a", "Bytes": b"a", "Bool": True}.get(dtype.element.name, 1)


@given(cuts=st.lists(st.integers(1, 400), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_batches_change_nothing(cuts: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=1000)
    table = rows_of(values.tolist(), Float64)
    batches, start = [], 0
    for cut in [*cuts, 1000]:
        batches += table.slice(start, cut).to_batches()
        start += cut
    column = Column("x", Float64)
    whole, parts = (measure([column], some)[1]["x"] for some in (table.to_batches(), batches))
    assert (whole.points, whole.distinct) == (parts.points, parts.distinct)
    assert (whole.low, whole.high) == (parts.low, parts.high)
    assert whole.mean == pytest.approx(parts.mean)


def test_a_sample_is_small_and_tells_the_truth() -> None:
    values = np.random.default_rng(1).exponential(size=300_000)
    one = measured(values.tolist(), Float64, 50_000)
    ranks = np.searchsorted(np.sort(values), one.points) / len(values)
    middle = (np.arange(statistics.POINTS) + 0.5) / statistics.POINTS
    assert len(one.points) == statistics.POINTS
    assert np.abs(ranks - middle).max() < 0.0077
    assert one.mean == pytest.approx(values.mean(), rel=1e-12)
    assert one.high == values.max()


def test_the_sample_holds_no_more_rows_than_it_may() -> None:
    measurement = statistics.Measurement([Column("x", Int64)], sample=100)
    for start in range(0, 10_000, 50):
        measurement.add(rows_of(list(range(start, start + 50)), Int64).to_batches()[0])
        assert sum(map(len, measurement._sample._parts)) <= 250
    points = measurement.features()["x"].points
    assert len(points) == 100
    # Drawn from all of the rows, not from the first or the last.
    assert 3_500 < np.mean(points) < 6_500


@pytest.mark.parametrize("different", [1, 4_095, 4_096, 50_000])
def test_different_values_are_counted(different: int) -> None:
    values = np.random.default_rng(2).permutation(np.arange(100_000) % different)
    numbers, texts = measured(values.tolist(), Int64), measured(list(map(str, values)), String)
    for one in (numbers, texts):
        assert one.distinct == different if different < 4_096 else abs(one.distinct / different - 1) < 0.06


def test_long_names_of_categories_stay_apart() -> None:
    names = {category("a" * 200 + end) for end in "xyz"}
    assert len(names) == 3
    assert all(len(name) < 100 for name in names)
    assert (category(b"\x00\xff"), category(True)) == ("0x00ff", "true")


def test_nothing_is_measured_without_rows() -> None:
    for name, dtype in TYPES.items():
        one = measured([], dtype)
        assert (one.dtype, one.rows, one.points, one.top, one.mean, one.quantile(0.5)) == (name, 0, (), {}, None, None)
