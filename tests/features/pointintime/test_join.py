from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features import clock
from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DataError
from isthmus.features.offline.history import ViewHistory, status_column, table_schema
from isthmus.features.pointintime.join import Join, point_in_time
from isthmus.features.types import Bool, Bytes, DataType, Float32, Float64, Int32, Int64, String, UnixTimestamp
from tests.features.support import (
    ALL,
    DAY,
    FIRST,
    LAST,
    arrow,
    join_naively,
    latest,
    make_view,
    same_bits,
    schemas,
    table,
    times,
    values_of,
)

KEYS: dict[str, st.SearchStrategy[Any]] = {
    "Int32": st.integers(-1, 1),
    "Int64": st.sampled_from([-(1 << 63), 0, 1, (1 << 63) - 1]),
    "Bool": st.booleans(),
    "UnixTimestamp": st.sampled_from([FIRST, -1, 0, 1, LAST]),
    "Bytes": st.sampled_from([b"", b"\0", b"\0\0", b"1", b"\xff"]),
    "String": st.sampled_from(["1", "11", "", "a", "A", "é", "e\u0301", "\0"]),
}
KEY_SETS: list[dict[str, DataType]] = [
    {"k": Int32},
    {"k": Int64},
    {"k": String},
    {"k": String, "l": String},
    {"order": Int64, "group": String},
    {"k": Bool},
    {"k": UnixTimestamp},
    {"k": Bytes, "l": Bool, "m": UnixTimestamp},
]
NAMES = ["at", "event", "row", "select", "known", "since", "content", "asked", "winners", "history", "usable", "max",
         "epoch_us", "greatest", "timestamp", "null", "from", "status_", "rows", "k2", "values", "key"]  # fmt: skip
MOMENTS = st.integers(-4, 4)
TTLS = st.none() | st.integers(1, 5)


@st.composite
def _views(draw: st.DrawFn, name: str, keys: Mapping[str, DataType]) -> tuple[ViewContract, list[dict[str, Any]]]:
    dtypes = list(draw(schemas(1, 4)).values())
    names = draw(st.permutations(NAMES))
    fields = dict(zip(names, dtypes, strict=False))
    view = make_view(fields, keys, draw(TTLS), name)
    row = st.fixed_dictionaries({key: KEYS[dtype.name] for key, dtype in keys.items()})
    rows = draw(st.lists(st.tuples(row, MOMENTS, MOMENTS, values_of(fields)), max_size=10))
    return view, [{**key, "_event": event, "_known": known, **values} for key, event, known, values in rows]


