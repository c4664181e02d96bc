from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.redis.pipeline import Client
from isthmus.features.types import String
from isthmus.features.values.entitykey import entity_keys
from isthmus.serving.wire.formats import Format
from tests.serving.support import (
    CARRIER,
    CONTRACT,
    FLIGHT,
    HOUR,
    NOW,
    PUNCTUALITY,
    ROUTE,
    Server,
    contract_of,
    fill,
    make_package,
    serving,
    view,
    wait,
    write,
)

EPOCH = "1970-01-01T00:00:00Z"
HOUR_AGO = "2027-01-15T07:00:00Z"


def test_answer_is_feasts_json(server: Server) -> None:
    answer = server.lookup(
        features=["punctuality:late_rate", "punctuality:flights"], entities={"carrier": ["UA", "AA", "B6", "OO", "??"]}
    )
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["isthmus-contract"] == CONTRACT.hash
    body = answer.json()
    assert body["metadata"] == {"feature_names": ["carrier", "late_rate", "flights"], "contract": CONTRACT.hash}
    times = [HOUR_AGO, HOUR_AGO, "2027-01-15T06:59:59.999999Z", "2027-01-14T07:59:59.999999Z", EPOCH]
    assert body["results"] == [
        {
            "values": ["UA", "AA", "B6", "OO", "??"],
            "statuses": ["PRESENT"] * 5,
            "event_timestamps": [EPOCH] * 5,
        },
        {
            # float32 0.1, widened to the double it is
            "values": [0.10000000149011612, None, None, None, None],
            "statuses": ["PRESENT", "NULL_VALUE", "NULL_VALUE", "OUTSIDE_MAX_AGE", "NOT_FOUND"],
            "event_timestamps": times,
        },
        {
            "values": [2**60 + 1, None, 7, None, None],
            "statuses": ["PRESENT", "NULL_VALUE", "PRESENT", "OUTSIDE_MAX_AGE", "NOT_FOUND"],
            "event_timestamps": times,
        },
    ]


def test_exactly_ttl_old_is_valid_and_the_future_is_not_there_yet(server: Server) -> None:
    body = server.lookup(features=["punctuality:flights"], entities={"carrier": ["EX", "ZZ"]}).json()
    assert body["results"][1]["values"] == [10, None]
    assert body["results"][1]["statuses"] == ["PRESENT", "NOT_FOUND"]
    assert body["results"][1]["event_timestamps"][1] == EPOCH


def test_duplicate_and_unordered_keys_are_answered_in_place(server: Server) -> None:
    asked = ["B6", "UA", "??", "UA", "B6"]
    body = server.lookup(features=["punctuality:flights"], entities={"carrier": asked}).json()
    assert body["results"][0]["values"] == asked
    assert body["results"][1]["values"] == [7, 2**60 + 1, None, 2**60 + 1, 7]


def test_every_type(server: Server) -> None:
    features = [f"everything:{name}" for name in "abcdefgh"]
    answer = server.lookup(features=features, entities={"flight": [1, 2, 2**62 + 1]})
    columns = dict(zip("_abcdefgh", (result["values"] for result in answer.json()["results"]), strict=True))
    assert columns == {
        "_": [1, 2, 2**62 + 1],
        "a": [True, None, False],
        "b": [-(2**31), 5, 6],
        "c": [2**63 - 1, None, -(2**63)],
        "d": ["NaN", "Infinity", 0.5],
        "e": ["-Infinity", None, 1e300],
        "f": [1_700_000_000, 1_700_000_000.123456, None],
        "g": ["é😀", "", None],
        "h": ["AP8=", None, ""],
    }
    statuses = {result["values"].index(None): result["statuses"] for result in answer.json()["results"][3:4]}
    assert statuses == {1: ["PRESENT", "NULL_VALUE", "PRESENT"]}
    assert b"9223372036854775807" in answer.content


def test_arrays_are_lists_and_every_type_can_be_a_key(server: Server) -> None:
    asked = {"seen": [5, 5, -1, 6], "token": ["AP8=", "", "", "AP8="], "open": [True, True, True, True]}
    body = server.lookup(features=[f"lists:{name}" for name in "abcdefgh"], entities=asked).json()
    columns = dict(zip(["seen", "token", "open", *"abcdefgh"], (r["values"] for r in body["results"]), strict=True))
    assert columns == {
        **asked,
        "a": [[True, False], None, [], None],
        "b": [[1, -2], [], None, None],
        "c": [[2**62 + 1], None, None, None],
        "d": [[0.10000000149011612, 2.0], [], None, None],
        "e": [["NaN", 1.5, "-Infinity"], None, [2.5] * 20, None],
        "f": [[1.0], [0.5], None, None],
        "g": [["é", ""], [], None, None],
        "h": [["AP8=", ""], None, [], None],
    }
    assert body["results"][3]["statuses"] == ["PRESENT", "NULL_VALUE", "PRESENT", "NOT_FOUND"]


