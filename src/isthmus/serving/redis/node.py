"""A Redis server or cluster node with pipelined requests: many callers share a connection."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import hiredis
import redis.asyncio
from redis.asyncio.connection import DefaultParser
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AskError, InvalidResponse

from isthmus.features.online.loss import INFO
from isthmus.features.redis.refusal import is_replica_error
from isthmus.features.redis.routing import Command, Piece, Script
from isthmus.serving.threads import offload

KEYS = 1000
"""Most commands to pack on the event loop, which takes about a millisecond."""

_FEW = 256
"""Most commands of a small request. Larger requests use a separate connection so that small ones do not wait."""

_SILENCE = 0.5
"""A canceled request closes its connection if no reply has arrived for this many seconds."""

_NOTHING = object()


class RedisNode:
    """Send the commands of many callers to a Redis server or cluster node, over shared connections.

    One connection is for small requests and one for large requests.
    """

    def __init__(self, url: str) -> None:
        # The pool only opens connections: it handles TLS, passwords and databases of the URL. Timeouts come from the
        # requests.
        self._pool = redis.asyncio.ConnectionPool.from_url(
            url, protocol=2, socket_timeout=None, socket_connect_timeout=None, retry=Retry(NoBackoff(), 0)
        )
        self._wires: dict[bool, _Wire] = {}
        self._opening = {False: asyncio.Lock(), True: asyncio.Lock()}

    async def ask(self, commands: Sequence[Command], *, refusals: bool = False) -> list[Any]:
        """Send Redis commands in one round trip, and return their replies in order.

        Raises the first error reply. With `refusals`, error replies are returned in their places instead. After a
        connection error or a failover, sends all commands once more on a new connection, so Redis may run them twice.
        """
        packed = await offload(len(commands) > KEYS, _pack, commands)
        before = list(self._wires.values())
        replies = await self._replies(packed, len(commands))
        errors = [reply for reply in replies if isinstance(reply, Exception)]
        if before and any(map(is_replica_error, errors)):
            # These connections date from before a failover. New ones go where the name resolves to now.
            for wire in before:
                wire.close_when_idle()
            replies = await self._replies(packed, len(commands))
            errors = [reply for reply in replies if isinstance(reply, Exception)]
        if errors and not refusals:
            raise errors[0]
        return replies

    async def run(self, script: Script, arguments: Sequence[bytes], piece: Piece) -> list[Any]:
        return await self.ask(script.calls(arguments, piece, cluster=False))

    async def ping(self, project: str) -> None:
        (reply,) = await self.ask([(b"HMGET", f"{project}:tables".encode(), b"")], refusals=True)
        if isinstance(reply, Exception) and not isinstance(reply, AskError):
            raise reply

    async def info(self) -> list[dict[str, str]]:
        replies = await self.ask([(b"INFO", section.encode()) for section in INFO], refusals=True)
        lines = [line for reply in replies if isinstance(reply, bytes) for line in reply.decode().splitlines()]
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        return [fields] if "maxmemory_policy" in fields else []

    async def close(self) -> None:
        for wire in self._wires.values():
            wire.abort()

    async def _replies(self, packed: bytes, count: int) -> list[Any]:
        try:
            return await self._exchange(packed, count)
        except redis.ConnectionError:
            # The connection may predate a restart of Redis; the next one is new.
            return await self._exchange(packed, count)

    async def _exchange(self, packed: bytes, count: int) -> list[Any]:
        large = count > _FEW
        wire = self._wires.get(large)
        if wire is None or wire.left:
            async with self._opening[large]:
                wire = self._wires.get(large)
                if wire is None or wire.left:
                    wire = self._wires[large] = await self._open()
        return await wire.ask(packed, count)

    async def _open(self) -> "_Wire":
        """Open a connection with redis-py, which does the handshake. Afterwards only `_Wire` reads and writes it."""
        connection: Any = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return _Wire(connection)


class _Wire(asyncio.Protocol):
    def __init__(self, connection: Any) -> None:
        self.left = False
        # Keep the writer: garbage collection of it would close the transport.
        self._writer, connection._writer, connection._reader = connection._writer, None, None
        self._transport: asyncio.WriteTransport = self._writer.transport
        self._transport.set_protocol(self)
        self._loop = asyncio.get_running_loop()
        self._replies = hiredis.Reader(
            protocolError=InvalidResponse,
            replyError=DefaultParser.parse_error,  # redis-py's class for a refusal
            notEnoughData=_NOTHING,
        )
        self._waiting: deque[tuple[asyncio.Future[list[Any]], int, list[Any]]] = deque()
        self._outgoing: list[bytes] = []
        self._heard = self._loop.time()

    async def ask(self, packed: bytes, count: int) -> list[Any]:
        if count == 0:
            return []
        sent = self._loop.time()
        future: asyncio.Future[list[Any]] = self._loop.create_future()
        self._waiting.append((future, count, []))
        if not self._outgoing:
            # Send all requests of one event loop turn together: a write costs more than the bytes it carries.
            self._loop.call_soon(self._send)
        self._outgoing.append(packed)
        try:
            return await future
        except asyncio.CancelledError:
            # Replies to a canceled request are still read and dropped. After long silence, assume the connection is
            # dead: it would delay all other requests.
            if self._loop.time() - max(sent, self._heard) >= _SILENCE:
                self.abort()
            raise

    def _send(self) -> None:
        parts, self._outgoing = self._outgoing, []
        if not self._transport.is_closing():
            self._transport.writelines(parts)

    def close_when_idle(self) -> None:
        """Take no more requests, and close the connection once the pending ones are answered."""
        self.left = True
        if not self._waiting:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
        self.connection_lost(None)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        self._replies.feed(data)
        try:
            while (reply := self._replies.gets()) is not _NOTHING:
                future, count, replies = self._waiting[0]
                replies.append(reply)
                if len(replies) == count:
                    self._waiting.popleft()
                    if not future.done():
                        future.set_result(replies)
            if self.left and not self._waiting:
                self._transport.close()
        except (InvalidResponse, IndexError):
            # The other side is not a Redis server.
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.left = True
        while self._waiting:
            future, _, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(redis.ConnectionError(str(exc or "the connection was closed")))


def _pack(commands: Sequence[Command]) -> bytes:
    return b"".join([hiredis.pack_command(cast("Any", command)) for command in commands])
