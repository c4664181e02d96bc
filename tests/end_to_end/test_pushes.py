"""Servers and collectors killed at any moment while rows are pushed: the history of an undisturbed run."""

import os
import random
import signal
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from isthmus.features.offline.history import table_schema
from isthmus.features.offline.pushes import PushLog
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online.store import OnlineStore
from isthmus.features.publishing.collect import collect
from isthmus.features.redis.connection import connect
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.values.arrow import micros
from tests.features.publishing.test_collect import collector
from tests.serving.support import CONTRACT, NOW, PUNCTUALITY, Server, serving, wait

pytestmark = pytest.mark.accept

KILLS = int(os.environ.get("TEST_KILLS", "16"))
ROWS = 50
DAY = 86_400_000_000


class Pusher(threading.Thread):
    """Pushes rows with keys of their own until it is stopped, and knows which of them were accepted."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.server: Server | None = None
        self.accepted: set[str] = set()
        self.unknown: set[str] = set()
        self.stopped = threading.Event()

    def run(self) -> None:
        turn = 0
        while not self.stopped.is_set():
            if (server := self.server) is None:
                time.sleep(0.01)
                continue
            turn += 1
            names = [f"{turn}-{n}" for n in range(ROWS)]
            times = {"event_timestamp": [NOW - turn % 3 * DAY] * ROWS, "known_at": [NOW] * ROWS}
            df = {"carrier": names, **times, "late_rate": [0.5] * ROWS, "flights": list(range(ROWS))}
            self.unknown.update(names)
            with suppress(httpx.TransportError):
                if server.http.post("/push", json={"push_source_name": "punctuality", "df": df}).status_code == 200:
                    self.accepted.update(names)
                    self.unknown.difference_update(names)


@pytest.mark.thorough
def test_nothing_is_lost_and_nothing_is_twice(tmp_path: Path) -> None:
    chance, store = random.Random(7), OfflineStore(tmp_path / "store")
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "contract.json").write_bytes(CONTRACT.dumps())
    with store.prepare(PUNCTUALITY, _nothing()) as ready:
        store.write(ready)
    pusher = Pusher()
    pusher.start()
    with EmbeddedRedis(tmp_path / "redis") as server, connect(server.url) as client, ExitStack() as last:
        last.callback(pusher.stopped.set)
        for kill in range(KILLS):
            with suppress(AssertionError), ExitStack() as stack:
                # `serving` asserts that its process ends by SIGTERM.
                running = stack.enter_context(serving(tmp_path / "server", server.url))
                child = stack.enter_context(
                    collector(server.url, store.root, "tests.serving.support", "PUNCTUALITY", "flights")
                )
                wait(lambda running=running: running.http.get("/readyz").status_code == 200, "the contract")
                pusher.server = running
                time.sleep(chance.uniform(0.02, 0.6))
                victim = child if kill % 2 else running.process
                os.kill(victim.pid, signal.SIGKILL)
                victim.wait()
                pusher.server = None
        pusher.stopped.set()
        pusher.join()
        collect(client, CONTRACT.project, store, PUNCTUALITY.table, [PUNCTUALITY])
        served = set(OnlineStore(client, CONTRACT).keys(PUNCTUALITY)["carrier"])
    rows = store.history(PUNCTUALITY).table()
    names = rows["carrier"].to_pylist()
    assert len(names) == len(set(names)), "nothing is twice"
    assert len(pusher.accepted) > KILLS * ROWS, "there was something to lose"
    assert pusher.accepted <= set(names) <= pusher.accepted | pusher.unknown
    assert pusher.accepted <= served <= set(names), "what is served is in the history"
    assert sorted(PushLog(store.root, PUNCTUALITY.table).rows(PUNCTUALITY)["carrier"].to_pylist()) == sorted(names)
    assert set(micros(rows["known_at"]).tolist()) == {NOW}
    undisturbed = OfflineStore(tmp_path / "undisturbed")
    with undisturbed.prepare(PUNCTUALITY, rows) as ready:
        undisturbed.write(ready)
    assert undisturbed.history(PUNCTUALITY).fingerprint == store.history(PUNCTUALITY).fingerprint


def _nothing() -> pa.Table:
    return table_schema(PUNCTUALITY).empty_table()
