"""The connection to the online store: one pipelined round trip per request, every wait bounded."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.features.address import Address
from isthmus.features.online import LookupPlan, ViewAnswer, answering
from isthmus.serving.cluster import Cluster
from isthmus.serving.limits import Limits
from isthmus.serving.metrics import waiting
from isthmus.serving.node import Node

TIMEOUT_SECONDS = 2.0
_SPARE = 32
"""Connections beyond those of the requests that are counted: for the state of the server."""


class Store:
    """The Redis of a server process.

    Args:
        url: see `Address`; the settings have checked it.
        limits: of the server: each request has a connection, and half of the time it has left for Redis at most.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        self._url = url
        self._seconds = min(TIMEOUT_SECONDS, limits.deadline_seconds / 2)
        address, connections = Address.of(url), limits.concurrency + _SPARE
        self._redis = Cluster(address, connections) if address.cluster else Node(url, connections)

    async def read(
        self, plan: LookupPlan, keys: Mapping[str, Sequence[Any]], rows: int, at: int
    ) -> dict[str, ViewAnswer]:
        """What the views of a plan answer for `rows` rows of keys at time `at`.

        Raises:
            DependencyError: Redis does not answer.
            ContractMismatch: a row was written under another contract.
        """
        commands = plan.commands(keys)
        with waiting(), answering(self._url):
            async with asyncio.timeout(self._seconds):
                replies = await self._redis.ask(commands)
        return plan.decode(replies, rows, at)

    async def ping(self) -> None:
        """Asks Redis for a sign of life.

        Raises:
            DependencyError: there is none.
        """
        with waiting(), answering(self._url):
            async with asyncio.timeout(self._seconds):
                await self._redis.ping()

    async def close(self) -> None:
        """Closes all connections."""
        await self._redis.close()
