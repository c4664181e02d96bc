"""Rows pushed to a real server, and read from it."""

import json
import math
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.features import clock
from isthmus.features.clock import Row, Status, as_of
from isthmus.features.online.pushes import stream, waiting
from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.types import Float32, Int64
from isthmus.features.values.columns import Values, from_python
from isthmus.features.values.entitykey import entity_key
from isthmus.features.values.rows import RowCodec
from isthmus.serving.limits import Limits
from tests.serving.support import CARRIER, CONTRACT, EVERYTHING, HOUR, NOW, PUNCTUALITY, Server, serving, wait

AT = "2027-01-15T07:00:00Z"
ROW: dict[str, list[Any]] = {"carrier": ["QQ"], "event_timestamp": [AT], "late_rate": [0.25], "flights": [3]}
FRESH = count()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of its own: the other tests read one that nobody writes."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as embedded:
        yield embedded.url


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(folder, redis_url) as running:
        wait(lambda: running.http.get("/readyz").status_code == 200, "the contract")
        yield running


def push(server: Server, df: object, view: str = "punctuality", **more: Any) -> httpx.Response:
    return server.http.post("/push", json={"push_source_name": view, "df": df, **more})


def flights(server: Server, *carriers: str) -> list[Any]:
    """The values of one feature, or why there is none."""
    body = server.lookup(features=["punctuality:flights"], entities={"carrier": carriers}).json()
    result = body["results"][1]
    return [
        value if status == "PRESENT" else status
        for value, status in zip(result["values"], result["statuses"], strict=True)
    ]


def carrier() -> str:
    return f"push-{next(FRESH)}"


def test_a_pushed_row_is_there_at_the_next_lookup(server: Server) -> None:
    one, two = carrier(), carrier()
    df = {
        "carrier": [one, two], "event_timestamp": ["2027-01-15 08:00:00.000001+01:00", NOW], "late_rate": [0.5, None],
        "flights": [2**63 - 1, None],
    }  # fmt: skip
    answer = push(server, df, allow_registry_cache=False, to="online", transform_on_write=True)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"rows": 2, "written": 2}
    assert answer.headers["isthmus-contract"] == CONTRACT.hash
    body = server.lookup(features=["punctuality:late_rate", "punctuality:flights"], entities={"carrier": [one, two]})
    assert [result["values"] for result in body.json()["results"][1:]] == [[0.5, None], [2**63 - 1, None]]
    assert body.json()["results"][1]["statuses"] == ["PRESENT", "NULL_VALUE"]
    assert body.json()["results"][1]["event_timestamps"] == ["2027-01-15T07:00:00.000001Z", "2027-01-15T08:00:00Z"]


def test_newer_wins_by_event_then_known_time(server: Server) -> None:
    name = carrier()

    def one(event: int, known: int, number: int) -> dict[str, int]:
        df = {**ROW, "carrier": [name], "event_timestamp": [event], "known_at": [known], "flights": [number]}
        answer: dict[str, int] = push(server, df).json()
        return answer

    assert one(NOW - 5, NOW - 5, 1) == {"rows": 1, "written": 1}
    assert one(NOW - 6, NOW - 1, 2) == {"rows": 1, "written": 0}
    assert one(NOW - 5, NOW - 5, 1) == {"rows": 1, "written": 0}
    assert flights(server, name) == [1]
    assert one(NOW - 5, NOW - 4, 3) == {"rows": 1, "written": 1}
    assert flights(server, name) == [3]
    assert one(NOW, NOW, 4) == {"rows": 1, "written": 1}
    assert flights(server, name) == [4]


def test_what_a_push_writes_is_what_the_online_store_writes(server: Server, redis_url: str) -> None:
    name = carrier()
    push(server, {**ROW, "carrier": [name], "known_at": [AT]})
    with connect(redis_url) as client:
        (key,) = list(client.scan_iter(match=f"*{name}"))
        pushed = client.hgetall(key)
        client.delete(key)
        at = np.array([clock.micros(datetime.fromisoformat(AT))])
        columns = {"late_rate": from_python([0.25], Float32), "flights": from_python([3], Int64)}
        OnlineStore(client, CONTRACT).write(PUNCTUALITY, {"carrier": [name]}, at, at, columns)
        assert client.hgetall(key) == pushed


