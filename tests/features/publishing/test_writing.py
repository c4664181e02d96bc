"""Writers among others, and writers whose Redis or whose connection is gone in the middle."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from isthmus.features.errors import DependencyError
from isthmus.features.online.store import PIECE, OnlineStore, WriteCounts
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.redis.pipeline import IN_FLIGHT, Client, run
from isthmus.features.redis.routing import CHUNK, Script
from isthmus.features.types import Int64, String
from isthmus.features.values.rows import RowCodec
from tests.features.support import columns_of, make_contract, make_view
from tests.servers import free_port, redis_cluster, redis_server

VIEW = make_view({"a": Int64, "b": String}, {"k": Int64})
CONTRACT = make_contract(VIEW)
ROWS = 60_000
HORIZON = 1_000
PUSHED = 300
"""Keys below this one are pushed, too."""


def _write(client: Client, rows: list[dict[str, Any]], horizon: int | None = None) -> WriteCounts:
    event, known = (np.array([row[name] for row in rows], np.int64) for name in ("_event", "_known"))
    keys = {"k": [row["k"] for row in rows]}
    return OnlineStore(client, CONTRACT).write(VIEW, keys, event, known, columns_of(VIEW, rows), horizon=horizon)


def _state(client: Client) -> dict[Any, Any]:
    """The packed row of every key, past the store's own reading."""
    nodes: list[Any] = [client]
    if isinstance(client, redis.RedisCluster):
        nodes = [client.get_redis_connection(node) for node in client.get_primaries()]  # type: ignore[no-untyped-call]
    found: dict[Any, Any] = {}
    for node in nodes:
        names = list(node.scan_iter("*:k:*", count=5000))
        pipeline = node.pipeline(transaction=False)
        for name in names:
            pipeline.hgetall(name)
        found.update(zip(names, pipeline.execute(), strict=True))
    return found


def _rows(at: int) -> list[dict[str, Any]]:
    return [{"k": n, "_event": at, "_known": at, "a": n * at, "b": str(n)} for n in range(ROWS)]


