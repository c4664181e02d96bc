"""The online store: the latest row of every view and key, in Redis.

One Redis hash per project and entity key, one field per view, one packed row per field. A lookup is one pipelined
round trip, whatever the number of views and keys.
"""

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import redis
from redis.connection import parse_url
from redis.exceptions import RedisClusterException
from redis.lock import Lock

from isthmus.features import published
from isthmus.features.address import SCHEMES, Address, without_credentials
from isthmus.features.clock import Status
from isthmus.features.columns import Values, from_python, to_arrow
from isthmus.features.contract import Column, Contract, ViewContract
from isthmus.features.entitykey import KeyValue, decode_key, entity_keys, key_prefix
from isthmus.features.errors import DependencyError
from isthmus.features.exchange import CHUNK, Client, Piece, Script, ask
from isthmus.features.published import Published, Stamp
from isthmus.features.refusal import Refusal, only_writes, refusal, words
from isthmus.features.rows import VERSION, Block, Columns, Int64, RowCodec

PIECE = 4000
"""Rows that are packed at a time: a small part of all memory, and few enough for Redis to start on them soon."""

SETTING = "stores.online in isthmus.toml"
"""Where the URL of Redis is configured, unless an online store of Feast's says otherwise."""

MANY = 100_000
"""Keys that others have written of which each is remembered, until a materialization has looked at them."""

LEASE_SECONDS = 5.0
"""How long a materialization that does not say so is taken to be alive."""

EVERYTHING = (1 << 63) - 1
"""The horizon behind which every row lies."""

# Decides for many rows in one call which of them replace what is stored. Lua's numbers are doubles, which hold
# microseconds only to the year 2255: the 64-bit header numbers are compared as a signed and an unsigned half.
#
# The second argument is the horizon of a table, which decides about all that was known by then (8 bytes), or the stamp
# of the view for rows that come from elsewhere (24 bytes), or nothing.
WRITE = Script("""
local field, decided, stamped = ARGV[1], #ARGV[2] == 8, #ARGV[2] == 24
local sub, unpack, call = string.sub, struct.unpack, redis.call
local hl, hh = 0, 0
if decided or stamped then hl, hh = unpack('<I4i4', ARGV[2]) end
local changed, written = 0, 0
local function later(row)
  local l, h = unpack('<I4i4', row, 18)
  return h > hh or (h == hh and l > hl)
end
local function newer(new, old)
  if stamped then
    if not later(new) then return false end
    if not later(old) then old = sub(old, 1, 9) .. sub(ARGV[2], 9, 24) .. sub(old, 26, 33) end
  end
  for place = 10, 26, 8 do
    local l, h = unpack('<I4i4', new, place)
    local was_l, was_h = unpack('<I4i4', old, place)
    if h ~= was_h then return h > was_h end
    if l ~= was_l then return l > was_l end
  end
  return false
end
for i, key in ipairs(KEYS) do
  local new = ARGV[i + 2]
  local old = call('HGET', key, field)
  local write, differs = true, true
  if old == new then
    write = false
  elseif old and #old >= 33 and sub(old, 1, 9) == sub(new, 1, 9) then
    differs = sub(old, 26, 33) ~= sub(new, 26, 33)
    if not decided or later(old) then write = newer(new, old) end
  end
  if write then
    call('HSET', key, field, new)
    written = written + 1
    if differs then changed = changed + 1 end
  end
end
return {changed, written}
""")

# Removes the rows of a view that stand under another contract, or became known no later than the horizon.
_REMOVE = Script("""
local field, prefix = ARGV[1], ARGV[2]
local hl, hh = struct.unpack('<I4i4', ARGV[3])
local removed = 0
for _, key in ipairs(KEYS) do
  local row = redis.call('HGET', key, field)
  if row then
    local old = #row < 33 or string.sub(row, 1, 9) ~= prefix
    if not old then
      local l, h = struct.unpack('<I4i4', row, 18)
      old = h < hh or (h == hh and l <= hl)
    end
    if old then removed = removed + redis.call('HDEL', key, field) end
  end
end
return {removed}
""")

