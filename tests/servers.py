"""Redis servers of the tests' own: one with any arguments, and a cluster of three primaries."""

import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis

from isthmus.features.redis.embedded import binary

NODES = 3
SLOTS = 16384


def owner(slot: int) -> int:
    """Which node of a cluster has a slot at the beginning: the first ones the first, as Redis shares them out."""
    return slot * NODES // SLOTS


@contextmanager
def redis_server(
    folder: Path, *arguments: str, client: redis.Redis, executable: str | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server with its data in `folder`, as soon as `client` gets an answer from it; it is killed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [executable or binary(), "--dir", str(folder), "--save", "", *arguments]
    with (folder / "redis.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with client:
            _await(lambda: _answers(client, process), f"Redis, see {folder}/redis.log")
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def redis_cluster(folder: Path, *arguments: str, password: str | None = None) -> Iterator[list[int]]:
    """The ports of three primaries on the loopback interface that share all slots."""
    with ExitStack() as stack:
        clients = []
        for port in _ports():
            of_node = ["--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes"]
            # Nodes that have met each other twice forget the second time after that long.
            of_node += ["--cluster-node-timeout", "1000"]
            client = redis.Redis(port=port, password=password)
            stack.enter_context(redis_server(folder / str(port), *of_node, *arguments, client=client))
            clients.append(stack.enter_context(client))
        ports = [client.connection_pool.connection_kwargs["port"] for client in clients]
        for n, client in enumerate(clients):
            # By ADDSLOTS, since 6.2 has no ADDSLOTSRANGE; the epochs are told so that nobody has to agree on them.
            client.execute_command("CLUSTER ADDSLOTS", *(slot for slot in range(SLOTS) if owner(slot) == n))
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", n + 1)
            for port in ports[:n]:
                client.execute_command("CLUSTER MEET", "127.0.0.1", port)
        _await(lambda: all(_complete(client) for client in clients), "the cluster")
        for client in clients:
            client.config_set("cluster-node-timeout", 15000)
        yield ports


def _complete(client: redis.Redis) -> bool:
    state = client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
    return bool(state["cluster_state"] == "ok" and state["cluster_known_nodes"] == str(NODES))


def _answers(client: redis.Redis, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "it ended"
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.BusyLoadingError):
        return False


def _await(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ports() -> Sequence[int]:
    """Free ports whose bus, 10000 above, is free too."""
    found: list[int] = []
    while len(found) < NODES:
        port = random.randrange(11_000, 32_000)
        with ExitStack() as stack:
            try:
                for number in (port, port + 10_000):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