@pytest.mark.accept
@pytest.mark.parametrize(
    "kept", [pytest.param(True, marks=pytest.mark.accept), False], ids=["rows are kept", "rows are lost"]
)
def test_a_killed_redis_is_one_clear_error_and_a_rerun_mends_it(tmp_path: Path, kept: bool) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}"
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--appendonly", "yes" if kept else "no"]

    def probe() -> redis.Redis:
        return redis.Redis(port=port, retry=Retry(NoBackoff(), 0))

    before, after = _rows(1), _rows(2)
    with EmbeddedRedis(tmp_path / "undisturbed") as calm, connect(calm.url) as client:
        _write(client, before)
        _write(client, after)
        expected = _state(client)
    with redis_server(tmp_path / "killed", *arguments, client=probe()) as process, connect(url) as client:
        _write(client, before)
        reached = int(client.info("commandstats").get("cmdstat_hset", {"calls": 0})["calls"])

        def kill() -> None:
            with probe() as watching:
                while int(watching.info("commandstats")["cmdstat_hset"]["calls"]) < reached + 5 * CHUNK:
                    pass
            os.kill(process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(DependencyError, match="does not answer") as caught, translate_errors(url):
            _write(client, after)
        killer.join()
        assert f"127.0.0.1:{port}" in str(caught.value)
    with redis_server(tmp_path / "killed", *arguments, client=probe()), connect(url) as client:
        if kept:
            assert 0 < sum(row != expected[name] for name, row in _state(client).items()) < ROWS
        _write(client, after)
        assert _state(client) == expected
        assert _write(client, after) == WriteCounts(ROWS, 0, 0)


_SET = Script("for n, key in ipairs(KEYS) do redis.call('INCR', key) end return {#KEYS}")


def _cut(client: Any, calls: int, cut: int) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Calls of one key each; before one of them all other connections are cut."""
    for n in range(calls):
        if n == cut:
            with redis.Redis(connection_pool=client.connection_pool) as other:
                other.client_kill_filter(_type="normal", skipme=True)
        yield [b"%d" % n], []


def test_a_connection_is_made_anew_as_long_as_nothing_was_confirmed(tmp_path: Path) -> None:
    calls = 4 * IN_FLIGHT
    with EmbeddedRedis(tmp_path) as server, connect(server.url) as client:
        assert run(client, _SET, [], _cut(client, calls, IN_FLIGHT)) == [calls]
        assert {int(client.get(b"%d" % n)) for n in range(IN_FLIGHT, calls)} == {1}
        with pytest.raises(redis.ConnectionError):
            run(client, _SET, [], _cut(client, calls, IN_FLIGHT + 3))
        # What an error leaves behind answers nobody else.
        assert run(client, _SET, [], _cut(client, calls, -1)) == [calls]
        assert client.ping() is True


def test_an_error_of_redis_leaves_no_replies_behind(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, connect(server.url) as client:
        client.set("5", "no number")
        for _ in range(3):
            with pytest.raises(redis.ResponseError, match="integer"):
                run(client, _SET, [], _cut(client, 12, -1))
            assert client.ping() is True


class _Watched(list[int]):
    """Key values that know what Redis has already whenever some more of them are taken."""

    def __init__(self, values: Any, redis_has: Any) -> None:
        super().__init__(values)
        self._redis_has = redis_has
        self.ahead: list[int] = []

    def __getitem__(self, place: Any) -> Any:
        self.ahead.append(place.stop - self._redis_has())
        return super().__getitem__(place)


def test_packing_is_a_few_pieces_ahead_of_redis_at_most(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, connect(server.url) as client, connect(server.url) as other:
        keys = _Watched(range(ROWS), other.dbsize)
        times, columns = np.ones(ROWS, np.int64), columns_of(VIEW, _rows(1))
        assert OnlineStore(client, CONTRACT).write(VIEW, {"k": keys}, times, times, columns).written == ROWS
    assert len(keys.ahead) == ROWS / PIECE
    assert max(keys.ahead) <= PIECE + (IN_FLIGHT + 1) * CHUNK


@contextmanager
def _one_server(folder: Path) -> Iterator[str]:
    with EmbeddedRedis(folder) as server:
        yield server.url


@contextmanager
def _cluster(folder: Path) -> Iterator[str]:
    with redis_cluster(folder) as ports:
        yield f"redis+cluster://127.0.0.1:{ports[0]}"


def _offered(writer: int) -> list[dict[str, Any]]:
    """What a writer has to write: all know the same keys, many of the same rows, and nothing that the table decides."""
    rng = np.random.default_rng(writer // 2)
    rows = []
    for n in rng.integers(0, PUSHED, 3000).tolist():
        event, later, a = (int(x) for x in rng.integers(0, 5, 3))
        rows.append({"k": n, "_event": HORIZON - 2 + event, "_known": HORIZON + 1 + later, "a": a, "b": str(a) * a})
    np.random.default_rng(writer).shuffle(rows)
    return rows


def _table() -> list[dict[str, Any]]:
    rng = np.random.default_rng(99)
    return [
        {"k": n, "_event": HORIZON - 2 + int(rng.integers(0, 3)), "_known": HORIZON, "a": n, "b": "table"}
        for n in range(100, 600)
    ]


def _push(url: str, writer: int, start: Any) -> None:
    rows = _offered(writer)
    with connect(url) as client:
        start.wait()
        for place in range(0, len(rows), 37):
            _write(client, rows[place : place + 37])


def _materialize(url: str, start: Any) -> None:
    rows = _table()
    with connect(url) as client:
        start.wait()
        for _ in range(5):
            _write(client, rows, HORIZON)
            OnlineStore(client, CONTRACT).remove_except(VIEW, {"k": [row["k"] for row in rows]}, HORIZON)


@pytest.mark.accept
@pytest.mark.parametrize("where", [_one_server, pytest.param(_cluster, marks=pytest.mark.accept)])
def test_writers_at_once_end_where_writers_in_a_row_do(tmp_path: Path, where: Any) -> None:
    writers = 4
    # What the table takes back. A push that comes before that and loses to it is gone: here none loses.
    stale = [
        {"k": n, "_event": HORIZON + (5 if n >= PUSHED else -3), "_known": HORIZON, "a": -1, "b": ""}
        for n in range(100, 600, 3)
    ]
    gone = [{"k": n, "_event": 1, "_known": 1, "a": -1, "b": ""} for n in range(600, 700)]
    newest: dict[int, Any] = {}
    for row in [*_table(), *(row for writer in range(writers) for row in _offered(writer))]:
        content = RowCodec(VIEW).content(columns_of(VIEW, [row]), 1).tolist()[0]
        order = (row["_event"], row["_known"], content)
        newest[row["k"]] = max(newest.get(row["k"], (order, row)), (order, row), key=lambda pair: pair[0])
    spawn = multiprocessing.get_context("spawn")
    with where(tmp_path) as url, connect(url) as client:
        _write(client, stale + gone)
        start = spawn.Barrier(writers + 1)
        processes = [spawn.Process(target=_push, args=(url, writer, start)) for writer in range(writers)]
        processes.append(spawn.Process(target=_materialize, args=(url, start)))
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            assert process.exitcode == 0
        found = _state(client)
        client.flushall()
        _write(client, [row for _, row in newest.values()])
        assert found == _state(client)
