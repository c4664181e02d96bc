import math

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from isthmus import DataError
from isthmus.distill.evaluation.interval import interval


def test_the_mean_and_its_interval() -> None:
    # The textbook's quantile for two degrees of freedom is 4.303; the standard deviation of 1, 2, 3 is 1.
    value, low, high = interval([3, 1, 2])
    assert value == 2
    assert high == pytest.approx(2 + 4.303 / math.sqrt(3), abs=1e-3)
    assert low == pytest.approx(2 - 4.303 / math.sqrt(3), abs=1e-3)
    assert interval([3, 1, 2]).bounds == [low, high]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_it_is_that_of_scipy(values: list[float]) -> None:
    value, low, high = interval(values)
    spread = scipy.stats.sem(values)
    assert value == pytest.approx(sum(values) / len(values), abs=1e-6)
    expected = scipy.stats.t.interval(0.95, len(values) - 1, value, spread) if spread else (value, value)
    assert (low, high) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_one_value_has_no_interval() -> None:
    assert interval([0.5]) == (0.5, None, None)
    assert interval([0.5]).bounds is None


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf, 1.0]])
def test_no_numbers_no_interval(values: list[float]) -> None:
    with pytest.raises(DataError, match="expected finite numbers, at least one"):
        interval(values)
