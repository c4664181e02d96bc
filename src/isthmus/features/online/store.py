"""The online store: the latest row of every view and key, in Redis.

Each project and entity key has a Redis hash, with a field per view that holds a packed row. A lookup is a single
pipelined round trip, whatever the number of views and keys.
"""

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import redis
from redis.lock import Lock

from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.online import loss, pushes, scripts
from isthmus.features.online import record as records
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.online.pushes import Backlog
from isthmus.features.online.record import Published
from isthmus.features.redis.pipeline import Client, ask, run
from isthmus.features.redis.routing import CHUNK, Piece
from isthmus.features.values.arrow import to_arrow
from isthmus.features.values.columns import Ints, Values, from_python
from isthmus.features.values.entitykey import KeyValue, decode_key, entity_key, entity_keys, key_prefix
from isthmus.features.values.rows import HEADER, VERSION, Block, RowCodec, known_times

PIECE = 4000
"""Rows that are packed at a time: a small part of all memory, and few enough for Redis to start on them soon."""

LEASE_SECONDS = 5.0
"""How long a materialization that does not renew its lock is taken to be alive."""

EVERYTHING = (1 << 63) - 1
"""The horizon behind which every row lies."""


@dataclass(frozen=True, slots=True)
class WriteCounts:
    """What a write did: rows offered, rows whose content was new, rows that replaced what was stored."""

    compared: int
    changed: int
    written: int