def test_many_rows_survive_a_redis_that_knows_no_script(server: Server, redis_url: str) -> None:
    with connect(redis_url) as client:
        client.script_flush()
    rows = 10_000
    names = [f"many-{n}" for n in range(rows)]
    df: dict[str, list[Any]] = {
        "carrier": names, "event_timestamp": [NOW - 1] * rows, "late_rate": [None] * rows, "flights": list(range(rows)),
    }  # fmt: skip
    assert push(server, df).json() == {"rows": rows, "written": rows}
    assert flights(server, *names) == list(range(rows))
    assert push(server, {name: [*column, column[-1]] for name, column in df.items()}).status_code == 413
    assert push(server, {**df, "flights": [0.5] * (rows + 1)}).status_code == 413


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
TYPES: dict[str, st.SearchStrategy[Any]] = {
    "a": st.booleans(),
    "b": st.integers(-(2**31), 2**31 - 1),
    "c": st.integers(-(2**63), 2**63 - 1),
    "d": st.floats(width=32).map(lambda value: math.nan if math.isnan(value) else value),  # JSON has one NaN
    "e": st.floats().map(lambda value: math.nan if math.isnan(value) else value),
    "f": st.integers(-(2**55), 2**55),
    "g": TEXTS,
    "h": st.binary(max_size=5),
}
FEATURES = st.fixed_dictionaries({name: st.none() | values for name, values in TYPES.items()})
TIMES = st.integers(NOW - 3, NOW)


