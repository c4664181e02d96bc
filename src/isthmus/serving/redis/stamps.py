"""Stamps of views, cached by the server."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import redis

from isthmus.features.contract.schema import Contract
from isthmus.features.online import record
from isthmus.features.online.record import Stamp
from isthmus.serving.redis.cluster import Cluster
from isthmus.serving.redis.node import RedisNode

FRESH_SECONDS = 0.5
"""Seconds for which a cached stamp is used."""

CONTRACTS = 4
"""Number of contracts whose stamps are cached: for lookups, and for deployed and tried models."""

PATIENCE_SECONDS = 0.25
"""Seconds to wait for newer stamps before using the old ones."""


@dataclass(slots=True)
class _Reading:
    """Records of a contract's views as read from Redis, and their stamps."""

    time: float
    reply: list[bytes | None]
    stamps: Mapping[str, Stamp]


class Stamps:
    """The stamps of all views of a project: never newer than the rows read next, and at most slightly older.

    All stamps are read together. In a cluster they are on one node; a server that has read them works without that
    node.
    """

    def __init__(self, redis: Cluster | RedisNode) -> None:
        self._redis = redis
        self._latest: dict[str, _Reading] = {}

    async def of(self, contract: Contract) -> Mapping[str, Stamp]:
        """Return the stamp of each view that has one."""
        latest = self._latest.get(contract.hash)
        now = asyncio.get_running_loop().time()
        if latest is None:
            reply = await self._read(contract)
            stamps = record.stamps(contract.views.values(), reply)
            while len(self._latest) >= CONTRACTS:
                del self._latest[next(iter(self._latest))]
            self._latest[contract.hash] = _Reading(now, reply, stamps)
            return stamps
        if now - latest.time > FRESH_SECONDS:
            # Other requests use the old stamps meanwhile, as does this one if Redis does not answer.
            latest.time = now
            with suppress(redis.RedisError, OSError, TimeoutError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    reply = await self._read(contract)
                if reply != latest.reply:
                    latest.reply, latest.stamps = reply, record.stamps(contract.views.values(), reply)
        return latest.stamps

    async def _read(self, contract: Contract) -> list[bytes | None]:
        reply: list[bytes | None]
        (reply,) = await self._redis.ask([record.query(contract.project, contract.views.values())])
        return reply
