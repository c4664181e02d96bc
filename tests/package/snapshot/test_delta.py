"""Differences of snapshots: they lead to the file that they name, or are refused."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.errors import DataError
from isthmus.package.snapshot.delta import apply_delta, difference
from tests.package.snapshot.support import contents, made, views
from tests.package.snapshot.test_file import ROWS, VIEWS


@given(st.data())
def test_it_leads_from_any_snapshot_to_any_other(data: st.DataObject) -> None:
    of = data.draw(views())
    before = [data.draw(contents(view)) for view in of]
    after = [
        {**{key: row for key, row in rows.items() if data.draw(st.booleans())}, **data.draw(contents(view))}
        for view, rows in zip(of, before, strict=True)
    ]
    base, target = made(of, before), made(of, after, number=2)
    assert apply_delta(base.data, difference(base, target)) == target.data


def test_rows_that_stay_cost_a_few_bytes() -> None:
    rows = [{(n,): (n, n, {"n": n, "x": n / 3}) for n in range(1000)}, ROWS[1]]
    changed = [{**rows[0], (500,): (501, 502, {"n": 1, "x": 1.0})}, ROWS[1]]
    base, target = made(VIEWS, rows), made(VIEWS, changed, number=2)
    delta = difference(base, target)
    assert len(delta) < len(target.parts[0]) + 250 < len(target.data) / 50
    assert apply_delta(base.data, delta) == target.data


def test_torn_or_altered_anywhere_it_is_refused() -> None:
    base = made(VIEWS, ROWS)
    target = made(VIEWS, [{**ROWS[0], (8,): (1, 2, {"n": 3, "x": 4.0})}, {}], number=2)
    delta = difference(base, target)
    for place in range(len(delta)):
        altered = bytearray(delta)
        altered[place] ^= 1 << place % 8
        for harmed in (delta[:place], bytes(altered)):
            with pytest.raises(DataError):
                apply_delta(base.data, harmed)


@given(st.binary(max_size=60))
def test_garbage_is_refused(noise: bytes) -> None:
    base, target = made(VIEWS, ROWS), made(VIEWS, [ROWS[0], {}], number=2)
    delta = difference(base, target)
    for harmed in (noise, delta[:77] + noise, delta + noise):
        # A step of no bytes changes nothing.
        with suppress(DataError):
            assert apply_delta(base.data, harmed) == target.data


def test_from_another_snapshot_it_is_refused() -> None:
    base, target = made(VIEWS, ROWS), made(VIEWS, [ROWS[0], {}], number=2)
    with pytest.raises(DataError, match="is for another snapshot; expected"):
        apply_delta(target.data, difference(base, target))
