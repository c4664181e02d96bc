"""Rows from tiles against a loop over all events."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus import Count, Max, Mean, Min, Sum
from isthmus.features.definition.tiles import Tiling, window_name
from isthmus.features.errors import DataError
from isthmus.features.streams.tiles import TileState
from isthmus.features.types import Int64, String
from tests.features.support import make_view

TICK = 600
START = 1_700_000_400  # a multiple of the tick
VIEW = make_view({"unused": Int64}, {"bus": String, "line": Int64})
TILING = Tiling(
    [Count(), Count("n"), Sum("n"), Mean("n"), Min("n"), Max("n")],
    [timedelta(minutes=10), timedelta(minutes=30), timedelta(hours=4)], timedelta(seconds=TICK),
)  # fmt: skip
KEYS = pa.schema([("bus", pa.string()), ("line", pa.int64())])


@dataclass(frozen=True)
class Event:
    bus: str
    line: int
    known: int
    n: int | None


events = st.lists(
    st.builds(
        Event, st.sampled_from("ab"), st.integers(0, 1), st.integers(START - 10_000, START + 10_000),
        st.none() | st.integers(-(1 << 40), 1 << 40),
    ),
    min_size=1, max_size=30,
)  # fmt: skip


def table(parts: list[Event]) -> pa.Table:
    columns: dict[str, Any] = {"bus": [e.bus for e in parts], "line": [e.line for e in parts]}
    columns |= {"known_at": [e.known * 1_000_000 for e in parts], "n": [e.n for e in parts]}
    schema = pa.schema([*KEYS, ("known_at", pa.int64()), ("n", pa.int64())])
    whole = pa.table(columns, schema)
    return whole.set_column(2, "known_at", whole["known_at"].cast(pa.timestamp("us", "UTC")))


def rows_of(parts: list[Event]) -> dict[tuple[str, int, int], dict[str, Any]]:
    """The rows of all events, in seconds: the oracle."""
    rows: dict[tuple[str, int, int], dict[str, Any]] = {}
    for bus, line, tick in {(e.bus, e.line, -(-e.known // TICK) * TICK) for e in parts}:
        row: dict[str, Any] = {}
        for window in TILING.windows:
            first = tick - int(window.total_seconds())
            own = [e.n for e in parts if (e.bus, e.line) == (bus, line) and first < e.known <= tick]
            values, name = [n for n in own if n is not None], window_name(window)
            row |= {f"count_{name}": len(own), f"n_count_{name}": len(values)}
            row |= {f"n_sum_{name}": sum(values) if values else None}
            row |= {f"n_mean_{name}": float(sum(values)) / len(values) if values else None}
            row |= {f"n_min_{name}": min(values, default=None), f"n_max_{name}": max(values, default=None)}
        rows[bus, line, tick] = row
    return rows


def found(rows: pa.Table) -> dict[tuple[str, int, int], dict[str, Any]]:
    result = {}
    for row in rows.to_pylist():
        key = row.pop("bus"), row.pop("line"), int(row.pop("event_timestamp").timestamp())
        result[key] = row
    return result


def keys_of(parts: list[Event]) -> pa.Table:
    return table(parts).select(KEYS.names).group_by(KEYS.names).aggregate([])


@given(events=events, cuts=st.lists(st.integers(0, 30), max_size=4), first=st.integers(START - 12_000, START + 12_000))
def test_rows_in_any_order_and_parts_equal_a_loop_over_all_events(
    events: list[Event], cuts: list[int], first: int
) -> None:
    tiles = TileState(VIEW, TILING)
    ends = sorted(min(cut, len(events)) for cut in (*cuts, len(events)))
    for start, end in zip([0, *ends], ends, strict=False):
        tiles.add(table(events[start:end]))
    wanted = {key: row for key, row in rows_of(events).items() if key[2] >= first}
    assert found(tiles.rows(keys_of(events), first * 1_000_000)) == wanted


@given(events=events, first=st.integers(START - 12_000, START + 12_000))
def test_rows_after_forgetting_what_they_do_not_need(events: list[Event], first: int) -> None:
    tiles = TileState(VIEW, TILING)
    tiles.add(table(events))
    tiles.forget((first - 4 * 3600) * 1_000_000)
    # An event of a new key, after keys without tiles were dropped.
    more = [*events, Event("c", 0, START + 20_000, 1)]
    tiles.add(table(more[-1:]))
    wanted = {key: row for key, row in rows_of(more).items() if key[2] >= first}
    assert found(tiles.rows(keys_of(more), first * 1_000_000)) == wanted


def test_keys_that_are_not_there_have_no_rows() -> None:
    tiles = TileState(VIEW, TILING)
    assert len(tiles.rows(keys_of([Event("a", 0, START, 1)]), 0)) == 0
    tiles.add(table([Event("a", 0, START, 1)]))
    assert len(tiles.rows(keys_of([Event("b", 0, START, 1)]), 0)) == 0


@pytest.mark.parametrize("known", [-62_135_596_800, 253_402_300_199])
def test_events_of_the_first_and_the_last_year(known: int) -> None:
    tiling = Tiling([Count(), Sum("n")], [timedelta(seconds=1), timedelta(days=28)], timedelta(seconds=1))
    tiles = TileState(VIEW, tiling)
    tiles.add(table([Event("a", 0, known, 3), Event("b", 0, START, 5), Event("b", 0, START, 6)]))
    rows = tiles.rows(keys_of([Event("a", 0, 0, 0), Event("b", 0, 0, 0)]), -62_135_596_800 * 1_000_000)
    assert dict(zip(rows["bus"].to_pylist(), rows["n_sum_28d"].to_pylist(), strict=True)) == {"a": 3, "b": 11}
    assert np.asarray(rows["event_timestamp"].cast(pa.int64())).tolist() == [known * 1_000_000, START * 1_000_000]


def test_sums_that_exceed_64_bits_are_refused() -> None:
    tiling = Tiling(
        [Sum("n"), Mean("n"), Max("n")], [timedelta(seconds=TICK), timedelta(days=1)], timedelta(seconds=TICK)
    )
    tiles, huge = TileState(VIEW, tiling), 1 << 62
    tiles.add(table([Event("a", 0, START, huge), Event("b", 0, START, -huge), Event("b", 0, START + 9 * TICK, huge)]))
    assert tiles.rows(keys_of([Event("a", 0, 0, 0)]), 0)["n_sum_1d"].to_pylist() == [huge]
    with pytest.raises(DataError, match="aggregation of n: a sum exceeds 64 bits"):
        tiles.rows(keys_of([Event("b", 0, 0, 0)]), 0)