def test_a_key_of_the_other_truth_value_or_moment_is_another_key(server: Server) -> None:
    keys = {"seen": [5, 4], "token": ["AP8="] * 2, "open": [False, True]}
    body = server.lookup(features=["lists:a"], entities=keys).json()
    assert body["results"][3]["statuses"] == ["NOT_FOUND"] * 2


def test_whole_seconds_are_whole_numbers(server: Server) -> None:
    answer = server.lookup(features=["everything:f"], entities={"flight": [1]})
    assert b"[1700000000]" in answer.content


def test_views_with_different_keys_in_one_request(server: Server) -> None:
    body = server.lookup(
        features=["route:flights", "punctuality:flights", "everything:b"],
        entities={"flight": [1, 1, 2], "carrier": ["UA", "AA", "UA"]},
        full_feature_names=True,
    ).json()
    names = ["flight", "carrier", "route__flights", "punctuality__flights", "everything__b"]
    assert body["metadata"]["feature_names"] == names
    assert [result["values"] for result in body["results"][2:]] == [
        [3, 4, None], [2**60 + 1, None, 2**60 + 1], [-(2**31), -(2**31), 5],
    ]  # fmt: skip


def test_feature_service_and_further_join_keys_are_echoed(server: Server) -> None:
    body = server.lookup(feature_service="late", entities={"carrier": ["UA"], "flight": [9]}).json()
    assert body["metadata"]["feature_names"] == ["carrier", "flight", "late_rate", "flights"]
    assert body["results"][1]["values"] == [9]


def test_many_rows(server: Server) -> None:
    flights = list(range(10_000))
    answer = server.lookup(features=["everything:b", "everything:g"], entities={"flight": flights})
    body = answer.json()
    assert body["results"][1]["values"][:4] == [None, -(2**31), 5, None]
    assert len(body["results"][2]["statuses"]) == 10_000
    assert server.lookup(features=["everything:b"], entities={"flight": [*flights, 1]}).status_code == 413


def test_a_request_id_is_kept_or_made(server: Server) -> None:
    kept = server.http.get("/healthz", headers={"X-Request-Id": "abc-1"})
    assert kept.headers["x-request-id"] == "abc-1"
    made = server.http.get("/healthz", headers={"X-Request-Id": 'no "good" one'})
    assert len(made.headers["x-request-id"]) == 16
    (line,) = [line for line in server.lines() if line.get("id") == "abc-1"]
    assert line.pop("ms") > 0
    assert line.pop("timestamp")
    assert line == {
        "event": "request", "level": "info", "id": "abc-1", "method": "GET", "path": "/healthz", "status": 200,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "body", "error"),
    [
        ("POST", "/get-online-features", b'{"features": ["a:b"], "entities": {}}', "NotFoundError"),
        ("POST", "/get-online-features", b"{", "UnreadableError"),
        ("POST", "/get-online-features", b" " * (1 << 20) + b"{}", "TooLargeError"),
        ("GET", "/predict", b"", "NotAllowedError"),
    ],
)
def test_the_log_names_the_error_of_a_refused_request(
    server: Server, method: str, path: str, body: bytes, error: str
) -> None:
    answer = server.http.request(method, path, content=body)
    assert answer.json()["error"] == error
    (line,) = [line for line in server.lines() if line.get("id") == answer.headers["x-request-id"]]
    assert (line["status"], line["error"]) == (answer.status_code, error)


UA = {"carrier": ["UA"]}


