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

import numpy as np
import redis
from redis.connection import parse_url
from redis.exceptions import RedisClusterException

from isthmus.features.address import SCHEMES, Address, without_credentials
from isthmus.features.clock import Status
from isthmus.features.columns import Values
from isthmus.features.contract import Column, Contract, ViewContract
from isthmus.features.entitykey import KeyValue, decode_key, entity_keys, key_prefix
from isthmus.features.errors import DependencyError
from isthmus.features.exchange import CHUNK, Client, Piece, Script, ask
from isthmus.features.refusal import Refusal, only_writes, refusal, words
from isthmus.features.rows import VERSION, Block, Columns, Int64, RowCodec

PIECE = 4000
"""Rows that are packed at a time: a small part of all memory, and few enough for Redis to start on them soon."""

SETTING = "stores.online in isthmus.toml"
"""Where the URL of Redis is configured, unless an online store of Feast's says otherwise."""

EVERYTHING = (1 << 63) - 1
"""The horizon behind which every row lies."""

# Decides for many rows in one call which of them replace what is stored. Lua's numbers are doubles, which hold
# microseconds only to the year 2255: the 64-bit header numbers are compared as a signed and an unsigned half.
WRITE = Script("""
local field, decided = ARGV[1], ARGV[2] ~= ''
local sub, unpack, call = string.sub, struct.unpack, redis.call
local hl, hh = 0, 0
if decided then hl, hh = unpack('<I4i4', ARGV[2]) end
local changed, written = 0, 0
local function newer(new, old)
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
    local l, h = unpack('<I4i4', old, 18)
    if not decided or h > hh or (h == hh and l > hl) then write = newer(new, old) end
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

# Sets a field if it still is what somebody has read; a field that is not there is empty.
_REPLACE = Script("""
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then return {0} end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return {1}
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
        except TypeError:
            raise ValueError("an option of the URL is none of Redis") from None
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
    where, correct = f"Redis at {without_credentials(url)}", f"correct {setting}"
    embedded = ', or set it to "embedded"' if setting == SETTING else ""
    try:
        yield
    except ValueError:
        # What the parser says quotes the URL, and with it the password: neither it nor its traceback is passed on.
        raise DependencyError(
            where, "is not the URL of a Redis",
            expected=f"{', '.join(SCHEMES[:-1])} or {SCHEMES[-1]}, with / ? # and @ in a password percent-encoded",
            remedy=correct + embedded, passes=False,
        ) from None  # fmt: skip
    except (redis.RedisError, RedisClusterException, OSError) as error:
        start = f"start it{',' if embedded else ' or'} {correct}{embedded}"
        refused = refusal(error) or Refusal(f"does not answer ({words(error)})", start, passes=True)
        remedy, found, shown = refused.remedy.replace("{setting}", setting), refused.found, True
        for password in _passwords(url):
            # A Redis that does not know a command repeats its arguments.
            found, shown = found.replace(password, "..."), shown and password not in str(error)
        raise DependencyError(where, found, remedy=remedy, passes=refused.passes) from (error if shown else None)


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
            horizon: of rows that come from the offline table, what `claim` has said: whatever is stored and was known
                by then is replaced, be it newer, since the table would still have it if it were true.
        """
        codec = RowCodec(view)

        def packed() -> Iterator[Piece]:
            for start in range(0, len(event), PIECE):
                part = slice(start, start + PIECE)
                values = {name: Values(column.data[part], column.valid[part]) for name, column in columns.items()}
                names = entity_keys(self.contract.project, view.keys, {name: keys[name][part] for name in keys})
                yield names, codec.encode(event[part], known[part], values)

        decided = b"" if horizon is None else struct.pack("<q", horizon)
        changed, written = WRITE.run(self.client, [view.name.encode(), decided], packed()) or (0, 0)
        return WriteCounts(len(event), changed, written)

    def claim(self, view: ViewContract, horizon: int, built: int) -> int | None:
        """Announces that the rows of an offline table come next; returns until when the table decides what is stored.

        The table holds everything that was known at its horizon, so a stored row that was known by then and that it
        lacks is not true any more. A row that became known later may come from another writer, which the table has yet
        to catch up with. The last table's horizon counts on: its newest row may be what is not true any more.

        Args:
            view: the view.
            horizon: the latest known time of the table, microseconds.
            built: when the table was written, in any unit that does not change.

        Returns:
            The horizon for `write` and `remove_others`; None if Redis has rows of a table that was built later, where
            this one decides nothing.
        """
        name, field = f"{self.contract.project}:tables", view.name.encode()
        while True:
            before = cast("bytes | None", self.client.hget(name, view.name)) or b""
            last = [int(number) for number in before.split()]
            if last and last[1] > built:
                return None
            until = max(horizon, last[0]) if last else horizon
            # Compared and set in one, since another run may announce another table at the same time.
            after = b"%d %d" % (until, built)
            if _REPLACE.run(self.client, [field, before, after], [([name.encode()], [])]) == [1]:
                return until

    def remove_others(self, view: ViewContract, keys: Mapping[str, Sequence[KeyValue]], horizon: int) -> int:
        """Removes the rows of other keys that were known by the horizon; returns how many those were.

        A row of another contract, which nothing can read, is removed whatever its time.
        """
        kept = set(entity_keys(self.contract.project, view.keys, keys))
        others: Iterator[Piece] = (([name for name in names if name not in kept], []) for names in self._names(view))
        arguments = [view.name.encode(), bytes([VERSION]) + view.prefix, struct.pack("<q", horizon)]
        return sum(_REMOVE.run(self.client, arguments, others))

    def keys(self, view: ViewContract) -> dict[str, list[KeyValue]]:
        """Join key name to the values of every key that has a row of the view, in no order."""
        rows: set[tuple[KeyValue, ...]] = set()
        field = view.name.encode()
        for names in self._names(view):
            held = zip(names, ask(self.client, [(b"HEXISTS", name, field) for name in names]), strict=True)
            rows.update(decode_key(self.contract.project, view.keys, name) for name, has in held if has)
        ordered = sorted(column.name for column in view.keys)
        return {name: [row[n] for row in rows] for n, name in enumerate(ordered)}

    def runs(self) -> frozenset[str]:
        """What Redis calls the processes that hold the rows, each by a name that it never has again."""
        told = [cast("dict[str, Any]", node.info("server")) for node in self._nodes()]
        return frozenset(str(server.get("run_id")) for server in told)

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
    """

    def __init__(self, contract: Contract, views: Iterable[str]) -> None:
        self.project = contract.project
        self.views = [contract.view(name) for name in dict.fromkeys(views)]
        self.codecs = {view.name: RowCodec(view) for view in self.views}
        groups: dict[tuple[str, ...], list[ViewContract]] = {}
        for view in self.views:
            groups.setdefault(tuple(sorted(column.name for column in view.keys)), []).append(view)
        self._groups = list(groups.values())
        self.keys: dict[str, Column] = {column.name: column for view in self.views for column in view.keys}

    def commands(self, keys: Mapping[str, Sequence[KeyValue]]) -> list[tuple[bytes, ...]]:
        """The Redis commands of one lookup."""
        commands: list[tuple[bytes, ...]] = []
        for views in self._groups:
            fields = tuple(view.name.encode() for view in views)
            commands += [(b"HMGET", name, *fields) for name in entity_keys(self.project, views[0].keys, keys)]
        return commands

    def decode(self, replies: Sequence[Sequence[bytes | None]], rows: int, at: int) -> dict[str, ViewAnswer]:
        """View name to its answer, from the replies to `commands` for `rows` entity rows."""
        answers = {}
        for group, views in enumerate(self._groups):
            part = replies[group * rows : (group + 1) * rows]
            for position, view in enumerate(views):
                packed = [reply[position] for reply in part]
                answers[view.name] = _answer(view, self.codecs[view.name], packed, at)
        return answers

    def read(self, client: Client, keys: Mapping[str, Sequence[KeyValue]], at: int) -> dict[str, ViewAnswer]:
        """Reads and decodes, blocking."""
        return self.decode(ask(client, self.commands(keys)), _rows(keys), at)


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


def _answer(view: ViewContract, codec: RowCodec, packed: Sequence[bytes | None], at: int) -> ViewAnswer:
    """Applies the time rule to stored rows: the future is not there yet, the past expires."""
    block = codec.decode(packed)
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