@st.composite
def _cases(draw: st.DrawFn) -> tuple[pa.Table, list[ViewHistory]]:
    keys = draw(st.sampled_from(KEY_SETS))
    stretch, shift = draw(st.sampled_from([(1, 0), (DAY, 0), (1, LAST - 8), (1, FIRST + 8), (-FIRST // 4, 0)]))
    histories = []
    for name in draw(st.sampled_from([["a"], ["a", "b"], ["asked", "history", "winners"]])):
        view, rows = draw(_views(name, keys))
        for row in rows:
            row["_event"], row["_known"] = row["_event"] * stretch + shift, row["_known"] * stretch + shift
        if view.ttl is not None:
            ttl = view.ttl * stretch - draw(st.integers(0, 1))
            view = make_view({f.name: f.dtype for f in view.fields}, keys, ttl, name)
        data = table(view, rows)
        histories.append(ViewHistory(view, data, 0))
    asked = st.tuples(MOMENTS, *(st.none() | KEYS[dtype.name] for dtype in keys.values()))
    questions = draw(st.lists(asked, max_size=10))
    columns = {
        key: arrow([question[n] for question in questions], dtype) for n, (key, dtype) in enumerate(keys.items(), 1)
    }
    at = times([question[0] * stretch + shift for question in questions])
    return pa.table({"label": pa.array(range(len(questions)), pa.int64()), **columns, "event_timestamp": at}), histories


@given(_cases())
def test_join_is_the_time_rule(case: tuple[pa.Table, list[ViewHistory]]) -> None:
    spine, histories = case
    expected = spine
    for history in histories:
        expected = join_naively(expected, history)
    joined = point_in_time(spine, histories)
    assert same_bits(joined, expected)
    assert joined.schema.names[: len(spine.schema)] == spine.schema.names
    assert [joined[view].type for view in joined.column_names] == [
        expected[view].type for view in expected.column_names
    ]


@st.composite
def _batches(draw: st.DrawFn, spine: pa.Table) -> list[pa.RecordBatch]:
    """A spine in batches of any sizes, empty ones among them."""
    cuts = sorted(draw(st.lists(st.integers(0, len(spine)), max_size=5)))
    parts = [spine.slice(start, end - start) for start, end in pairwise([0, *cuts, len(spine)])]
    empty = pa.RecordBatch.from_pylist([], schema=spine.schema)
    return [batch for part in parts for batch in (part.combine_chunks().to_batches() or [empty])]


@given(st.data(), st.integers(1, 4), st.booleans())
def test_a_join_in_passes_over_files_is_the_join(folder: Path, data: st.DataObject, rows: int, status: bool) -> None:
    spine, histories = data.draw(_cases())
    wanted = point_in_time(spine, histories)
    features = {}
    for n, history in enumerate(histories):
        # Each history in files of row groups of a few rows, in no order, as a table partitioned by day has them.
        order = data.draw(st.permutations(range(history.rows())))
        (folder / str(n)).mkdir(exist_ok=True)
        for file in (0, 1):
            half = history.table().take(pa.array(order[file::2], pa.int64()))
            pq.write_table(half, folder / str(n) / f"{file}.parquet", row_group_size=rows)
        histories[n] = ViewHistory(history.view, ds.dataset(folder / str(n)), 0)
        features[history.view.name] = data.draw(
            st.lists(st.sampled_from([f.name for f in history.view.fields]), unique=True)
        )
    join = Join(spine.schema, histories, features=features, status=status, rows=rows)
    joined = pa.Table.from_batches(join.batches(data.draw(_batches(spine))), join.schema)
    names = spine.column_names
    for history in histories:
        names += [history.view.full_name(name) for name in features[history.view.name]]
        names += [status_column(history.view)] if status else []
    assert same_bits(joined, wanted.select(names))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("histories")


@given(_cases(), MOMENTS)
def test_latest_is_the_time_rule(case: tuple[pa.Table, list[ViewHistory]], at: int) -> None:
    for history in case[1]:
        assert isinstance(history.data, pa.Table)
        view, rows = history.view, history.data.to_pylist()
        base = history.data["event_timestamp"].cast(pa.int64()).to_pylist()
        known = history.data["known_at"].cast(pa.int64()).to_pylist()
        moment = base[0] + at if base else at
        keys = [tuple(row[key.name] for key in view.keys) for row in rows]
        expected = {}
        for key in set(keys):
            own = [
                clock.Row(base[n], known[n], row["content_hash"], ()) for n, row in enumerate(rows) if keys[n] == key
            ]
            winner, _ = clock.as_of(own, moment, None)
            if winner:
                expected[key] = (winner.event, winner.known, winner.content)
        answer = latest(history, moment)
        found = zip(
            answer["event_timestamp"].cast(pa.int64()).to_pylist(), answer["known_at"].cast(pa.int64()).to_pylist(),
            answer["content_hash"].to_pylist(), strict=True,
        )  # fmt: skip
        names = zip(*(answer[key.name].to_pylist() for key in view.keys), strict=True)
        assert dict(zip(names, found, strict=True)) == expected
        assert len(answer) == len(expected)
        assert answer.schema == table_schema(view)
        # Whole rows come out, to the bit.
        stored = set(map(repr, history.data.to_pylist()))
        assert all(repr(row) in stored for row in answer.to_pylist())


VIEW = make_view({"a": Int64}, {"k": String}, ttl=10)


def _spine(keys: list[str | None], at: list[int]) -> pa.Table:
    return pa.table({"k": pa.array(keys, pa.string()), "event_timestamp": times(at)})


def _statuses(spine: pa.Table, *histories: ViewHistory) -> list[tuple[Any, str]]:
    joined = point_in_time(spine, histories)
    return list(zip(joined["traffic__a"].to_pylist(), joined["traffic__status"].to_pylist(), strict=True))


def _history(*rows: tuple[str, int, int, int | None]) -> ViewHistory:
    return ViewHistory(VIEW, table(VIEW, [{"k": k, "_event": e, "_known": n, "a": a} for k, e, n, a in rows]), 0)


def test_statuses_at_the_edges() -> None:
    history = _history(("x", 0, 0, 1), ("x", 5, 30, 2), ("n", 0, 0, None))
    spine = _spine(["x", "x", "x", "x", "x", "n", "y", None], [-1, 0, 10, 11, 30, 5, 5, 5])
    assert _statuses(spine, history) == [
        (None, "not_found"), (1, "present"), (1, "present"), (None, "expired"), (None, "expired"),
        (None, "null"), (None, "not_found"), (None, "not_found"),
    ]  # fmt: skip


def test_a_late_row_does_not_displace_a_newer_one() -> None:
    history = _history(("x", 5, 5, 2), ("x", 1, 7, 1))
    assert _statuses(_spine(["x", "x"], [6, 8]), history) == [(2, "present"), (2, "present")]


def test_every_spine_row_stays_in_order() -> None:
    keys: list[str | None] = ["b", "a", "b", "b", None] * 3000
    spine = _spine(keys, [n % 7 for n in range(len(keys))]).append_column("n", [range(len(keys))])
    joined = point_in_time(spine, [_history(("a", 0, 0, 1), ("b", 3, 3, 2))])
    assert joined.select(spine.column_names).equals(spine)
    assert len(joined) == len(keys)


def test_composite_keys_do_not_run_together() -> None:
    view = make_view({"a": Int64}, {"k": String, "l": String})
    rows = [
        {"k": "1", "l": "11", "_event": 0, "_known": 0, "a": 1},
        {"k": "11", "l": "1", "_event": 0, "_known": 0, "a": 2},
    ]
    spine = pa.table({"l": ["1", "11", "1"], "k": ["11", "1", "1"], "event_timestamp": times([0, 0, 0])})
    assert point_in_time(spine, [ViewHistory(view, table(view, rows), 0)])["traffic__a"].to_pylist() == [2, 1, None]


def test_empty_spine_and_empty_history() -> None:
    empty, history = _history(), _history(("x", 0, 0, 1))
    joined = point_in_time(_spine([], []), [history])
    assert joined.column_names == ["k", "event_timestamp", "traffic__a", "traffic__status"]
    assert len(joined) == 0
    assert joined["traffic__a"].type == pa.int64()
    no_chunks = pa.table(
        {"k": pa.chunked_array([], pa.string()), "event_timestamp": pa.chunked_array([], times([]).type)}
    )
    assert len(point_in_time(no_chunks, [history])) == 0
    assert _statuses(_spine(["x"], [0]), empty) == [(None, "not_found")]
    assert point_in_time(_spine(["x"], [0]), []).column_names == ["k", "event_timestamp"]
    assert len(latest(empty, 0)) == 0


def test_every_type_comes_through_in_its_type() -> None:
    view = make_view(ALL, {"k": String})
    values = {"bool": True, "int32": -1, "int64": 1 << 62, "float32": -0.0, "float64": float("inf"),
              "unixtimestamp": -1, "string": "é", "bytes": b"\0"}  # fmt: skip
    values |= {f"array_{name}": [value, value] for name, value in values.items()} | {"array_string": []}
    assert values.keys() == ALL.keys()
    data = table(view, [{"k": "x", "_event": 0, "_known": 0, **values}])
    joined = point_in_time(_spine(["x", "y"], [0, 0]), [ViewHistory(view, data, 0)])
    for name in values:
        assert joined[f"traffic__{name}"].type == data[name].type
        assert joined[f"traffic__{name}"].to_pylist() == [data[name][0].as_py(), None]
    assert latest(ViewHistory(view, data, 0), 0).equals(data.cast(table_schema(view)))


@pytest.mark.parametrize(("dtype", "code"), [(Float32, "<u4"), (Float64, "<u8")])
def test_floats_come_through_to_the_bit(dtype: DataType, code: str) -> None:
    view = make_view({"a": dtype}, {"k": Int64})
    sign = 1 << 8 * np.dtype(code).itemsize - 1
    quiet = int(np.array(np.nan, dtype.numpy).view(code))
    numbers = np.array([sign, 0, quiet | 1, quiet | sign, 1, sign | 1], code)
    rows = [{"k": n, "_event": 0, "_known": 0, "a": 0.0} for n in range(len(numbers))]
    data = table(view, rows).set_column(3, "a", pa.array(numbers.view(np.dtype(dtype.numpy))))
    spine = pa.table({"k": range(len(numbers)), "event_timestamp": times([0] * len(numbers))})
    joined = point_in_time(spine, [ViewHistory(view, data, 0)])
    assert joined["traffic__a"].to_numpy().view(code).tolist() == numbers.tolist()
    assert latest(ViewHistory(view, data, 0), 0)["a"].to_numpy().view(code).tolist() == numbers.tolist()


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_spine_in_any_unit_and_zone(unit: str) -> None:
    at = times([9_000_000, 11_000_000]).cast(pa.timestamp(unit, tz="America/New_York"))
    spine = pa.table({"k": pa.array(["x", "x"], pa.large_string()), "event_timestamp": at})
    joined = point_in_time(spine, [_history(("x", 10_999_999, 0, 1))])
    assert joined["traffic__status"].to_pylist() == ["not_found", "present"]
    assert joined["event_timestamp"].type == at.type


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.drop_columns(["event_timestamp"]), "spine: has no column event_timestamp"),
        (
            lambda s: s.set_column(1, "event_timestamp", s[1].cast(pa.timestamp("us"))),
            "expected a timestamp with a time zone. Add a time zone",
        ),
        (
            lambda s: s.set_column(1, "event_timestamp", pa.array(["now"])),
            "has type string; expected a timestamp with a time zone. Add a time zone",
        ),
        (lambda s: s.set_column(1, "event_timestamp", pa.nulls(1, pa.timestamp("us", tz="UTC"))), "is null in row 0"),
        (lambda s: s.drop_columns(["k"]), "has no column k; expected every key of traffic"),
        (lambda s: s.set_column(0, "k", pa.array([1])), "k: has type int64; expected string. Cast it to string"),
        (lambda s: s.append_column("traffic__a", pa.array([1])), "has a column traffic__a"),
        (lambda s: s.append_column("traffic__status", pa.array([1])), "has a column traffic__status"),
        (lambda s: s.append_column("k", s["k"]), "two columns k"),
        (
            lambda s: s.set_column(1, "event_timestamp", pa.array([1], pa.int64()).cast(pa.timestamp("ns", tz="UTC"))),
            "spine, event_timestamp: has a value in row 0 that does not fit",
        ),
    ],
)
def test_a_spine_that_cannot_be_joined(change: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        point_in_time(change(_spine(["x"], [0])), [_history(("x", 0, 0, 1))])
    assert message in str(caught.value)


def test_a_key_too_great_for_its_type_is_a_data_error() -> None:
    view = make_view({"a": Float64}, {"k": Int32})
    history = ViewHistory(view, table(view, [{"k": 1, "_event": 0, "_known": 0, "a": 1.0}]), 0)
    spine = pa.table({"k": pa.array([1, 1 << 40], pa.int64()), "event_timestamp": times([0, 0])})
    with pytest.raises(DataError, match=r"spine, k: .*1099511627776.*expected int32"):
        point_in_time(spine, [history])
    assert point_in_time(spine[:1], [history])["traffic__a"].to_pylist() == [1.0]


@pytest.mark.parametrize("dtype", [Int32, Int64])
def test_the_row_of_a_key_that_does_not_fit_is_named(dtype: DataType) -> None:
    view = make_view({"a": Float64}, {"k": dtype})
    keys = [n if n < 70 else (1 << 64) - n for n in range(100)]
    spine = pa.table({"k": pa.array(keys, pa.uint64()), "event_timestamp": times([0] * 100)})
    with pytest.raises(DataError, match=r"spine, k: has a value in row 70 that does not fit"):
        point_in_time(spine, [ViewHistory(view, table(view, []), 0)])


def test_the_same_view_twice_is_a_data_error() -> None:
    history = _history(("x", 0, 0, 1))
    with pytest.raises(DataError, match="traffic"):
        point_in_time(_spine(["x"], [0]), [history, history])


def test_views_with_different_keys_share_a_spine() -> None:
    other = make_view({"a": Int64}, {"k": String, "K2": Int32}, name="other")
    data = table(other, [{"k": "x", "K2": 7, "_event": 0, "_known": 0, "a": 5}])
    spine = _spine(["x", "x"], [0, 0]).append_column("K2", pa.array([7, None], pa.int32()))
    joined = point_in_time(spine, [ViewHistory(other, data, 0), _history(("x", 0, 0, 1))])
    assert joined["other__a"].to_pylist() == [5, None]
    assert joined["traffic__a"].to_pylist() == [1, 1]


def test_status_column_is_named_after_the_view() -> None:
    assert status_column(VIEW) == "traffic__status"


def test_a_spine_gives_a_key_in_any_unit_and_width() -> None:
    view = make_view({"a": Int64}, {"t": UnixTimestamp, "b": Bytes})
    history = ViewHistory(view, table(view, [{"t": 5_000_000, "b": b"x", "_event": 0, "_known": 0, "a": 7}]), 0)
    seconds = times([5_000_000]).cast(pa.timestamp("s", tz="Asia/Tokyo"))
    spine = pa.table({"t": seconds, "b": pa.array([b"x"], pa.large_binary()), "event_timestamp": times([0])})
    assert point_in_time(spine, [history])["traffic__a"].to_pylist() == [7]
    with pytest.raises(DataError, match=r"spine, t: has type timestamp\[s\]; expected timestamp"):
        point_in_time(spine.set_column(0, "t", pa.array([5], pa.timestamp("s"))), [history])


def test_no_row_is_lost_by_a_key_of_bytes_after_another_key() -> None:
    view = make_view({"a": Int64}, {"n": Int64, "token": Bytes})
    chance = np.random.default_rng(0)
    numbers, tokens = chance.integers(-(1 << 63), (1 << 63) - 1, 2000).tolist(), chance.integers(0, 4, 2000).tolist()
    rows = [{"n": numbers[n], "token": b"s%d" % tokens[n], "_event": n, "_known": n, "a": n} for n in range(2000)]
    data = table(view, rows)
    order = chance.permutation(2000)
    spine = data.select(["n", "token"]).take(order).append_column("event_timestamp", times([2000] * 2000))
    assert point_in_time(spine, [ViewHistory(view, data, 0)])["traffic__a"].to_pylist() == order.tolist()