class OnlineStore:
    """The rows of a project in a Redis."""

    def __init__(self, client: Client, contract: Contract) -> None:
        self.client = client
        self.contract = contract
        self._records = records.records(contract.project).decode()

    def write(
        self,
        view: ViewContract,
        keys: Mapping[str, Sequence[KeyValue]],
        event: Ints,
        known: Ints,
        columns: Mapping[str, Values],
        *,
        horizon: int | None = None,
    ) -> WriteCounts:
        """Writes n rows of a view; a row replaces what is stored unless that is newer by (event, known, content).

        Times have shape (n,), int64 microseconds. The `horizon` is for rows of the offline table: until when it
        decides. Whatever is stored and was known by then is replaced, even if it is newer, since the table would still
        have it if it were true.
        """
        codec = RowCodec(view)

        def names(part: slice) -> list[bytes]:
            return entity_keys(self.contract.project, view.keys, {name: keys[name][part] for name in keys})

        def write(rule: bytes) -> list[int]:
            return run(self.client, scripts.WRITE, [view.online_name.encode(), rule], packed()) or [0, 0, 0]

        def packed() -> Iterator[Piece]:
            for start in range(0, len(event), PIECE):
                part = slice(start, start + PIECE)
                values = {name: column.take(part) for name, column in columns.items()}
                yield names(part), codec.encode(event[part], known[part], values)

        if horizon is not None:
            changed, written, newer = write(struct.pack("<q", horizon))
            if newer:
                self._remember(view, names(slice(None)), horizon)
            return WriteCounts(len(event), changed, written)
        return self._pushed(view, lambda: names(slice(None)), known, write)

    def put(self, view: ViewContract, names: Sequence[bytes], rows: Sequence[bytes]) -> WriteCounts:
        """`write` for packed rows under their entity keys."""

        def write(rule: bytes) -> list[int]:
            return run(self.client, scripts.WRITE, [view.online_name.encode(), rule], [(names, rows)]) or [0, 0, 0]

        return self._pushed(view, lambda: names, known_times(rows), write)

    def _pushed(
        self,
        view: ViewContract,
        names: Callable[[], Sequence[bytes]],
        known: Ints,
        write: Callable[[bytes], Sequence[int]],
    ) -> WriteCounts:
        """Writes rows that are no table's, by a rule that is passed to `write`."""
        steps = scripts.push_steps(view)
        reply: Any = None
        try:
            while True:
                match steps.send(reply):
                    case scripts.PushStep.READ:
                        reply = self.published(view)
                    case scripts.PushStep.ANNOUNCE:
                        self._suspect(view, names(), known)
                    case bytes(rule):
                        reply = write(rule)
        except StopIteration as end:
            changed, written, _ = end.value
        return WriteCounts(len(known), changed, written)

    def push(  # noqa: PLR0913 - as `write`, and when
        self,
        view: ViewContract,
        keys: Mapping[str, Sequence[KeyValue]],
        event: Ints,
        known: Ints,
        columns: Mapping[str, Values],
        *,
        accepted: int,
        waiting: int = records.WAITING,
    ) -> WriteCounts:
        """Writes rows that the history of the view gets, too, by the next collection.

        `accepted` is the present, in microseconds, and `waiting` how many rows may wait for the history.

        Raises:
            DependencyError: more would wait. Nothing was written.
        """
        names = entity_keys(self.contract.project, view.keys, keys)
        self.append(view, names, RowCodec(view).encode(event, known, columns), accepted, waiting)
        return self.write(view, keys, event, known, columns)

    def append(
        self,
        view: ViewContract,
        names: Sequence[bytes],
        rows: Sequence[bytes],
        accepted: int,
        waiting: int = records.WAITING,
    ) -> None:
        """Puts packed rows under their entity keys on their way to the history, as `push` does."""
        arguments = pushes.appended(names, rows, accepted, waiting)
        counts = run(self.client, pushes.APPEND, arguments, [([pushes.stream(self.contract.project, view.table)], [])])
        pushes.require_room(view.table, counts, len(names))

    def backlog(self, table: str) -> Backlog:
        """What waits for the history in an offline table."""
        return pushes.backlog(ask(self.client, pushes.backlog_commands(self.contract.project, table)))

    def _suspect(self, view: ViewContract, names: Sequence[bytes], known: Ints) -> None:
        """Notes keys whose rows do not come from the offline table."""
        for start in range(0, len(names), CHUNK):
            part = slice(start, start + CHUNK)
            arguments = scripts.announced(names[part], known[part])
            run(
                self.client,
                scripts.ANNOUNCE,
                arguments,
                [([scripts.suspects(self.contract.project, view.online_name)], [])],
            )

    def _remember(self, view: ViewContract, names: Sequence[bytes], horizon: int) -> None:
        """Notes which of these keys have rows that were known after the horizon: those were pushed."""
        stored = zip(names, self.rows(view, names), strict=True)
        rows = [(name, row) for name, row in stored if row and len(row) >= HEADER.size]
        known = known_times([row for _, row in rows])
        later = np.flatnonzero(known > horizon)
        self._suspect(view, [rows[place][0] for place in later], known[later])

    def distrust(self, view: ViewContract) -> None:
        """Makes the next materialization compare every row."""
        self.client.zadd(self._suspects(view).decode(), {"*": float("inf")})

    def _suspects(self, view: ViewContract) -> bytes:
        return scripts.suspects(self.contract.project, view.online_name)

    def record_text(self, view: ViewContract) -> bytes | None:
        """The record of the view as Redis holds it, to be compared by `replace`."""
        return cast("bytes | None", self.client.hget(self._records, view.online_name))

    def published(self, view: ViewContract) -> Published | None:
        """The record of the view."""
        return records.decode(self.record_text(view))

    def replace(self, view: ViewContract, before: bytes | None, record: bytes) -> bool:
        """Writes the record of the view if it is still the same as `before`; returns whether it was."""
        arguments = [view.online_name.encode(), before or b"", record]
        return run(self.client, scripts.REPLACE, arguments, [([self._records.encode()], [])]) == [1]

    def lock(self, view: ViewContract) -> Lock:
        """A lock that lets a single materialization of the view run at a time."""
        name = scripts.locked(self.contract.project, view.online_name).decode()
        return cast("Lock", self.client.lock(name, timeout=LEASE_SECONDS, thread_local=False))

    def take_suspects(self, view: ViewContract, horizon: int) -> pa.Table | None:
        """The join keys of pushed rows, None if too many were noted; those known by a horizon are then forgotten."""
        name = self._suspects(view).decode()
        with self.client.pipeline(transaction=True) as pipeline:
            pipeline.zrange(name, 0, -1)
            pipeline.zremrangebyscore(name, "-inf", horizon)
            pipeline.zrem(name, "*")
            names, _, many = pipeline.execute()
        if many:
            return None
        # A server that has not heard of a new contract may name keys of another form. Nothing can read their rows.
        rows = [row for key in names if (row := self._read_key(view, key)) is not None]
        columns = sorted(view.keys, key=lambda column: column.name)
        values = {column.name: [row[n] for row in rows] for n, column in enumerate(columns)}
        return pa.table({key.name: to_arrow(from_python(values[key.name], key.dtype), key.dtype) for key in view.keys})

    def _read_key(self, view: ViewContract, name: bytes) -> tuple[KeyValue, ...] | None:
        ordered = sorted(view.keys, key=lambda column: column.name)
        try:
            row = decode_key(self.contract.project, view.keys, name)
            same = entity_key(self.contract.project, list(zip(ordered, row, strict=True))) == name
        except (ValueError, TypeError, AttributeError, struct.error):
            return None
        return row if same else None

    def remove(self, view: ViewContract, keys: Mapping[str, Sequence[KeyValue]], horizon: int) -> int:
        """Removes the rows of keys that were known by the horizon; returns how many those were.

        A row of another contract, which nothing can read, is removed whatever its time.
        """
        return self._remove(view, [entity_keys(self.contract.project, view.keys, keys)], horizon)

    def remove_others(self, view: ViewContract, keys: Mapping[str, Sequence[KeyValue]], horizon: int) -> int:
        """Removes the rows of all keys but these likewise."""
        keep = set(entity_keys(self.contract.project, view.keys, keys))
        others = ([name for name in names if name not in keep] for names in self._names(view))
        return self._remove(view, others, horizon)

    def _remove(self, view: ViewContract, batches: Iterable[Sequence[bytes]], horizon: int) -> int:
        sent: list[Sequence[bytes]] = []

        def pieces() -> Iterator[Piece]:
            for names in batches:
                sent.append(names)
                yield names, []

        arguments = [view.online_name.encode(), bytes([VERSION]) + view.prefix, struct.pack("<q", horizon)]
        removed, newer = run(self.client, scripts.REMOVE, arguments, pieces()) or (0, 0)
        for names in sent if newer else ():
            self._remember(view, names, horizon)
        return removed

    def rows(self, view: ViewContract, names: Sequence[bytes]) -> list[bytes | None]:
        """The packed rows of entity keys."""
        replies: list[bytes | None] = ask(self.client, [(b"HGET", name, view.online_name.encode()) for name in names])
        return replies

    def pushed(self, view: ViewContract, horizon: int) -> Iterator[tuple[dict[str, list[KeyValue]], Block]]:
        """The rows that were pushed and became known after a horizon: join keys and rows, a part at a time."""
        codec, ordered = RowCodec(view), sorted(column.name for column in view.keys)
        noted = cast("list[bytes]", self.client.zrange(self._suspects(view).decode(), 0, -1))
        parts = self._names(view) if b"*" in noted else (noted[n : n + CHUNK] for n in range(0, len(noted), CHUNK))
        for names in parts:
            rows, keys = [], []
            for name, row in zip(names, self.rows(view, names), strict=True):
                key = self._read_key(view, name)
                if key is not None and row and row[1:9] == view.prefix and known_times([row])[0] > horizon:
                    rows.append(row)
                    keys.append(key)
            if rows:
                yield {name: [key[n] for key in keys] for n, name in enumerate(ordered)}, codec.decode(rows)

    def drop(self, view: ViewContract) -> None:
        """Removes a definition of a view: its rows, its record and what is noted beside them."""
        self.client.hdel(self._records, view.online_name)
        self._remove(view, self._names(view), EVERYTHING)
        for name in (self._suspects(view), loss.sample(self.contract.project, view)):
            self.client.delete(name.decode())

    def keep_sample(self, view: ViewContract, keys: Mapping[str, Sequence[KeyValue]]) -> None:
        """Store a sample of a view's keys. A later check looks up their rows to find lost ones."""
        names = entity_keys(self.contract.project, view.keys, keys)
        self.client.set(loss.sample(self.contract.project, view).decode(), msgspec.msgpack.encode(names))

    def lacks_sample(self, view: ViewContract) -> bool:
        """Return whether a row of the sample is gone."""
        keys = cast("bytes | None", self.client.get(loss.sample(self.contract.project, view).decode()))
        return not all(self._exist(view, loss.sampled(keys)))

    def losses(self, written: loss.Materialized) -> loss.Losses:
        """Return view name to why Redis may have lost its rows, by comparing Redis with these materializations."""
        views = list(self.contract.views.values())
        try:
            nodes = self._info()
        except redis.ResponseError:  # this user may not run it
            nodes = []
        steps = loss.check(self.contract.project, views, written, nodes)
        commands = next(steps)
        try:
            while True:
                commands = steps.send(ask(self.client, commands))
        except StopIteration as end:
            found: loss.Losses = end.value
        return found

    def missing(self, view: ViewContract, keys: Mapping[str, Sequence[KeyValue]]) -> int:
        """How many of these keys have no row of the view."""
        return self._exist(view, entity_keys(self.contract.project, view.keys, keys)).count(0)

    def keys(self, view: ViewContract) -> dict[str, list[KeyValue]]:
        """Join key name to the values of every key that has a row of the view, in no order."""
        rows: set[tuple[KeyValue, ...]] = set()
        for names in self._names(view):
            exist = zip(names, self._exist(view, names), strict=True)
            rows.update(decode_key(self.contract.project, view.keys, name) for name, has in exist if has)
        ordered = sorted(column.name for column in view.keys)
        return {name: [row[n] for row in rows] for n, name in enumerate(ordered)}

    def _exist(self, view: ViewContract, names: Sequence[bytes]) -> list[Any]:
        return ask(self.client, [(b"HEXISTS", name, view.online_name.encode()) for name in names])

    def servers(self) -> dict[str, int]:
        """The processes that hold the rows, by names that they never have again, and how many keys each has evicted."""
        return {str(node["run_id"]): int(node["evicted_keys"]) for node in self._info()}

    def still_holds(self, servers: Mapping[str, int]) -> bool:
        """Whether Redis still holds everything that it held when `servers` returned this.

        A single server writes a record after the rows: if it was restarted and has the record, it has the rows. A node
        of a cluster can have come back without.
        """
        for node in self._info():
            evicts = node["maxmemory"] and node["maxmemory_policy"] != "noeviction"
            restarted = str(node["run_id"]) not in servers
            if restarted and (evicts or isinstance(self.client, redis.RedisCluster)):
                return False
            if not restarted and int(node["evicted_keys"]) != servers[str(node["run_id"])]:
                return False
        return True

    def _info(self) -> list[Any]:
        return [node.info("everything") for node in self._nodes()]

    def _nodes(self) -> list[redis.Redis]:
        client = self.client
        if not isinstance(client, redis.RedisCluster):
            return [client]
        return [client.get_redis_connection(node) for node in client.get_primaries()]  # type: ignore[no-untyped-call]

    def _names(self, view: ViewContract) -> Iterator[list[bytes]]:
        """The Redis keys with the join keys of the view, batch by batch; a key may come twice."""
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", key_prefix(self.contract.project, view.keys)) + b"*"
        for node in self._nodes():
            cursor = -1
            while cursor:
                cursor, names = cast("tuple[int, list[bytes]]", node.scan(max(cursor, 0), match=pattern, count=CHUNK))
                if names:
                    yield names

    def read(self, view: ViewContract, keys: Mapping[str, Sequence[KeyValue]], at: int) -> ViewAnswer:
        """The answer of a view for n keys at time `at`, in microseconds."""
        plan = LookupPlan(self.contract, [view.name])
        return plan.read(self.client, keys, at)[view.name]
