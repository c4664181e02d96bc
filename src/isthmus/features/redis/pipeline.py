"""Commands in flight: many at once, on the connection to one Redis or on those to every primary of a cluster."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from hashlib import sha1
from typing import Any, cast

import hiredis
import redis
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, NoScriptError, SlotNotCoveredError, TryAgainError

Client = redis.Redis | redis.RedisCluster
Command = tuple[bytes, ...]
Piece = tuple[Sequence[bytes], Sequence[bytes]]
"""Keys, and one value for each or none at all."""

CHUNK = 1000
"""Keys in one call of a script: long enough to make round trips rare, short enough not to block Redis."""

IN_FLIGHT = 3
"""Batches that are sent before the replies to the first one are awaited: Redis works while the next one is made."""

FIRST_KEY = 3
"""Where the first key of a call of a script is."""

_READS = 5000
"""Commands in one batch of a lookup."""

_ROUND = 1000
"""Calls in one batch to a cluster."""

_BLOCK_KEYS, _BLOCK_BYTES = 1 << 16, 1 << 24
"""What is gathered for a cluster before it is sorted by slots: with 4 keys a slot, a quarter of the calls."""

_ELSEWHERE = (AskError, TryAgainError, ClusterDownError)  # A MovedError is an AskError.


def ask(client: Client, commands: Sequence[Command]) -> list[Any]:
    """The replies to commands whose first argument is a key: one round trip, to all nodes at once.

    Of very many commands, the later ones are sent while the first ones' replies come in.
    """
    replies: list[Any] = []
    batches = (commands[start : start + _READS] for start in range(0, len(commands), _READS))
    with closing(_Exchange(client, 1).run(batches)) as exchange:
        for found in exchange:
            replies += found
    for place, reply in enumerate(replies):
        if isinstance(reply, Exception):
            replies[place] = _elsewhere(client, reply, *commands[place])
    return replies


class Script:
    """A Lua script over many keys whose reply is some counts: what they add up to is independent of any grouping.

    Args:
        text: what works on KEYS, and on arguments: first those that are common to all keys, then one for each or none.
    """

    def __init__(self, text: str) -> None:
        self._text = text.encode()
        self._sha = sha1(self._text, usedforsecurity=False).hexdigest().encode()

    def run(self, client: Client, arguments: Sequence[bytes], pieces: Iterable[Piece]) -> list[int]:
        """Runs the script over all keys, a few calls ahead of the replies; returns the sums of what it replied.

        A connection that is lost before the first reply is made anew once: any call may be made twice. After that it is
        an error, since a Redis that was started again may have lost what it had confirmed.
        """
        batched = _by_slot(pieces) if isinstance(client, redis.RedisCluster) else _by_size(pieces)
        calls: deque[Sequence[Piece]] = deque()

        def commands() -> Iterator[Sequence[Command]]:
            for batch in batched:
                calls.append(batch)
                yield [self._call(arguments, piece) for piece in batch]

        totals: list[int] = []
        with closing(_Exchange(client, FIRST_KEY, first=self._first).run(commands())) as exchange:
            for replies in exchange:
                for place, piece in enumerate(calls.popleft()):
                    if isinstance(replies[place], Exception):
                        replies[place] = self._again(client, arguments, piece, replies[place])
                totals = _sums([totals, *replies] if totals else replies)
        return totals

    def calls(self, arguments: Sequence[bytes], piece: Piece, *, by_slot: bool) -> list[Command]:
        """The commands that run the script over a piece, for who sends them at once.

        On one server the first brings the text along, so that no restart can have lost it for the others. In a cluster
        (`by_slot`) all do, since each may go to another node.
        """
        parts = [part for batch in (_by_slot if by_slot else _by_size)([piece]) for part in batch]
        commands = [self._call(arguments, part) for part in parts]
        return [self._first(command) if by_slot or not n else command for n, command in enumerate(commands)]

    def apart(self, arguments: Sequence[bytes], call: Command) -> list[Command]:
        """A call with one value for each key as one call per key, for when some keys of a slot have moved ahead."""
        count = int(call[2])
        keys, values = call[FIRST_KEY : FIRST_KEY + count], call[FIRST_KEY + count + len(arguments) :]
        pairs = zip(keys, values, strict=True)
        return [self._first(self._call(arguments, ([key], [value]))) for key, value in pairs]

    def _call(self, arguments: Sequence[bytes], piece: Piece) -> Command:
        keys, values = piece
        return (b"EVALSHA", self._sha, b"%d" % len(keys), *keys, *arguments, *values)

    def _first(self, command: Command) -> Command:
        """The call with the text of the script, from which Redis knows it for the following ones."""
        return (b"EVAL", self._text, *command[2:])

    def _again(self, client: Client, arguments: Sequence[bytes], piece: Piece, reply: Exception) -> list[int]:
        """A call that a node has refused. Of a slot on the move, some keys are here and some there: each goes alone."""
        keys, values = piece
        parts = [piece] if isinstance(reply, NoScriptError) else [([k], values[n : n + 1]) for n, k in enumerate(keys)]
        counts = [_elsewhere(client, reply, *self._first(self._call(arguments, part))) for part in parts]
        return _sums(counts)


def _sums(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*counts, strict=True)]


def _by_size(pieces: Iterable[Piece]) -> Iterator[Sequence[Piece]]:
    """One call of at most `CHUNK` keys at a time."""
    for keys, values in pieces:
        for start in range(0, len(keys), CHUNK):
            yield [(keys[start : start + CHUNK], values[start : start + CHUNK])]


def _by_slot(pieces: Iterable[Piece]) -> Iterator[Sequence[Piece]]:
    """Calls whose keys share a slot, as Redis Cluster wants it, some at a time."""
    slots: dict[int, tuple[list[bytes], list[bytes]]] = {}
    held = size = 0
    for keys, values in pieces:
        places = list(map(key_slot, keys))
        for slot in set(places) - slots.keys():
            slots[slot] = ([], [])
        for slot, key in zip(places, keys, strict=True):
            slots[slot][0].append(key)
        for slot, value in zip(places, values, strict=bool(values)):
            slots[slot][1].append(value)
        held += len(keys)
        size += sum(map(len, values))
        if held >= _BLOCK_KEYS or size >= _BLOCK_BYTES:
            yield from _rounds(slots)
            slots, held, size = {}, 0, 0
    yield from _rounds(slots)


def _rounds(slots: Mapping[int, Piece]) -> Iterator[Sequence[Piece]]:
    calls = [
        (keys[start : start + CHUNK], values[start : start + CHUNK])
        for keys, values in slots.values()
        for start in range(0, len(keys), CHUNK)
    ]
    for start in range(0, len(calls), _ROUND):
        yield calls[start : start + _ROUND]


def _elsewhere(client: Client, reply: Exception, *command: bytes) -> Any:
    """The reply to a command that its node has refused, by way of redis-py, which follows a slot to where it is."""
    if not isinstance(client, redis.RedisCluster) and not isinstance(reply, NoScriptError):
        raise reply
    # The name as text: by it redis-py decides where a command goes.
    return client.execute_command(command[0].decode(), *command[1:])  # type: ignore[no-untyped-call]


class _Exchange:
    """The connections of one run, each used by nobody else until all its replies are read.

    Args:
        client: where the connections come from.
        key: which part of a command is its key.
        first: makes of the first command on a connection the one that is sent.
    """

    def __init__(self, client: Client, key: int, first: Callable[[Command], Command] = lambda same: same) -> None:
        self._client = client
        self._key = key
        self._first = first
        self._connections: dict[str, tuple[redis.ConnectionPool, Any]] = {}
        self._flying: deque[Sequence[Command]] = deque()
        self._places: deque[dict[str, list[int]]] = deque()
        self._answered = self._retried = False

    def run(self, batches: Iterable[Sequence[Command]]) -> Generator[list[Any]]:
        """The replies to each batch, in order; a refusal of a node of a cluster stands in the place of its reply."""
        try:
            for batch in batches:
                self._send(batch)
                if len(self._flying) > IN_FLIGHT:
                    yield self._receive()
            while self._flying:
                yield self._receive()
        finally:
            self._leave()

    def _send(self, batch: Sequence[Command]) -> None:
        self._flying.append(batch)
        try:
            self._places.append(self._deliver(batch))
        except redis.ConnectionError as loss:
            self._anew(loss)

    def _receive(self) -> list[Any]:
        try:
            replies = self._collect()
        except redis.ConnectionError as loss:
            self._anew(loss)
            replies = self._collect()
        self._answered = True
        self._flying.popleft()
        self._places.popleft()
        return replies

    def _anew(self, loss: redis.ConnectionError) -> None:
        """Sends what is under way on new connections, once."""
        if self._answered or self._retried:
            raise loss
        self._retried = True
        self._leave()
        if isinstance(self._client, redis.RedisCluster):
            self._client.nodes_manager.initialize()
        self._places = deque([self._deliver(batch) for batch in self._flying])

    def _deliver(self, batch: Sequence[Command]) -> dict[str, list[int]]:
        """Sends a batch; returns which of its commands went to which node."""
        places: dict[str, list[int]] = {}
        if isinstance(self._client, redis.RedisCluster):
            for place, command in enumerate(batch):
                places.setdefault(self._node(self._client, command[self._key]), []).append(place)
        elif batch:
            places[""] = list(range(len(batch)))
        for node, mine in places.items():
            commands = [batch[place] for place in mine]
            if node not in self._connections:
                self._enter(node)
                commands[0] = self._first(commands[0])
            packed = b"".join([hiredis.pack_command(cast("Any", command)) for command in commands])
            self._connections[node][1].send_packed_command([packed], check_health=False)
        return places

    def _collect(self) -> list[Any]:
        """The replies to the batch that was sent first."""
        replies: list[Any] = [None] * len(self._flying[0])
        cluster = isinstance(self._client, redis.RedisCluster)
        for node, mine in self._places[0].items():
            read = self._connections[node][1].read_response
            for place in mine:
                try:
                    replies[place] = read(disable_decoding=True)
                except NoScriptError as refusal:
                    replies[place] = refusal
                except _ELSEWHERE as refusal:
                    if not cluster:
                        raise
                    replies[place] = refusal
        return replies

    @staticmethod
    def _node(client: redis.RedisCluster, key: bytes) -> str:
        try:
            name: str = client.nodes_manager.slots_cache[key_slot(key)][0].name
        except KeyError:
            raise SlotNotCoveredError(f"no node has slot {key_slot(key)}") from None  # type: ignore[no-untyped-call]
        return name

    def _enter(self, node: str) -> None:
        client = self._client
        if isinstance(client, redis.RedisCluster):
            client = client.get_redis_connection(client.get_node(node_name=node))  # type: ignore[no-untyped-call]
        pool = client.connection_pool
        self._connections[node] = (pool, pool.get_connection())

    def _leave(self) -> None:
        """Gives the connections back; one with replies that nobody has read is closed."""
        for pool, connection in self._connections.values():
            if self._flying:
                connection.disconnect()
            pool.release(connection)
        self._connections.clear()
