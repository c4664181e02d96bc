"""A Redis Cluster: a request goes to all nodes that have its keys, in parallel."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import redis
from redis.connection import parse_url
from redis.crc import REDIS_CLUSTER_HASH_SLOTS
from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError

from isthmus.features.redis.address import Address
from isthmus.features.redis.routing import FIRST_KEY, MOVING, Command, Piece, Script, by_node
from isthmus.serving.redis.node import RedisNode

_ATTEMPTS = 3
"""Maximum number of times a command is sent."""

_LEARN_SECONDS = 0.5
"""Timeout for asking one node for the slot map before trying the next one."""


class Cluster:
    """Send each command to the primary node of its key in a Redis Cluster.

    The client fetches the slot map (which node has which keys) on first use, and again after redirects or errors.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._nodes = {url: RedisNode(url) for url in address.urls}
        self._owners: Sequence[str] = ()
        self._learning = asyncio.Lock()

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send Redis commands whose first argument is a key to the nodes of their keys. Return the replies in order.

        Raises the first error that a new slot map cannot resolve. While keys move between nodes, or a node does not
        answer, a command is sent up to three times, so Redis may run it more than once.
        """
        return await self._ask(commands, 1)

    async def run(self, script: Script, arguments: Sequence[bytes], piece: Piece) -> list[Any]:
        calls = script.calls(arguments, piece, cluster=True)
        replies = await self._ask(calls, FIRST_KEY, divided=True)
        again = [
            command
            for call, reply in zip(calls, replies, strict=True)
            if isinstance(reply, TryAgainError)
            for command in script.after_refusal(arguments, call, reply)
        ]
        if not again:
            return replies
        return [reply for reply in replies if not isinstance(reply, TryAgainError)] + await self._ask(again, FIRST_KEY)

    async def ping(self, project: str) -> None:
        owners = self._owners or await self._learn(())
        try:
            await asyncio.gather(*(self._node(url).ping(project) for url in set(owners)))
        except redis.RedisError:
            self._owners = ()
            raise

    async def info(self) -> list[dict[str, str]]:
        owners = self._owners or await self._learn(())
        return [*chain.from_iterable(await asyncio.gather(*(self._node(url).info() for url in set(owners))))]

    async def close(self) -> None:
        for node in self._nodes.values():
            await node.close()

    async def _ask(self, commands: Sequence[Command], key: int, *, divided: bool = False) -> list[Any]:
        """Send commands to the nodes of their keys, in up to three attempts. Return the replies in order.

        `key` is the position of the key in each command. With `divided`, a command whose keys are split between two
        nodes is not sent again: its reply is a TryAgainError.
        """
        replies: list[Any] = [None] * len(commands)
        left = list(range(len(commands)))
        owners = self._owners
        for attempt in range(_ATTEMPTS):
            if attempt or not owners:
                owners = await self._learn(owners)
            try:
                left = await self._round(owners, commands, replies, left, key)
                if divided:
                    left = [place for place in left if not isinstance(replies[place], TryAgainError)]
            except asyncio.CancelledError:
                # If a timeout canceled us, a silent node may have lost its slots to another.
                self._owners = ()
                raise
            if not left:
                return replies
        raise replies[left[0]]

    async def _round(
        self, owners: Sequence[str], commands: Sequence[Command], replies: list[Any], left: Sequence[int], key: int
    ) -> list[int]:
        nodes = by_node(commands, key, owners.__getitem__, left)
        answers = await self._gather({url: [commands[place] for place in places] for url, places in nodes.items()})
        again = []
        for places, answer in zip(nodes.values(), answers, strict=True):
            for n, place in enumerate(places):
                reply = replies[place] = answer if isinstance(answer, Exception) else answer[n]
                if isinstance(reply, Exception):
                    reply = replies[place] = await self._redirected(commands[place], reply)
                    if isinstance(reply, Exception):
                        again.append(place)
        return again

    async def _redirected(self, command: Command, refusal: Exception) -> Any:
        """Follow the ASK redirect in `refusal`, and return the reply of the node that has the key now.

        Return the error if a new slot map may help. Raise any other error.
        """
        if isinstance(refusal, AskError) and not isinstance(refusal, MovedError):
            # The slot is moving, and this key has moved already.
            node = self._node(self._address.node(refusal.host, refusal.port))
            try:
                reply = (await node.ask([(b"ASKING",), command], refusals=True))[1]
            except redis.ConnectionError as error:
                return error
            if not isinstance(reply, Exception):
                return reply
            refusal = reply
        if isinstance(refusal, (*MOVING, redis.ConnectionError)):
            return refusal
        raise refusal

    async def _gather(self, requests: Mapping[str, Sequence[Command]]) -> list[Any]:
        waits = [self._node(url).ask(commands, refusals=True) for url, commands in requests.items()]
        if len(waits) > 1:
            replies: list[Any] = await asyncio.gather(*waits, return_exceptions=True)
            return replies
        try:
            return [await wait for wait in waits]
        except redis.ConnectionError as error:
            return [error]

    def _node(self, url: str) -> RedisNode:
        if url not in self._nodes:
            self._nodes[url] = RedisNode(url)
        return self._nodes[url]

    async def _learn(self, outdated: Sequence[str]) -> Sequence[str]:
        """Fetch the owner of each slot, unless another request has replaced the `outdated` owners by now."""
        async with self._learning:
            if self._owners and self._owners is not outdated:
                return self._owners
            failure: Exception = redis.ConnectionError("no node answers")
            urls = list({*outdated, *self._address.urls})
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
                    # A node that does not know its own name leaves it empty.
                    name = host.decode() if host else parse_url(url)["host"]  # type: ignore[no-untyped-call]
                    owners[first : last + 1] = [self._address.node(name, port)] * (last + 1 - first)
                if not all(owners):
                    failure = ClusterDownError(f"no node has slot {owners.index('')}")
                    continue
                self._owners = owners
                return owners
            raise failure
