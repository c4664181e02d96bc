"""The stamps that a server goes by."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import redis

from isthmus.features.contract.contract import Contract
from isthmus.features.online import record
from isthmus.features.values.stamp import Stamp
from isthmus.serving.redis.cluster import Cluster
from isthmus.serving.redis.node import Node

FRESH_SECONDS = 0.5
"""How long a server goes by the stamps that it has read."""

PATIENCE_SECONDS = 0.25
"""How long it waits for newer ones before it goes on with those that it has."""


@dataclass(slots=True)
class _Told:
    """What Redis has told of the views of a contract, and when it was asked."""

    contract: str
    asked: float
    reply: list[bytes | None]
    stamps: Mapping[str, Stamp]


class Stamps:
    """The stamps of all views of a project: never newer than the rows that are read next, and hardly older.

    Those of all views are read at once. In a cluster they lie on one node: a server that has seen them goes on without
    that node.

    Args:
        redis: where they are.
    """

    def __init__(self, redis: Cluster | Node) -> None:
        self._redis = redis
        self._told: _Told | None = None

    async def of(self, contract: Contract) -> Mapping[str, Stamp]:
        """View name to its stamp, if it has one.

        Raises:
            RedisError: they have never been read under this contract, and Redis does not tell them.
        """
        told = self._told
        now = asyncio.get_running_loop().time()
        if told is None or told.contract != contract.hash:
            reply = await self._ask(contract)
            stamps = record.stamps(contract.views.values(), reply)
            self._told = _Told(contract.hash, now, reply, stamps)
            return stamps
        if now - told.asked > FRESH_SECONDS:
            # Others go on with what was told before, and so does this request where it cannot be told anew.
            told.asked = now
            with suppress(redis.RedisError, OSError, TimeoutError):
                async with asyncio.timeout(PATIENCE_SECONDS):
                    reply = await self._ask(contract)
                if reply != told.reply:
                    told.reply, told.stamps = reply, record.stamps(contract.views.values(), reply)
        return told.stamps

    async def _ask(self, contract: Contract) -> list[bytes | None]:
        (reply,) = await self._redis.ask([record.asking(contract.project, contract.views.values())])
        found: list[bytes | None] = reply
        return found
