"""The connection to the online store: one pipelined round trip per request, every wait bounded."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.features.address import Address
from isthmus.features.online import LookupPlan, ViewAnswer, answering
from isthmus.serving.cluster import Cluster
from isthmus.serving.node import Node

TIMEOUT_SECONDS = 2.0


class Store:
    """The Redis of a server process.

    Args:
        url: see `Address`; the settings have checked it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        address = Address.of(url)
        self._redis = Cluster(address) if address.cluster else Node(url)

    async def read(
        self, plan: LookupPlan, keys: Mapping[str, Sequence[Any]], rows: int, at: int
    ) -> dict[str, ViewAnswer]:
        """What the views of a plan answer for `rows` rows of keys at time `at`.

        Raises:
            DependencyError: Redis does not answer.
            ContractMismatch: a row was written under another contract.
        """
        commands = plan.commands(keys)
        with answering(self._url):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                replies = await self._redis.ask(commands)
        return plan.decode(replies, rows, at)

    async def ping(self) -> None:
        """Asks Redis for a sign of life.

        Raises:
            DependencyError: there is none.
        """
        with answering(self._url):
            async with asyncio.timeout(TIMEOUT_SECONDS):
                await self._redis.ping()

    async def close(self) -> None:
        """Closes all connections."""
        await self._redis.close()
