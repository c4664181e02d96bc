"""A Redis server, or a node of a cluster: requests follow each other on a connection without waiting.

Redis answers in order, so a connection carries the requests of many callers at once: no request borrows it from a pool,
and replies are handed out as they come, without a coroutine for each.
"""

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
"""Commands that are built and packed on the event loop: about a millisecond."""

_FEW = 256
"""Commands of a request that others may have to wait for. Larger requests have their own connection."""

_SILENCE = 0.5
"""Seconds without a reply after which a canceled request takes its connection with it."""

_NOTHING = object()


class Node:
    """A server, with a connection for small requests and another for large requests."""

    def __init__(self, url: str) -> None:
        # It only opens connections: it knows what the URL says of TLS, passwords and databases.
        # Timeouts are those of the requests.
        self._pool = redis.asyncio.ConnectionPool.from_url(
            url, protocol=2, socket_timeout=None, socket_connect_timeout=None, retry=Retry(NoBackoff(), 0)
        )
        self._wires: dict[bool, _Wire] = {}
        self._opening = {False: asyncio.Lock(), True: asyncio.Lock()}

    async def ask(self, commands: Sequence[Command], *, refusals: bool = False) -> list[Any]:
        """The replies to commands; with `refusals` an error is the reply to its command, and not raised."""
        packed = await offload(len(commands) > KEYS, _pack, commands)
        before = list(self._wires.values())
        replies = await self._replies(packed, len(commands))
        refused = [reply for reply in replies if isinstance(reply, Exception)]
        if before and any(map(is_replica_error, refused)):
            # Connections from before another server became the primary. New ones go where its name leads now.
            for wire in before:
                wire.leave()
            replies = await self._replies(packed, len(commands))
            refused = [reply for reply in replies if isinstance(reply, Exception)]
        if refused and not refusals:
            raise refused[0]
        return replies

    async def run(self, script: Script, arguments: Sequence[bytes], piece: Piece) -> list[Any]:
        """The replies to the calls that run a script over a piece."""
        return await self.ask(script.calls(arguments, piece, cluster=False))

    async def ping(self, project: str) -> None:
        """Asks for a sign of life: whether a lookup of a project would be answered, here or by the node it names.

        PING is refused where writes are, and answered where lookups are refused.
        """
        (reply,) = await self.ask([(b"HMGET", f"{project}:tables".encode(), b"")], refusals=True)
        if isinstance(reply, Exception) and not isinstance(reply, AskError):
            raise reply

    async def info(self) -> list[dict[str, str]]:
        """Return sections of the server's `INFO`; empty if the user may not run `INFO`."""
        replies = await self.ask([(b"INFO", section.encode()) for section in INFO], refusals=True)
        lines = [line for reply in replies if isinstance(reply, bytes) for line in reply.decode().splitlines()]
        found = dict(line.split(":", 1) for line in lines if ":" in line)
        return [found] if "maxmemory_policy" in found else []

    async def close(self) -> None:
        """Closes all connections."""
        for wire in self._wires.values():
            wire.abort()

    async def _replies(self, packed: bytes, count: int) -> list[Any]:
        try:
            return await self._exchange(packed, count)
        except redis.ConnectionError:
            # A connection from before Redis was restarted. The next is new.
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
        """A connection on which redis-py has shaken hands, and on which nobody but us reads and writes from then on."""
        connection: Any = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        return _Wire(connection)


class _Wire(asyncio.Protocol):
    """A connection whose transport is taken over from redis-py, and the requests whose replies are under way on it."""

    def __init__(self, connection: Any) -> None:
        self.left = False
        """Whether it takes no more requests."""
        # A writer that is collected would close its transport.
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
            # The requests of a turn of the event loop leave together: a write costs more than what it carries.
            self._loop.call_soon(self._send)
        self._outgoing.append(packed)
        try:
            return await future
        except asyncio.CancelledError:
            # The replies are still read off the connection when they come. If nothing has come for long, the other
            # side may be gone without a word, and would keep everyone waiting.
            if self._loop.time() - max(sent, self._heard) >= _SILENCE:
                self.abort()
            raise

    def _send(self) -> None:
        parts, self._outgoing = self._outgoing, []
        if not self._transport.is_closing():
            self._transport.writelines(parts)

    def leave(self) -> None:
        """Takes no more requests, and closes the connection once those under way are answered."""
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
            # The other side is no Redis.
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.left = True
        while self._waiting:
            future, _, _ = self._waiting.popleft()
            if not future.done():
                future.set_exception(redis.ConnectionError(str(exc or "the connection was closed")))


def _pack(commands: Sequence[Command]) -> bytes:
    return b"".join([hiredis.pack_command(cast("Any", command)) for command in commands])
