"""The connection to the online store: one pipelined round trip per request, every wait bounded."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import redis

from isthmus.features import published
from isthmus.features.address import Address
from isthmus.features.online import (
    ANNOUNCE,
    WRITE,
    LookupPlan,
    ViewAnswer,
    announced,
    answering,
    rule_of,
    suspects,
)
from isthmus.features.published import Stamp
from isthmus.features.rows import known_of
from isthmus.serving.cluster import Cluster
from isthmus.serving.limits import Limits
from isthmus.serving.metrics import Waiting
from isthmus.serving.node import KEYS, Node
from isthmus.serving.offload import VALUES, offload

TIMEOUT_SECONDS = 2.0

FRESH_SECONDS = 0.5
"""How long a server goes by the stamps that it has read."""

LISTS = 1024
"""Lists of views whose stamps are kept."""

PATIENCE_SECONDS = 0.25
"""How long it waits for newer ones before it goes on with those that it has."""


@dataclass(slots=True)
class _Told:
    """What Redis has told of the views of a plan, and when it was asked."""

    asked: float
    reply: list[bytes | None]
    stamps: dict[str, Stamp]


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
        self._told: dict[tuple[bytes, ...], _Told] = {}

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
                stamps = await self._stamps(plan)
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

    async def ping(self, project: str) -> None:
        """Asks Redis whether it would answer the lookups of a project.

        Raises:
            DependencyError: it would not.
        """
        with Waiting(), answering(self._url):
            async with asyncio.timeout(self._seconds):
                await self._redis.ping(project)

    async def _stamps(self, plan: LookupPlan) -> dict[str, Stamp]:
        """The stamps of a plan's views: never newer than the rows that are read next, and hardly older."""
        told = self._told.get(plan.records)
        now = asyncio.get_running_loop().time()
        if told is not None and now - told.asked <= FRESH_SECONDS:
            return told.stamps
        if told is None:
            (reply,) = await self._redis.ask([plan.records])
            if len(self._told) >= LISTS:
                self._told.clear()  # Callers choose which views they ask for together: there may be many such lists.
            told = self._told[plan.records] = _Told(now, reply, plan.stamps(reply))
            return told.stamps
        # Others go on with what was told before, and so does this request where it cannot be told anew: in a cluster,
        # the rows may be somewhere else.
        told.asked = now
        with suppress(redis.RedisError, OSError, TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                (reply,) = await self._redis.ask([plan.records])
            if reply != told.reply:
                told.reply, told.stamps = reply, plan.stamps(reply)
        return told.stamps

    async def close(self) -> None:
        """Closes all connections."""
        await self._redis.close()
