import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.days import Days, day_name, union
from isthmus.features.errors import RequestError

RANGES = st.tuples(st.integers(0, 30), st.integers(0, 12)).map(lambda pair: Days(pair[0], pair[0] + pair[1]))


def _set(ranges: list[Days]) -> set[int]:
    return {day for days in ranges for day in range(days.first, days.end)}


def test_a_range_is_of_days_or_of_times_on_their_borders() -> None:
    expected = Days(19723, 19754)
    assert Days.parse("2024-01-01", "2024-02-01") == expected
    assert Days.parse("2024-01-01T00:00:00Z", "2024-02-01T01:00:00+01:00") == expected
    assert str(expected) == "2024-01-01 to 2024-02-01"
    assert str(Days.parse("0001-01-01", "9999-12-31")) == "0001-01-01 to 9999-12-31"
    assert day_name(Days.parse("9999-12-30", "9999-12-31").end + 1) == "day 2932897"


@pytest.mark.parametrize(
    ("first", "end", "message"),
    [
        ("yesterday", "2024-02-01", "--from yesterday: is not a day"),
        ("2024-01-01", "2024-02-30", "--to 2024-02-30: is not a day"),
        ("2024-01-01T00:00:00", "2024-02-01", "has no time zone"),
        ("2024-01-01T01:00:00Z", "2024-02-01", "is not the start of a UTC day"),
        ("2024-01-01T00:00:00+01:00", "2024-02-01", "is not the start of a UTC day"),
        ("2024-01-01", "2024-01-01", "2024-01-01 to 2024-01-01 contains no day"),
        ("2024-01-02", "2024-01-01", "contains no day"),
    ],
)
def test_what_is_no_range(first: str, end: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Days.parse(first, end)
    assert message in str(caught.value)


@given(days=RANGES, others=st.lists(RANGES, max_size=5), length=st.integers(1, 9))
def test_ranges_are_sets_of_days(days: Days, others: list[Days], length: int) -> None:
    left = days.without(others)
    assert _set(left) == _set([days]) - _set(others)
    assert left == sorted(left)
    steps = [step for part in left for step in part.steps(length)]
    assert _set(steps) == _set(left)
    assert all(1 <= len(step) <= length for step in steps)
    assert _set(union(others)) == _set(others)
    assert sum(map(len, union(others))) == len(_set(others))