def in_request(name: str, value: Any) -> Any:
    """A value as a request holds it."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case bytes():
            return b64encode(value).decode()
        case int() if name == "f" and value % 2:
            return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=value)).isoformat()
    return value


def in_answer(name: str, value: Any) -> Any:
    """A value as an answer holds it."""
    if name == "f" and value is not None:
        return value // 1_000_000 if value % 1_000_000 == 0 else value / 1_000_000
    return value if name == "f" else in_request(name, value)


@given(
    rows=st.lists(st.tuples(st.integers(0, 1), TIMES, st.none() | TIMES, FEATURES), min_size=1, max_size=5),
    pushes=st.integers(1, 3),
)
def test_lookups_answer_what_the_rules_of_time_say_of_all_pushes(
    server: Server, rows: list[tuple[int, int, int | None, dict[str, Any]]], pushes: int
) -> None:
    base = next(FRESH) * 2
    history: dict[int, list[Row]] = {0: [], 1: []}
    codec = RowCodec(EVERYTHING)
    for key, event, known, features in rows:
        columns: dict[str, Values] = {f.name: from_python([features[f.name]], f.dtype) for f in EVERYTHING.fields}
        (content,) = codec.content(columns, 1).tolist()
        history[key].append(Row(event, NOW if known is None else known, content, tuple(features[n] for n in TYPES)))
    for part in range(pushes):
        chosen = rows[part::pushes]
        if not chosen:
            continue
        df: dict[str, list[Any]] = {
            "flight": [base + key for key, *_ in chosen],
            "event_timestamp": [event for _, event, _, _ in chosen],
            "known_at": [NOW if known is None else known for _, _, known, _ in chosen],
            **{name: [in_request(name, features[name]) for *_, features in chosen] for name in TYPES},
        }
        if all(known is None for _, _, known, _ in chosen):
            del df["known_at"]
        answer = push(server, df, "everything")
        assert answer.status_code == 200, answer.text
    asked = {"features": [f"everything:{name}" for name in TYPES], "entities": {"flight": [base, base + 1]}}
    results = server.lookup(**asked).json()["results"][1:]
    for key in (0, 1):
        row, status = as_of(history[key], NOW, None)
        expected = dict(zip(TYPES, row.values if row else [None] * len(TYPES), strict=True))
        if status in (Status.PRESENT, Status.NULL):
            assert [r["values"][key] for r in results] == [in_answer(n, value) for n, value in expected.items()]
        else:
            assert {r["statuses"][key] for r in results} == {"NOT_FOUND"}


def test_under_the_clock_the_later_push_wins_and_the_future_is_refused(tmp_path: Any, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    name = carrier()
    with serving(tmp_path, redis_url, now=None) as server:
        wait(lambda: server.http.get("/readyz").status_code == 200, "the contract")
        df = {**ROW, "carrier": [name], "event_timestamp": [clock.now()]}
        for number in (9, 1, 5):
            assert push(server, {**df, "flights": [number]}).json() == {"rows": 1, "written": 1}
            assert flights(server, name) == [number]
        ahead = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
        for time in ("event_timestamp", "known_at"):
            refused = push(server, {**df, time: [ahead]})
            assert refused.status_code == 422
            assert refused.json()["where"] == f"df.{time}"


def test_every_problem_is_named_at_once_and_nothing_is_written(server: Server) -> None:
    name = carrier()
    df = {
        "carrier": [name, None, name], "event_timestamp": [AT, AT[:-1], "x"], "known_at": [NOW, NOW + 1, NOW + 2],
        "late_rate": [1, 1e39, 0], "speed": [1],
    }  # fmt: skip
    answer = push(server, df)
    assert answer.status_code == 422
    body = answer.json()
    assert body["where"] == "df"
    assert "nothing was written" in body["remedy"]
    problems = {problem["where"]: problem["found"] for problem in body["problems"]}
    assert problems.keys() == {
        "df.carrier", "df.event_timestamp", "df.known_at", "df.late_rate", "df.flights", "df.speed",
    }  # fmt: skip
    assert problems["df.carrier"] == "row 1 is null"
    assert "timezone" in problems["df.event_timestamp"]
    assert "1 more" in problems["df.event_timestamp"]
    assert "`list[1]`, and 1 more" in problems["df.known_at"]
    assert "1e+39" in problems["df.late_rate"]
    assert flights(server, name) == ["NOT_FOUND"]


@pytest.mark.parametrize(
    ("changed", "status", "where", "word"),
    [
        ({"push_source_name": "nothing"}, 404, "push_source_name", "punctuality"),
        ({"push_source_name": 1}, 422, "body", "push_source_name"),
        ({"to": "elsewhere"}, 422, "body", "elsewhere"),
        ({"mode": "append"}, 422, "body", "mode"),
        ({"df": []}, 422, "body", "df"),
        ({"df": {}}, 422, "df", "carrier"),
        ({"df": {**ROW, "flights": [1.0]}}, 422, "df.flights", "Int64"),
        ({"df": {**ROW, "flights": ["1"]}}, 422, "df.flights", "Int64"),
        ({"df": {**ROW, "flights": [True]}}, 422, "df.flights", "Int64"),
        ({"df": {**ROW, "flights": [2**63]}}, 422, "df.flights", "Int64"),
        ({"df": {**ROW, "flights": 1}}, 422, "df.flights", "array"),
        ({"df": {**ROW, "flights": [[1]]}}, 422, "df.flights", "row 0 is [1]"),
        ({"df": {**ROW, "late_rate": ["nan"]}}, 422, "df.late_rate", "NaN"),
        ({"df": {**ROW, "late_rate": ["0.5"]}}, 422, "df.late_rate", "Float32"),
        ({"df": {**ROW, "late_rate": [True]}}, 422, "df.late_rate", "Float32"),
        ({"df": {**ROW, "late_rate": [-3.5e38]}}, 422, "df.late_rate", "too large"),
        ({"df": {**ROW, "carrier": [None]}}, 422, "df.carrier", "null"),
        ({"df": {**ROW, "carrier": ["a", "b"]}}, 422, "df", "length"),
        ({"df": {name: [] for name in ROW}}, 422, "df", "no row"),
        ({"df": {**ROW, "event_timestamp": [None]}}, 422, "df.event_timestamp", "null"),
        ({"df": {**ROW, "event_timestamp": [1.5]}}, 422, "df.event_timestamp", "zone"),
        ({"df": {**ROW, "event_timestamp": ["2027-01-15"]}}, 422, "df.event_timestamp", "zone"),
        ({"df": {**ROW, "event_timestamp": ["2027-01-15T06:00:00.1234567Z"]}}, 422, "df.event_timestamp", "micro"),
        ({"df": {**ROW, "event_timestamp": [NOW + 1]}}, 422, "df.event_timestamp", "2027-01-15T08:00:00+00:00"),
        ({"df": {**ROW, "event_timestamp": [-(2**63)]}}, 422, "df.event_timestamp", "year 1"),
        ({"df": {**ROW, "event_timestamp": ["0001-01-01T00:00:00+00:01"]}}, 422, "df.event_timestamp", "year 1"),
        ({"df": {**ROW, "known_at": [None]}}, 422, "df.known_at", "null"),
    ],
)  # fmt: skip
def test_what_cannot_be_pushed_is_refused(
    server: Server, changed: dict[str, Any], status: int, where: str, word: str
) -> None:
    answer = server.http.post("/push", json={"push_source_name": "punctuality", "df": ROW, **changed})
    assert answer.status_code == status, answer.text
    assert where in answer.json()["where"]
    assert word in answer.text


@pytest.mark.parametrize(
    ("column", "status", "where"),
    [
        (b"[NaN]", 400, "body"),
        (b"[Infinity]", 400, "body"),
        (b"[1e400]", 422, "df.late_rate"),
        (b"[" + b"9" * 5000 + b"]", 422, "df.late_rate"),
        (b'["\xff"]', 400, "df.late_rate"),
        (b'["\\ud800"]', 400, "body"),
        (b"[" * 5000 + b"]" * 5000, 400, "body"),
        (b"[[[[[[1]]]]]]", 422, "df.late_rate"),
        (b'[{"a": 1, "a": 2}]', 422, "late_rate"),
        (b'[0.5], "late_rate": [0.75]', 422, "late_rate"),
        (b'[0.5], "late\\u005frate": [0.75]', 422, "late_rate"),
        (b"", 400, "body"),
        (b"[0.5", 400, "body"),
    ],
)
def test_bytes_that_are_no_rows(server: Server, column: bytes, status: int, where: str) -> None:
    name = carrier()
    others = json.dumps({**ROW, "carrier": [name], "late_rate": None}).encode()
    df = others.replace(b"null", column)
    answer = server.http.post("/push", content=b'{"push_source_name": "punctuality", "df": ' + df + b"}")
    assert answer.status_code == status, answer.text
    assert where in answer.json()["where"]
    assert flights(server, name) == ["NOT_FOUND"]


def test_a_field_that_is_given_twice_is_refused(server: Server) -> None:
    df = json.dumps(ROW)
    body = f'{{"push_source_name": "punctuality", "df": {{}}, "df": {df}}}'
    answer = server.http.post("/push", content=body)
    assert answer.status_code == 422
    assert "'df'" in answer.json()["where"]


@pytest.mark.parametrize("time", ['"2027-01-15T08:00:00\\u002b01:00"', '"2027-01-15T07:00:00.0000000Z"'])
def test_texts_that_mean_the_same_time(server: Server, time: str) -> None:
    name = carrier()
    df = json.dumps({**ROW, "carrier": [name]}).replace(json.dumps(AT), time)
    answer = server.http.post("/push", content=f'{{"push_source_name": "punctuality", "df": {df}}}')
    assert answer.status_code == 200, answer.text
    body = server.lookup(features=["punctuality:flights"], entities={"carrier": [name]}).json()
    assert body["results"][1]["event_timestamps"] == [AT]


def test_an_escaped_time_that_is_too_fine_is_refused(server: Server) -> None:
    df = json.dumps(ROW).replace(json.dumps(AT), '"2027-01-15T07:00:00\\u002e0000001Z"')
    answer = server.http.post("/push", content=f'{{"push_source_name": "punctuality", "df": {df}}}')
    assert answer.status_code == 422


def test_an_old_row_is_expired_at_once(server: Server) -> None:
    name = carrier()
    assert (
        push(server, {**ROW, "carrier": [name], "event_timestamp": ["0001-01-01T00:00:00Z"]}, to="online").json()[
            "written"
        ]
        == 1
    )
    assert flights(server, name) == ["OUTSIDE_MAX_AGE"]
    assert push(server, {**ROW, "carrier": [name], "event_timestamp": [NOW - 24 * HOUR]}).json()["written"] == 1
    assert flights(server, name) == [3]


def test_without_redis_nothing_is_pushed(tmp_path: Any) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, "redis://127.0.0.1:1") as server:
        wait(lambda: server.lookup(features=["a:b"], entities={}).status_code == 404, "the contract")
        answer = push(server, ROW)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"


def test_a_push_needs_the_scope_of_its_view(tmp_path: Any, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url) as server:
        wait(lambda: server.http.get("/readyz").status_code == 200, "the contract")
        keys = server.grant(writer="push:punctuality read:*", other="push:everything read:* predict:*")
        name = carrier()
        body = {"push_source_name": "punctuality", "df": {**ROW, "carrier": [name]}}
        refused = server.http.post("/push", json=body, headers={"Authorization": keys["other"]})
        assert refused.status_code == 403
        assert "push:punctuality" in refused.text
        assert server.http.post("/push", json=body).status_code == 401
        answer = server.http.post("/push", json=body, headers={"Authorization": keys["writer"]})
        assert answer.json() == {"rows": 1, "written": 1}


def test_rows_as_feast_sends_them(server: Server) -> None:
    one, two, three = carrier(), carrier(), carrier()
    df = {
        "carrier": [one, two, three], "event_timestamp": ["2027-01-15T07:00:00", "2027-01-15T07:00:00.000001", AT],
        "created": ["2027-01-15T07:30:00", None, "2027-01-15T12:30:00+05:00"], "late_rate": [0.5, None, 0.25],
        "flights": [1, 2, 3],
    }  # fmt: skip
    body = {"feature_view_name": "punctuality", "df": df, "allow_registry_cache": False}
    answer = server.http.post("/write-to-online-store", json=body)
    assert (answer.status_code, answer.json()) == (200, {"rows": 3, "written": 3})
    assert flights(server, one, two, three) == [1, 2, 3]
    # A row whose known time was null is known now, before which no other row of its event time can have come.
    for known, expected in (("2027-01-15T07:45:00", [9, 2, 9]), (None, [7, 7, 7])):
        later = {**df, "event_timestamp": ["2027-01-15T07:00:00", "2027-01-15T07:00:00.000001", AT]}
        later |= {"created": [known] * 3, "flights": [9 if known else 7] * 3, "late_rate": [2.0**-149] * 3}
        if known is None:
            del later["created"]
            later["event_timestamp"] = ["2027-01-15T07:00:01"] * 3
        assert server.http.post("/write-to-online-store", json={**body, "df": later}).status_code == 200
        assert flights(server, one, two, three) == expected


def test_times_that_feast_counts_in_seconds(server: Server) -> None:
    key = next(FRESH) + 2**40
    df = {
        "flight": [key, key + 1, key + 2], "event_timestamp": [NOW] * 3,
        **{name: [None] * 3 for name in "abcdegh"}, "f": [1_700_000_000, -(2**63), None],
    }  # fmt: skip
    answer = server.http.post("/write-to-online-store", json={"feature_view_name": "everything", "df": df})
    assert answer.status_code == 200, answer.text
    body = server.lookup(features=["everything:f"], entities={"flight": df["flight"]}).json()
    assert body["results"][1]["values"] == [1_700_000_000, None, None]
    for wrong in (2**63 // 10**6 + 1, -(2**63) // 10**6 - 1, 1.5, "2027-01-15T07:00:00"):
        df["f"] = [1, wrong, 1]
        answer = server.http.post("/write-to-online-store", json={"feature_view_name": "everything", "df": df})
        assert (answer.status_code, answer.json()["where"]) == (422, "df.f"), wrong


def test_the_forms_of_a_push_are_not_mixed(server: Server) -> None:
    for path, body, where in (
        ("/push", {"push_source_name": "punctuality", "df": {**ROW, "created": [AT]}}, "df.created"),
        ("/push", {"push_source_name": "punctuality", "df": {**ROW, "event_timestamp": [AT[:-1]]}},
         "df.event_timestamp"),
        ("/push", {"feature_view_name": "punctuality", "df": ROW}, "body"),
        ("/write-to-online-store", {"feature_view_name": "punctuality", "df": {**ROW, "known_at": [AT]}},
         "df.known_at"),
        ("/write-to-online-store", {"feature_view_name": "nothing", "df": ROW}, "feature_view_name"),
        ("/write-to-online-store", {"feature_view_name": "punctuality", "df": {**ROW, "created": [NOW + 1]}},
         "df.created"),
        ("/write-to-online-store", {"feature_view_name": "punctuality", "df": {**ROW, "created": [AT, AT]}}, "df"),
    ):  # fmt: skip
        answer = server.http.post(path, json=body)
        assert answer.status_code in (404, 422)
        assert answer.json()["where"] == where, answer.text


def test_a_push_to_the_history_reaches_back_so_many_days(tmp_path: Any, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url, limits=Limits(push_days=30)) as server, connect(redis_url) as client:
        wait(lambda: server.http.get("/readyz").status_code == 200, "the contract")
        client.delete(stream("flights", "punctuality"))
        # A day of each is a partition of the table.
        names = [f"{carrier()}-{n}" for n in range(10_000)]
        days = {name: column * len(names) for name, column in ROW.items()} | {"carrier": names}
        days["event_timestamp"] = [NOW - n * 24 * HOUR for n in range(len(names))]
        for to in ({}, {"to": "offline"}, {"to": "online_and_offline"}):
            refused = push(server, days, **to)
            assert refused.status_code == 422
            [problem] = refused.json()["problems"]
            assert problem["where"] == "df.event_timestamp"
            assert "at `list[31]`, and 9,968 more rows is too old to be pushed to the history" in problem["found"]
            assert clock.moment(NOW - 30 * 24 * HOUR).isoformat() in problem["expected"]
            assert "`push_days` in [server.limits]" in problem["expected"]
        assert not waiting(client, "flights", "punctuality", 9)
        edge = {**ROW, "carrier": [carrier()], "event_timestamp": [NOW - 30 * 24 * HOUR]}
        assert push(server, edge).json() == {"rows": 1, "written": 1}
        assert push(server, days, to="online").json()["rows"] == 10_000


def test_a_push_has_no_more_rows_and_values_than_the_limits_say(tmp_path: Any, redis_url: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url, limits=Limits(rows=3, values=4)) as server:
        wait(lambda: server.http.get("/readyz").status_code == 200, "the contract")
        for rows, status in ((2, 200), (3, 413), (4, 413)):
            df = {name: column * rows for name, column in {**ROW, "carrier": [carrier()]}.items()}
            assert push(server, df).status_code == status


def test_a_push_is_on_its_way_to_the_history_unless_it_is_for_the_online_store_alone(
    tmp_path: Path, redis_url: str
) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url, limits=Limits(waiting_rows=3)) as small, connect(redis_url) as client:
        wait(lambda: small.http.get("/readyz").status_code == 200, "the contract")
        client.delete(stream("flights", "punctuality"))
        name = carrier()
        df = {**ROW, "carrier": [name, name], "event_timestamp": [AT, NOW], "late_rate": [0.5] * 2, "flights": [1, 2]}
        assert push(small, df).json() == {"rows": 2, "written": 2}
        assert push(small, {**ROW, "carrier": [name], "event_timestamp": [NOW - 1]}, to="online").json()["rows"] == 1
        entries = waiting(client, "flights", "punctuality", 9)
        assert [entry.accepted for entry in entries] == [NOW, NOW]
        assert {entry.name for entry in entries} == {entity_key("flights", [(CARRIER, name)])}
        block = RowCodec(PUNCTUALITY).decode([entry.row for entry in entries])
        assert (block.event.tolist(), block.known.tolist()) == ([NOW - HOUR, NOW], [NOW, NOW])
        other = carrier()
        refused = push(small, {**df, "carrier": [other, other]})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "2 pushed rows wait for it; 2 more exceed the limit" in refused.json()["found"]
        assert "isthmus pushes collect" in refused.json()["remedy"]
        assert flights(small, other) == ["NOT_FOUND"], "all rows or none, and nowhere"
        assert push(small, {**ROW, "carrier": [other]}, to="offline").json() == {"rows": 1, "written": 0}
        assert flights(small, other) == ["NOT_FOUND"]
        assert push(small, {**df, "carrier": [other, other]}, to="online").json() == {"rows": 2, "written": 2}
        assert len(waiting(client, "flights", "punctuality", 9)) == 3
