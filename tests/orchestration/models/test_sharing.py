"""A training beside a real API that is too slow for its objective: it pauses, and goes on afterwards."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from isthmus.distill.throttle import policy
from isthmus.distill.training.checkpoint import copy_weights
from isthmus.distill.training.loop import Training
from isthmus.features.latency import LatencyReader, LatencySample, LatencyWriter
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.models.students import distill
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import settings
from isthmus.orchestration.training.set import training_set
from tests.distill.pausing import Clock, squares, training
from tests.orchestration import shop
from tests.orchestration.shop import Shop
from tests.serving.support import CONTRACT, Server, fill, serving, wait

ASKED = {"features": ["punctuality:flights"], "entities": {"carrier": ["UA"]}}
IMPOSSIBLE_MS = 0.001


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as embedded:
        fill(embedded.url)
        yield embedded.url


@contextmanager
def answering(folder: Path, redis: str, **more: object) -> Iterator[tuple[Server, Path]]:
    """A server, and the folder in which it says how fast it answers."""
    folder.mkdir()
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    told = folder / "latency"
    with serving(folder, redis, latency=str(told), **more) as server:
        yield server, told


@contextmanager
def load(server: Server) -> Iterator[threading.Event]:
    """Lookups one after the other, until it is over or the event is set."""
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.http.base_url, timeout=10) as http:
            while not over.is_set():
                http.post("/get-online-features", json=ASKED)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield over
    finally:
        over.set()
        asking.join()


def weights(run: Training) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in copy_weights(run.module).items()}


@pytest.mark.accept
def test_a_training_pauses_while_the_api_is_too_slow_and_ends_as_if_it_had_been_alone(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "time", Clock(times=5))
    told: list[str] = []
    with (
        answering(tmp_path / "server", redis_url, latency_objective_ms=IMPOSSIBLE_MS) as (server, folder),
        load(server) as over,
    ):

        def progress(text: str, _done: float) -> None:
            told.append(text)
            if text.endswith(": paused"):
                over.set()

        def slowly(*asked: Any) -> Any:
            over.wait(0.05)
            return squares(*asked)

        beside = training("table", LatencyReader(folder), tmp_path / "run", 600, step=slowly, progress=progress)
        state = beside.train().state
    assert any(text.startswith("gives way to serving (p99 ") and text.endswith(" ms): paused") for text in told)
    assert any(text.startswith("takes back") for text in told)
    assert state.paused > 0
    alone = training("table", steps=600)
    alone.run()
    assert weights(beside) == weights(alone)


@pytest.mark.accept
@pytest.mark.parametrize("workers", [1, 2])
def test_what_servers_say_is_what_they_count(tmp_path: Path, redis_url: str, workers: int) -> None:
    with answering(tmp_path / "server", redis_url, latency_objective_ms=0.3, workers=workers) as (server, folder):
        wait(lambda: len(list(folder.glob("*.json"))) == workers, "all workers to say how fast they are")
        for _ in range(20):
            assert server.lookup(**ASKED).status_code == 200
        assert server.lookup(features=["no:such"], entities={}).status_code == 404
        server.http.get("/models")

        def told() -> list[LatencySample]:
            return [msgspec.json.decode(file.read_bytes(), type=LatencySample) for file in folder.glob("*.json")]

        wait(lambda: sum(sum(one.counts) for one in told()) == 20, "all answers, and nothing else, to be told")
        assert {one.objective_ms for one in told()} == {0.3}
        # The objective is a bound, of the metrics too: what is above it is exact.
        assert all(0.0003 in one.bounds for one in told())
        assert 'le="0.0003"' in server.http.get("/metrics").text
    assert not list(folder.iterdir())


@pytest.mark.accept
def test_a_folder_that_cannot_be_written_is_said_once_and_answers_go_on(tmp_path: Path, redis_url: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, redis_url, latency=str(tmp_path / "file" / "latency")) as server:
        wait(lambda: "latency not written" in server.log.read_text(), "the log")
        time.sleep(2.5)
        assert server.lookup(**ASKED).status_code == 200
        assert server.log.read_text().count("latency not written") == 1


def test_one_switch(tmp_path: Path) -> None:
    project = Project(shop.write(tmp_path / "shop").root)
    url = "redis://localhost"
    assert settings(project, url).latency == str(project.latency_folder)
    # A server that verifies serves nobody.
    assert settings(project, url, private=True).latency is None
    file = project.root / "isthmus.toml"
    switched = file.read_text().replace("[profiles.training]", "[profiles.training]\ngive_way = false")
    file.write_text(f"{switched}\n[profiles.serving]\nlatency_objective_ms = 7.5\n")
    off = settings(Project(project.root), url)
    assert (off.latency, off.latency_objective_ms) == (None, 7.5)
    file.write_text(f"{file.read_text()}\n[server]\nlatency_objective_ms = 20\n")
    apart = Project(project.root)
    assert settings(apart, url).latency_objective_ms == 20
    assert apart.settings.profiles.serving.latency_objective_ms == 7.5, "what is exported keeps its own"


@pytest.mark.parametrize("gives", [True, pytest.param(False, marks=pytest.mark.accept)])
def test_distilling_beside_a_server_runs_at_a_low_priority(built: Shop, gives: bool) -> None:
    if not gives:
        file = built.root / "isthmus.toml"
        file.write_text(file.read_text().replace("[profiles.training]", "[profiles.training]\ngive_way = false"))
    project = Project(built.root)
    training_set(project)
    teller, over, policies = LatencyWriter(project.latency_folder, 1.0, (0.001,)), threading.Event(), set()

    def tell() -> None:
        while not over.wait(1):
            teller.write([100, 0])

    teller.write([0, 0])
    telling = threading.Thread(target=tell)
    telling.start()
    try:
        distill(project, progress=lambda _text, _done: policies.add(os.sched_getscheduler(0)))
    finally:
        over.set()
        telling.join()
    assert policies == ({os.SCHED_OTHER, os.SCHED_BATCH} if gives else {os.SCHED_OTHER})
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    report = Artifacts(project, project.distillation()).last_report()["training"]
    assert (report["slowed_seconds"], report["paused_seconds"]) == (0, 0)
