"""What a cluster does while a run is under way: slots move, nodes forget scripts and die."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from isthmus.features.errors import DependencyError
from isthmus.features.online.store import OnlineStore, WriteCounts
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.features.redis.embedded import EmbeddedRedis
from isthmus.features.redis.pipeline import Client, ask, run
from isthmus.features.redis.routing import Script
from isthmus.features.types import Int64
from isthmus.features.values.columns import Values
from isthmus.features.values.entitykey import entity_keys
from tests.features.support import make_contract, make_view
from tests.servers import NODES, free_port, owner, redis_cluster, redis_server

VIEW = make_view({"a": Int64}, {"k": Int64})
CONTRACT = make_contract(VIEW)
ROWS = 60_000
KEYS = {"k": list(range(ROWS))}
NAMES = entity_keys("prod", VIEW.keys, KEYS)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def url(ports: list[int]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports)


@pytest.fixture
def client(url: str) -> Iterator[redis.RedisCluster]:
    with connect(url) as connected:
        assert isinstance(connected, redis.RedisCluster)
        connected.flushall()
        yield connected


def _write(client: Client, at: int) -> WriteCounts:
    times = np.full(ROWS, at, np.int64)
    values = Values(np.arange(ROWS, dtype=np.int64) * at, np.ones(ROWS, bool))
    return OnlineStore(client, CONTRACT).write(VIEW, KEYS, times, times, {"a": values})


def _read(client: Client) -> list[Any]:
    return OnlineStore(client, CONTRACT).read(VIEW, KEYS, 100).columns["a"].tolist(Int64)


class _Nodes:
    """The nodes themselves, past every client of a cluster."""

    def __init__(self, ports: list[int]) -> None:
        self.clients = [redis.Redis(port=port) for port in ports]
        self.names = [str(self(n, "CLUSTER MYID"), "ascii") for n in range(len(ports))]

    def __call__(self, node: int, *command: Any) -> Any:
        return self.clients[node].execute_command(*command)  # type: ignore[no-untyped-call]

    def begin(self, slot: int, source: int, target: int) -> None:
        self(target, "CLUSTER SETSLOT", slot, "IMPORTING", self.names[source])
        self(source, "CLUSTER SETSLOT", slot, "MIGRATING", self.names[target])

    def move(self, names: list[bytes], source: int, target: int) -> None:
        port = self.clients[target].connection_pool.connection_kwargs["port"]
        self(source, "MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *names)

    def end(self, slot: int, target: int) -> None:
        for node in (target, *range(len(self.clients))):
            self(node, "CLUSTER SETSLOT", slot, "NODE", self.names[target])


@pytest.fixture
def nodes(ports: list[int]) -> Iterator[_Nodes]:
    found = _Nodes(ports)
    yield found
    for one in found.clients:
        one.close()


@pytest.mark.accept
def test_every_node_has_its_share(client: redis.RedisCluster, nodes: _Nodes) -> None:
    assert _write(client, 1) == WriteCounts(ROWS, ROWS, ROWS)
    shares = [nodes(n, "DBSIZE") for n in range(3)]
    assert sum(shares) == ROWS
    assert min(shares) > ROWS / 4
    assert _read(client) == list(range(ROWS))
    assert sorted(OnlineStore(client, CONTRACT).keys(VIEW)["k"]) == KEYS["k"]


@pytest.mark.accept
def test_keys_are_written_and_read_while_their_slot_moves(client: redis.RedisCluster, nodes: _Nodes) -> None:
    slots: dict[int, list[bytes]] = {}
    for name in NAMES:
        slots.setdefault(key_slot(name), []).append(name)
    slot, there = max(slots.items(), key=lambda pair: len(pair[1]))
    assert len(there) > 2
    source, target = owner(slot), (owner(slot) + 1) % NODES
    # A client from before, which learns of nothing until a node refuses its commands.
    _write(client, 1)
    nodes.begin(slot, source, target)
    try:
        nodes.move(there[::2], source, target)
        assert _read(client) == list(range(ROWS))
        assert _write(client, 2) == WriteCounts(ROWS, ROWS - 1, ROWS)
        assert _read(client) == list(range(0, 2 * ROWS, 2))
        nodes.move(there[1::2], source, target)
    finally:
        nodes.end(slot, target)
    assert _read(client) == list(range(0, 2 * ROWS, 2))
    assert _write(client, 3) == WriteCounts(ROWS, ROWS - 1, ROWS)
    assert _read(client) == list(range(0, 3 * ROWS, 3))
    assert OnlineStore(client, CONTRACT).remove_except(VIEW, {"k": KEYS["k"][:10]}, 50) == ROWS - 10
    nodes.begin(slot, target, source)
    nodes.move(there, target, source)  # the key that was kept; Redis leaves out the others
    nodes.end(slot, source)


def test_a_node_forgets_the_script(client: redis.RedisCluster, nodes: _Nodes) -> None:
    counting = Script("for n, key in ipairs(KEYS) do redis.call('SET', key, ARGV[n]) end return {#KEYS}")

    def pieces() -> Iterator[tuple[list[bytes], list[bytes]]]:
        for start in range(0, ROWS, 1000):
            for node in range(3):
                nodes(node, "SCRIPT FLUSH")
            part = NAMES[start : start + 1000]
            yield part, part

    assert run(client, counting, [], pieces()) == [ROWS]
    assert sum(nodes(n, "DBSIZE") for n in range(3)) == ROWS


def test_one_server_forgets_the_script(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, connect(server.url) as client:

        def pieces() -> Iterator[tuple[list[bytes], list[bytes]]]:
            for start in range(0, ROWS, 1000):
                client.script_flush()
                yield NAMES[start : start + 1000], []

        assert run(client, Script("redis.call('SET', KEYS[1], '') return {#KEYS}"), [], pieces()) == [ROWS]
        assert client.dbsize() == ROWS / 1000


def test_a_plain_url_of_a_cluster_is_explained(ports: list[int]) -> None:
    url = f"redis://127.0.0.1:{ports[0]}"
    with connect(url) as one, pytest.raises(DependencyError, match=r"redis\+cluster://"), translate_errors(url):
        ask(one, [(b"HGETALL", name) for name in NAMES[:20]])


def test_a_cluster_url_of_one_server_is_explained(tmp_path: Path) -> None:
    port = free_port()
    running = redis_server(tmp_path, "--port", str(port), client=redis.Redis(port=port))
    with running, pytest.raises(DependencyError, match="is not a cluster"):
        connect(f"redis+cluster://127.0.0.1:{port}")


def test_a_slot_without_a_node_is_a_clear_error(client: redis.RedisCluster, url: str) -> None:
    missing = client.nodes_manager.slots_cache.pop(key_slot(NAMES[0]))
    try:
        with pytest.raises(DependencyError, match="slot"), translate_errors(url):
            ask(client, [(b"HGETALL", NAMES[0])])
    finally:
        client.nodes_manager.slots_cache[key_slot(NAMES[0])] = missing


@pytest.mark.accept
def test_a_dead_node_is_one_clear_error(tmp_path_factory: pytest.TempPathFactory) -> None:
    with redis_cluster(tmp_path_factory.mktemp("mortal")) as mortal:
        url = f"redis+cluster://127.0.0.1:{mortal[0]},127.0.0.1:{mortal[1]}"
        with connect(url) as client:
            _write(client, 1)
            with redis.Redis(port=mortal[2], retry=Retry(NoBackoff(), 0)) as third:
                third.shutdown(nosave=True)
            with pytest.raises(DependencyError, match="does not answer") as caught, translate_errors(url):
                _write(client, 2)
            assert str(mortal[2]) in str(caught.value)
            with pytest.raises(DependencyError, match="does not answer"), translate_errors(url):
                _read(client)
