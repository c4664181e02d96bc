"""The online store: the latest row of every view and key, in Redis.

One Redis hash per project and entity key, one field per view, one packed row per field. A lookup is one pipelined
round trip, whatever the number of views and keys.
"""

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import redis

from isthmus.features.clock import Status
from isthmus.features.columns import Values
from isthmus.features.contract import Column, Contract, ViewContract
from isthmus.features.errors import DependencyError, RequestError
from isthmus.features.rows import Int64, RowCodec

CHUNK = 1000
"""Rows in one call of the write script: long enough to make round trips rare, short enough not to block Redis."""

KeyValue = int | str

# Decides for many rows in one call which of them replace what is stored. Lua's numbers are doubles, which hold
# microseconds only to the year 2255: the 64-bit header numbers are compared as a signed and an unsigned half.
_WRITE = """
local field, full, table_wins = ARGV[1], ARGV[2] == '1', ARGV[3] == '1'
local changed, written = 0, 0
local function parts(row)
  local el, eh, kl, kh, cl, ch = struct.unpack('<I4i4I4i4I4I4', row, 10)
  return {eh, el, kh, kl, ch, cl}
end
for i, key in ipairs(KEYS) do
  local new = ARGV[i + 3]
  local old = redis.call('HGET', key, field)
  local write, differs = true, true
  if old and #old >= 33 and string.sub(old, 1, 9) == string.sub(new, 1, 9) then
    differs = string.sub(old, 26, 33) ~= string.sub(new, 26, 33)
    write = full and old ~= new
    if not full then
      local was, is = parts(old), parts(new)
      local times_only = table_wins and 4 or 6
      write = table_wins and old ~= new
      for j = 1, times_only do
        if is[j] ~= was[j] then write = is[j] > was[j]; break end
      end
    end
  end
  if write then
    redis.call('HSET', key, field, new)
    written = written + 1
    if differs then changed = changed + 1 end
  end
end
return {changed, written}
"""


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
        event: shape (n,) int64 microseconds, 0 where there is no row.
        known: shape (n,) int64 microseconds, 0 where there is no row.
    """

    columns: Mapping[str, Values]
    status: np.ndarray[Any, np.dtype[np.uint8]]
    event: Int64
    known: Int64


def connect(url: str, timeout: float = 5.0) -> redis.Redis:
    """A client for the Redis at a URL (`redis://`, `rediss://`, `unix://`); no wait is longer than `timeout` seconds.

    Raises:
        DependencyError: the URL is none, or nothing answers there.
    """
    with answering(url):
        try:
            client = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
            client.ping()
        except TypeError:
            raise ValueError("an option of the URL is none of Redis") from None
    return client


@contextmanager
def answering(url: str) -> Any:
    """Turns the ways in which Redis can fail to answer into one error that does not show the password."""
    try:
        yield
    except ValueError:
        # What the parser says quotes the URL, and with it the password: neither it nor its traceback is passed on.
        raise DependencyError(
            f"Redis at {without_credentials(url)}", "is not the URL of a Redis",
            expected="redis://, rediss:// or unix://, with / ? # and @ in a password percent-encoded",
            remedy="correct stores.online in isthmus.toml, or set it to \"embedded\"",
        ) from None  # fmt: skip
    except (redis.RedisError, OSError) as error:
        text = str(error).rstrip(".") or type(error).__name__
        raise DependencyError(
            f"Redis at {without_credentials(url)}", f"does not answer ({text})",
            remedy="start it, correct stores.online in isthmus.toml, or set it to \"embedded\"",
        ) from error  # fmt: skip


def without_credentials(url: str) -> str:
    """The URL as it may be shown: without user, password and options."""
    head, separator, tail = url.partition("://")
    scheme, rest = (head, tail) if separator else ("", url)
    place, *options = re.split(r"[?#]", rest)
    if any("@" in option for option in options):
        # An unescaped password, or one given as an option: where it ends cannot be told.
        return f"{scheme}{separator}..."
    return f"{scheme}{separator}{place.rpartition('@')[2]}"


def entity_key(project: str, keys: Sequence[tuple[Column, KeyValue]]) -> bytes:
    """The name of the Redis hash of one entity key.

    The project comes first and delimited, then the names of the join keys in alphabetical order, then each value with
    its type and, for text, its length: no two different keys share a name.
    """
    ordered = sorted(keys, key=lambda pair: pair[0].name)
    return _prefix(project, [column for column, _ in ordered]) + b"".join([_encode(value) for _, value in ordered])


def _prefix(project: str, keys: Iterable[Column]) -> bytes:
    return f"{project}:{','.join(sorted(column.name for column in keys))}:".encode()


def _encode(value: KeyValue) -> bytes:
    if isinstance(value, str):
        try:
            text = value.encode()
        except UnicodeEncodeError:
            raise RequestError(f"key {value!r}", "is not text", expected="text with a UTF-8 form") from None
        return b"s" + struct.pack("<I", len(text)) + text
    return b"i" + struct.pack("<q", value)


def entity_keys(project: str, columns: Sequence[Column], values: Mapping[str, Sequence[KeyValue]]) -> list[bytes]:
    """`entity_key` for n rows of key columns."""
    names = sorted(column.name for column in columns)
    prefix = _prefix(project, columns)
    if len(names) == 1:
        return [prefix + _encode(value) for value in values[names[0]]]
    return [prefix + b"".join(map(_encode, row)) for row in zip(*(values[name] for name in names), strict=True)]


class OnlineStore:
    """The rows of one project in one Redis.

    Args:
        client: a connection that returns bytes.
        contract: what the rows must have been written under.
    """

    def __init__(self, client: redis.Redis, contract: Contract) -> None:
        self.client = client
        self.contract = contract
        self._write = client.register_script(_WRITE)

    def write(
        self,
        view: ViewContract,
        keys: Mapping[str, Sequence[KeyValue]],
        event: Int64,
        known: Int64,
        columns: Mapping[str, Values],
        *,
        full: bool = False,
        table: bool = False,
    ) -> WriteCounts:
        """Writes n rows of a view; a row replaces what is stored unless that is newer by (event, known, content).

        Args:
            view: the view.
            keys: join key name to n values.
            event: shape (n,) int64 microseconds.
            known: shape (n,) int64 microseconds.
            columns: feature name to its values, shape (n,).
            full: replace every row that differs, also a newer one.
            table: the rows come from the offline table: at equal times they replace what differs, whatever its hash.
        """
        names = entity_keys(self.contract.project, view.keys, keys)
        rows = RowCodec(view).encode(event, known, columns)
        changed = written = 0
        for start in range(0, len(rows), CHUNK):
            batch = slice(start, start + CHUNK)
            reply = self._write(
                keys=names[batch], args=[view.name, int(full), int(table), *rows[batch]], client=self.client
            )
            more_changed, more_written = cast("list[int]", reply)
            changed += more_changed
            written += more_written
        return WriteCounts(len(rows), changed, written)

    def read(self, view: ViewContract, keys: Mapping[str, Sequence[KeyValue]], at: int) -> ViewAnswer:
        """What a view answers for n keys at time `at`, in microseconds."""
        plan = LookupPlan(self.contract, [view.name])
        return plan.read(self.client, keys, at)[view.name]


class LookupPlan:
    """How some views are read for many entity rows in one round trip: built once, used by every request.

    Args:
        contract: the project's contract.
        views: names of the views to read.
    """

    def __init__(self, contract: Contract, views: Iterable[str]) -> None:
        self.project = contract.project
        self.views = [contract.view(name) for name in dict.fromkeys(views)]
        self._codecs = {view.name: RowCodec(view) for view in self.views}
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
                answers[view.name] = _answer(view, self._codecs[view.name], packed, at)
        return answers

    def read(self, client: redis.Redis, keys: Mapping[str, Sequence[KeyValue]], at: int) -> dict[str, ViewAnswer]:
        """Reads and decodes, blocking."""
        pipeline = client.pipeline(transaction=False)
        for command in self.commands(keys):
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]  # so in redis-py
        return self.decode(pipeline.execute(), _rows(keys), at)


def _rows(keys: Mapping[str, Sequence[KeyValue]]) -> int:
    return len(next(iter(keys.values()), ()))


def _answer(view: ViewContract, codec: RowCodec, packed: Sequence[bytes | None], at: int) -> ViewAnswer:
    """Applies the time rule to stored rows: the future is not there yet, the past expires."""
    block = codec.decode(packed)
    visible = block.found & (block.event <= at) & (block.known <= at)
    status = np.where(visible, np.uint8(Status.PRESENT), np.uint8(Status.NOT_FOUND))
    if view.ttl is not None:
        status[visible & (at - block.event > view.ttl)] = Status.EXPIRED
    present = status == Status.PRESENT
    columns = block.columns
    if (block.found & ~present).any():
        columns = {name: _only(values, present) for name, values in columns.items()}
    filled = np.zeros(len(packed), bool)
    for values in columns.values():
        filled |= values.valid
    status[present & ~filled] = Status.NULL
    return ViewAnswer(columns, status, block.event, block.known)


def _only(values: Values, present: np.ndarray[Any, np.dtype[np.bool_]]) -> Values:
    """The values where `present`, and null elsewhere: nothing of an expired row stays under its null."""
    nothing: Any = None if values.data.dtype == object else values.data.dtype.type(0)
    return Values(np.where(present, values.data, nothing), values.valid & present)
