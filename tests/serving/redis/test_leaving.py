"""Clients leave in the middle of a request, and nobody else gets a value of theirs.

TEST_SECONDS says for how long.
"""

import json
import os
import random
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from isthmus.features.online.store import OnlineStore
from isthmus.features.redis.connection import connect
from tests.servers import redis_cluster
from tests.serving.support import CONTRACT, NOW, Server, fill, serving, write

SECONDS = float(os.environ.get("TEST_SECONDS", "5"))
FLIGHTS = 2_000
ROWS = 100
ABORT = struct.pack("ii", 1, 0)
"""Of SO_LINGER: the connection ends by a reset."""


class Clients:
    """Threads that ask for rows drawn at random until the time is over, and either read the answer or leave."""

    def __init__(self, server: Server) -> None:
        self._server, self._end = server, time.monotonic() + SECONDS
        self.left, self.values, self.wrong = 0, 0, list[str]()
        self._threads = [threading.Thread(target=self._leave, args=[seed]) for seed in range(3)]
        self._threads += [threading.Thread(target=self._check, args=[seed]) for seed in range(3)]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()

    def _leave(self, seed: int) -> None:
        chance, port = random.Random(seed), self._server.http.base_url.port
        while time.monotonic() < self._end:
            body = json.dumps(_question(chance)).encode()
            head = f"POST /get-online-features HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            request = head.encode() + body
            with socket.create_connection(("127.0.0.1", port)) as connection, suppress(ConnectionError, TimeoutError):
                connection.settimeout(0.01)
                if chance.random() < 0.2:
                    connection.sendall(request[: chance.randrange(len(request))])
                else:
                    connection.sendall(request)
                    if chance.random() < 0.7:
                        time.sleep(chance.random() * 0.004)  # the moment to leave at, not one to wait for
                    else:
                        connection.recv(100)  # a part of the answer
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
            self.left += 1

    def _check(self, seed: int) -> None:
        chance = random.Random(100 + seed)
        with httpx.Client(base_url=self._server.http.base_url, timeout=30) as http:
            while time.monotonic() < self._end and len(self.wrong) < 10:
                question = _question(chance)
                answer = http.post("/get-online-features", json=question)
                if answer.status_code != 200:
                    self.wrong.append(answer.text)
                elif (values := answer.json()["results"][-1]["values"]) != question["entities"]["flight"]:
                    self.wrong.append(f"{values} instead of {question['entities']['flight']}")
                self.values += ROWS


def _question(chance: random.Random) -> dict[str, Any]:
    flights = [chance.randrange(FLIGHTS) for _ in range(ROWS)]
    return {"features": ["route:flights"], "entities": {"carrier": ["UA"] * ROWS, "flight": flights}}


def _nobody_is_answered_for_another(folder: Path, url: str, workers: int) -> None:
    fill(url)
    with connect(url) as client:
        keys: dict[str, list[Any]] = {"carrier": ["UA"] * FLIGHTS, "flight": list(range(FLIGHTS))}
        write(OnlineStore(client, CONTRACT), CONTRACT.view("route"), keys, [NOW] * FLIGHTS, flights=range(FLIGHTS))
    (folder / "contract.json").write_bytes(CONTRACT.dumps())
    with serving(folder, url, workers=workers) as server:
        clients = Clients(server)
        clients.run()
        print(f"{clients.left:,} left, {clients.values:,} values")  # noqa: T201 - a report
        assert clients.wrong == []
        assert clients.left > 10 * SECONDS
        assert clients.values > 10 * ROWS * SECONDS
        assert server.http.get("/readyz").status_code == 200


@pytest.mark.accept
@pytest.mark.thorough
@pytest.mark.timeout(120 + 4 * SECONDS)
@pytest.mark.parametrize("workers", [1, 2])
def test_values_of_one_redis(tmp_path: Path, redis_url: str, workers: int) -> None:
    _nobody_is_answered_for_another(tmp_path, redis_url, workers)


@pytest.mark.accept
@pytest.mark.thorough
@pytest.mark.timeout(120 + 4 * SECONDS)
def test_values_of_a_cluster(tmp_path: Path) -> None:
    with redis_cluster(tmp_path / "cluster") as ports:
        _nobody_is_answered_for_another(tmp_path, f"redis+cluster://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}", 2)