@pytest.mark.parametrize(
    ("asked", "status", "where", "word"),
    [
        ({"features": ["nothing:late_rate"], "entities": UA}, 404, "nothing:late_rate", "punctuality"),
        ({"features": ["punctuality:nothing"], "entities": UA}, 404, "punctuality:nothing", "late_rate"),
        ({"feature_service": "nothing", "entities": UA}, 404, "feature_service", "late"),
        ({"features": ["late_rate"], "entities": UA}, 422, "late_rate", "view:feature"),
        ({"features": [], "entities": UA}, 422, "features", "at least one"),
        ({"entities": UA}, 422, "features", "both are missing"),
        ({"features": ["punctuality:flights"], "feature_service": "late", "entities": UA}, 422, "features", "both"),
        ({"features": ["punctuality:flights"]}, 422, "body", "entities"),
        ({"features": ["punctuality:flights"], "entities": {}}, 422, "entities.carrier", "missing"),
        ({"features": ["route:flights"], "entities": UA}, 422, "entities.flight", "missing"),
        ({"features": ["punctuality:flights"], "entities": {**UA, "plane": ["N1"]}}, 422, "entities.plane", "carrier"),
        ({"features": ["punctuality:flights"], "entities": {"carrier": "UA"}}, 422, "entities.carrier", "array"),
        ({"features": ["punctuality:flights"], "entities": {"carrier": [1]}}, 422, "entities.carrier", "in quotes"),
        ({"features": ["punctuality:flights"], "entities": {"carrier": [None]}}, 422, "entities.carrier", "String"),
        ({"features": ["punctuality:flights"], "entities": {"carrier": []}}, 422, "entities", "no row"),
        ({"features": ["everything:b"], "entities": {"flight": ["1"]}}, 422, "entities.flight", "Int64"),
        ({"features": ["everything:b"], "entities": {"flight": [1, True]}}, 422, "entities.flight", "Int64"),
        ({"features": ["lists:a"], "entities": {"token": ["?"]}}, 422, "entities.token", "Base64"),
        ({"features": ["lists:a"], "entities": {"open": [1]}}, 422, "entities.open", "true or false"),
        ({"features": ["lists:a"], "entities": {"seen": ["2024"]}}, 422, "entities.seen", "microseconds"),
        ({"features": ["everything:b"], "entities": {"flight": [1.5]}}, 422, "entities.flight", "Int64"),
        ({"features": ["everything:b"], "entities": {"flight": [2**63]}}, 422, "entities.flight", "Int64"),
        ({"features": ["everything:b"], "entities": {"flight": [1], "carrier": ["a", "b"]}}, 422, "entities", "length"),
        ({"features": ["punctuality:flights", "route:flights"], "entities": {**UA, "flight": [1]}}, 422, "features",
         "full_feature_names"),
        ({"features": ["punctuality:flights"] * 2, "entities": UA}, 422, "features", "flights"),
        ({"features": "punctuality:flights", "entities": UA}, 422, "body", "array"),
        ({"features": [1], "entities": UA}, 422, "body", "str"),
        ({"features": ["punctuality:flights"], "entities": UA, "full_feature_names": "yes"}, 422, "body", "bool"),
        ({"features": ["punctuality:flights"], "entities": UA, "at": 1}, 422, "body", "at"),
        ([], 422, "body", "object"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_is_refused(server: Server, asked: object, status: int, where: str, word: str) -> None:
    answer = server.http.post("/get-online-features", json=asked)
    assert answer.status_code == status, answer.text
    error = answer.json()
    assert error.keys() == {"error", "where", "found", "expected", "remedy"}
    assert where in error["where"]
    assert word in answer.text


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"features": ["punctuality:flights"], "entities": {"carrier": ["UA"]}} trailing', 400),
        (b'{"features": ["punctuality:flights"], "entities": {"carrier": [NaN]}}', 400),
        (b'{"features": ["punctuality:flights"], "entities": {"carrier": ["\xff"]}}', 400),
        (b'{"features": ["punctuality:flights"], "entities": {"carrier": ["\\ud800"]}}', 400),
        (b'{"features": ["\xff:x"], "entities": {"carrier": ["UA"]}}', 400),
        (b'{"features": ["punctuality:flights"], "entities": {"carrier": [' + b"[" * 5000 + b"]}}", 400),
        (b'{"features": ["everything:b"], "entities": {"flight": [1e400]}}', 422),
        (b'{"features": ["everything:b"], "entities": {"flight": [' + b"9" * 5000 + b"]}}", 422),
        (b" " * (1 << 20) + b"{}", 413),
        (b'{"features": ["punctuality:flights"], "entities": {"carrier": ["UA"], "carrier": ["AA"]}}', 422),
        (b'{"features": ["a:b"], "features": ["punctuality:flights"], "entities": {"carrier": ["UA"]}}', 422),
        (b'{"features": ["punctuality:flights"], "entities": {"carrier": ["{\\"a\\": 1, \\"a\\": 2}"]}}', 200),
    ],
)
def test_bytes_that_are_no_request(server: Server, body: bytes, status: int) -> None:
    answer = server.http.post("/get-online-features", content=body)
    assert answer.status_code == status, answer.text
    assert status == 200 or orjson.loads(answer.content)["error"]


