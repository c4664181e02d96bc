"""The Redis streams of pushed rows that have not reached the history, one stream for each offline table.

A push appends its rows to the stream before it writes them, so every served row is in the history or queued for it. If
a server is killed in between, its push was not confirmed; the next materialization writes the rows online.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import redis

from isthmus.features.errors import DependencyError
from isthmus.features.online import record
from isthmus.features.redis.pipeline import Client, run
from isthmus.features.redis.routing import Command, Script

# A place packs the two numbers of a stream id, the millisecond and the sequence number, into this many bits.
_MOMENT, _SEQUENCE = 41, 22

# Append all rows of a push, or no row if too many would wait. Reply with the number of appended and of waiting rows.
APPEND = Script("""
local call, stream = redis.call, KEYS[1]
local waiting, rows = call('XLEN', stream), (#ARGV - 2) / 2
if waiting + rows > tonumber(ARGV[1]) then return {0, waiting} end
for i = 3, #ARGV, 2 do call('XADD', stream, '*', 'k', ARGV[i], 'r', ARGV[i + 1], 'a', ARGV[2]) end
return {rows, waiting + rows}
""")

# Give new ids to entries whose ids are too large for a place. A clock that jumped makes such ids, as does any clock
# from 2039 on. New ids follow the ids before them: by the clock until 12 days before the end of the range, then by 1.
_RENUMBER = Script(f"""
if redis.replicate_commands then redis.replicate_commands() end -- before Redis 7, to write after TIME
local call, stream, clock = redis.call, KEYS[1], redis.call('TIME')
local now = math.min(clock[1] * 1000, {(1 << _MOMENT) - (1 << 30)})
local entries, ms, seq = call('XRANGE', stream, '-', '+'), 0, 0
for _, entry in ipairs(entries) do -- more values have no room in a call, and half of the entries must not be gone
  if #entry[2] > 4000 then return redis.error_reply('WRONGTYPE an entry is of another program') end
end
call('DEL', stream)
for _, entry in ipairs(entries) do
  local own, count = string.match(entry[1], '(%d+)-(%d+)')
  own, count = tonumber(own), tonumber(count)
  if own < {1 << _MOMENT} and count < {1 << _SEQUENCE} and (own > ms or (own == ms and count > seq)) then
    ms, seq = own, count
  elseif now > ms then
    ms, seq = now, 0
  elseif seq + 1 < {1 << _SEQUENCE} then
    seq = seq + 1
  else
    ms, seq = ms + 1, 0
  end
  call('XADD', stream, string.format('%.0f-%.0f', ms, seq), unpack(entry[2]))
end
return {{#entries}}
""")

_RESTORE = Script("""
local call, stream = redis.call, KEYS[1]
local top = call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
if (top and top[1] or '') ~= ARGV[1] then return {0} end
call('XADD', stream, ARGV[2], 'k', '', 'r', '', 'a', 0)
call('XTRIM', stream, 'MINID', ARGV[2])
return {1}
""")


@dataclass(frozen=True, slots=True)
class Entry:
    """A pushed row in the Redis stream.

    Attributes:
        place: position in the stream: the stream id as a single number, ascending along the stream.
        name: entity key.
        row: packed row; other bytes if another program wrote the entry.
        accepted: time at which the push was accepted, in microseconds since 1970 UTC.
    """

    place: int
    name: bytes
    row: bytes
    accepted: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """The number of pushed rows that wait, and since when, in microseconds since 1970 UTC; None if no row waits."""

    rows: int
    since: int | None


def stream(project: str, table: str) -> bytes:
    return record.view_key(project, table, "pushed")


def backlog_commands(project: str, table: str) -> list[Command]:
    name = stream(project, table)
    return [(b"XLEN", name), (b"XRANGE", name, b"-", b"+", b"COUNT", b"2"), (b"GET", _collected(project, table))]


def backlog(replies: Sequence[Any]) -> Backlog:
    # A collection that was killed at its very end leaves its rows counted until the next one.
    length, entries, collected = replies
    # Do not count the last collected entry, which stays, or the entry without a row that `restore` adds.
    if entries and (entries[0][0] == collected or b"" in entries[0][1]):
        length, entries = length - 1, entries[1:]
    return Backlog(length, min(_numbers(entries[0][0])[0], 1 << _MOMENT) * 1000 if entries else None)


def _collected(project: str, table: str) -> bytes:
    return record.view_key(project, table, "collected")


def append_arguments(names: Sequence[bytes], rows: Sequence[bytes], accepted: int, limit: int) -> list[bytes]:
    pairs = [part for pair in zip(names, rows, strict=True) for part in pair]
    return [b"%d" % limit, b"%d" % accepted, *pairs]


def require_room(table: str, counts: Sequence[int], rows: int) -> None:
    if counts[0] < rows:
        raise DependencyError(
            f"history of {table}", f"{counts[1]:,} pushed rows wait for it; {rows:,} more exceed the limit",
            remedy="run `isthmus pushes collect`, or push with `to: online`, which skips the history", passes=True,
        )  # fmt: skip


def newest(client: Client, project: str, table: str) -> int:
    """Return the position of the last entry in a table's stream of pushed rows, or -1 if the stream is empty.

    `collect` reads up to this position (see `Entry.place`), and leaves later rows to its next run. If the entry's id is
    too large to be a position, this gives the entries of the stream new ids.
    """
    entries = _entries(client, project, table, lambda name: client.xrevrange(name, count=1))
    return _place(entries[0][0]) if entries else -1


def waiting(
    client: Client, project: str, table: str, count: int, after: int = -1, until: int | None = None
) -> list[Entry]:
    """Read pushed rows that wait in a table's stream to be collected, in order.

    At most `count` rows are read, with positions greater than `after` and up to `until` (see `Entry.place`). None means
    no upper limit. If an id is too large to be a position, this gives the entries of the stream new ids. Raise
    redis.RedisError if Redis does not answer.
    """
    first, last = "-" if after < 0 else f"({_id(after)}", "+" if until is None else _id(max(until, 0))
    entries = _entries(client, project, table, lambda name: client.xrange(name, first, last, count=count))
    return [entry for entry in (_entry(_place(name), fields) for name, fields in entries) if entry.row]


def _entries(client: Client, project: str, table: str, read: Callable[[bytes], Any]) -> list[Any]:
    name = stream(project, table)
    entries: list[Any] = read(name)
    if any(ms >> _MOMENT or count >> _SEQUENCE for ms, count in (_numbers(entry[0]) for entry in entries)):
        run(client, _RENUMBER, [], [([name], [])])
        entries = read(name)
    return entries


def _entry(place: int, fields: Mapping[bytes, bytes]) -> Entry:
    with suppress(KeyError, ValueError):
        return Entry(place, fields[b"k"], fields[b"r"], int(fields[b"a"]))
    return Entry(place, b"", b"?", -1)


def unreadable_stream(project: str, table: str) -> bytes:
    return record.view_key(project, table, "aside")


def set_aside(client: Client, project: str, table: str, entries: Iterable[Entry]) -> None:
    """Copy entries that cannot be collected to a separate stream, unless that stream has them already.

    `trim` later removes the originals, so they no longer block the stream. `put_back` returns the copies to it.
    """
    name = unreadable_stream(project, table)
    for place in (_id(entry.place) for entry in entries):
        if not client.xrange(name, place, place):
            for _, fields in cast("list[Any]", client.xrange(stream(project, table), place, place)):
                try:
                    client.xadd(name, fields, id=place)
                except redis.ResponseError:  # The clock went back: the stream ends with a greater id.
                    client.xadd(name, fields)


def put_back(client: Client, project: str, table: str) -> None:
    """Move entries from the separate stream of `set_aside` back to the stream of pushed rows, to collect them again.

    Use this once the cause is fixed. Entries without the fields of a pushed row stay in the separate stream.
    """
    for name, fields in cast("list[Any]", client.xrange(unreadable_stream(project, table))):
        if fields.keys() >= {b"k", b"r"} and fields.get(b"a", b"").isdigit():
            arguments = [b"%d" % (1 << 62), fields[b"a"], fields[b"k"], fields[b"r"]]
            # If the process is killed here, the entry is in both streams, and counts as one row.
            run(client, APPEND, arguments, [([stream(project, table)], [])])
            client.xdel(unreadable_stream(project, table), name)


def trim(client: Client, project: str, table: str, place: int) -> int:
    """Record in Redis that all pushed rows up to the position `place` are collected, and remove the entries before it.

    Return the number of removed entries. Raise redis.RedisError if Redis fails.
    """
    client.set(_collected(project, table).decode(), _id(place))
    # The entry at `place` stays: while it exists, Redis has not lost any later entry.
    return client.xtrim(stream(project, table), minid=_id(place), approximate=False)


def collected(client: Client, project: str, table: str) -> int:
    name = cast("bytes | None", client.get(_collected(project, table).decode()))
    return -1 if name is None else _place(name)


def holds(client: Client, project: str, table: str, place: int) -> bool:
    return bool(client.xrange(stream(project, table), _id(place), _id(place)))


def restore(client: Client, project: str, table: str, place: int, seen: int) -> None:
    """Restart a stream whose entries Redis has lost, so that new pushed rows get positions after `place`.

    `place` is the last position in the log of pushes (see `Entry.place`). This adds an entry without a row there, and
    removes earlier entries. `seen` is the last position that the caller read in the stream, or -1 if it was empty. If
    the stream has grown since then, or `place` is not after its end, nothing changes.
    """
    arguments = [b"" if seen < 0 else _id(seen).encode(), _id(place).encode()]
    with suppress(redis.ResponseError):  # The stream accepts only greater ids.
        run(client, _RESTORE, arguments, [([stream(project, table)], [])])


def appended_at(place: int) -> int:
    """Return the time at which Redis appended an entry to the stream, in microseconds since 1970 UTC.

    `place` is the position of the entry (see `Entry.place`). If Redis has lost the stream, rows pushed later may be
    lost.
    """
    return (place >> _SEQUENCE) * 1000


def _id(place: int) -> str:
    return f"{place >> _SEQUENCE}-{place & ((1 << _SEQUENCE) - 1)}"


def _numbers(name: bytes) -> tuple[int, int]:
    milliseconds, _, count = name.partition(b"-")
    return int(milliseconds), int(count)


def _place(name: bytes) -> int:
    milliseconds, count = _numbers(name)
    return milliseconds << _SEQUENCE | count
