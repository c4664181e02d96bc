"""A run killed at any moment: readers see old rows or new ones, and the next run leaves what one alone leaves."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.publish import publish
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.redis.pipeline import Client
from tests.features.publishing.test_publish import VIEW, Row, history_of, key_of
from tests.features.support import make_contract

ROWS = 8_000
KILLS = int(os.environ.get("TEST_KILLS", "3"))

RUN = """
import sys, time
from isthmus.features.redis.connection import connect
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.publish import publish
from tests.features.support import make_contract
from tests.features.publishing.test_publish import VIEW
folder, url, now = sys.argv[1], sys.argv[2], int(sys.argv[3])
offline = OfflineStore(folder)
with connect(url) as client:
    sys.stdout.write("ready\\n")
    sys.stdout.flush()
    publish(OnlineStore(client, make_contract(VIEW)), url, offline, offline.history(VIEW), lambda: now)
"""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with EmbeddedRedis(tmp_path / "redis") as running:
        yield running.url


def _table(number: int) -> dict[int, list[Row]]:
    """The versions in turn change some values, give all rows new times, and change all."""
    at = 10 * number
    match number % 3:
        case 0:
            return {key: [(at, at, key + number)] for key in range(ROWS)}
        case 1:
            return {**_table(number - 1), **{key: [(at, at, -key)] for key in range(0, ROWS, 7)}}
    return {key: [(at, at, rows[-1][2])] for key, rows in _table(number - 1).items()}


def _rows(client: Client) -> dict[bytes, Any]:
    names = sorted(client.scan_iter("prod:k,n:*", count=10_000))
    return {name: client.hget(name, VIEW.name) for name in names}


@contextmanager
def _watched(url: str, allowed: list[dict[int, list[Row]]]) -> Iterator[list[str]]:
    """Somebody who reads all the time; the list says what was wrong."""
    over, wrong = Event(), list[str]()
    keys = random.Random(1).sample(range(ROWS), 50)
    named = [key_of(key) for key in keys]

    def read() -> None:
        with connect(url) as client:
            store = OnlineStore(client, make_contract(VIEW))
            while not over.is_set():
                answer = store.read(VIEW, {"k": [k for k, _ in named], "n": [n for _, n in named]}, 1 << 62)
                values = answer.columns["a"].data.tolist()
                for row in zip(keys, answer.event.tolist(), answer.known.tolist(), values, strict=True):
                    if not any(row[1:] == table[row[0]][-1] for table in allowed):
                        wrong.append(f"{row} is in neither table")

    thread = Thread(target=read)
    thread.start()
    try:
        yield wrong
    finally:
        over.set()
        thread.join()


@pytest.mark.accept
@pytest.mark.timeout(900)
@pytest.mark.thorough
def test_killed_at_any_moment(tmp_path: Path, url: str) -> None:
    chance = random.Random(7)
    offline = OfflineStore(tmp_path / "tables")
    with connect(url) as client:
        store = OnlineStore(client, make_contract(VIEW))

        def finish(number: int) -> None:
            publish(store, url, offline, offline.history(VIEW), lambda: 10 * number + 5)

        offline.write(offline.prepare(VIEW, history_of(_table(0))))
        finish(0)
        for number in range(1, KILLS + 1):
            offline.write(offline.prepare(VIEW, history_of(_table(number))))
            with _watched(url, [_table(number - 1), _table(number)]) as wrong:
                arguments = [sys.executable, "-c", RUN, str(tmp_path / "tables"), url, str(10 * number + 5)]
                with subprocess.Popen(arguments, stdout=subprocess.PIPE) as child:
                    assert child.stdout is not None
                    assert child.stdout.readline() == b"ready\n"
                    time.sleep(chance.uniform(0, 0.6))
                    child.kill()
                finish(number)
            assert wrong == []
            alone = _undisturbed(tmp_path / f"alone{number}", offline, number)
            assert _effective(client, number) == alone


def _effective(client: Client, number: int) -> list[Any]:
    store = OnlineStore(client, make_contract(VIEW))
    named = [key_of(key) for key in range(ROWS)]
    answer = store.read(VIEW, {"k": [k for k, _ in named], "n": [n for _, n in named]}, 10 * number + 5)
    return [answer.event.tolist(), answer.known.tolist(), answer.status.tolist(), answer.columns["a"].data.tolist(),
            answer.columns["b"].data.tolist(), len(_rows(client))]  # fmt: skip


def _undisturbed(folder: Path, offline: OfflineStore, number: int) -> list[Any]:
    with EmbeddedRedis(folder) as server, connect(server.url) as client:
        store = OnlineStore(client, make_contract(VIEW))
        publish(store, server.url, offline, offline.history(VIEW), lambda: 10 * number + 5)
        return _effective(client, number)
