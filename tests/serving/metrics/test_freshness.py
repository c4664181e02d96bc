"""How fresh the rows of each view are: known without a request, from the online store, whatever happens to it."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from isthmus.features.contract.generations import Generations, Retired
from isthmus.features.contract.schema import ViewContract
from isthmus.features.online.record import NEVER, Published, records
from isthmus.features.online.scripts import suspects_key
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from tests.serving.metrics.test_metrics import counted, folder_of, scrape, value, workers
from tests.serving.support import CONTRACT, HOUR, NOW, PUNCTUALITY, Server, fill, free_port, make_package, serving, wait

AGE, NEWEST = "isthmus_view_freshness_seconds", "isthmus_view_newest_known_timestamp_seconds"
OBJECTIVE = "isthmus_view_freshness_objective_seconds"
WAITING = "isthmus_view_waiting_rows"
LOOKUP = {"features": ["punctuality:flights"], "entities": {"carrier": ["UA"]}}


def materialized(url: str, view: ViewContract, horizon: int, **changes: Any) -> None:
    record = Published(contract=view.hash, version=1, fingerprint="f", built=1, at=NOW, horizon=horizon, servers={})
    text = msgspec.json.encode(msgspec.structs.replace(record, **changes))
    with connect(url) as client:
        client.hset(records(CONTRACT.project).decode(), view.online_name, text)


def by_view(server: Server, name: str) -> dict[str, float]:
    return {dict(labels)["view"]: found for (metric, labels), found in scrape(server.http).items() if metric == name}


def ready(server: Server) -> float:
    return value(scrape(server.http), "isthmus_ready")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[str]:
    with EmbeddedRedis(tmp_path / "redis") as embedded:
        fill(embedded.url)
        yield embedded.url


def test_every_view_with_rows_has_a_time_before_anybody_asks(tmp_path: Path, own: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    everything, route, lists = (CONTRACT.view(name) for name in ("everything", "route", "lists"))
    with serving(tmp_path, own) as server:
        assert by_view(server, NEWEST) == {}
        materialized(own, PUNCTUALITY, NOW - HOUR)
        materialized(own, everything, 0)  # without times
        materialized(own, route, NOW, contract="another")
        materialized(own, lists, NEVER)  # no row was known yet
        assert by_view(server, NEWEST) == {"punctuality": (NOW - HOUR) / 1e6}
        assert by_view(server, WAITING) == dict.fromkeys(CONTRACT.views, 0)
        assert by_view(server, AGE) == {"punctuality": 3600}

        push = {"carrier": ["UA"], "event_timestamp": [NOW - 60_000_000], "known_at": [NOW - 60_000_000],
                "late_rate": [0.5], "flights": [1]}  # fmt: skip
        answer = server.http.post("/push", json={"push_source_name": "punctuality", "df": push})
        assert answer.json() == {"rows": 1, "written": 1}
        assert by_view(server, AGE) == {"punctuality": 60}
        assert by_view(server, WAITING) == {**dict.fromkeys(CONTRACT.views, 0), "punctuality": 1}
        waited = by_view(server, "isthmus_view_waiting_seconds")
        assert 0 < waited.pop("punctuality") < 60
        assert set(waited.values()) == {0}
        with connect(own) as client:
            # A row of the future is not served, and the mark of too many pushes is no time.
            name = suspects_key(CONTRACT.project, PUNCTUALITY.online_name).decode()
            client.zadd(name, {"later": NOW + HOUR, "*": float("inf")})
        assert by_view(server, AGE) == {"punctuality": 60}
        materialized(own, PUNCTUALITY, NOW - 30_000_000)
        assert by_view(server, AGE) == {"punctuality": 30}


def test_what_a_model_reads_of_an_earlier_contract_counts_as_well(tmp_path: Path, own: str) -> None:
    """Nothing but pushes makes those rows fresher: the tables are those of the current contract."""
    longer = replace(PUNCTUALITY, ttl=48 * HOUR)
    changed = replace(CONTRACT, views={**CONTRACT.views, "punctuality": longer})
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    package = make_package(tmp_path / "package")
    with serving(tmp_path, own) as server:
        server.deploy(package)
        wait(lambda: server.http.get("/readyz").json().get("model") == "late", "the model")
        materialized(own, PUNCTUALITY, NOW - HOUR)
        following = Generations(CONTRACT).with_slots(changed)
        Generations(CONTRACT).switch(following, NOW).write(tmp_path / "contract.json")
        wait(lambda: server.http.get("/readyz").json()["contract"] == following.hash, "the switch")
        assert by_view(server, AGE) == {"punctuality": 3600}
        materialized(own, following.views["punctuality"], NOW - 60_000_000)
        assert by_view(server, AGE) == {"punctuality": 3600}
        materialized(own, PUNCTUALITY, NOW)
        assert by_view(server, AGE) == {"punctuality": 60}
        gone = replace(following, views={"route": following.views["route"]}, services={})
        Generations(following, None, (Retired(CONTRACT, NOW),)).switch(gone, NOW).write(tmp_path / "contract.json")
        wait(lambda: server.http.get("/readyz").json()["contract"] == gone.hash, "the view to be gone")
        assert by_view(server, AGE) == {"punctuality": 0}


def test_a_run_that_is_not_complete_makes_no_view_fresher(tmp_path: Path, own: str) -> None:
    """It may have been killed: a part of its rows is missing."""
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    route = CONTRACT.view("route")
    with serving(tmp_path, own) as server:
        materialized(own, PUNCTUALITY, NOW, pending=True, complete=NOW - HOUR)
        materialized(own, route, NOW, pending=True)  # the first run, or that of an earlier version
        assert by_view(server, AGE) == {"punctuality": 3600}
        views = server.http.get("/status").json()["views"]
        assert [views[name]["age_seconds"] for name in ("punctuality", "route")] == [3600, None]


def test_what_was_read_last_holds_while_redis_is_away(tmp_path: Path) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with ExitStack() as running:
        url = running.enter_context(EmbeddedRedis(tmp_path / "redis")).url
        materialized(url, PUNCTUALITY, NOW - HOUR)
        with serving(tmp_path, url) as server:
            assert (ready(server), by_view(server, AGE)) == (1, {"punctuality": 3600})
            running.close()
            assert (ready(server), by_view(server, AGE)) == (0, {"punctuality": 3600})


def test_without_a_contract_there_is_nothing_to_be_ready_for(tmp_path: Path) -> None:
    with serving(tmp_path, f"redis://127.0.0.1:{free_port()}", freshness_objective_seconds={"route": 60}) as server:
        assert ready(server) == 0
        assert by_view(server, OBJECTIVE) == {}


def test_the_objectives_of_deployed_views_are_beside_their_ages(tmp_path: Path, own: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    objectives = {"punctuality": 1800.0, "route": 60.0, "gone": 5.0}
    materialized(own, PUNCTUALITY, NOW - HOUR)
    with serving(tmp_path, own, freshness_objective_seconds=objectives, latency_objective_ms=2.5) as server:
        assert by_view(server, OBJECTIVE) == {"punctuality": 1800, "route": 60}
        assert value(scrape(server.http), "isthmus_latency_objective_seconds") == 0.0025
        status = server.http.get("/status").json()["views"]
        assert [status[name]["freshness_objective_seconds"] for name in ("punctuality", "route", "lists")] == [
            1800, 60, None,
        ]  # fmt: skip
        assert (status["punctuality"]["freshness_seconds"], status["route"]["freshness_seconds"]) == (3600, None)
        page = server.http.get("/status", headers={"accept": "text/html"}).text
        assert "stale: 60 minutes, and the objective is 30 minutes" in page


def test_a_damaged_row_is_counted_from_the_first_scrape_on(tmp_path: Path, own: str) -> None:
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, own) as server:
        series = ("isthmus_view_values_total", (("status", "INVALID"), ("view", "route")))
        assert scrape(server.http)[series] == 0


@pytest.mark.accept
def test_what_a_dead_worker_served_last_does_not_stay(tmp_path: Path, own: str) -> None:
    """Its rows may have been removed from the store since."""
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())

    def served(pid: int) -> float:
        file = folder / f"gauge_livemax_{pid}.db"
        return value(counted(file), "isthmus_view_newest_known_microseconds", view="punctuality")

    def asked() -> bool:
        with httpx.Client(base_url=server.http.base_url, timeout=10) as http:
            assert http.post("/get-online-features", json=LOOKUP).status_code == 200
        return any(served(pid) for pid in workers(folder))

    with serving(tmp_path, own, workers=2) as server:
        folder = folder_of(server)
        wait(lambda: len(workers(folder)) == 2, "both workers")
        wait(asked, "a worker to have served")
        with connect(own) as client:
            client.flushall()
        for pid in workers(folder):
            os.kill(pid, signal.SIGKILL)

        def ages() -> dict[str, float] | None:
            try:
                with httpx.Client(base_url=server.http.base_url, timeout=10) as http:
                    return {key[1][0][1]: found for key, found in scrape(http).items() if key[0] == AGE}
            except httpx.TransportError:
                return None

        wait(lambda: ages() == {}, "the times of the dead to be gone")
