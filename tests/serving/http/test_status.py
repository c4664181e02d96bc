"""Where a server and its project stand: as JSON, as a page, and what of it can be trusted in a browser."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from isthmus.features import projectstatus
from isthmus.features.online.record import NEVER, Published, records
from isthmus.features.projectstatus import ModelStatus, ProjectStatus, RunStatus, ViewStatus
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.serving.http.statuspage import page as status_page
from isthmus.serving.metrics.counters import Tally
from isthmus.serving.wire.messages import StatusAnswer
from tests.serving.support import CONTRACT, HOUR, NOW, PUNCTUALITY, Server, fill, make_package, serving, wait

PAGE = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
NASTY = "<script>alert(1)</script>"
FOUND = ProjectStatus(
    project="flights", contract=CONTRACT.hash, applied=False, now=NOW, measured=False, found_at=NOW,
    views={"punctuality": ViewStatus(rows=7, last_day="2027-01-15", broken=(f"{NASTY} is above 1",)),
           NASTY: ViewStatus(problem=NASTY)},
    models={NASTY: ModelStatus(package=NASTY, verdict=False, stale=(NASTY,))},
    runs=[RunStatus(id=NASTY, made=NASTY, status=NASTY, at=NOW)],
)  # fmt: skip


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server over a Redis of its own, with a model that was deployed for a nasty reason."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with EmbeddedRedis(folder / "redis") as embedded:
        fill(embedded.url)
        with serving(folder, embedded.url, latency_objective_ms=2.5) as running:
            running.deploy(make_package(folder / "package"), why=NASTY)
            wait(lambda: running.http.get("/readyz").json().get("model") == "late", "the model")
            yield running, embedded.url


def asked(server: Server) -> StatusAnswer:
    answer = server.http.get("/status")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    return msgspec.json.decode(answer.content, type=StatusAnswer)


def test_a_server_tells_what_it_knows_by_itself(own: tuple[Server, str]) -> None:
    server, url = own
    record = Published(contract=PUNCTUALITY.hash, version=1, fingerprint="f", built=1, at=NOW, horizon=NOW - HOUR,
                       servers={})  # fmt: skip
    with connect(url) as client:
        client.hset(records(CONTRACT.project).decode(), "punctuality", msgspec.json.encode(record))
        other = msgspec.structs.replace(record, contract="another")
        client.hset(records(CONTRACT.project).decode(), "route", msgspec.json.encode(other))
    assert server.predict(entities={"carrier": ["UA"]}, request={"distance": [1.0]}).status_code == 200
    found = asked(server)
    assert (found.name, found.contract, found.now, found.latency_objective_ms) == ("flights", CONTRACT.hash, NOW, 2.5)
    told = found.views["punctuality"]
    assert (told.materialized_at, told.known_until, told.age_seconds) == (NOW, NOW - HOUR, 3600.0)
    assert (told.ttl_seconds, told.refused) == (24 * 3600.0, None)
    assert "another contract" in (found.views["route"].refused or "")
    assert found.views["lists"].refused == "nothing has been materialized"
    assert [(one.model, one.current) for one in found.models] == [("late", True)]
    assert [(one.action, one.why) for one in found.history] == [("deploy", NASTY)]
    assert found.latency["/predict"].count == found.latency["runs of late"].count == 1
    assert 0 < found.latency["/predict"].p50_ms <= found.latency["/predict"].p99_ms
    assert (found.project, found.problems) == (msgspec.UNSET, [])


def test_the_page_says_the_same_and_runs_nothing(own: tuple[Server, str]) -> None:
    server, _ = own
    folder = server.deployment.parent
    FOUND.write(folder)
    try:
        assert asked(server).project == FOUND
        answer = server.http.get("/status", headers=PAGE)
    finally:
        (folder / projectstatus.FILE).unlink()
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "<script" not in answer.text
    assert answer.text.count("&lt;script&gt;") >= 8
    assert "http" not in answer.text
    for said in ("p99 of 2.5 ms", "to be materialized", "not in force", "is above 1", "nothing has been materialized"):
        assert said in answer.text, said
    assert "<th>why" in answer.text
    assert "objective</th>" not in answer.text, "no view has one"


def test_what_has_no_times_has_no_age(own: tuple[Server, str]) -> None:
    server, url = own
    record = Published(contract=PUNCTUALITY.hash, version=1, fingerprint="f", built=1, at=NOW, horizon=0, servers={})
    with connect(url) as client:
        client.hset(records(CONTRACT.project).decode(), "punctuality", msgspec.json.encode(record))
    timeless = msgspec.structs.replace(FOUND, views={"frames": ViewStatus(rows=7, last_day="1970-01-01")})
    answer = asked(server)
    assert answer.views["punctuality"].age_seconds == NOW / 1e6
    page = status_page(msgspec.structs.replace(answer, project=timeless))
    assert page.count("no times") == 2
    assert "1970" not in page
    assert f"{NOW / 86_400e6:.0f} days" not in page


def test_a_table_of_the_future_has_no_age_yet(own: tuple[Server, str]) -> None:
    server, url = own
    record = Published(
        contract=PUNCTUALITY.hash, version=1, fingerprint="f", built=1, at=NOW, horizon=NEVER, servers={}
    )
    with connect(url) as client:
        client.hset(records(CONTRACT.project).decode(), "punctuality", msgspec.json.encode(record))
    told = asked(server).views["punctuality"]
    assert (told.materialized_at, told.known_until, told.age_seconds) == (NOW, None, None)
    assert server.http.get("/status", headers=PAGE).status_code == 200


def test_what_cannot_be_read_hides_nothing_else(own: tuple[Server, str]) -> None:
    server, _ = own
    file = server.deployment.with_name(projectstatus.FILE)
    file.write_text("{}")
    try:
        found = asked(server)
    finally:
        file.unlink()
    assert found.project is msgspec.UNSET
    assert found.history
    assert len(found.problems) == 1
    assert "cannot be read" in found.problems[0]
    assert "isthmus status" in found.problems[0]


def test_a_redis_that_is_away_hides_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, "redis://127.0.0.1:1/0") as server:
        found = asked(server)
        page = server.http.get("/status", headers=PAGE).text
    assert (found.views, found.models, found.history) == ({}, [], [])
    assert "127.0.0.1:1" in found.problems[0]
    assert "Nothing was ever deployed" in page


def test_it_needs_a_contract_and_where_there_are_keys_a_key(tmp_path: Path, redis_url: str) -> None:
    with serving(tmp_path, redis_url) as server:
        assert server.http.get("/status").status_code == 503
        (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
        wait(lambda: server.http.get("/status").status_code == 200, "the contract")
        key = server.grant(owner="status:*")["owner"]
        for headers in ({}, PAGE):
            refused = server.http.get("/status", headers=headers)
            assert refused.status_code == 401
            assert "punctuality" not in refused.text
        assert server.http.get("/status", headers={**PAGE, "Authorization": key}).status_code == 200


def test_quantiles_lie_between_the_bounds_of_their_bucket() -> None:
    tally = Tally(None)
    family = tally.histogram("isthmus_test_seconds", "For this test.", "route")
    assert tally.quantiles("isthmus_test_seconds", "route", 0.5) == {}
    for _ in range(100):
        family.seconds("/a").observe(0.0015)
    family.seconds("/b").observe(100.0)
    found = tally.quantiles("isthmus_test_seconds", "route", 0.5, 0.99)
    assert found["/a"][0] == 100
    assert found["/a"][1] == pytest.approx([0.00175, 0.002485])
    assert found["/b"] == (1, [2.5, 2.5]), "what is beyond the last bound is at it"


def test_a_view_says_what_is_to_be_done() -> None:
    fresh = ViewStatus(rows=1, current=True, served=True)
    assert list(fresh.wrong(applied=True)) == []
    assert list(msgspec.structs.replace(fresh, current=False).wrong(applied=True)) == ["to be built again"]
    assert list(msgspec.structs.replace(fresh, current=False).wrong(applied=False)) == []
    everything = msgspec.structs.replace(fresh, served=False, expired=True, broken=("x",), drifted=("y",))
    told = ["to be materialized", "expired", "breaks expectations", "has drifted"]
    assert list(everything.wrong(applied=True)) == told
    answer = StatusAnswer("p", "c", NOW, {}, [], None, {}, 5.0, [], FOUND, [])
    assert "to be materialized" in status_page(answer)
