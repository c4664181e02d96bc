import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from isthmus.features.redis.embedded import binary
from tests.serving.support import CONTRACT, Server, fill, free_port, require_discreet, serving, wait

PASSWORD = "never-to-be-shown"  # noqa: S105
ASKED: dict[str, Any] = {"features": ["punctuality:flights"], "entities": {"carrier": ["B6"]}}
VALUES = {"UA": 2**60 + 1, "B6": 7, "EX": 10, "AA": None, "??": None}
CLIENTS = 8


@contextmanager
def redis_server(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A Redis that can be killed and started again on the same port with the same data."""
    arguments = [
        "--port", str(port), "--requirepass", PASSWORD, "--dir", str(folder), "--save", "",
        "--appendonly", "yes", "--appendfsync", "always",
    ]  # fmt: skip
    process = subprocess.Popen([binary(), *arguments], stdout=subprocess.DEVNULL)
    try:
        # Without the client's own retries, to know to the hundredth of a second when Redis is back.
        with redis.Redis(port=port, password=PASSWORD, retry=Retry(NoBackoff(), 0)) as client:
            wait(lambda: _answers(client), "Redis")
        yield process
    finally:
        process.kill()
        process.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.BusyLoadingError):
        return False


def test_redis_is_killed_and_comes_back(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://:{PASSWORD}@127.0.0.1:{port}"
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, url) as server:
        with redis_server(tmp_path, port):
            fill(url)
            assert server.lookup(**ASKED).json()["results"][1]["values"] == [7]
        start = time.monotonic()
        for path in ("/get-online-features", "/readyz"):
            gone = server.lookup(**ASKED) if path == "/get-online-features" else server.http.get(path)
            assert (gone.status_code, gone.json()["error"]) == (503, "DependencyError")
            assert gone.headers["retry-after"] == "1"
            assert f"127.0.0.1:{port}" in gone.json()["where"]
            assert PASSWORD not in gone.text
        assert time.monotonic() - start < 1
        with redis_server(tmp_path, port) as process:
            for _ in range(3):
                assert server.lookup(**ASKED).json()["results"][1]["values"] == [7]
            # Redis that is there and says nothing is as good as gone.
            os.kill(process.pid, signal.SIGSTOP)
            start = time.monotonic()
            assert server.lookup(**ASKED).status_code == 503
            assert time.monotonic() - start < 6
            os.kill(process.pid, signal.SIGCONT)
            assert server.lookup(**ASKED).status_code == 200
    assert PASSWORD not in server.log.read_text()


@dataclass
class Load:
    """Clients that ask without a pause, each for other keys, and note when each answer came and what was wrong."""

    server: Server
    answers: list[tuple[float, float, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def _ask(self, client: int) -> None:
        carriers = list(VALUES)[client % 5 :] + list(VALUES)[: client % 5]
        expected = [VALUES[carrier] for carrier in carriers]
        asked = {"features": ["punctuality:flights"], "entities": {"carrier": carriers}}
        with httpx.Client(base_url=self.server.http.base_url, timeout=15) as http:
            while not self.ended.is_set():
                start = time.monotonic()
                try:
                    answer = http.post("/get-online-features", json=asked)
                    require_discreet(answer.text, {PASSWORD})
                    good = answer.status_code == 503 or answer.json()["results"][1]["values"] == expected
                    if not good or (answer.status_code == 503 and answer.headers["retry-after"] != "1"):
                        self.wrong.append(answer.text)
                    self.answers.append((start, time.monotonic(), answer.status_code))
                except (httpx.TransportError, AssertionError) as error:
                    self.wrong.append(repr(error))

    def __enter__(self) -> "Load":
        self._threads = [threading.Thread(target=self._ask, args=[client]) for client in range(CLIENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        for thread in self._threads:
            thread.join()

    def statuses(self, begin: float, end: float) -> set[int]:
        """The statuses of requests that began and were answered in a stretch of time."""
        return {status for start, answered, status in self.answers if start > begin and answered < end}


@pytest.mark.accept
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_under_load_no_value_is_wrong_and_the_service_is_back_with_redis(tmp_path: Path, how: str) -> None:
    port = free_port()
    (tmp_path / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(tmp_path, f"redis://:{PASSWORD}@127.0.0.1:{port}") as server, ExitStack() as started:
        process = started.enter_context(redis_server(tmp_path, port))
        fill(f"redis://:{PASSWORD}@127.0.0.1:{port}")
        outages = []
        with Load(server) as load:
            for _ in range(2):
                begin, before = time.monotonic(), len(load.answers)
                wait(lambda before=before: len(load.answers) > before + 5 * CLIENTS, "the load to be answered")
                still = gone = time.monotonic()
                if how == "killed":
                    process.kill()
                    process.wait()
                    gone = time.monotonic()
                    time.sleep(1)
                    until = time.monotonic()
                    process = started.enter_context(redis_server(tmp_path, port))
                else:
                    process.send_signal(signal.SIGSTOP)
                    time.sleep(0.05)  # until it has come to a stop
                    gone = time.monotonic()
                    time.sleep(4.5)  # longer than two requests, one after the other, wait for Redis
                    until = time.monotonic()
                    process.send_signal(signal.SIGCONT)
                back = time.monotonic()
                time.sleep(2)
                outages.append((begin, still, gone, until, back, time.monotonic()))
    assert not load.wrong, load.wrong[:3]
    assert max(end - start for start, end, _ in load.answers) < (1 if how == "killed" else 3)
    for begin, still, gone, until, back, end in outages:
        assert load.statuses(begin, still) == {200}
        assert load.statuses(gone, until) == {503}
        assert load.statuses(back + 1, end) == {200}
        first = min(answered for start, answered, status in load.answers if answered > back and status == 200)
        assert first - back < 1
