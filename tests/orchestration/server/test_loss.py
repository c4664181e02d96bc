"""Redis loses rows that were materialized: readiness, gauges, status and lookups say so until they are back."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from isthmus import ConfigurationError
from isthmus.features.errors import LostRowsError
from isthmus.features.online import loss
from isthmus.features.online import record as records
from isthmus.features.redis.connection import connect
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.lookup import lookup
from isthmus.orchestration.status import require_rows, status
from isthmus.orchestration.tables.materialize import materialize
from tests.orchestration.server.served import served
from tests.orchestration.shop import VIEWS, Open, Shop
from tests.servers import free_port, redis_server
from tests.serving.support import wait

FEATURES = ["customer_orders:orders_7d", "customer_facts:city"]
CUSTOMERS = [1_000_003 * n for n in range(40)]


def asked(http: httpx.Client, customers: list[int] = CUSTOMERS, features: list[str] = FEATURES) -> httpx.Response:
    body = {"features": features, "entities": {"customer": customers}}
    return http.post("/get-online-features", json=body)


def gauges(http: httpx.Client, name: str) -> list[str]:
    return [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]


@contextmanager
def with_redis(shop: Shop, opened: Open, *arguments: str) -> Iterator[tuple[Project, redis.Redis]]:
    """The project with a Redis of its own, into which everything was materialized."""
    port = free_port()
    url = f"redis://127.0.0.1:{port}"
    client = redis.Redis(port=port)
    with redis_server(shop.root / "own", "--port", str(port), *arguments, client=client):
        shop.append(f'\n[stores]\nonline = "{url}"\n', "isthmus.toml")
        project = opened(shop)
        materialize(project)
        yield project, redis.Redis(port=port)


def require_reported(http: httpx.Client, project: Project, view: str, why: str) -> None:
    """All that speak of the view say the same, and the gauge of its freshness does not go on."""
    ready = http.get("/readyz")
    assert ready.status_code == 503, ready.text
    assert why in ready.json()["found"]
    assert "run `isthmus materialize`" in ready.json()["remedy"]
    assert "retry-after" not in ready.headers, "waiting does not help"
    assert http.get("/v2/health/ready").status_code == 503
    assert gauges(http, "isthmus_ready") == ["isthmus_ready 0.0"]
    assert f'isthmus_view_lost_rows{{view="{view}"}} 1.0' in gauges(http, "isthmus_view_lost_rows")
    assert not [line for line in gauges(http, "isthmus_view_fresh") if f'seconds{{view="{view}"' in line]
    assert why in http.get("/status").json()["views"][view]["refused"]
    report = status(project, measure=False)
    assert why in report.views[view].lost
    assert "has lost online rows" in report.views[view].wrong(applied=True)
    with pytest.raises(LostRowsError, match="run `isthmus materialize`"):
        require_rows(report)


def require_well(http: httpx.Client, project: Project) -> None:
    assert http.get("/readyz").status_code == 200
    assert gauges(http, "isthmus_ready") == ["isthmus_ready 1.0"]
    assert not [line for line in gauges(http, "isthmus_view_lost_rows{") if not line.endswith(" 0.0")]
    report = status(project, measure=False)
    assert [view.lost for view in report.views.values()] == [""] * 3
    require_rows(report)


def emptied(client: redis.Redis) -> None:
    client.flushall()


def without_a_view(client: redis.Redis) -> None:
    for key in client.scan_iter("shop:customer:*"):
        client.hdel(key, "customer_orders")


def without_half(client: redis.Redis) -> None:
    for n, key in enumerate(sorted(client.scan_iter("shop:customer:*"))):
        if n % 2:
            client.delete(key)


@pytest.mark.accept
def test_rows_that_are_gone_are_reported_and_come_back(built: Shop, project: Open) -> None:
    with with_redis(built, project) as (opened, client), served(opened) as http:
        require_well(http, opened)
        before = asked(http)
        assert before.json()["results"][1]["statuses"].count("PRESENT") > 20
        for lose, why in (
            (emptied, "no record of the materialization"),
            (without_a_view, "sampled keys are gone"),
            (without_half, "sampled keys are gone"),
        ):
            lose(client)
            require_reported(http, opened, "customer_orders", why)
            refused = asked(http)
            assert (refused.status_code, refused.json()["error"]) == (503, "LostRowsError")
            with pytest.raises(LostRowsError):
                lookup(opened, "customer_orders:orders_7d", [f"customer={customer}" for customer in CUSTOMERS])
            # Whatever is still there is right, and one view is no reason to refuse another.
            if lose is without_a_view:
                assert asked(http, features=FEATURES[1:]).status_code == 200
            if lose is without_half:
                assert {asked(http, [customer]).status_code for customer in CUSTOMERS} == {200, 503}
            assert materialize(opened)["customer_orders"].written
            require_well(http, opened)
            # All of them are back, not only those that were looked for.
            assert asked(http).content == before.content
        assert {counts.changed for counts in materialize(opened, full=True).values()} == {0}


def test_a_refused_lookup_closes_its_connection(built: Shop, project: Open) -> None:
    with with_redis(built, project) as (opened, client):
        client.flushall()
        before = len(client.client_list())
        with pytest.raises(LostRowsError) as caught:
            lookup(opened, "customer_orders:orders_7d", ["customer=1000003"])
        # The error's traceback keeps the client alive, so that it must have been closed.
        wait(lambda: len(client.client_list()) == before, "the end of the connection", 2)
        assert caught.value.__traceback__ is not None


def test_rows_are_lost_until_all_of_them_are_back(built: Shop, project: Open) -> None:
    """A materialization into an empty Redis begins with its record, and may be killed before its rows are there."""
    with with_redis(built, project) as (opened, client), served(opened) as http:
        text = client.hget("shop:tables", "customer_orders")
        assert isinstance(text, bytes)
        begun = {**json.loads(text), "pending": True, "complete": records.NEVER}
        client.hset("shop:tables", "customer_orders", json.dumps(begun))
        require_reported(http, opened, "customer_orders", "does not hold all rows")
        materialize(opened)
        require_well(http, opened)
        # The next one begins with all rows in place.
        begun |= {"complete": begun["horizon"]}
        client.hset("shop:tables", "customer_orders", json.dumps(begun))
        require_well(http, opened)


def test_neither_a_damaged_sample_nor_a_user_without_info_hides_a_loss(built: Shop, project: Open) -> None:
    with with_redis(built, project) as (opened, client):
        key = loss.sample_key("shop", opened.applied().views["customer_orders"]).decode()
        with served(opened) as http:
            for damaged in (b"\xff\x00", b"\xa1x", b""):
                client.set(key, damaged)
                require_well(http, opened)
                materialize(opened)
                assert client.get(key) != damaged, "it is written anew"
        client.acl_setuser("reader", enabled=True, passwords=["+pw"], keys=["*"], categories=["+@read", "+@connection"])
        built.replace("redis://127", "redis://reader:pw@127", "isthmus.toml")
        reader = project(built)
        asked = (reader, "customer_orders:orders_7d", ["customer=1000003"])
        assert lookup(*asked)["results"][-1]["statuses"]
        require_rows(status(reader, measure=False))
        client.flushall()
        with pytest.raises(LostRowsError):
            lookup(*asked)
        with pytest.raises(LostRowsError):
            require_rows(status(reader, measure=False))


@pytest.mark.accept
def test_evicted_rows_and_the_policy_that_evicts_them_are_reported(built: Shop, project: Open) -> None:
    said: list[str] = []
    with (
        with_redis(built, project, "--maxmemory-policy", "allkeys-lru", "--maxmemory", "100mb") as (opened, client),
        served(opened) as http,
    ):
        materialize(opened, progress=lambda text, _: said.append(text))
        line = "CONFIG SET maxmemory-policy noeviction"
        assert [line in text for text in said].count(True) == 1
        assert line in status(opened, measure=False).online
        require_well(http, opened)  # it may evict, and has not
        assert any(line in problem for problem in http.get("/status").json()["problems"])
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 1_000_000)
        for n in range(2000):
            client.set(f"other:{n}", bytes(1000))
        assert int(client.info("stats")["evicted_keys"])
        require_reported(http, opened, "customer_facts", "evict")
        assert line in http.get("/readyz").json()["found"]
        # To the letter.
        client.delete(*(f"other:{n}" for n in range(2000)))
        client.config_set("maxmemory", 0)
        client.config_set("maxmemory-policy", "noeviction")
        assert http.get("/readyz").status_code == 503, "what is gone is gone"
        materialize(opened)
        require_well(http, opened)
        assert http.get("/status").json()["problems"] == []


@pytest.mark.accept
def test_an_older_state_of_redis_is_reported(built: Shop, project: Open) -> None:
    with with_redis(built, project, "--enable-debug-command", "yes") as (opened, client), served(opened) as http:
        client.save()
        before = (built.root / "own" / "dump.rdb").read_bytes()
        built.replace("now = 2024-03-01T00:00:00Z", "now = 2024-03-01T06:00:00Z", "isthmus.toml")
        opened = project(built)
        materialize(opened)
        require_well(http, opened)
        (built.root / "own" / "dump.rdb").write_bytes(before)
        client.execute_command("DEBUG", "RELOAD", "NOSAVE")  # type: ignore[no-untyped-call]
        require_reported(http, opened, "customer_orders", "an earlier materialization")
        materialize(opened)
        require_well(http, opened)


@pytest.mark.accept
def test_null_is_for_those_who_say_so(built: Shop, project: Open) -> None:
    built.append('\n[server]\nmissing = "null"\n', "isthmus.toml")
    with with_redis(built, project) as (opened, client), served(opened) as http:
        client.flushall()
        wait(lambda: gauges(http, 'isthmus_view_lost_rows{view="customer_orders"}')[0].endswith(" 1.0"), "the loss")
        assert (http.get("/readyz").status_code, gauges(http, "isthmus_ready")) == (200, ["isthmus_ready 1.0"])
        assert asked(http).json()["results"][1]["statuses"] == ["NOT_FOUND"] * len(CUSTOMERS)
        assert "has lost online rows" in http.get("/status").json()["views"]["customer_orders"]["refused"]
        assert lookup(opened, "customer_orders:orders_7d", ["customer=1000003"])["results"][-1]["statuses"] == [
            "NOT_FOUND"
        ]
    built.replace('missing = "null"', 'missing = "ignore"', "isthmus.toml")
    with pytest.raises(ConfigurationError, match=r"missing.*'refuse' or 'null'"):
        project(built).settings  # noqa: B018 - it is read here


@pytest.mark.accept
def test_a_damaged_or_missing_record_of_materializations_refuses_nothing(built: Shop, project: Open) -> None:
    with with_redis(built, project) as (opened, _client), served(opened) as http:
        file = opened.state / loss.FILE
        whole: dict[str, Any] = json.loads(file.read_bytes())
        assert set(whole) == set(VIEWS)
        for text in (None, b"", b'{"customer_orders": 5}', b"\xff"):
            file.unlink(missing_ok=True) if text is None else file.write_bytes(text)
            require_well(http, opened)
        materialize(opened, ["customer_orders"])
        assert json.loads(file.read_bytes()) == {"customer_orders": whole["customer_orders"]}


@pytest.mark.accept
def test_before_anything_was_materialized_nothing_is_lost(built: Shop, project: Open, tmp_path: Path) -> None:
    (built.root / ".isthmus" / loss.FILE).unlink()
    port = free_port()
    with redis_server(tmp_path / "empty", "--port", str(port), client=redis.Redis(port=port)):
        built.append(f'\n[stores]\nonline = "redis://127.0.0.1:{port}"\n', "isthmus.toml")
        opened = project(built)
        with served(opened) as http, connect(f"redis://127.0.0.1:{port}"):
            require_well(http, opened)
            assert asked(http).json()["results"][1]["statuses"] == ["NOT_FOUND"] * len(CUSTOMERS)
            assert http.get("/status").json()["views"]["customer_orders"]["refused"] == "nothing has been materialized"