# Notes which keys others than the table have written, by when the rows became known. Of too many, only that there are.
ANNOUNCE = Script(f"""
local call, set = redis.call, KEYS[1]
if call('ZSCORE', set, '*') then return {{0}} end
if call('ZCARD', set) + #ARGV / 2 > {MANY} then
  call('DEL', set)
  call('ZADD', set, '+inf', '*')
  return {{0}}
end
for i = 1, #ARGV, 2 do call('ZADD', set, 'GT', ARGV[i], ARGV[i + 1]) end
return {{#ARGV / 2}}
""")


@dataclass(frozen=True, slots=True)
class WriteCounts:
    """What a write did: rows offered, rows whose content was new, rows that replaced what was stored."""

    compared: int
    changed: int
    written: int


@dataclass(frozen=True, slots=True)
class ViewAnswer:
    """What one view answers for n keys at one time.

    Attributes:
        columns: feature name to its values; everything but a present value is null.
        status: shape (n,) uint8, codes of `Status`.
        whole: whether every row is there, is present and has no null: then there is nothing to mask.
        event: shape (n,) int64 microseconds, 0 where there is no row.
        known: shape (n,) int64 microseconds, 0 where there is no row.
    """

    columns: Columns
    status: np.ndarray[Any, np.dtype[np.uint8]]
    event: Int64
    known: Int64
    whole: bool = False


def connect(url: str, timeout: float = 5.0, setting: str = SETTING) -> Client:
    """A client for the Redis or the Redis Cluster at a URL; no wait is longer than `timeout` seconds.

    Args:
        url: `redis://`, `rediss://`, `unix://`, `redis+cluster://` or `rediss+cluster://`, see `Address`.
        timeout: seconds.
        setting: where the URL is configured, for the remedy of an error.

    Raises:
        DependencyError: the URL is none, or what is there does not answer or refuses.
    """
    waits: dict[str, Any] = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    with answering(url, setting):
        try:
            address = Address.of(url)
            if address.cluster:
                return redis.RedisCluster(url=address.urls[0], startup_nodes=address.nodes()[1:], **waits)
            client = redis.Redis.from_url(url, **waits)
            client.ping()
        except (ValueError, TypeError):
            # What the parser says quotes the URL, and with it the password: neither it nor its traceback is passed on.
            raise DependencyError(
                f"Redis at {without_credentials(url)}", "is not the URL of a Redis",
                expected=f"{', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}, with / ? # and @ in a password percent-encoded",
                remedy=f"correct {setting}" + _embedded(setting), passes=False,
            ) from None  # fmt: skip
        except redis.ResponseError as error:
            if not only_writes(error):
                raise
    return client


@contextmanager
def answering(url: str, setting: str = SETTING) -> Iterator[None]:
    """Turns the ways in which Redis can refuse, or fail to answer, into one error that does not show the password.

    Args:
        url: where it is.
        setting: where that is configured.
    """
    try:
        yield
    except (redis.RedisError, RedisClusterException, OSError) as error:
        embedded = _embedded(setting)
        start = f"start it{',' if embedded else ' or'} correct {setting}{embedded}"
        refused = refusal(error) or Refusal(f"does not answer ({words(error)})", start, passes=True)
        remedy, found, shown = refused.remedy.replace("{setting}", setting), refused.found, True
        for password in _passwords(url):
            # A Redis that does not know a command repeats its arguments.
            found, shown = found.replace(password, "..."), shown and password not in str(error)
        raise DependencyError(
            f"Redis at {without_credentials(url)}", found, remedy=remedy, passes=refused.passes
        ) from (error if shown else None)  # fmt: skip


def _embedded(setting: str) -> str:
    return ', or set it to "embedded"' if setting == SETTING else ""


