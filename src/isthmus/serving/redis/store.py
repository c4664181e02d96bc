"""`Store`: a server's client of Redis, with one pipelined round trip per request, and a timeout."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import redis

from isthmus.features.clock import Status
from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.online import loss, pushes, record
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.online.pushes import APPEND, Backlog
from isthmus.features.online.record import NEVER, Published, Stamp
from isthmus.features.online.scripts import ANNOUNCE, WRITE, PushStep, announce_arguments, push_steps, suspects_key
from isthmus.features.redis.address import Address
from isthmus.features.redis.connection import translate_errors
from isthmus.features.redis.refusal import is_type_error
from isthmus.features.redis.routing import Command, Piece, total
from isthmus.features.values.rows import known_times
from isthmus.serving import log
from isthmus.serving.deadlines import Deadline, Deadlines, StoreWait
from isthmus.serving.limits import Limits
from isthmus.serving.redis.cluster import Cluster
from isthmus.serving.redis.node import KEYS, RedisNode
from isthmus.serving.threads import VALUES, offload

TIMEOUT_SECONDS = 2.0

FRESH_SECONDS = 0.5
"""Seconds for which cached stamps are used without reading them again."""

CONTRACTS = 4
"""Number of contracts whose stamps are cached: for lookups, and for deployed and tried models."""

PATIENCE_SECONDS = 0.25
"""Seconds to wait for newer stamps before using the old ones."""


@dataclass(frozen=True, slots=True)
class ViewRows:
    """The state of a view's rows in Redis.

    Attributes:
        record: the last materialization; None if the view was never materialized.
        pushed: time the newest pushed row became known, in microseconds since 1970 UTC; None without pushed rows.
        backlog: pushed rows that wait to be written to the view's history.
    """

    record: Published | None
    pushed: int | None
    backlog: Backlog

    def newest(self, view: ViewContract) -> int | None:
        if self.record is None or self.record.contract != view.hash:
            return None
        newest = max(self.record.complete_until, NEVER if self.pushed is None else self.pushed)
        # A view without event times starts at time 0; reporting that as an age would cause false alarms.
        return None if newest in (NEVER, 0) else newest


class Store:
    """Read and write a server's rows in Redis. Methods raise a DependencyError if Redis refuses or is too slow.

    `check_losses` checks whether Redis has lost rows of a view. It keeps the result in `losses`, and with `refuse` also
    in `refused`: online view name to reason. `read` then raises an error for a row that may be lost, in place of null.
    `check_share` is the fraction of reads that check row contents against their hashes.
    """

    def __init__(
        self, url: str, limits: Limits, check_share: float = 0.0,
        written: Callable[[], loss.LastMaterializations] = dict, *, refuse: bool = True,
    ) -> None:  # fmt: skip
        self._written, self._refuse, self.losses = written, refuse, loss.Losses()
        self.refused: Mapping[str, str] = {}
        self._url = url
        self._deadlines = Deadlines(min(TIMEOUT_SECONDS, limits.deadline_seconds / 2))
        address = Address.of(url)
        self._redis = Cluster(address) if address.cluster else RedisNode(url)
        self._stamps = Stamps(self._redis)
        self._share, self._due = check_share, 0.0

    async def read(
        self, plan: LookupPlan, keys: Mapping[str, Sequence[Any]], rows: int, at: int, *, check: bool = False
    ) -> dict[str, ViewAnswer]:
        """Read the stored features for a lookup or prediction from Redis. Return the answer of each view, by view name.

        `keys` has `rows` values for each join key. `at` is the time of the request in microseconds since 1970 UTC.
        Rows that are damaged or have another contract get the status DAMAGED and are logged. With `check`, or for the
        fraction `check_share` of the reads, each row is compared with its hash. Raises a DependencyError if Redis does
        not answer. Raises a LostRowsError if a key has no row in a view of `self.refused`, whose rows Redis may have
        lost. Raises a ContractMismatch if all rows of a view have another contract.
        """
        commands = await offload(rows > KEYS, plan.commands, keys)
        with StoreWait(), translate_errors(self._url), Deadline(self._deadlines):
            stamps = await self._stamps.of(plan.contract)
            replies, foreign = await self._replies(commands)
        size = rows * sum(len(view.fields) for view in plan.views)
        self._due += self._share
        if self._due >= 1:
            self._due -= 1
            check = True
        answers = await offload(size > VALUES, plan.decode, replies, rows, at, stamps, check)
        if foreign:
            answers = plan.with_foreign(answers, rows, foreign)
        if self.refused:
            loss.require_rows(self.refused, plan.views, answers)
        for view, answer in answers.items():
            if not answer.complete and (damaged := np.count_nonzero(answer.status == Status.DAMAGED)):
                log.warning("damaged rows", view=view, rows=int(damaged), foreign=len(answer.foreign or ()))
        return answers

    async def _replies(self, commands: Sequence[Command]) -> tuple[list[Any], Mapping[int, str]]:
        """Send the commands of a lookup. Return the replies, and by index the type of each key that is not a hash.

        A key that is not a hash is a damaged row. Its fields are empty in the reply.
        """
        try:
            return await self._redis.ask(commands), {}
        except redis.ResponseError as error:
            if not is_type_error(error):
                raise
        kinds = await self._redis.ask([(b"TYPE", name) for _, name, *_ in commands])
        foreign = {place: kind.decode() for place, kind in enumerate(kinds) if kind not in (b"hash", b"none")}
        replies = iter(await self._redis.ask([own for place, own in enumerate(commands) if place not in foreign]))
        return [
            [b""] * len(fields) if place in foreign else next(replies) for place, (_, _, *fields) in enumerate(commands)
        ], foreign

    async def write(self, project: str, view: ViewContract, names: Sequence[bytes], rows: Sequence[bytes]) -> int:
        """Write rows that a client pushed to Redis. Return the number of rows written: a newer stored row stays.

        `names` are the Redis keys, and `rows` the packed rows. The next materialization compares these rows with the
        offline table.
        """
        announcement = announce_arguments(names, known_times(rows))
        steps = push_steps(view)
        reply: Any = None
        async with self._bounded():
            try:
                while True:
                    match steps.send(reply):
                        case PushStep.READ:
                            ((text,),) = await self._redis.ask([record.query(project, [view])])
                            reply = record.decode(text)
                        case PushStep.ANNOUNCE:
                            await self._redis.run(
                                ANNOUNCE, announcement, ([suspects_key(project, view.online_name)], [])
                            )
                        case bytes(rule):
                            reply = total(
                                await self._redis.run(WRITE, (view.online_name.encode(), rule), (names, rows))
                            )
            except StopIteration as end:
                _, written, _ = end.value
        return int(written)

    async def append(
        self, project: str, view: ViewContract, names: Sequence[bytes], rows: Sequence[bytes], accepted: int, limit: int
    ) -> None:
        """Append rows that a client pushed to a Redis stream, for a view's offline table. Append all rows or none.

        `isthmus pushes collect` writes them to the table. `names` are the Redis keys, and `rows` the packed rows.
        `accepted` is the time of the push in microseconds since 1970 UTC. Raises a DependencyError if more than `limit`
        rows would then wait in the stream.
        """
        piece: Piece = ([pushes.stream(project, view.table)], [])
        async with self._bounded():
            replies = await self._redis.run(APPEND, pushes.append_arguments(names, rows, accepted, limit), piece)
        pushes.require_room(view.table, total(replies), len(rows))

    async def view_rows(self, project: str, views: Collection[ViewContract], now: int) -> dict[str, ViewRows]:
        """Return how fresh the rows of each view in Redis are, by view name, for metrics and the status page.

        `now` is the current time in microseconds since 1970 UTC. Pushed rows that become known later are ignored.
        """
        if not views:
            return {}
        latest = (b"%d" % now, b"-inf", b"WITHSCORES", b"LIMIT", b"0", b"1")
        names = [suspects_key(project, view.online_name) for view in views]
        pushed = [(b"ZREVRANGEBYSCORE", name, *latest) for name in names]
        waiting = [pushes.backlog_commands(project, view.table) for view in views]
        async with self._bounded():
            reply, *rest = await self._redis.ask([record.query(project, views), *pushed, *chain(*waiting)])
        times, backlogs = rest[: len(views)], zip(*[iter(rest[len(views) :])] * len(waiting[0]), strict=True)
        return {
            view.name: ViewRows(record.decode(text), int(float(time[1])) if time else None, pushes.backlog(backlog))
            for view, text, time, backlog in zip(views, reply, times, backlogs, strict=True)
        }

    async def ping(self, contract: Contract) -> None:
        async with self._bounded():
            await self._redis.ping(contract.project)
            await self._stamps.of(contract)

    async def require_no_losses(self, project: str, views: Collection[ViewContract]) -> None:
        """Raise a LostRowsError if Redis has lost rows of one of the views: the server is then not ready.

        Does not raise for lost rows if the store was created with `refuse=False`. Updates `losses` and `refused`.
        """
        await self.check_losses(project, views)
        for view in views:
            if why := self.refused.get(view.online_name):
                raise loss.refusal(view.name, why)

    async def check_losses(self, project: str, views: Collection[ViewContract]) -> None:
        """Check whether Redis has lost rows of the views, for example by eviction or a restart without persistence.

        Updates `losses`, and with `refuse` also `refused`, the views whose missing rows `read` then reports as errors.
        Logs changes.
        """
        written = self._written()
        async with self._bounded():
            steps = loss.check(project, views, written, await self._redis.info())
            commands = next(steps)
            try:
                while True:
                    commands = steps.send(await self._redis.ask(commands))
            except StopIteration as end:
                before, self.losses = self.losses, end.value
        self.refused = self.losses.views if self._refuse else {}
        if self.losses != before:
            log.warning("online rows", lost=self.losses.views, policy=self.losses.policy)

    async def close(self) -> None:
        await self._redis.close()

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        # `read` does not use this generator because it is the hot path.
        with StoreWait(), translate_errors(self._url), Deadline(self._deadlines):
            yield


@dataclass(slots=True)
class _Reading:
    time: float
    reply: list[bytes | None]
    stamps: Mapping[str, Stamp]


class Stamps:
    """A cache of the stamps of a contract's views. A stamp holds the times that all unchanged rows of a view share.

    Stamps are never newer than the rows that are read next. They may be older by a fraction of a second, or by more
    while Redis does not answer. A cluster keeps them on one node. If that node fails, a server goes on with the stamps
    it has read.
    """

    def __init__(self, node: Cluster | RedisNode) -> None:
        self._redis = node
        self._latest: dict[str, _Reading] = {}

    async def of(self, contract: Contract) -> Mapping[str, Stamp]:
        """Return the stamps of a contract's views by view name, with which a lookup decodes rows.

        A stamp holds the times that all unchanged rows of a view share. Reads the stamps from Redis if the cached ones
        are older than `FRESH_SECONDS`. If that fails or takes longer than `PATIENCE_SECONDS`, returns the cached
        stamps. The first read for a contract has no time limit and may raise a Redis error.
        """
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
            # Other requests use the old stamps meanwhile, as does this one if Redis does not answer.
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
