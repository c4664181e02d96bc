import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features import clock
from isthmus.features.clock import Status
from isthmus.features.contract.schema import Column, Contract, ViewContract
from isthmus.features.errors import ContractMismatch, DataError, DependencyError, RequestError
from isthmus.features.online.plan import LookupPlan
from isthmus.features.online.store import EVERYTHING, OnlineStore, WriteCounts
from isthmus.features.redis.address import without_credentials
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.redis.pipeline import Client
from isthmus.features.redis.routing import CHUNK
from isthmus.features.types import Bool, Bytes, DataType, Float64, Int32, Int64, String, UnixTimestamp
from isthmus.features.values.arrow import to_arrow
from isthmus.features.values.entitykey import decode_key, entity_key, entity_keys
from isthmus.features.values.rows import RowCodec
from tests.features.support import bits, bits_of, columns_of, integers, make_contract, make_view, values_of
from tests.servers import redis_cluster

VIEW = make_view({"a": Int64, "b": String}, {"k": String}, ttl=10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module", params=["one server", "cluster"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What holds for one server holds for a cluster."""
    if request.param == "cluster":
        with redis_cluster(tmp_path_factory.mktemp("cluster")) as ports:
            yield f"redis+cluster://127.0.0.1:{ports[0]}"
    else:
        yield request.getfixturevalue("server").url


@pytest.fixture(scope="module")
def shared(url: str) -> Iterator[Client]:
    with connect(url) as connected:
        yield connected


@pytest.fixture
def client(shared: Client) -> Client:
    shared.flushall()
    return shared


def _write(store: OnlineStore, view: ViewContract, rows: list[dict[str, Any]], **how: int) -> WriteCounts:
    """Rows hold the keys, `_event`, `_known` and the features."""
    event, known = (np.array([row[name] for row in rows], np.int64) for name in ("_event", "_known"))
    keys = {key.name: [row[key.name] for row in rows] for key in view.keys}
    return store.write(view, keys, event, known, columns_of(view, rows), **how)


def _row(key: str, event: int, known: int, a: int | None = 0, b: str | None = "") -> dict[str, Any]:
    return {"k": key, "_event": event, "_known": known, "a": a, "b": b}


def _state(client: Client) -> dict[bytes, Any]:
    return {name: client.hgetall(name) for name in client.scan_iter()}


_FIELDS = {"a": Int64, "b": String, "c": Float64}
_WIDE = make_view(_FIELDS, {"k": String, "n": Int32}, ttl=5)
_OTHER = replace(VIEW, name="other")
_TIMES = st.integers(-3, 3) | integers(64)
_TEXTS, _NUMBERS = st.sampled_from(["1", "11", "", "ü"]), st.sampled_from([1, 11, -1])
_ROWS = st.lists(
    st.tuples(_TEXTS, _NUMBERS, _TIMES, _TIMES, values_of(_FIELDS)).map(
        lambda row: {"k": row[0], "n": row[1], "_event": row[2], "_known": row[3], **row[4]}
    ),
    min_size=1, max_size=10,
)  # fmt: skip


def _order(row: dict[str, Any]) -> tuple[int, int, int]:
    content = RowCodec(_WIDE).content(columns_of(_WIDE, [row]), 1).tolist()[0]
    return row["_event"], row["_known"], content


def _cut(random: Any, rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    while rows:
        size = random.randint(1, len(rows))
        yield rows[:size]
        rows = rows[size:]


@given(rows=_ROWS, random=st.randoms(use_true_random=False))
def test_any_order_and_chunking_ends_in_the_same_state(shared: Client, rows: list[Any], random: Any) -> None:
    states = []
    store = OnlineStore(shared, make_contract(_WIDE))
    for _ in range(2):
        shared.flushall()
        offered = [*rows, *random.sample(rows, len(rows) // 2)]
        random.shuffle(offered)
        for chunk in _cut(random, offered):
            _write(store, _WIDE, chunk)
        states.append(_state(shared))
    assert states[0] == states[1]
    expected: dict[bytes, Any] = {}
    for row in sorted(rows, key=_order):
        keys = [(column, row[column.name]) for column in _WIDE.keys]
        event, known = (np.array([row[name]], np.int64) for name in ("_event", "_known"))
        packed = RowCodec(_WIDE).encode(event, known, columns_of(_WIDE, [row]))[0]
        expected[entity_key("prod", keys)] = {b"traffic": packed}
    assert states[0] == expected


@given(rows=_ROWS, at=st.integers(-3, 8))
def test_reading_is_the_time_rule(shared: Client, rows: list[Any], at: int) -> None:
    shared.flushall()
    store = OnlineStore(shared, make_contract(_WIDE))
    rows = [row for row in rows if row["_event"] <= at and row["_known"] <= at and row["_event"] > -1000]
    if rows:
        _write(store, _WIDE, rows)
    keys: dict[str, list[Any]] = {"k": ["1", "11", "1", "", "ü", "1"], "n": [11, 1, 1, -1, 1, 11]}
    answer = store.read(_WIDE, keys, at)
    for n, key in enumerate(zip(keys["k"], keys["n"], strict=True)):
        own = [(*_order(row), row) for row in rows if (row["k"], row["n"]) == key]
        history = [
            clock.Row(event, known, content, tuple(row[name] for name in _FIELDS)) for event, known, content, row in own
        ]
        winner, status = clock.as_of(history, at, _WIDE.ttl)
        assert answer.status[n] == status
        for position, field in enumerate(_WIDE.fields):
            expected = bits(winner.values[position], field.dtype) if winner else None
            assert bits_of(answer.columns[field.name], field.dtype)[n] == expected


def test_counts_say_what_happened(client: Client) -> None:
    store = OnlineStore(client, make_contract(VIEW))
    rows = [_row("x", 5, 5, 1), _row("y", 5, 5, 2), _row("z", 5, 5, 3)]
    assert _write(store, VIEW, []) == WriteCounts(0, 0, 0)
    assert _write(store, VIEW, rows) == WriteCounts(3, 3, 3)
    assert _write(store, VIEW, rows) == WriteCounts(3, 0, 0)
    # Same content at a later time: written, since age decides about expiry, but no content changed.
    assert _write(store, VIEW, [_row("x", 6, 6, 1), *rows[1:]]) == WriteCounts(3, 0, 1)
    assert _write(store, VIEW, [_row("x", 6, 7, 9), _row("y", 4, 9, 9), rows[2]]) == WriteCounts(3, 1, 1)
    assert store.read(VIEW, {"k": ["x", "y", "z"]}, 10).columns["a"].tolist(Int64) == [9, 2, 3]


def test_full_puts_the_table_over_newer_rows(client: Client) -> None:
    store = OnlineStore(client, make_contract(VIEW))
    _write(store, VIEW, [_row("x", 9, 9, 9), _row("y", 5, 5, 2)])
    table = [_row("x", 5, 5, 1), _row("y", 5, 5, 2)]
    assert _write(store, VIEW, table) == WriteCounts(2, 0, 0)
    assert _write(store, VIEW, table, horizon=EVERYTHING) == WriteCounts(2, 1, 1)
    assert _write(store, VIEW, table, horizon=EVERYTHING) == WriteCounts(2, 0, 0)
    assert store.read(VIEW, {"k": ["x"]}, 10).columns["a"].tolist(Int64) == [1]


@given(rows=_ROWS, table=_ROWS, horizon=_TIMES)
def test_the_table_decides_what_was_known_by_its_horizon(
    shared: Client, rows: list[Any], table: list[Any], horizon: int
) -> None:
    shared.flushall()
    store = OnlineStore(shared, make_contract(_WIDE, _OTHER))
    _write(store, _OTHER, [_row("1", 5, 5)])
    _write(store, _WIDE, rows)
    stored, offered = _latest(rows), _latest(table)
    assert {*zip(*store.keys(_WIDE).values(), strict=True)} == set(stored)
    _write(store, _WIDE, list(offered.values()), horizon=horizon)
    keys = {"k": [key[0] for key in offered], "n": [key[1] for key in offered]}
    store.remove_except(_WIDE, keys, horizon)
    expected = {key: row for key, row in stored.items() if row["_known"] > horizon}
    for key, row in offered.items():
        if key not in expected or _order(row) > _order(expected[key]):
            expected[key] = row
    found = store.read(_WIDE, {"k": [key[0] for key in expected], "n": [key[1] for key in expected]}, 2**63 - 1)
    assert {*zip(*store.keys(_WIDE).values(), strict=True)} == set(expected)
    assert found.event.tolist() == [row["_event"] for row in expected.values()]
    assert found.known.tolist() == [row["_known"] for row in expected.values()]
    assert store.keys(_OTHER) == {"k": ["1"]}


def _latest(rows: list[Any]) -> dict[Any, Any]:
    return {(row["k"], row["n"]): row for row in sorted(rows, key=_order)}


@pytest.mark.parametrize("how", [{}, {"horizon": EVERYTHING}])
def test_a_row_of_another_contract_is_refused_and_replaced(client: Client, how: dict[str, int]) -> None:
    other = replace(VIEW, code="2")
    _write(OnlineStore(client, make_contract(other)), other, [_row("x", 99, 99, 1)])
    store = OnlineStore(client, make_contract(VIEW))
    with pytest.raises(ContractMismatch, match="isthmus materialize"):
        store.read(VIEW, {"k": ["x"]}, 100)
    assert _write(store, VIEW, [_row("x", 1, 1, 7)], **how) == WriteCounts(1, 1, 1)
    assert store.read(VIEW, {"k": ["x"]}, 5).columns["a"].tolist(Int64) == [7]


@pytest.mark.parametrize("junk", [b"", b"junk", b"\0" * 50])
def test_junk_in_a_field_is_refused_and_replaced(client: Client, junk: bytes) -> None:
    store = OnlineStore(client, make_contract(VIEW))
    key = entity_key("prod", [(VIEW.keys[0], "x")])
    client.execute_command("HSET", key, "traffic", junk)  # type: ignore[no-untyped-call]  # so in redis-py
    with pytest.raises(DataError, match="traffic"):
        store.read(VIEW, {"k": ["x"]}, 0)
    assert _write(store, VIEW, [_row("x", 0, 0, 7)]) == WriteCounts(1, 1, 1)
    assert store.read(VIEW, {"k": ["x"]}, 0).columns["a"].tolist(Int64) == [7]


def test_statuses_at_the_edges(client: Client) -> None:
    store = OnlineStore(client, make_contract(VIEW))
    _write(store, VIEW, [_row("x", 100, 103, 1, "s"), _row("n", 100, 100, None, None)])
    for at, status in [(102, Status.NOT_FOUND), (103, Status.PRESENT), (110, Status.PRESENT), (111, Status.EXPIRED)]:
        answer = store.read(VIEW, {"k": ["x", "nobody"]}, at)
        assert answer.status.tolist() == [status, Status.NOT_FOUND]
        values = [1 if status is Status.PRESENT else None, None]
        assert answer.columns["a"].tolist(Int64) == values
        assert answer.columns["b"].tolist(String) == ["s" if status is Status.PRESENT else None, None]
    assert store.read(VIEW, {"k": ["n"]}, 110).status.tolist() == [Status.NULL]
    assert store.read(VIEW, {"k": ["n"]}, 111).status.tolist() == [Status.EXPIRED]
    assert store.read(VIEW, {"k": ["n"]}, 99).status.tolist() == [Status.NOT_FOUND]


def test_nothing_of_an_expired_or_future_row_leaks(client: Client) -> None:
    store = OnlineStore(client, make_contract(VIEW))
    _write(store, VIEW, [_row("x", 100, 100, 77, "secret"), _row("y", 105, 105, 5, "fresh")])
    for at in (50, 111):
        answer = store.read(VIEW, {"k": ["x", "y"]}, at)
        assert to_arrow(answer.columns["b"], String)[0].as_py() is None
        assert to_arrow(answer.columns["a"], Int64)[0].as_py() is None
        assert answer.columns["a"].data[0] == 0
        assert answer.columns["b"].data[0] is None
    assert to_arrow(answer.columns["b"], String).to_pylist() == [None, "fresh"]
    # Of the past, and not known yet.
    _write(store, VIEW, [_row("z", 100, 108, 7, "early")])
    for at, value in ((107, None), (108, "early")):
        assert store.read(VIEW, {"k": ["z"]}, at).columns["b"].tolist(String) == [value]


def test_more_rows_than_one_chunk(client: Client) -> None:
    store = OnlineStore(client, make_contract(VIEW))
    for count in (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7):
        client.flushall()
        rows = [_row(str(n), n, n, n, str(n)) for n in range(count)]
        assert _write(store, VIEW, rows) == WriteCounts(count, count, count)
        assert _write(store, VIEW, [*rows[:-1], _row(str(count - 1), count, count, -1)]) == WriteCounts(count, 1, 1)
        answer = store.read(VIEW, {"k": [str(n) for n in range(count + 1)]}, count)
        assert answer.columns["a"].data.tolist()[:-2] == [n if n >= count - 10 else 0 for n in range(count - 1)]


def test_projects_do_not_touch_each_other(client: Client) -> None:
    stores = {
        name: OnlineStore(client, make_contract(VIEW, project=name)) for name in ("prod", "preprod", "prod2", "pro")
    }
    for n, store in enumerate(stores.values()):
        _write(store, VIEW, [_row("x", 1, 1, n)])
    assert len(_state(client)) == 4
    client.delete(*client.scan_iter(match="prod:*"))
    found = [store.read(VIEW, {"k": ["x"]}, 1).columns["a"].tolist(Int64)[0] for store in stores.values()]
    assert found == [None, 1, 2, 3]


def test_views_of_one_key_share_a_hash_and_one_round_trip(client: Client) -> None:
    other = make_view({"t": UnixTimestamp}, {"k": String}, name="other")
    third = make_view({"t": Int32}, {"l": Int64}, name="third")
    contract = make_contract(VIEW, other, third)
    store = OnlineStore(client, contract)
    _write(store, VIEW, [_row("x", 1, 1, 5)])
    _write(store, other, [{"k": "x", "_event": 1, "_known": 1, "t": -7}])
    _write(store, third, [{"l": 3, "_event": 1, "_known": 1, "t": 9}])
    assert len(_state(client)) == 2
    plan = LookupPlan(contract, ["third", "traffic", "other", "third"])
    keys: dict[str, list[Any]] = {"k": ["x", "y"], "l": [3, 4]}
    assert len(plan.commands(keys)) == 4
    answers = plan.read(client, keys, 1)
    assert answers["traffic"].columns["a"].tolist(Int64) == [5, None]
    assert answers["other"].columns["t"].tolist(UnixTimestamp) == [-7, None]
    assert answers["third"].columns["t"].tolist(Int32) == [9, None]
    with pytest.raises(RequestError, match="'nothing'"):
        LookupPlan(contract, ["nothing"])


_NUMBERS_64 = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from([0, 1])
_KEY_VALUES: dict[DataType, st.SearchStrategy[Any]] = {
    Bool: st.booleans(),
    Int64: _NUMBERS_64,
    UnixTimestamp: _NUMBERS_64,
    String: st.text(max_size=4) | st.sampled_from(["1", "11", "i", "s", ":", ","]),
    Bytes: st.binary(max_size=4) | st.sampled_from([b"1", b"11", b"i", b"s", b":"]),
}
_TYPED = st.sampled_from(list(_KEY_VALUES)).flatmap(lambda dtype: st.tuples(st.just(dtype), _KEY_VALUES[dtype]))
_NAMES = st.sampled_from(["a", "b", "ab", "a_b"])
_KEY = st.tuples(
    st.sampled_from(["p", "p-a", "a"]),
    st.lists(st.tuples(_NAMES, _TYPED), min_size=1, max_size=3, unique_by=lambda k: k[0]),
)


def _name(pair: tuple[str, Any]) -> str:
    return pair[0]


@given(_KEY, _KEY)
def test_different_keys_have_different_names(left: Any, right: Any) -> None:
    names = []
    for project, values in (left, right):
        pairs = [(Column(name, dtype), value) for name, (dtype, value) in values]
        names.append(entity_key(project, pairs))
        assert names[-1] == entity_key(project, pairs[::-1])
        assert names[-1] == entity_keys(project, [pair[0] for pair in pairs], {name: [v] for name, (_, v) in values})[0]
        columns = [column for column, _ in pairs]
        assert names[-1] == entity_keys(project, columns[::-1], {name: [v] for name, (_, v) in values})[0]
        found = decode_key(project, columns, names[-1])
        assert [(type(value), value) for value in found] == [(type(v), v) for _, (_, v) in sorted(values, key=_name)]
        assert names[-1].startswith(project.encode() + b":")
        for end in range(len(names[-1])):
            with suppress(ValueError, TypeError, AttributeError, struct.error):  # which the store takes for no key
                decode_key(project, columns, names[-1][:end])
    assert (names[0] == names[1]) == (left[0] == right[0] and sorted(left[1], key=_name) == sorted(right[1], key=_name))


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1/0",
        "redis://user:hunter2@127.0.0.1:1/0",
        "redis://:hun%24ter2@127.0.0.1:1/0",
        "redis://:hunter2/more@127.0.0.1:6379/0",
        "redis://:hunter2#x@127.0.0.1:6379/0",
        "redis://:a@hunter2@127.0.0.1:1",
        "redis://127.0.0.1:1?password=hunter2",
        "unix:///nowhere/redis.sock?password=hunter2",
        "unix:///nowhere/redis.sock",
        "user:hunter2@127.0.0.1",
        "http://user:hunter2@127.0.0.1",
        "redis://127.0.0.1:99999",
        "redis://127.0.0.1:port",
        "redis://127.0.0.1?socket_timeout=soon",
        "redis://127.0.0.1?unknown=hunter2",
        "redis://[::1",
        "redis://" + "x" * 300,
        "redis+cluster://user:hunter2@127.0.0.1:1,127.0.0.1:2",
        "redis+cluster://:hunter2@127.0.0.1:1/3",
        "redis+cluster://:hun%24ter2@127.0.0.1:1?socket_timeout=soon",
        "redis+cluster://:hunter2@127.0.0.1:1?unknown=hunter2",
        "redis+cluster://127.0.0.1:1?password=hunter2",
        "redis+cluster://:hunter2#x@127.0.0.1:6379",
        "",
        "garbage",
    ],
)
def test_a_redis_that_is_not_there(url: str) -> None:
    with pytest.raises(DependencyError) as caught:
        connect(url, timeout=0.2)
    text = str(caught.value) + repr(caught.value.as_dict()) + str(caught.value.__cause__)
    for secret in ("hunter2", "hun%24ter2", "hun$ter2"):
        assert secret not in text
    assert "stores.online" in str(caught.value)


def test_a_wrong_password_is_named_without_it(server: EmbeddedRedis) -> None:
    client = connect(server.url)
    client.config_set("requirepass", "right")
    try:
        for url in (server.url.replace("unix://", "unix://:hunter2@"), f"{server.url}?password=hunter2", server.url):
            with pytest.raises(DependencyError) as caught:
                connect(url)
            assert "hunter2" not in str(caught.value)
        with connect(server.url.replace("unix://", "unix://:right@")) as allowed:
            assert allowed.ping()
    finally:
        client.config_set("requirepass", "")
        client.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("rediss://u:p@h:1/0", "rediss://h:1/0"),
        ("redis://h?password=p&db=1", "redis://h"),
        ("unix://:p@/a/b.sock", "unix:///a/b.sock"),
        ("u:p@h", "h"),
        ("redis://:p://q@h", "redis://h"),
        ("redis://:p?q@h", "redis://..."),
        ("redis+cluster://u:p@h:1,i:2,j?password=p", "redis+cluster://h:1,i:2,j"),
        ("rediss+cluster://:p?q@h,i", "rediss+cluster://..."),
    ],
)
def test_urls_are_shown_without_credentials(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


def test_a_key_that_is_no_text_is_a_request_error() -> None:
    contract: Contract = make_contract(VIEW)
    with pytest.raises(RequestError, match="UTF-8"):
        LookupPlan(contract, ["traffic"]).commands({"k": ["\ud800"]})


def test_rows_survive_the_server(tmp_path: Path) -> None:
    rows = [_row("x", 5, 5, 1, "é")]
    with EmbeddedRedis(tmp_path) as own, connect(own.url) as connected:
        _write(OnlineStore(connected, make_contract(VIEW)), VIEW, rows)
    with EmbeddedRedis(tmp_path) as own, connect(own.url) as connected:
        store = OnlineStore(connected, make_contract(VIEW))
        assert _write(store, VIEW, rows) == WriteCounts(1, 0, 0)
        assert store.read(VIEW, {"k": ["x"]}, 5).columns["b"].tolist(String) == ["é"]


def test_at_equal_times_the_table_wins_whatever_the_hash(client: Client) -> None:
    store = OnlineStore(client, make_contract(VIEW))
    for value in range(20):
        # About half of these corrections have the smaller content hash.
        columns = columns_of(VIEW, [_row("x", 1, 1, value)])
        at = np.array([1], np.int64)
        counts = store.write(VIEW, {"k": ["x"]}, at, at, columns, horizon=1)
        assert counts == WriteCounts(1, 1, 1)
        assert store.read(VIEW, {"k": ["x"]}, 5).columns["a"].tolist(Int64) == [value]
    older = np.array([0], np.int64)
    columns = columns_of(VIEW, [_row("x", 0, 0, 99)])
    assert store.write(VIEW, {"k": ["x"]}, older, older, columns, horizon=0) == WriteCounts(1, 0, 0)
