"""Send many commands to Redis at once, over one connection, or over a connection to each primary of a cluster."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import Any, cast

import hiredis
import redis
from redis.exceptions import NoScriptError, SlotNotCoveredError

from isthmus.features.redis.routing import FIRST_KEY, MOVING, Command, Piece, Script, by_node, by_size, by_slot, total

Client = redis.Redis | redis.RedisCluster

IN_FLIGHT = 3
"""Batches that are sent before we wait for the first replies, so that Redis works while we prepare the next."""

_READS = 5000
"""Commands in one batch of a lookup."""


def ask(client: Client, commands: Sequence[Command]) -> list[Any]:
    """Send many read-only commands to Redis in few round trips, and return their replies in order.

    The first argument of each command must be a key, which selects the node of a cluster. If a connection is lost
    before the first reply, all commands are sent once more. Raises redis.RedisError if Redis fails or rejects a
    command.
    """
    replies: list[Any] = []
    batches = (commands[start : start + _READS] for start in range(0, len(commands), _READS))
    with closing(_Exchange(client, 1).run(batches)) as exchange:
        for _, batch in exchange:
            replies += batch
    for place, reply in enumerate(replies):
        if isinstance(reply, Exception):
            replies[place] = _follow(client, commands[place])
    return replies


def run(client: Client, script: Script, arguments: Sequence[bytes], pieces: Iterable[Piece]) -> list[int]:
    """Run a Lua script over many keys in several calls. Each call returns a list of counts; return their sums.

    Without keys, the result is empty. `arguments` are passed to each call. `pieces` has pairs of keys and their values;
    values may be empty. If a connection is lost before the first reply, all calls are sent once more, so the script
    must be safe to repeat. A later loss raises redis.ConnectionError, because a restarted Redis may have lost writes
    that it had confirmed. Raises redis.RedisError if Redis fails or rejects a call.
    """
    # Calls are sent a few batches ahead of the replies.
    batches = (by_slot if isinstance(client, redis.RedisCluster) else by_size)(pieces)
    commands = ([script.call(arguments, piece) for piece in batch] for batch in batches)
    totals: list[int] = []
    with closing(_Exchange(client, FIRST_KEY, first=script.with_text).run(commands)) as exchange:
        for calls, replies in exchange:
            counts = [totals] if totals else []
            for call, reply in zip(calls, replies, strict=True):
                if isinstance(reply, Exception):
                    counts += [_follow(client, command) for command in script.after_refusal(arguments, call, reply)]
                else:
                    counts.append(reply)
            totals = total(counts)
    return totals


def _follow(client: Client, command: Command) -> Any:
    """Repeat a rejected command with redis-py, which follows a moved slot to its node."""
    # redis-py routes a command by its name, which must be text.
    return client.execute_command(command[0].decode(), *command[1:])  # type: ignore[no-untyped-call]


class _Exchange:
    """The connections of one run. `key` is the index of a command's key; `first` changes the first command of each."""

    def __init__(self, client: Client, key: int, first: Callable[[Command], Command] = lambda same: same) -> None:
        self._client = client
        self._key = key
        self._first = first
        self._connections: dict[str, tuple[redis.ConnectionPool, Any]] = {}
        self._flying: deque[Sequence[Command]] = deque()
        self._places: deque[dict[str, list[int]]] = deque()
        self._answered = self._retried = False

    def run(self, batches: Iterable[Sequence[Command]]) -> Generator[tuple[Sequence[Command], list[Any]]]:
        """Send batches, and yield each with its replies in order. Errors worth a retry are returned as replies."""
        try:
            for batch in batches:
                self._send(batch)
                if len(self._flying) > IN_FLIGHT:
                    yield self._receive()
            while self._flying:
                yield self._receive()
        finally:
            self._release()

    def _send(self, batch: Sequence[Command]) -> None:
        self._flying.append(batch)
        try:
            self._places.append(self._deliver(batch))
        except redis.ConnectionError as loss:
            self._reconnect(loss)

    def _receive(self) -> tuple[Sequence[Command], list[Any]]:
        try:
            replies = self._collect()
        except redis.ConnectionError as loss:
            self._reconnect(loss)
            replies = self._collect()
        self._answered = True
        self._places.popleft()
        return self._flying.popleft(), replies

    def _reconnect(self, loss: redis.ConnectionError) -> None:
        if self._answered or self._retried:
            raise loss
        self._retried = True
        self._release()
        if isinstance(self._client, redis.RedisCluster):
            self._client.nodes_manager.initialize()
        self._places = deque([self._deliver(batch) for batch in self._flying])

    def _deliver(self, batch: Sequence[Command]) -> dict[str, list[int]]:
        if isinstance(self._client, redis.RedisCluster):
            nodes = by_node(batch, self._key, self._owner)
        else:
            nodes = {"": list(range(len(batch)))} if batch else {}
        for node, places in nodes.items():
            commands = [batch[place] for place in places]
            if node not in self._connections:
                self._connect(node)
                commands[0] = self._first(commands[0])
            packed = b"".join([hiredis.pack_command(cast("Any", command)) for command in commands])
            self._connections[node][1].send_packed_command([packed], check_health=False)
        return nodes

    def _collect(self) -> list[Any]:
        replies: list[Any] = [None] * len(self._flying[0])
        retryable = (NoScriptError, *MOVING) if isinstance(self._client, redis.RedisCluster) else NoScriptError
        for node, places in self._places[0].items():
            read = self._connections[node][1].read_response
            for place in places:
                try:
                    replies[place] = read(disable_decoding=True)
                except retryable as refusal:
                    replies[place] = refusal
        return replies

    def _owner(self, slot: int) -> str:
        try:
            name: str = cast("redis.RedisCluster", self._client).nodes_manager.slots_cache[slot][0].name
        except KeyError:
            raise SlotNotCoveredError(f"no node has slot {slot}") from None
        return name

    def _connect(self, node: str) -> None:
        client = self._client
        if isinstance(client, redis.RedisCluster):
            client = client.get_redis_connection(client.get_node(node_name=node))  # type: ignore[no-untyped-call]
        pool = client.connection_pool
        self._connections[node] = (pool, pool.get_connection())

    def _release(self) -> None:
        for pool, connection in self._connections.values():
            if self._flying:
                connection.disconnect()
            pool.release(connection)
        self._connections.clear()
