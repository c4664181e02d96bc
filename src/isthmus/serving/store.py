"""The connection to the online store: one pipelined round trip per request, every wait bounded."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import hiredis
import redis.asyncio

from isthmus.features.online import LookupPlan, ViewAnswer, answering
from isthmus.serving.limits import Limits
from isthmus.serving.offload import VALUES, offload

TIMEOUT_SECONDS = 2.0
KEYS = 1000
"""Rows whose commands are packed on the event loop: about a millisecond."""
TURN = 256
"""Replies that are read before other requests have their turn: about a millisecond."""
_SPARE = 32
"""Connections beyond those of the requests that are counted: for the state of the server."""


class Store:
    """The Redis of a server process.

    The exchange is written out here because a redis-py pipeline sets a timer and passes half a dozen coroutines for
    each of the many replies of a lookup: half of all the time that a lookup of a hundred keys took.

    Args:
        url: `redis://`, `rediss://` or `unix://`; the settings have checked it.
        limits: of the server: each request has a connection, and half of the time it has left for Redis at most.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        self._url = url
        self._seconds = min(TIMEOUT_SECONDS, limits.deadline_seconds / 2)
        connections = limits.concurrency + _SPARE
        self._pool = redis.asyncio.ConnectionPool.from_url(url, max_connections=connections, socket_timeout=None)

    async def read(
        self, plan: LookupPlan, keys: Mapping[str, Sequence[Any]], rows: int, at: int
    ) -> dict[str, ViewAnswer]:
        """What the views of a plan answer for `rows` rows of keys at time `at`.

        Raises:
            DependencyError: Redis does not answer.
            ContractMismatch: a row was written under another contract.
        """
        packed, count = await offload(rows > KEYS, lambda: _pack(plan.commands(keys)))
        replies = await self._ask(packed, count)
        size = rows * sum(len(view.fields) for view in plan.views)
        return await offload(size > VALUES, plan.decode, replies, rows, at)

    async def write(self, commands: Sequence[tuple[bytes, ...]]) -> int:
        """Runs calls of the online store's write script; returns how many rows replaced what was stored.

        Raises:
            DependencyError: Redis does not answer.
        """
        replies = await self._ask(*_pack(commands))
        return sum(written for _, written in replies)

    async def ping(self) -> None:
        """Asks Redis for a sign of life.

        Raises:
            DependencyError: there is none.
        """
        await self._ask(*_pack([(b"PING",)]))

    async def close(self) -> None:
        """Closes all connections."""
        await self._pool.disconnect()

    async def _ask(self, packed: bytes, count: int) -> list[Any]:
        """The replies to `count` packed commands."""
        with answering(self._url):
            async with asyncio.timeout(self._seconds):
                try:
                    return await self._exchange(packed, count)
                except redis.ConnectionError:
                    # A pooled connection from before Redis was started again. The next one is new.
                    await self._pool.disconnect(inuse_connections=False)
                    return await self._exchange(packed, count)

    async def _exchange(self, packed: bytes, count: int) -> list[Any]:
        connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_packed_command(packed, check_health=False)
            replies: list[Any] = []
            for number in range(1, count + 1):
                replies.append(await connection.read_response(disable_decoding=True))
                if number % TURN == 0:
                    # Reading does not wait while there is something to read.
                    await asyncio.sleep(0)
        except BaseException:
            # Also when canceled: replies that nobody has read must not answer the next request.
            await connection.disconnect(nowait=True)
            raise
        else:
            return replies
        finally:
            await self._pool.release(connection)


def _pack(commands: Sequence[tuple[bytes, ...]]) -> tuple[bytes, int]:
    """Commands as they are sent, and how many they are."""
    return b"".join([hiredis.pack_command(cast("Any", command)) for command in commands]), len(commands)