def test_a_body_without_announced_length_is_cut_off(server: Server) -> None:
    answer = server.http.post("/get-online-features", content=(b" " * 65_536 for _ in range(100)))
    assert answer.status_code == 413


def test_paths_and_methods(server: Server) -> None:
    missing = server.http.get("/nothing")
    assert (missing.status_code, missing.json()["error"]) == (404, "NotFoundError")
    method = server.http.get("/get-online-features")
    assert (method.status_code, method.headers["allow"]) == (405, "POST")
    assert method.json()["error"] == "NotAllowedError"


def test_a_join_key_that_has_the_name_of_a_feature_is_refused_in_every_form(tmp_path: Path, redis_url: str) -> None:
    """Arrow would keep one of two columns with one name, in silence."""
    clash = view("clash", [FLIGHT], [("carrier", String)])
    contract = contract_of(PUNCTUALITY, clash)
    (tmp_path / "contract.json").write_bytes(contract.dumps())
    asked = {"features": ["clash:carrier"], "entities": {"flight": [1], "carrier": ["UA"]}}
    with serving(tmp_path, redis_url) as server:
        for form in Format:
            answer = server.http.post("/get-online-features", json=asked, headers={"accept": form.value})
            assert answer.status_code == 422
            assert answer.json()["where"] == "entities.carrier"
        assert server.lookup(**asked, full_feature_names=True).status_code == 200


