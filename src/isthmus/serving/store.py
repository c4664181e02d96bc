"""The connection to the online store: one pipelined round trip per request, every wait bounded."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import hiredis
import redis.asyncio

from isthmus.features.online import LookupPlan, ViewAnswer, answering
from isthmus.serving.metrics import Waiting

TIMEOUT_SECONDS = 2.0
CONNECTIONS = 256


class Store:
    """The Redis of a server process.

    The exchange is written out here because a redis-py pipeline sets a timer and passes half a dozen coroutines for
    each of the many replies of a lookup: half of all the time that a lookup of a hundred keys took.

    Args:
        url: `redis://`, `rediss://` or `unix://`; the settings have checked it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = redis.asyncio.ConnectionPool.from_url(url, max_connections=CONNECTIONS, socket_timeout=None)

    async def read(
        self, plan: LookupPlan, keys: Mapping[str, Sequence[Any]], rows: int, at: int
    ) -> dict[str, ViewAnswer]:
        """What the views of a plan answer for `rows` rows of keys at time `at`.

        Raises:
            DependencyError: Redis does not answer.
            ContractMismatch: a row was written under another contract.
        """
        return plan.decode(await self._ask(plan.commands(keys)), rows, at)

    async def ping(self) -> None:
        """Asks Redis for a sign of life.

        Raises:
            DependencyError: there is none.
        """
        await self._ask([(b"PING",)])

    async def close(self) -> None:
        """Closes all connections."""
        await self._pool.disconnect()

    async def _ask(self, commands: Sequence[tuple[bytes, ...]]) -> list[Any]:
        """The replies to some commands."""
        packed = b"".join([hiredis.pack_command(cast("Any", command)) for command in commands])
        with Waiting(), answering(self._url):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                try:
                    return await self._exchange(packed, len(commands))
                except redis.ConnectionError:
                    # A pooled connection from before Redis was started again. The next one is new.
                    await self._pool.disconnect(inuse_connections=False)
                    return await self._exchange(packed, len(commands))

    async def _exchange(self, packed: bytes, count: int) -> list[Any]:
        connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_packed_command(packed, check_health=False)
            return [await connection.read_response(disable_decoding=True) for _ in range(count)]
        except BaseException:
            # Also when canceled: replies that nobody has read must not answer the next request.
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)