def _passwords(url: str) -> list[str]:
    options = [parse_url(node) for node in Address.of(url).urls]  # type: ignore[no-untyped-call]
    return [option["password"] for option in options if option.get("password")]


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
        rule = struct.pack("<q", horizon) if horizon is not None else self._announce(view, keys, known)

        def packed() -> Iterator[Piece]:
            for start in range(0, len(event), PIECE):
                part = slice(start, start + PIECE)
                values = {name: Values(column.data[part], column.valid[part]) for name, column in columns.items()}
                names = entity_keys(self.contract.project, view.keys, {name: keys[name][part] for name in keys})
                yield names, codec.encode(event[part], known[part], values)

        changed, written = WRITE.run(self.client, [view.name.encode(), rule], packed()) or (0, 0)
        return WriteCounts(len(event), changed, written)

    def _announce(self, view: ViewContract, keys: Mapping[str, Sequence[KeyValue]], known: Int64) -> bytes:
        """Says which keys are about to be written by somebody else than the table; returns the rule for `WRITE`."""
        record = self.published(view)
        if record is None:
            return b""
        names = entity_keys(self.contract.project, view.keys, keys)
        for start in range(0, len(names), CHUNK):
            part = slice(start, start + CHUNK)
            arguments = announced(names[part], known[part])
            ANNOUNCE.run(self.client, arguments, [([suspects(self.contract.project, view.name)], [])])
        return rule_of(published.stamp_of(view, record))

    def published(self, view: ViewContract) -> Published | None:
        """What Redis has been told of the view's offline table."""
        told = cast("bytes | None", self.client.hget(self._records, view.name))
        return published.decode(told)

    def publish(self, view: ViewContract, record: Published) -> None:
        """Tells Redis so."""
        self.client.hset(self._records, view.name, msgspec.json.encode(record).decode())

    def lock(self, view: ViewContract) -> Lock:
        """What one materialization of a view at a time can hold."""
        name = published.beside(self.contract.project, view.name, "lock").decode()
        return cast("Lock", self.client.lock(name, timeout=LEASE_SECONDS, thread_local=False))

    def take_suspects(self, view: ViewContract, horizon: int) -> pa.Table | None:
        """The join keys of rows that others have written and that were known by a horizon, which are forgotten.

        Returns:
            The keys; None if they are too many to be remembered.
        """
        name = suspects(self.contract.project, view.name).decode()
        with self.client.pipeline(transaction=True) as pipeline:
            pipeline.zrangebyscore(name, "-inf", horizon)
            pipeline.zremrangebyscore(name, "-inf", horizon)
            pipeline.zscore(name, "*")
            found, _, many = pipeline.execute()
        if many is not None:
            self.client.delete(name)
            return None
        rows = [decode_key(self.contract.project, view.keys, key) for key in found]
        columns = sorted(view.keys, key=lambda column: column.name)
        values = {column.name: [row[n] for row in rows] for n, column in enumerate(columns)}
        return pa.table({key.name: to_arrow(from_python(values[key.name], key.dtype), key.dtype) for key in view.keys})

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
        pieces: Iterator[Piece] = ((some, []) for some in names)
        arguments = [view.name.encode(), bytes([VERSION]) + view.prefix, struct.pack("<q", horizon)]
        return sum(_REMOVE.run(self.client, arguments, pieces))

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


