"""The online store: the latest row of every view and key, in Redis.

One Redis hash per project and entity key, one field per view, one packed row per field. A lookup is one pipelined
round trip, whatever the number of views and keys.
"""

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import redis
from redis.lock import Lock

from isthmus.features.contract.contract import Contract, ViewContract
from isthmus.features.online import record as published
from isthmus.features.online.plan import LookupPlan, ViewAnswer
from isthmus.features.online.record import Published
from isthmus.features.online.scripts import ANNOUNCE, REMOVE, REPLACE, WRITE, announced, locked, rule_of, suspects
from isthmus.features.redis.pipeline import CHUNK, Client, Piece, ask
from isthmus.features.values.columns import Values, from_python, to_arrow
from isthmus.features.values.entitykey import KeyValue, decode_key, entity_key, entity_keys, key_prefix
from isthmus.features.values.rows import HEADER, VERSION, Int64, RowCodec, known_of

PIECE = 4000
"""Rows that are packed at a time: a small part of all memory, and few enough for Redis to start on them soon."""

LEASE_SECONDS = 5.0
"""How long a materialization that does not say so is taken to be alive."""

EVERYTHING = (1 << 63) - 1
"""The horizon behind which every row lies."""


@dataclass(frozen=True, slots=True)
class WriteCounts:
    """What a write did: rows offered, rows whose content was new, rows that replaced what was stored."""

    compared: int
    changed: int
    written: int


