"""The connection to the online store: one pipelined round trip per request, every wait bounded."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.features.address import Address
from isthmus.features.online import WRITE, LookupPlan, ViewAnswer, answering
from isthmus.serving.cluster import Cluster
from isthmus.serving.limits import Limits
from isthmus.serving.metrics import Waiting
from isthmus.serving.node import KEYS, Node
from isthmus.serving.offload import VALUES, offload

TIMEOUT_SECONDS = 2.0


class Store:
    """The Redis of a server process.

    Args:
        url: see `Address`; the settings have checked it.
        limits: of the server: Redis has half of the time of a request at most.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        self._url = url
        self._seconds = min(TIMEOUT_SECONDS, limits.deadline_seconds / 2)
        address = Address.of(url)
        self._redis = Cluster(address) if address.cluster else Node(url)

    async def read(
        self, plan: LookupPlan, keys: Mapping[str, Sequence[Any]], rows: int, at: int
    ) -> dict[str, ViewAnswer]:
        """What the views of a plan answer for `rows` rows of keys at time `at`.

        Raises:
            DependencyError: Redis does not answer, or refuses.
            ContractMismatch: a row was written under another contract.
        """
        commands = await offload(rows > KEYS, plan.commands, keys)
        with Waiting(), answering(self._url):
            async with asyncio.timeout(self._seconds):
                replies = await self._redis.ask(commands)
        size = rows * sum(len(view.fields) for view in plan.views)
        return await offload(size > VALUES, plan.decode, replies, rows, at)

    async def write(self, view: str, names: Sequence[bytes], rows: Sequence[bytes]) -> int:
        """Writes packed rows by the rule of the online store; returns how many replaced what was stored.

        Args:
            view: name of the view.
            names: `entity_key` of each row.
            rows: the packed rows.

        Raises:
            DependencyError: Redis does not answer, or refuses.
        """
        with Waiting(), answering(self._url):
            async with asyncio.timeout(self._seconds):
                counts = await self._redis.run(WRITE, (view.encode(), b""), (names, rows))
        return sum(written for _, written in counts)

    async def ping(self, project: str) -> None:
        """Asks Redis whether it would answer the lookups of a project.

        Raises:
            DependencyError: it would not.
        """
        with Waiting(), answering(self._url):
            async with asyncio.timeout(self._seconds):
                await self._redis.ping(project)

    async def close(self) -> None:
        """Closes all connections."""
        await self._redis.close()