class LookupPlan:
    """How some views are read for many entity rows in one round trip: built once, used by every request.

    Args:
        contract: the project's contract.
        views: names of the views to read.

    Attributes:
        codecs: view name to what decodes its rows.
        records: the Redis command that reads what the stamps are in.
    """

    def __init__(self, contract: Contract, views: Iterable[str]) -> None:
        self.project = contract.project
        self.views = [contract.view(name) for name in dict.fromkeys(views)]
        self.codecs = {view.name: RowCodec(view) for view in self.views}
        groups: dict[tuple[str, ...], list[ViewContract]] = {}
        for view in self.views:
            groups.setdefault(tuple(sorted(column.name for column in view.keys)), []).append(view)
        self._groups = list(groups.values())
        self.records = (b"HMGET", published.records(self.project), *(view.name.encode() for view in self.views))
        self.keys: dict[str, Column] = {column.name: column for view in self.views for column in view.keys}

    def bits(self, features: Iterable[tuple[str, str]]) -> dict[str, bytes]:
        """View name to the null bits of its features among some (view, feature) pairs, for `Columns.nulls`."""
        names: dict[str, list[str]] = {}
        for view, feature in features:
            names.setdefault(view, []).append(feature)
        return {view: self.codecs[view].bits(own) for view, own in names.items()}

    def commands(self, keys: Mapping[str, Sequence[KeyValue]]) -> list[tuple[bytes, ...]]:
        """The Redis commands of one lookup."""
        commands: list[tuple[bytes, ...]] = []
        for views in self._groups:
            fields = tuple(view.name.encode() for view in views)
            commands += [(b"HMGET", name, *fields) for name in entity_keys(self.project, views[0].keys, keys)]
        return commands

    def stamps(self, reply: Sequence[bytes | None]) -> dict[str, Stamp]:
        """View name to its stamp, if it has one, from the reply to `records`."""
        told = zip(self.views, map(published.decode, reply), strict=True)
        return {view.name: stamp for view, record in told if (stamp := published.stamp_of(view, record))}

    def decode(
        self, replies: Sequence[Sequence[bytes | None]], rows: int, at: int, stamps: Mapping[str, Stamp]
    ) -> dict[str, ViewAnswer]:
        """View name to its answer, from the replies to `commands` for `rows` entity rows.

        The stamps must have been read before the rows: a row that a stamp does not mean is newer than the stamp.
        """
        answers = {}
        for group, views in enumerate(self._groups):
            part = replies[group * rows : (group + 1) * rows]
            for position, view in enumerate(views):
                packed = [reply[position] for reply in part]
                answers[view.name] = _answer(view, self.codecs[view.name], packed, at, stamps.get(view.name))
        return answers

    def read(self, client: Client, keys: Mapping[str, Sequence[KeyValue]], at: int) -> dict[str, ViewAnswer]:
        """Reads and decodes, blocking."""
        (told,) = ask(client, [self.records])
        return self.decode(ask(client, self.commands(keys)), _rows(keys), at, self.stamps(told))


def suspects(project: str, view: str) -> bytes:
    """The name of the sorted set of keys that others have written."""
    return published.beside(project, view, "suspects")


def announced(names: Sequence[bytes], known: Int64) -> list[bytes]:
    """The arguments of `ANNOUNCE` for rows, shape (n,) int64 microseconds when they became known."""
    return [part for name, time in zip(names, known.tolist(), strict=True) for part in (b"%d" % time, name)]


def rule_of(stamp: Stamp | None) -> bytes:
    """The rule for `WRITE` of rows that do not come from the table."""
    return b"" if stamp is None else struct.pack("<qqq", stamp.until, stamp.event, stamp.known)


def _rows(keys: Mapping[str, Sequence[KeyValue]]) -> int:
    return len(next(iter(keys.values()), ()))


def _all_present(view: ViewContract, block: Block, at: int) -> bool:
    """Whether no row of a complete block is from the future or has expired."""
    first, last = _bounds(block.event)
    return last <= at and _bounds(block.known)[1] <= at and (view.ttl is None or at - first <= view.ttl)


def _bounds(times: Int64) -> tuple[int, int]:
    """The smallest and the largest of some times; of a few, Python finds them sooner."""
    if len(times) > _FEW:
        return int(times.min()), int(times.max())
    few = times.tolist()
    return min(few), max(few)


_FEW = 32
_PRESENT, _NOT_FOUND = np.uint8(Status.PRESENT), np.uint8(Status.NOT_FOUND)


def _answer(
    view: ViewContract, codec: RowCodec, packed: Sequence[bytes | None], at: int, stamp: Stamp | None
) -> ViewAnswer:
    """Applies the time rule to stored rows: the future is not there yet, the past expires."""
    block = codec.decode(packed)
    if stamp is not None:
        event, known = stamp.apply(block.event, block.known)
        block = Block(block.found, event * block.found, known * block.found, block.columns)
    if block.columns.complete and _all_present(view, block, at):
        # What most lookups meet, with a third of the work.
        return ViewAnswer(block.columns, np.zeros(len(packed), np.uint8), block.event, block.known, whole=True)
    visible = block.found & (block.event <= at) & (block.known <= at)
    status = np.where(visible, _PRESENT, _NOT_FOUND)
    if view.ttl is not None:
        status[visible & (at - block.event > view.ttl)] = Status.EXPIRED
    present = status == _PRESENT
    columns = block.columns
    if np.count_nonzero(present) != np.count_nonzero(block.found):
        columns = columns.only(present)
    status[present & ~columns.filled] = Status.NULL
    return ViewAnswer(columns, status, block.event, block.known)
