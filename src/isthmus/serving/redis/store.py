"""The connection to the online store: one pipelined round trip per request, every wait bounded."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from isthmus.features.contract.contract import Contract, ViewContract
from isthmus.features.online import record as published
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.online.record import Published
from isthmus.features.online.scripts import ANNOUNCE, WRITE, announced, rule_of, suspects
from isthmus.features.redis.address import Address
from isthmus.features.redis.connection import answering
from isthmus.features.redis.pipeline import Piece
from isthmus.features.values.rows import known_of
from isthmus.serving.limits import Limits
from isthmus.serving.redis.cluster import Cluster
from isthmus.serving.redis.node import KEYS, Node
from isthmus.serving.redis.stamps import Stamps
from isthmus.serving.threads import VALUES, offload
from isthmus.serving.waits import Waiting

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

    async def write(self, project: str, view: ViewContract, names: Sequence[bytes], rows: Sequence[bytes]) -> int:
        """Writes packed rows by the rule of the online store; returns how many replaced what was stored.

        Args:
            project: name of the project.
            view: the view.
            names: `entity_key` of each row.
            rows: the packed rows.

        Raises:
            DependencyError: Redis does not answer, or refuses.
        """
        with Waiting(), answering(self._url):
            async with asyncio.timeout(self._seconds):
                record = await self._published(project, view)
                told = announced(names, known_of(rows))
                place: Piece = ([suspects(project, view.name)], [])
                if record is not None:
                    await self._redis.run(ANNOUNCE, told, place)
                rule = rule_of(published.stamp_of(view, record))
                counts = await self._redis.run(WRITE, (view.name.encode(), rule), (names, rows))
                if record is not None or await self._published(project, view) is not None:
                    # Once more: a materialization under way may have looked at these keys before their rows came.
                    await self._redis.run(ANNOUNCE, told, place)
        return sum(written for _, written, _ in counts)

    async def _published(self, project: str, view: ViewContract) -> Published | None:
        """What Redis has been told of the view's offline table."""
        ((told,),) = await self._redis.ask([published.asking(project, [view])])
        return published.decode(told)

    async def told(self, contract: Contract) -> dict[str, Published | None]:
        """What Redis has been told of the offline table of each view.

        Raises:
            DependencyError: Redis does not answer, or refuses.
        """
        with Waiting(), answering(self._url):
            async with asyncio.timeout(self._seconds):
                (reply,) = await self._redis.ask([published.asking(contract.project, contract.views.values())])
        return dict(zip(contract.views, map(published.decode, reply), strict=True))

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