class OnlineStore:
    """The rows of one project in one Redis.

    Args:
        client: a connection that returns bytes.
        contract: what the rows must have been written under.
    """

    def __init__(self, client: Client, contract: Contract) -> None:
        self.client = client
        self.contract = contract
        self._records = published.records(contract.project).decode()

    def write(
        self,
        view: ViewContract,
        keys: Mapping[str, Sequence[KeyValue]],
        event: Int64,
        known: Int64,
        columns: Mapping[str, Values],
        *,
        horizon: int | None = None,
    ) -> WriteCounts:
        """Writes n rows of a view; a row replaces what is stored unless that is newer by (event, known, content).

        Args:
            view: the view.
            keys: join key name to n values.
            event: shape (n,) int64 microseconds.
            known: shape (n,) int64 microseconds.
            columns: feature name to its values, shape (n,).
            horizon: of rows that come from the offline table, until when it decides: whatever is stored and was known
                by then is replaced, be it newer, since the table would still have it if it were true.
        """
        codec = RowCodec(view)

        def named(part: slice) -> list[bytes]:
            return entity_keys(self.contract.project, view.keys, {name: keys[name][part] for name in keys})

        # Without a record, the next run looks at every row that is there.
        record = self.published(view) if horizon is None else None
        if record is not None:
            self._suspect(view, named(slice(None)), known)
        rule = struct.pack("<q", horizon) if horizon is not None else rule_of(published.stamp_of(view, record))

        def packed() -> Iterator[Piece]:
            for start in range(0, len(event), PIECE):
                part = slice(start, start + PIECE)
                values = {name: Values(column.data[part], column.valid[part]) for name, column in columns.items()}
                yield named(part), codec.encode(event[part], known[part], values)

        changed, written, kept = WRITE.run(self.client, [view.name.encode(), rule], packed()) or (0, 0, 0)
        if horizon is not None:
            if kept:
                self._remember(view, named(slice(None)), horizon)
        elif record is not None or self.published(view) is not None:
            # Once more: a materialization under way may have looked at these keys before their rows came.
            self._suspect(view, named(slice(None)), known)
        return WriteCounts(len(event), changed, written)

    def _suspect(self, view: ViewContract, names: Sequence[bytes], known: Int64) -> None:
        """Says which keys are written by somebody else than the table."""
        for start in range(0, len(names), CHUNK):
            part = slice(start, start + CHUNK)
            arguments = announced(names[part], known[part])
            ANNOUNCE.run(self.client, arguments, [([suspects(self.contract.project, view.name)], [])])

    def _remember(self, view: ViewContract, names: Sequence[bytes], horizon: int) -> None:
        """Notes which of these keys have rows that were known after the horizon: others have written them."""
        rows = ask(self.client, [(b"HGET", name, view.name.encode()) for name in names])
        held = [(name, row) for name, row in zip(names, rows, strict=True) if row and len(row) >= HEADER.size]
        known = known_of([row for _, row in held])
        later = np.flatnonzero(known > horizon)
        self._suspect(view, [held[place][0] for place in later], known[later])

    def distrust(self, view: ViewContract) -> None:
        """Makes the next materialization compare every row."""
        self.client.zadd(suspects(self.contract.project, view.name).decode(), {"*": float("inf")})

    def told(self, view: ViewContract) -> bytes | None:
        """What Redis has been told of the view's offline table, as it stands there."""
        return cast("bytes | None", self.client.hget(self._records, view.name))

    def published(self, view: ViewContract) -> Published | None:
        """What Redis has been told of the view's offline table."""
        return published.decode(self.told(view))

    def publish(self, view: ViewContract, record: Published) -> None:
        """Tells Redis so."""
        self.client.hset(self._records, view.name, msgspec.json.encode(record).decode())

    def replace(self, view: ViewContract, told: bytes | None, record: bytes) -> bool:
        """Tells Redis so if it has been told nothing else since `told`; returns whether it has not."""
        arguments = [view.name.encode(), told or b"", record]
        return REPLACE.run(self.client, arguments, [([self._records.encode()], [])]) == [1]

    def lock(self, view: ViewContract) -> Lock:
        """What one materialization of a view at a time can hold."""
        name = locked(self.contract.project, view.name).decode()
        return cast("Lock", self.client.lock(name, timeout=LEASE_SECONDS, thread_local=False))

    def take_suspects(self, view: ViewContract, horizon: int) -> pa.Table | None:
        """The join keys of rows that others have written, of which those known by a horizon are forgotten.

        Returns:
            The keys; None if they are too many to be remembered.
        """
        name = suspects(self.contract.project, view.name).decode()
        with self.client.pipeline(transaction=True) as pipeline:
            pipeline.zrange(name, 0, -1)
            pipeline.zremrangebyscore(name, "-inf", horizon)
            pipeline.zrem(name, "*")
            found, _, many = pipeline.execute()
        if many:
            return None
        # A server that has not heard of a new contract may name keys of another form. Nothing can read their rows.
        rows = [row for key in found if (row := self._read_key(view, key)) is not None]
        columns = sorted(view.keys, key=lambda column: column.name)
        values = {column.name: [row[n] for row in rows] for n, column in enumerate(columns)}
        return pa.table({key.name: to_arrow(from_python(values[key.name], key.dtype), key.dtype) for key in view.keys})

    def _read_key(self, view: ViewContract, name: bytes) -> tuple[KeyValue, ...] | None:
        """The values of an entity key of this view; None if the name is not one's."""
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
        """Removes the rows of all other keys likewise."""
        kept = set(entity_keys(self.contract.project, view.keys, keys))
        others = ([name for name in names if name not in kept] for names in self._names(view))
        return self._remove(view, others, horizon)

    def _remove(self, view: ViewContract, names: Iterable[Sequence[bytes]], horizon: int) -> int:
        tried: list[Sequence[bytes]] = []

        def pieces() -> Iterator[Piece]:
            for some in names:
                tried.append(some)
                yield some, []

        arguments = [view.name.encode(), bytes([VERSION]) + view.prefix, struct.pack("<q", horizon)]
        removed, kept = REMOVE.run(self.client, arguments, pieces()) or (0, 0)
        for some in tried if kept else ():
            self._remember(view, some, horizon)
        return removed

    def missing(self, view: ViewContract, keys: Mapping[str, Sequence[KeyValue]]) -> int:
        """How many of these keys have no row of the view."""
        names = entity_keys(self.contract.project, view.keys, keys)
        return ask(self.client, [(b"HEXISTS", name, view.name.encode()) for name in names]).count(0)

    def keys(self, view: ViewContract) -> dict[str, list[KeyValue]]:
        """Join key name to the values of every key that has a row of the view, in no order."""
        rows: set[tuple[KeyValue, ...]] = set()
        field = view.name.encode()
        for names in self._names(view):
            held = zip(names, ask(self.client, [(b"HEXISTS", name, field) for name in names]), strict=True)
            rows.update(decode_key(self.contract.project, view.keys, name) for name, has in held if has)
        ordered = sorted(column.name for column in view.keys)
        return {name: [row[n] for row in rows] for n, name in enumerate(ordered)}

    def servers(self) -> dict[str, int]:
        """The processes that hold the rows, by names that they never have again, and how many keys each has evicted."""
        return {str(node["run_id"]): int(node["evicted_keys"]) for node in self._told()}

    def has_kept(self, servers: Mapping[str, int]) -> bool:
        """Whether everything is there that was there when `servers` said this.

        One server writes a record after the rows: if it was started again and has the record, it has the rows. Of the
        nodes of a cluster, one can have come back without.
        """
        for node in self._told():
            evicts = node["maxmemory"] and node["maxmemory_policy"] != "noeviction"
            again = str(node["run_id"]) not in servers
            if again and (evicts or isinstance(self.client, redis.RedisCluster)):
                return False
            if not again and int(node["evicted_keys"]) != servers[str(node["run_id"])]:
                return False
        return True

    def _told(self) -> list[dict[str, Any]]:
        return [cast("dict[str, Any]", node.info("everything")) for node in self._nodes()]

    def _nodes(self) -> list[redis.Redis]:
        """The one server, or every primary of the cluster."""
        client = self.client
        if not isinstance(client, redis.RedisCluster):
            return [client]
        return [client.get_redis_connection(node) for node in client.get_primaries()]  # type: ignore[no-untyped-call]

    def _names(self, view: ViewContract) -> Iterator[list[bytes]]:
        """The names of all hashes with the join keys of the view, some at a time and some perhaps twice."""
        pattern = re.sub(rb"([*?\[\]\\])", rb"\\\1", key_prefix(self.contract.project, view.keys)) + b"*"
        for node in self._nodes():
            cursor = -1
            while cursor:
                cursor, names = cast("tuple[int, list[bytes]]", node.scan(max(cursor, 0), match=pattern, count=CHUNK))
                if names:
                    yield names

    def read(self, view: ViewContract, keys: Mapping[str, Sequence[KeyValue]], at: int) -> ViewAnswer:
        """What a view answers for n keys at time `at`, in microseconds."""
        plan = LookupPlan(self.contract, [view.name])
        return plan.read(self.client, keys, at)[view.name]
