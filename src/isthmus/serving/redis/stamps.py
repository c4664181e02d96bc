"""The stamps that a server goes by."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import redis

from isthmus.features.contract.schema import Contract
from isthmus.features.online import record
from isthmus.features.values.stamp import Stamp
from isthmus.serving.redis.cluster import Cluster
from isthmus.serving.redis.node import Node

FRESH_SECONDS = 0.5
"""How long a server goes by the stamps that it has read."""

CONTRACTS = 4
"""Contracts whose stamps a server remembers: that of lookups and those of models, deployed and tried."""

PATIENCE_SECONDS = 0.25
"""How long it waits for newer stamps before it goes on with the old ones."""


@dataclass(slots=True)
class _Reading:
    """The records of the views of a contract as Redis sent them, when they were read, and their stamps."""

    time: float
    reply: list[bytes | None]
    stamps: Mapping[str, Stamp]


class Stamps:
    """The stamps of all views of a project: never newer than the rows that are read next, and hardly older.

    Those of all views are read at once. In a cluster they lie on a single node: a server that has seen them goes on
    without that node.
    """

    def __init__(self, redis: Cluster | Node) -> None:
        self._redis = redis
        self._latest: dict[str, _Reading] = {}

    async def of(self, contract: Contract) -> Mapping[str, Stamp]:
        """View name to its stamp, if it has one."""
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
            # Meanwhile other requests go on with the old stamps, and so does this request if Redis does not answer.
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
