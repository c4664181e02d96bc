"""The online store: the latest row of every view and key, as fields of one Redis hash per project and entity key."""

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
from isthmus.features.values.entitykey import KeyValue, by_join_key, decode_key, entity_key, entity_keys, key_prefix
from isthmus.features.values.rows import HEADER, VERSION, Block, RowCodec, known_times

PIECE = 4000
"""Rows packed at a time: small enough for memory, and for Redis to start soon."""

LEASE_SECONDS = 5.0
"""Seconds after which a materialization that has not renewed its lock counts as dead."""

EVERYTHING = (1 << 63) - 1
"""A horizon later than the known time of any row."""


@dataclass(frozen=True, slots=True)
class WriteCounts:
    """The effect of a write: rows compared, rows with new content, and rows added or replaced (`written`)."""

    compared: int
    changed: int
    written: int


class OnlineStore:
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
        """Write n rows of a view to Redis, and return the counts. A stored row stays if it is newer than the new row.

        The newer of two rows has the greater event time, then known time, then content hash.

        Args:
            view: definition of the view.
            keys: n values for each join key.
            event: event times in microseconds since 1970 UTC, shape (n,).
            known: times at which the rows became known, in the same form.
            columns: values by feature name.
            horizon: None for pushed rows, which the next materialization then checks. For rows of the offline table,
                the latest known time that the table covers, in microseconds since 1970 UTC: stored rows known by then
                are replaced even if they are newer, because the table no longer has them.
        """
        codec = RowCodec(view)

        def names(part: slice = slice(None)) -> list[bytes]:
            return entity_keys(self.contract.project, view.keys, {name: keys[name][part] for name in keys})

        def pieces() -> Iterator[Piece]:
            for start in range(0, len(event), PIECE):
                part = slice(start, start + PIECE)
                values = {name: column.take(part) for name, column in columns.items()}
                yield names(part), codec.encode(event[part], known[part], values)

        if horizon is None:
            return self._pushed(view, names, known, pieces)
        changed, written, newer = self._write(view, struct.pack("<q", horizon), pieces())
        if newer:
            self._remember(view, names(), horizon)
        return WriteCounts(len(event), changed, written)

    def put(self, view: ViewContract, names: Sequence[bytes], rows: Sequence[bytes]) -> WriteCounts:
        return self._pushed(view, lambda: names, known_times(rows), lambda: [(names, rows)])

    def _write(self, view: ViewContract, rule: bytes, pieces: Iterable[Piece]) -> list[int]:
        return run(self.client, scripts.WRITE, [view.online_name.encode(), rule], pieces) or [0, 0, 0]

    def _pushed(
        self,
        view: ViewContract,
        names: Callable[[], Sequence[bytes]],
        known: Ints,
        pieces: Callable[[], Iterable[Piece]],
    ) -> WriteCounts:
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
                        reply = self._write(view, rule, pieces())
        except StopIteration as end:
            changed, written, _ = end.value
        return WriteCounts(len(known), changed, written)

    def append(
        self,
        view: ViewContract,
        names: Sequence[bytes],
        rows: Sequence[bytes],
        accepted: int,
        most_waiting: int = records.WAITING,
    ) -> None:
        """Queue pushed rows in Redis, to be collected into the offline table. Only `put` makes them visible to lookups.

        Raise DependencyError, without queueing a row, if there is no room for all of them.

        Args:
            view: definition of the view.
            names: encoded entity keys.
            rows: packed row of each key.
            accepted: time of the push, in microseconds since 1970 UTC.
            most_waiting: maximum number of queued rows of the view's table, including these.
        """
        arguments = pushes.append_arguments(names, rows, accepted, most_waiting)
        counts = run(self.client, pushes.APPEND, arguments, [([pushes.stream(self.contract.project, view.table)], [])])
        pushes.require_room(view.table, counts, len(names))

    def backlog(self, table: str) -> Backlog:
        return pushes.backlog(ask(self.client, pushes.backlog_commands(self.contract.project, table)))

    def _suspect(self, view: ViewContract, names: Sequence[bytes], known: Ints) -> None:
        for start in range(0, len(names), CHUNK):
            part = slice(start, start + CHUNK)
            arguments = scripts.announce_arguments(names[part], known[part])
            run(self.client, scripts.ANNOUNCE, arguments, [([self._suspects(view)], [])])

    def _remember(self, view: ViewContract, names: Sequence[bytes], horizon: int) -> None:
        stored = zip(names, self.rows(view, names), strict=True)
        rows = [(name, row) for name, row in stored if row and len(row) >= HEADER.size]
        known = known_times([row for _, row in rows])
        later = np.flatnonzero(known > horizon)
        self._suspect(view, [rows[place][0] for place in later], known[later])

    def distrust(self, view: ViewContract) -> None:
        """Make the next materialization of a view compare every row with Redis.

        Call this if another run may have written the view at the same time, so that Redis may have a mixture of rows.
        """
        self.client.zadd(self._suspects(view).decode(), {"*": float("inf")})

    def _suspects(self, view: ViewContract) -> bytes:
        return scripts.suspects_key(self.contract.project, view.online_name)

    def record_text(self, view: ViewContract) -> bytes | None:
        return cast("bytes | None", self.client.hget(self._records, view.online_name))

    def published(self, view: ViewContract) -> Published | None:
        return records.decode(self.record_text(view))

    def replace(self, view: ViewContract, before: bytes | None, record: bytes) -> bool:
        """Replace a view's record in Redis, which describes its last materialization, unless it has changed meanwhile.

        `before` is the encoded record that the caller read, or None if there was none. `record` is the new one,
        encoded. Return True if Redis now has `record`. Return False, and change nothing, if Redis had neither of the
        two.
        """
        arguments = [view.online_name.encode(), before or b"", record]
        return run(self.client, scripts.REPLACE, arguments, [([self._records.encode()], [])]) == [1]

    def lock(self, view: ViewContract) -> Lock:
        name = scripts.lock_key(self.contract.project, view.online_name).decode()
        return cast("Lock", self.client.lock(name, timeout=LEASE_SECONDS, thread_local=False))

    def take_suspects(self, view: ViewContract, horizon: int) -> pa.Table | None:
        """Take the keys whose rows were pushed since the last materialization, to check them in this one.

        Return a table with a column per join key, or None if every row must be compared with Redis. That is the case
        after `distrust`, or if too many keys were pushed. The call removes this mark from Redis, and also the keys
        whose rows were known by `horizon`, in microseconds since 1970 UTC.
        """
        name = self._suspects(view).decode()
        with self.client.pipeline(transaction=True) as pipeline:
            pipeline.zrange(name, 0, -1)
            pipeline.zremrangebyscore(name, "-inf", horizon)
            pipeline.zrem(name, "*")
            names, _, many = pipeline.execute()
        if many:
            return None
        # A server that still uses an older contract may record keys of another form. Their rows are unreadable.
        rows = [row for key in names if (row := self._read_key(view, key)) is not None]
        values = by_join_key(view.keys, rows)
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
        return self.remove_names(view, [entity_keys(self.contract.project, view.keys, keys)], horizon)

    def remove_except(self, view: ViewContract, keys: Mapping[str, Sequence[KeyValue]], horizon: int) -> int:
        """Remove from Redis the rows of all keys of a view that are not in `keys`. Return the number of removed rows.

        A materialization that compares every row calls this. It scans all of Redis. `keys` has the values of each join
        key. Rows that became known after `horizon`, in microseconds since 1970 UTC, were pushed later and stay. The
        next materialization checks them. Rows of another definition of the view are always removed.
        """
        keep = set(entity_keys(self.contract.project, view.keys, keys))
        batches = ([name for name in names if name not in keep] for names in self.names(view))
        return self.remove_names(view, batches, horizon)

    def remove_names(self, view: ViewContract, batches: Iterable[Sequence[bytes]], horizon: int) -> int:
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
        replies: list[bytes | None] = ask(self.client, [(b"HGET", name, view.online_name.encode()) for name in names])
        return replies

    def pushed(self, view: ViewContract, horizon: int) -> Iterator[tuple[dict[str, list[KeyValue]], Block]]:
        """Yield a view's pushed rows that the last materialization did not cover, to copy them to a new definition.

        `horizon` is the time up to which that run covered the rows, in microseconds since 1970 UTC. Each item is a
        batch: the values of each join key, and the decoded rows. Rows of another definition are skipped.
        """
        codec = RowCodec(view)
        noted = cast("list[bytes]", self.client.zrange(self._suspects(view).decode(), 0, -1))
        parts = self.names(view) if b"*" in noted else (noted[n : n + CHUNK] for n in range(0, len(noted), CHUNK))
        for names in parts:
            rows, keys = [], []
            for name, row in zip(names, self.rows(view, names), strict=True):
                key = self._read_key(view, name)
                if key is not None and row and row[1:9] == view.prefix and known_times([row])[0] > horizon:
                    rows.append(row)
                    keys.append(key)
            if rows:
                yield by_join_key(view.keys, keys), codec.decode(rows)

    def drop(self, view: ViewContract) -> None:
        """Delete a view's rows from Redis, with its records there, to remove a definition that is no longer used.

        The records are that of the last materialization, the sample of keys for detecting lost rows, and the noted keys
        of pushed rows. Pushed rows that wait for the history stay.
        """
        self.client.hdel(self._records, view.online_name)
        self.remove_names(view, self.names(view), EVERYTHING)
        for name in (self._suspects(view), loss.sample_key(self.contract.project, view)):
            self.client.delete(name.decode())

    def keep_sample(self, view: ViewContract, names: Sequence[bytes]) -> None:
        self.client.set(loss.sample_key(self.contract.project, view).decode(), msgspec.msgpack.encode(names))

    def lacks_sample(self, view: ViewContract) -> bool:
        keys = cast("bytes | None", self.client.get(loss.sample_key(self.contract.project, view).decode()))
        return not all(self._exist(view, loss.decode_sample(keys)))

    def losses(self, written: loss.LastMaterializations) -> loss.Losses:
        """Find views whose rows Redis may have lost, by eviction, a restart or a restore from a backup.

        `written` has the last materializations by the view's name in Redis (`ViewContract.online_name`). If the Redis
        user may not run INFO, evictions and restarts are not checked.
        """
        views = list(self.contract.views.values())
        try:
            nodes = self._info()
        except redis.ResponseError:  # the user lacks permission for INFO
            nodes = []
        steps = loss.check(self.contract.project, views, written, nodes)
        commands = next(steps)
        try:
            while True:
                commands = steps.send(ask(self.client, commands))
        except StopIteration as end:
            losses: loss.Losses = end.value
        return losses

    def missing(self, view: ViewContract, names: Sequence[bytes]) -> int:
        return self._exist(view, names).count(0)

    def keys(self, view: ViewContract) -> dict[str, list[KeyValue]]:
        rows: set[tuple[KeyValue, ...]] = set()
        for names in self.names(view):
            exist = zip(names, self._exist(view, names), strict=True)
            rows.update(decode_key(self.contract.project, view.keys, name) for name, has in exist if has)
        return by_join_key(view.keys, list(rows))

    def _exist(self, view: ViewContract, names: Sequence[bytes]) -> list[Any]:
        return ask(self.client, [(b"HEXISTS", name, view.online_name.encode()) for name in names])

    def servers(self) -> dict[str, int]:
        return {str(node["run_id"]): int(node["evicted_keys"]) for node in self._info()}

    def still_holds(self, servers: Mapping[str, int]) -> bool:
        """Return True if Redis has lost no rows since an earlier call of `servers`, whose result is passed.

        A materialization then compares its rows only with those of the last run. Call this only if Redis still has the
        view's record of that run: a single server that was restarted then also has the rows, which were written before
        the record. The result is False if keys were evicted, or if a cluster node or a server that can evict keys was
        restarted, since rows may be lost.
        """
        # A restarted single server that has the record of a view also has its rows, which were written first.
        # A restarted cluster node may have lost them.
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

    def names(self, view: ViewContract) -> Iterator[list[bytes]]:
        """Yield the Redis keys with the join keys of the view, in batches. A key may appear twice."""
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", key_prefix(self.contract.project, view.keys)) + b"*"
        for node in self._nodes():
            cursor = -1
            while cursor:
                cursor, names = cast("tuple[int, list[bytes]]", node.scan(max(cursor, 0), match=pattern, count=CHUNK))
                if names:
                    yield names

    def read(self, view: ViewContract, keys: Mapping[str, Sequence[KeyValue]], at: int) -> ViewAnswer:
        plan = LookupPlan(self.contract, [view.name])
        return plan.read(self.client, keys, at)[view.name]
