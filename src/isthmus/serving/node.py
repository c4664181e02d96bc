"""One Redis server, or one node of a cluster: pooled connections, one pipelined round trip per request."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import hiredis
import redis.asyncio

from isthmus.serving.offload import offload

KEYS = 1000
"""Commands that are made and packed on the event loop: about a millisecond."""

TURN = 256
"""Replies that are read before other requests have their turn: about a millisecond."""

Command = tuple[bytes, ...]


class Node:
    """A server.

    The exchange is written out here because a redis-py pipeline sets a timer and passes half a dozen coroutines for
    each of the many replies of a lookup: half of all the time that a lookup of a hundred keys took.

    Args:
        url: `redis://`, `rediss://` or `unix://`.
        connections: how many there may be.
    """

    def __init__(self, url: str, connections: int) -> None:
        self._pool = redis.asyncio.ConnectionPool.from_url(url, max_connections=connections, socket_timeout=None)

    async def ask(self, commands: Sequence[Command], *, key: int = 1, refusals: bool = False) -> list[Any]:  # noqa: ARG002 - a cluster's
        """The replies to some commands.

        Args:
            commands: the commands.
            key: the place of the key in each, which only a cluster needs to know.
            refusals: whether an error that answers a command stands in the place of its reply; it is raised otherwise.
        """
        packed = await offload(len(commands) > KEYS, _pack, commands)
        try:
            return await self._exchange(packed, len(commands), refusals)
        except redis.ConnectionError:
            # A pooled connection from before Redis was started again. The next one is new.
            await self._pool.disconnect(inuse_connections=False)
            return await self._exchange(packed, len(commands), refusals)

    async def ping(self) -> None:
        """Asks for a sign of life."""
        await self.ask([(b"PING",)])

    async def close(self) -> None:
        """Closes all connections."""
        await self._pool.disconnect()

    async def _exchange(self, packed: bytes, count: int, refusals: bool) -> list[Any]:
        connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_packed_command(packed, check_health=False)
            replies: list[Any] = []
            for number in range(1, count + 1):
                replies.append(
                    await (_reply(connection) if refusals else connection.read_response(disable_decoding=True))
                )
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


def _pack(commands: Sequence[Command]) -> bytes:
    """Commands as they are sent."""
    return b"".join([hiredis.pack_command(cast("Any", command)) for command in commands])


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response(disable_decoding=True)
    except redis.ResponseError as error:
        return error
