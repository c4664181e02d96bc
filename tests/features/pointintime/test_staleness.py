"""What a device sees: the rows of a snapshot that is some time old, by the rules of time."""

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features import clock
from isthmus.features.definition.spec import Snapshot
from isthmus.features.errors import DataError
from isthmus.features.offline.history import ViewHistory, status_column
from isthmus.features.pointintime import staleness
from isthmus.features.pointintime.join import point_in_time
from isthmus.features.pointintime.staleness import AgedJoin, fixed_ages, random_ages
from isthmus.features.types import Int32, Int64
from isthmus.features.values.columns import Ints
from isthmus.package.snapshot.selection import rows_in_snapshot
from tests.features.support import make_view, same_bits, table, times

VIEW = make_view({"a": Int64, "b": Int64}, ttl=9)
DEVICE = Snapshot(age=timedelta(microseconds=12), every=timedelta(microseconds=5))

rows = st.lists(
    st.fixed_dictionaries({
        "k": st.integers(0, 2), "_event": st.integers(0, 40), "_known": st.integers(0, 50),
        "a": st.none() | st.integers(0, 99), "b": st.none() | st.integers(0, 99),
    }),
    max_size=12, unique_by=lambda row: (row["k"], row["_event"], row["_known"]),
)  # fmt: skip
questions = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=12)


def _spine(asked: list[tuple[int, int]]) -> pa.Table:
    return pa.table(
        {"k": pa.array([k for k, _ in asked], pa.int64()), "event_timestamp": times([at for _, at in asked])}
    )


def _joined(join: AgedJoin, spine: pa.Table) -> pa.Table:
    return pa.Table.from_batches(join.batches(spine.to_batches(max_chunksize=5)), join.schema)


def _seen(history: list[dict[str, Any]], key: int, at: int, age: int) -> tuple[str, int | None]:
    """The oracle: the row of the snapshot, unless it has expired by now."""
    own = [clock.Row(row["_event"], row["_known"], 0, (row["a"], row["b"])) for row in history if row["k"] == key]
    row, _ = clock.as_of(own, at - age, None)
    if row is None:
        return "not_found", None
    if clock.expired(row.event, at, VIEW.ttl):
        return "expired", None
    return ("null" if row.values == (None, None) else "present"), row.values[0]


@given(rows, questions, st.integers(0, 30), st.none() | st.sets(st.integers(0, 3), min_size=1))
def test_it_is_the_row_of_the_snapshot(
    history: list[dict[str, Any]], asked: list[tuple[int, int]], age: int, keys: set[int] | None
) -> None:
    past, spine = ViewHistory(VIEW, table(VIEW, history), 0), _spine(asked)
    device = replace(DEVICE, keys={"k": sorted(keys)} if keys else {})
    keeps = partial(rows_in_snapshot, device=device) if keys else None
    found = _joined(AgedJoin(spine.schema, [past], ages=fixed_ages(age), keeps=keeps), spine)
    assert found.select(spine.column_names).equals(spine)
    values = found[VIEW.full_name("a")].to_pylist()
    expected = [
        _seen(history, key, at, age) if keys is None or key in keys else ("not_found", None) for key, at in asked
    ]
    assert list(zip(found[status_column(VIEW)].to_pylist(), values, strict=True)) == expected


def test_a_row_that_does_not_fit_is_named_whatever_pass_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "PASS", 4)
    past = ViewHistory(make_view({"a": Int64}, {"k": Int32}), table(VIEW, []), 0)
    spine = _spine([*[(0, 0)] * 6, (1 << 40, 0)])
    with pytest.raises(DataError, match="value in row 6 that"):
        _joined(AgedJoin(spine.schema, [past], ages=fixed_ages(0)), spine)


@given(rows, questions)
def test_a_fresh_snapshot_is_the_point_in_time_join(
    history: list[dict[str, Any]], asked: list[tuple[int, int]]
) -> None:
    past, spine = ViewHistory(VIEW, table(VIEW, history), 0), _spine(asked)
    assert same_bits(_joined(AgedJoin(spine.schema, [past], ages=fixed_ages(0)), spine), point_in_time(spine, [past]))


@given(rows, questions)
def test_drawn_ages_do_not_depend_on_batches(history: list[dict[str, Any]], asked: list[tuple[int, int]]) -> None:
    past, spine = ViewHistory(VIEW, table(VIEW, history), 0), _spine(asked)
    found = _joined(AgedJoin(spine.schema, [past], ages=random_ages(DEVICE)), spine)
    ages = random_ages(DEVICE)(np.array([at for _, at in asked], np.int64), 0)
    expected = [_seen(history, key, at, int(age)) for (key, at), age in zip(asked, ages, strict=True)]
    assert (
        list(zip(found[status_column(VIEW)].to_pylist(), found[VIEW.full_name("a")].to_pylist(), strict=True))
        == expected
    )


@given(st.integers(1, 1000), st.integers(1, 1000), st.lists(st.integers(-(10**15), 10**15), min_size=1))
def test_a_drawn_snapshot_was_made_when_one_is_made_and_is_no_older_than_it_may_be(
    every: int, more: int, moments: list[int]
) -> None:
    age = every + more
    at: Ints = np.array(moments, np.int64)
    ages = random_ages(Snapshot(age=timedelta(microseconds=age), every=timedelta(microseconds=every)))(at, 3)
    assert ((at - ages) % every == 0).all()
    assert ((ages >= 0) & (ages <= age)).all()