def test_a_time_that_no_date_has_does_not_cost_the_answer(tmp_path: Path) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with EmbeddedRedis(tmp_path / "redis") as own, serving(tmp_path, own.url) as server:
        with connect(own.url) as client:
            rows: dict[str, list[Any]] = {"carrier": ["UA", "AA"], "flight": [1, 1]}
            write(OnlineStore(client, CONTRACT), ROUTE, rows, [-62_167_219_200_000_001, NOW - HOUR], flights=[3, 4])
        answer = server.lookup(features=["route:flights"], entities=rows)
        assert answer.status_code == 200
        assert answer.json()["results"][2]["values"] == [3, 4]
        assert answer.json()["results"][2]["event_timestamps"][0] == "0001-01-01T00:00:00Z"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server that looks at the content of every row, over a Redis of its own."""
    folder = tmp_path_factory.mktemp("strict")
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with EmbeddedRedis(folder / "redis") as redis:
        fill(redis.url)
        with serving(folder, redis.url, check_share=1.0) as running:
            running.deploy(make_package(folder / "package"))
            wait(lambda: running.http.get("/readyz").json().get("model") == "late", "the model")
            yield running, redis.url


@pytest.mark.parametrize("accept", ["application/json", Format.VALUES.value, Format.ARROW.value])
def test_a_damaged_row_fails_its_own_key_alone(strict: tuple[Server, str], accept: str) -> None:
    server, url = strict
    asked = {"features": [f"everything:{name}" for name in "abcdefgh"], "entities": {"flight": [1, 2, 2**62 + 1]}}
    (name,) = entity_keys("flights", [FLIGHT], {"flight": [2]})

    def look() -> tuple[list[list[Any]], list[str], str]:
        answer = server.http.post("/get-online-features", json=asked, headers={"accept": accept})
        assert answer.status_code == 200, answer.text
        if accept == Format.ARROW.value:
            table = pa.ipc.open_stream(answer.content).read_all()
            values = [[str(row[name]) for row in table.to_pylist()] for name in "abcdefgh"]
            return values, table["everything__status"].to_pylist(), ""
        body = answer.json()
        problems = " ".join(body["metadata"].get("problems", []))
        if accept == "application/json":
            return [r["values"] for r in body["results"][1:]], body["results"][1]["statuses"], problems
        return body["values"][1:], body["statuses"]["everything"], problems

    with connect(url) as client:
        whole = client.hget(name, "everything")
        assert whole is not None
        before, statuses, problems = look()
        assert (statuses[1], problems) == ("PRESENT", "") or accept == "application/json"
        # Its times are not part of its content.
        places = [*range(9), *range(25, len(whole))]
        try:
            for damaged in (*(flipped(whole, place) for place in places), whole[:-1], whole + b"x", b"", b"x" * 40):
                client.hset(name, "everything", damaged)
                values, found, problems = look()
                assert found[1] == "INVALID", damaged
                assert [[v for n, v in enumerate(column) if n != 1] for column in values] == [
                    [v for n, v in enumerate(column) if n != 1] for column in before
                ]
                assert {column[1] for column in values} <= {None, "None"}
                if accept != Format.ARROW.value:
                    assert problems == "view everything: the stored rows of keys 1 are damaged"
            assert server.lookup(features=["everything:a"], entities={"flight": [2]}).json()["results"][1] == {
                "values": [None], "statuses": ["INVALID"], "event_timestamps": ["1970-01-01T00:00:00Z"],
            }  # fmt: skip
        finally:
            client.hset(name, "everything", whole)


def flipped(row: bytes, place: int) -> bytes:
    return row[:place] + bytes([row[place] ^ 0x10]) + row[place + 1 :]


@contextmanager
def foreign(client: Client, name: bytes) -> Iterator[None]:
    """A key that another program has written."""
    whole = client.dump(name)
    assert isinstance(whole, bytes)
    client.delete(name)
    client.rpush(name, "something", "else")
    try:
        yield
    finally:
        client.delete(name)
        client.restore(name, 0, whole)


def test_a_key_of_another_type_fails_alone_and_is_told_from_a_damaged_row(strict: tuple[Server, str]) -> None:
    server, url = strict
    asked = {
        "features": ["everything:a", "punctuality:flights"],
        "entities": {"flight": [1, 2, 1], "carrier": ["UA", "B6", "B6"]},
    }
    before = server.lookup(**asked).json()
    (strange,) = entity_keys("flights", [FLIGHT], {"flight": [2]})
    (damaged,) = entity_keys("flights", [CARRIER], {"carrier": ["UA"]})
    problems = [
        "view everything: keys 1 have type list in Redis instead of hash: another program wrote them",
        "view punctuality: the stored rows of keys 0 are damaged",
    ]
    with connect(url) as client, foreign(client, strange):
        whole = client.hget(damaged, "punctuality")
        client.hset(damaged, "punctuality", b"x")
        try:
            answers = [
                server.http.post("/get-online-features", json=asked, headers={"accept": form.value}) for form in Format
            ]
        finally:
            client.hset(damaged, "punctuality", whole)
    assert [answer.status_code for answer in answers] == [200] * len(Format)
    full, values, arrow = answers
    assert full.json()["metadata"]["problems"] == values.json()["metadata"]["problems"] == problems
    table = pa.ipc.open_stream(arrow.content).read_all()
    assert orjson.loads(table.schema.metadata[b"isthmus-problems"]) == problems
    for column, earlier, place in zip(full.json()["results"][2:], before["results"][2:], (1, 0), strict=True):
        for part, lost in (("values", None), ("statuses", "INVALID")):
            assert column[part] == [lost if n == place else known for n, known in enumerate(earlier[part])]
    assert server.lookup(**asked).json() == before


def test_nothing_is_predicted_of_a_key_of_another_type(strict: tuple[Server, str]) -> None:
    server, url = strict
    (name,) = entity_keys("flights", [CARRIER], {"carrier": ["UA"]})
    asked = {"entities": {"carrier": ["B6", "UA"]}, "request": {"distance": [1.0, 2.0]}}
    with connect(url) as client, foreign(client, name):
        refused = server.predict(**asked)
    assert (refused.status_code, refused.json()["error"]) == (500, "DataError")
    assert "view punctuality: keys 1 have type list in Redis instead of hash" in refused.json()["found"]
    assert "delete those keys" in refused.json()["remedy"].lower()
    assert server.predict(**asked).status_code == 200


def test_nothing_is_predicted_of_a_damaged_row(strict: tuple[Server, str]) -> None:
    server, url = strict
    (name,) = entity_keys("flights", [CARRIER], {"carrier": ["UA"]})
    asked = {"entities": {"carrier": ["B6", "UA"]}, "request": {"distance": [1.0, 2.0]}}
    invalid = '\nisthmus_view_values_total{status="INVALID",view="punctuality"} '
    assert server.predict(**asked).status_code == 200
    with connect(url) as client:
        whole = client.hget(name, "punctuality")
        assert whole is not None
        client.hset(name, "punctuality", flipped(whole, len(whole) - 1))
        before = server.http.get("/metrics").text.partition(invalid)[2].partition("\n")[0]
        try:
            refused = server.predict(**asked)
        finally:
            client.hset(name, "punctuality", whole)
    assert (refused.status_code, refused.json()["error"]) == (500, "DamagedRowError")
    assert "view punctuality: the stored rows of keys 1 are damaged" in refused.json()["found"]
    assert "isthmus materialize --full" in refused.json()["remedy"]
    after = server.http.get("/metrics").text.partition(invalid)[2].partition("\n")[0]
    assert float(after) > float(before), "an alert rule looks at this"
