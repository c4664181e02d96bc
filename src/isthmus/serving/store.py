"""The connection to the online store: one pipelined round trip per request, every wait bounded."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.features import published
from isthmus.features.address import Address
from isthmus.features.connection import answering
from isthmus.features.contract import Contract
from isthmus.features.decisions import ANNOUNCE, WRITE, announced, rule_of, suspects
from isthmus.features.lookupplan import LookupPlan, ViewAnswer
from isthmus.features.rows import known_of
from isthmus.serving.cluster import Cluster
from isthmus.serving.limits import Limits
from isthmus.serving.metrics import Waiting
from isthmus.serving.node import KEYS, Node
from isthmus.serving.offload import VALUES, offload
from isthmus.serving.stamps import Stamps

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
        self._stamps = Stamps(self._redis)

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
                stamps = await self._stamps.of(plan.contract)
                replies = await self._redis.ask(commands)
        size = rows * sum(len(view.fields) for view in plan.views)
        return await offload(size > VALUES, plan.decode, replies, rows, at, stamps)

    async def write(self, project: str, view: str, names: Sequence[bytes], rows: Sequence[bytes]) -> int:
        """Writes packed rows by the rule of the online store; returns how many replaced what was stored.

        Args:
            project: name of the project.
            view: name of the view.
            names: `entity_key` of each row.
            rows: the packed rows.

        Raises:
            DependencyError: Redis does not answer, or refuses.
        """
        with Waiting(), answering(self._url):
            async with asyncio.timeout(self._seconds):
                (told,) = await self._redis.ask([(b"HGET", published.records(project), view.encode())])
                rule = b""
                if (record := published.decode(told)) is not None:
                    rule = rule_of(record.stamp)
                    await self._redis.run(ANNOUNCE, announced(names, known_of(rows)), ([suspects(project, view)], []))
                counts = await self._redis.run(WRITE, (view.encode(), rule), (names, rows))
        return sum(written for _, written in counts)

    async def ping(self, contract: Contract) -> None:
        """Asks Redis whether it would answer lookups.

        Raises:
            DependencyError: it would not.
        """
        with Waiting(), answering(self._url):
            async with asyncio.timeout(self._seconds):
                await self._redis.ping(contract.project)
                await self._stamps.of(contract)

    async def close(self) -> None:
        """Closes all connections."""
        await self._redis.close()
