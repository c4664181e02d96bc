"""A Redis Cluster: a request goes to the nodes that have its keys, to all of them at once."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import redis
from redis.connection import parse_url
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError

from isthmus.features.redis.address import Address
from isthmus.features.redis.pipeline import FIRST_KEY, Piece, Script
from isthmus.serving.redis.node import Command, Node

_TRIES = 3
"""How often a command is sent at most."""

_LEARN_SECONDS = 0.5
"""How long a node may take to say where the slots are, before the next one is asked."""


class Cluster:
    """The primaries of a cluster, and which of them has which slot.

    Args:
        address: some of its nodes.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._nodes = {url: Node(url) for url in address.urls}
        self._owners: Sequence[str] = ()
        self._learning = asyncio.Lock()

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to commands whose first argument is a key.

        Raises:
            RedisError: a node does not answer, or has refused a command.
        """
        return await self._ask(commands, 1)

    async def run(self, script: Script, arguments: Sequence[bytes], piece: Piece) -> list[Any]:
        """The replies to the calls that run a script over keys with one value each.

        Raises:
            RedisError: a node does not answer, or has refused a call.
        """
        calls = script.calls(arguments, piece, by_slot=True)
        replies = await self._ask(calls, FIRST_KEY, divided=True)
        apart: list[Command] = []
        for call, reply in zip(calls, replies, strict=True):
            if isinstance(reply, TryAgainError):
                # Of a slot on the move, some of the keys are still here and some are there already: each goes alone.
                apart += script.apart(arguments, call)
        if not apart:
            return replies
        others = await self._ask(apart, FIRST_KEY)
        return [reply for reply in replies if not isinstance(reply, TryAgainError)] + others

    async def ping(self, project: str) -> None:
        """Asks every primary for a sign of life, see `Node.ping`.

        Raises:
            RedisError: one has none.
        """
        owners = self._owners or await self._learn(())
        try:
            await asyncio.gather(*(self._node(url).ping(project) for url in set(owners)))
        except redis.RedisError:
            self._owners = ()
            raise

    async def close(self) -> None:
        """Closes all connections."""
        for node in self._nodes.values():
            await node.close()

    async def _ask(self, commands: Sequence[Command], key: int, *, divided: bool = False) -> list[Any]:
        """The replies to commands that have a key in that place, and no key of another slot.

        If `divided`, a TryAgainError may stand in the place of a reply: the keys of that command are on two nodes.
        """
        replies: list[Any] = [None] * len(commands)
        left = list(range(len(commands)))
        owners = self._owners
        for tries in range(_TRIES):
            if tries or not owners:
                owners = await self._learn(owners)
            try:
                left = await self._round(owners, commands, replies, left, key)
                if divided:
                    left = [place for place in left if not isinstance(replies[place], TryAgainError)]
            except asyncio.CancelledError:
                # Perhaps by the timeout: a node that says nothing may have lost its slots to another one.
                self._owners = ()
                raise
            if not left:
                return replies
        raise replies[left[0]]

    async def _round(
        self, owners: Sequence[str], commands: Sequence[Command], replies: list[Any], left: Sequence[int], key: int
    ) -> list[int]:
        """Asks once for the replies at some places; returns the places that want another try, with why as the reply."""
        places: dict[str, list[int]] = {}
        for place in left:
            places.setdefault(owners[key_slot(commands[place][key])], []).append(place)
        answers = await self._gather({url: [commands[place] for place in mine] for url, mine in places.items()})
        again = []
        for mine, answer in zip(places.values(), answers, strict=True):
            for n, place in enumerate(mine):
                reply = replies[place] = answer if isinstance(answer, Exception) else answer[n]
                if isinstance(reply, Exception):
                    reply = replies[place] = await self._ahead(commands[place], reply)
                    if isinstance(reply, Exception):
                        again.append(place)
        return again

    async def _ahead(self, command: Command, refusal: Exception) -> Any:
        """The reply to a command that a node has refused if that says who has it, or the refusal if a new map may help.

        Raises:
            RedisError: nothing of that helps.
        """
        if isinstance(refusal, AskError) and not isinstance(refusal, MovedError):
            # Of a slot on the move, this key has gone ahead.
            node = self._node(self._address.node(refusal.host, refusal.port))
            try:
                reply = (await node.ask([(b"ASKING",), command], refusals=True))[1]
            except redis.ConnectionError as error:
                return error
            if not isinstance(reply, Exception):
                return reply
            refusal = reply
        if isinstance(refusal, AskError | TryAgainError | ClusterDownError | redis.ConnectionError):
            return refusal
        raise refusal

    async def _gather(self, asked: Mapping[str, Sequence[Command]]) -> list[Any]:
        """The replies of some nodes, or why a node does not answer."""
        waits = [self._node(url).ask(commands, refusals=True) for url, commands in asked.items()]
        if len(waits) > 1:
            found: list[Any] = await asyncio.gather(*waits, return_exceptions=True)
            return found
        try:
            return [await wait for wait in waits]
        except redis.ConnectionError as error:
            return [error]

    def _node(self, url: str) -> Node:
        if url not in self._nodes:
            self._nodes[url] = Node(url)
        return self._nodes[url]

    async def _learn(self, known: Sequence[str]) -> Sequence[str]:
        """The URL of the owner of every slot, unless another request has found out what is newer than `known`."""
        async with self._learning:
            if self._owners and self._owners is not known:
                return self._owners
            failure: Exception = redis.ConnectionError("no node answers")
            urls = list({*known, *self._address.urls})
            random.shuffle(urls)
            for url in urls:
                try:
                    async with asyncio.timeout(_LEARN_SECONDS):
                        ranges = (await self._node(url).ask([(b"CLUSTER", b"SLOTS")]))[0]
                except (redis.ConnectionError, TimeoutError) as error:
                    failure = error
                    continue
                owners = [""] * REDIS_CLUSTER_HASH_SLOTS
                for first, last, (host, port, *_), *_ in ranges:
                    # A node that has not been told its own name leaves it out.
                    place = host.decode() if host else parse_url(url)["host"]  # type: ignore[no-untyped-call]
                    owners[first : last + 1] = [self._address.node(place, port)] * (last + 1 - first)
                if not all(owners):
                    failure = ClusterDownError(f"no node has slot {owners.index('')}")
                    continue
                self._owners = owners
                return owners
            raise failure
