"""The causes of differences, beside a naive reading of the same rows key by key."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features.audit.causes import CAUSES, mend
from isthmus.features.audit.compare import OnlineRows, compare
from isthmus.features.audit.history import BYTES, History
from isthmus.features.values.columns import Ints

Row = tuple[int, int, int, Any]
"""Key, event time, created time and value."""

MINUTE = 60_000_000
NOW = 20_000 * MINUTE
VALUES = [None, 1, 2, 2**53, 2**53 + 1]
TIMES = [NOW - minutes * MINUTE for minutes in (-1, 1, 5, 10, 15, 75, 120, 121)] + [NOW - 5 * MINUTE + 300_000]
KEYS = ["a", "b", "c"]


def encoded(values: Sequence[Any]) -> pa.Array:
    return pa.array([b"" if value is None else str(value).encode() for value in values], BYTES)


def causes_of(rows: list[Row], online: dict[int, tuple[int, Any]], ttl: int | None, resolution: int) -> dict[int, str]:
    keys, event, created, values = (list(part) for part in zip(*rows, strict=True))
    cells = {"x": encoded(values)}
    times = (np.array(event, np.int64), np.array(created, np.int64))
    history = History.of(pa.array([KEYS[key].encode() for key in keys], BYTES), *times, cells, NOW, resolution)
    names = [KEYS.index(key.decode()) for key in history.keys.to_pylist()]
    served = [online.get(key) for key in names]
    rows_online = OnlineRows(
        np.array([row is not None for row in served], bool),
        np.array([0 if row is None else row[0] for row in served], np.int64),
        {"x": pa.array([None if row is None else encoded([row[1]])[0].as_py() for row in served], BYTES)},
    )

    def rounded(_: str, places: Ints) -> pa.Array:
        near = [values[place] for place in places]
        return encoded([None if value is None else int(float(value)) for value in near])

    if not names:
        return {}
    _, differences = compare(history, rows_online, ttl, NOW, rounded)
    found = [(names[key], difference.cause) for difference in differences for key in difference.keys.tolist()]
    assert len(found) == len(dict(found)), "a key has one cause"
    return dict(found)


def cause_naively(rows: list[Row], key: int, served: tuple[int, Any] | None, ttl: int | None, resolution: int) -> str:
    known = [row for row in rows if row[1] <= NOW]
    mine = sorted((row for row in known if row[0] == key), key=lambda row: row[1:3])
    _, event, created, value = mine[-1]
    expired = ttl is not None and NOW - event > ttl
    if served is None:
        return "" if expired else "missing key"
    at, online = served
    same_time = [row for row in mine if row[1] // resolution == at // resolution]
    if matching := [row for row in same_time if row[3] == online]:
        if matching[-1][1:3] != (event, created):
            return "stale row"
        return "expired" if expired else ""
    shift = at - event // resolution * resolution
    if online == value:
        if at != created // resolution * resolution and shift % (15 * MINUTE) == 0 and abs(shift) <= 840 * MINUTE:
            return "wrong time zone"
        return "late ttl" if shift > 0 else "wrong time"
    if not same_time:
        theirs = [row for row in known if row[1] // resolution == at // resolution and row[3] == online]
        return "another entity's row" if theirs else "unknown row"
    base = same_time[-1][3]
    if base is None:
        return "null as a value"
    if online is not None and online == int(float(base)):
        return "rounded"
    if any(row[1] // resolution == at // resolution and row[3] == online for row in known):
        return "another entity's row"
    return "value lost" if online is None else "other value"


@pytest.mark.parametrize("resolution", [1, 1_000_000])
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from(TIMES), st.sampled_from(TIMES), st.sampled_from(VALUES)),
        min_size=1,
        max_size=8,
    ),
    online=st.dictionaries(
        st.sampled_from([0, 1, 2]), st.tuples(st.sampled_from(TIMES), st.sampled_from(VALUES)), max_size=3
    ),
    ttl=st.sampled_from([None, 12 * MINUTE]),
)
def test_causes_are_those_of_a_naive_reading(
    rows: list[Row], online: dict[int, tuple[int, Any]], ttl: int | None, resolution: int
) -> None:
    keys = {row[0] for row in rows if row[1] <= NOW}
    online = {key: (at // resolution * resolution, value) for key, (at, value) in online.items()}
    expected = {key: cause_naively(rows, key, online.get(key), ttl, resolution) for key in keys}
    found = causes_of(rows, online, ttl, resolution)
    assert found == {key: cause for key, cause in expected.items() if cause}
    assert {*found.values()} <= {*CAUSES}


def test_mending_lines_are_those_of_the_causes() -> None:
    assert mend([]) == mend(["another entity's row"]) == ""
    assert mend(["tie"]).startswith("offline_store: {type: isthmus.feast.IsthmusOfflineStore")
    assert mend(["expired", "stale row"]).count("\n") == 2
