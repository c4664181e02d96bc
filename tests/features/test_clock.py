from datetime import UTC, datetime, timedelta, timezone, tzinfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.clock import MICROSECOND, Row, Status, as_of, expired, micros, moment, now
from tests.features.support import FIRST, LAST

_TIMES = st.integers(-6, 6)
_HISTORIES = st.lists(
    st.builds(Row, _TIMES, _TIMES, st.integers(0, 2), st.tuples(st.none() | st.integers(0, 3))), max_size=8
)
_TTLS = st.none() | st.integers(1, 6)


@given(_HISTORIES, _TIMES, _TTLS, st.randoms())
def test_the_answer_does_not_depend_on_order(history: list[Row], at: int, ttl: int | None, random: object) -> None:
    # Rows that share times and content share their values: that is what the content hash says.
    history = list({(row.event, row.known, row.content): row for row in history}.values())
    shuffled = sorted(history, key=lambda row: hash((row, id(random))))
    assert as_of(history, at, ttl) == as_of(shuffled, at, ttl) == as_of(history * 2, at, ttl)


@given(_HISTORIES, _TIMES, _TTLS)
def test_nothing_of_the_future_is_seen(history: list[Row], at: int, ttl: int | None) -> None:
    visible = [row for row in history if max(row.event, row.known) <= at]
    assert as_of(history, at, ttl) == as_of(visible, at, ttl)
    if not visible:
        assert as_of(history, at, ttl) == (None, Status.NOT_FOUND)


@given(_HISTORIES, _TIMES, _TTLS)
def test_the_winner_is_the_greatest_and_valid(history: list[Row], at: int, ttl: int | None) -> None:
    row, status = as_of(history, at, ttl)
    visible = [row for row in history if row.event <= at and row.known <= at]
    newest = max((row.event for row in visible), default=None)
    if row is None:
        assert status in (Status.NOT_FOUND, Status.EXPIRED)
        assert (status is Status.NOT_FOUND) == (newest is None)
        assert newest is None or (ttl is not None and at - newest > ttl)
    else:
        assert row.event == newest
        assert not any((other.event, other.known) > (row.event, row.known) for other in visible)
        assert ttl is None or at - row.event <= ttl
        assert status is (Status.NULL if row.values == (None,) else Status.PRESENT)


def test_a_correction_wins_from_the_moment_it_is_known() -> None:
    first, corrected = Row(10, 10, 1, ("first",)), Row(10, 20, 0, ("corrected",))
    assert as_of([corrected, first], 19, None) == (first, Status.PRESENT)
    assert as_of([corrected, first], 20, None) == (corrected, Status.PRESENT)


def test_an_expired_winner_does_not_give_way_to_an_older_row() -> None:
    assert as_of([Row(0, 0, 0, (1,)), Row(5, 5, 0, (2,))], 16, 10) == (None, Status.EXPIRED)


def test_exactly_ttl_old_is_valid() -> None:
    assert [expired(100, at, 10) for at in (110, 111)] == [False, True]
    assert not expired(FIRST, LAST, None)
    assert as_of([Row(100, 0, 0, (1,))], 110, 10)[1] is Status.PRESENT
    assert as_of([Row(100, 0, 0, (1,))], 111, 10)[1] is Status.EXPIRED


def test_labels() -> None:
    assert [status.label for status in Status] == ["present", "null", "expired", "not_found", "damaged"]


@given(st.integers(FIRST, LAST))
def test_moment_and_micros_are_inverse(at: int) -> None:
    assert micros(moment(at)) == at
    assert moment(at).tzinfo is UTC


@given(st.datetimes(min_value=datetime(2, 1, 1), max_value=datetime(9998, 1, 1)), st.integers(-1439, 1439))  # noqa: DTZ001
def test_micros_of_any_zone(naive: datetime, minutes: int) -> None:
    zone = timezone(timedelta(minutes=minutes))
    assert micros(naive.replace(tzinfo=zone)) == micros(naive.replace(tzinfo=UTC)) - minutes * 60_000_000


class _NoOffset(tzinfo):
    """A zone that does not say how far from UTC it is: such a datetime is naive too."""

    def utcoffset(self, _: datetime | None, /) -> None:
        return None

    def dst(self, _: datetime | None, /) -> None:
        return None

    def tzname(self, _: datetime | None, /) -> None:
        return None


@pytest.mark.parametrize("zone", [None, _NoOffset()])
def test_a_naive_moment_is_refused(zone: tzinfo | None) -> None:
    with pytest.raises(ValueError, match="2024-01-02T03:04:05 has no time zone"):
        micros(datetime(2024, 1, 2, 3, 4, 5, tzinfo=zone))


def test_now_is_now() -> None:
    before = datetime.now(UTC)
    assert micros(before) <= now() <= micros(datetime.now(UTC)) + 1000
    assert timedelta(microseconds=1) == MICROSECOND
