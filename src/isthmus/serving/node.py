"""One Redis server, or one node of a cluster: pooled connections, one pipelined round trip per request."""

from collections.abc import Sequence
from typing import Any, cast

import hiredis
import redis.asyncio

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

    async def ask(self, commands: Sequence[Command], *, refusals: bool = False) -> list[Any]:
        """The replies to some commands.

        Args:
            commands: the commands.
            refusals: whether an error that answers a command stands in the place of its reply; it is raised otherwise.
        """
        packed = b"".join([hiredis.pack_command(cast("Any", command)) for command in commands])
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
            if refusals:
                return [await _reply(connection) for _ in range(count)]
            return [await connection.read_response(disable_decoding=True) for _ in range(count)]
        except BaseException:
            # Also when canceled: replies that nobody has read must not answer the next request.
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response(disable_decoding=True)
    except redis.ResponseError as error:
        return error
