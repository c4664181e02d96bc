"""The stream of pushed rows that no history has yet: one in Redis for each offline table.

A push appends its rows here before it writes them, so that a row which is served is in the history or on its way there.
Both cannot be one step: in a cluster the stream is on one node, and the rows are on all of them. A server that is
killed in between leaves rows of a push that nobody has confirmed; the next materialization writes them.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import redis

from isthmus.features.errors import DependencyError
from isthmus.features.online import record
from isthmus.features.redis.pipeline import Client, run
from isthmus.features.redis.routing import Command, Script

# All rows of a push, or none if too many would wait. Replies with the rows that it has appended, and how many wait.
APPEND = Script("""
local call, stream = redis.call, KEYS[1]
local waiting, rows = call('XLEN', stream), (#ARGV - 2) / 2
if waiting + rows > tonumber(ARGV[1]) then return {0, waiting} end
for i = 3, #ARGV, 2 do call('XADD', stream, '*', 'k', ARGV[i], 'r', ARGV[i + 1], 'a', ARGV[2]) end
return {rows, waiting + rows}
""")

_RESTORE = Script("""
local call, stream = redis.call, KEYS[1]
local top = call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
if (top and top[1] or '') ~= ARGV[1] then return {0} end
call('XADD', stream, ARGV[2], 'k', '', 'r', '', 'a', 0)
call('XTRIM', stream, 'MINID', ARGV[2])
return {1}
""")

_SEQUENCE = 22
"""Bits of the second number of an id, which counts the rows of a millisecond, in the number that we make of an id."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A pushed row in the stream.

    Attributes:
        place: its id as one number; rises along the stream.
        name: the entity key.
        row: the packed row.
        accepted: when the push was accepted, microseconds since 1970 UTC.
    """

    place: int
    name: bytes
    row: bytes
    accepted: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """The rows that wait for a history, and when Redis got the first of them, microseconds since 1970 UTC.

    Rows whose collection was killed at its very end still count, until the next one.
    """

    rows: int
    since: int | None


def stream(project: str, table: str) -> bytes:
    """The Redis key of the stream for an offline table."""
    return record.beside(project, table, "pushed")


def backlog_commands(project: str, table: str) -> list[Command]:
    """The Redis commands whose replies are a `backlog`."""
    name = stream(project, table)
    return [(b"XLEN", name), (b"XRANGE", name, b"-", b"+", b"COUNT", b"2"), (b"GET", _collected(project, table))]


def backlog(replies: Sequence[Any]) -> Backlog:
    """What waits, from the replies to `backlog_commands`."""
    length, entries, collected = replies
    # The last collected entry stays, and a stream that was lost begins with an entry without a row.
    if entries and (entries[0][0] == collected or b"" in entries[0][1]):
        length, entries = length - 1, entries[1:]
    return Backlog(length, moment(_place(entries[0][0])) if entries else None)


def _collected(project: str, table: str) -> bytes:
    return record.beside(project, table, "collected")


def appended(names: Sequence[bytes], rows: Sequence[bytes], accepted: int, limit: int) -> list[bytes]:
    """The arguments of `APPEND`."""
    pairs = [part for pair in zip(names, rows, strict=True) for part in pair]
    return [b"%d" % limit, b"%d" % accepted, *pairs]


def require_room(table: str, counts: Sequence[int], rows: int) -> None:
    """Raises a DependencyError if `APPEND` has refused rows."""
    if counts[0] < rows:
        raise DependencyError(
            f"history of {table}", f"{counts[1]:,} pushed rows wait for it, and {rows:,} more are too many",
            remedy="run `isthmus collect`, or push with `to: online`, which no history learns of", passes=True,
        )  # fmt: skip


def newest(client: Client, project: str, table: str) -> int:
    """The place of the last entry of a stream; -1 if it has none."""
    entries = cast("list[Any]", client.xrevrange(stream(project, table), count=1))
    return _place(entries[0][0]) if entries else -1


def waiting(
    client: Client, project: str, table: str, count: int, after: int = -1, until: int | None = None
) -> list[Entry]:
    """The first entries of a stream after a place, up to and with another one, in order.

    Raises:
        redis.RedisError: Redis does not answer, or refuses.
    """
    first, last = "-" if after < 0 else f"({_id(after)}", "+" if until is None else _id(max(until, 0))
    entries = cast("list[Any]", client.xrange(stream(project, table), first, last, count=count))
    try:
        found = [Entry(_place(name), fields[b"k"], fields[b"r"], int(fields[b"a"])) for name, fields in entries]
    except (KeyError, ValueError) as error:
        raise redis.ResponseError(
            f"WRONGTYPE {stream(project, table).decode()} has entries of another program"
        ) from error
    return [entry for entry in found if entry.row]


def trim(client: Client, project: str, table: str, place: int) -> int:
    """Removes the entries before a place, which was collected last; returns how many those were.

    That of the place itself stays: as long as it is there, Redis has lost nothing that came after it.
    """
    client.set(_collected(project, table).decode(), _id(place))
    return client.xtrim(stream(project, table), minid=_id(place), approximate=False)


def collected(client: Client, project: str, table: str) -> int:
    """The place that `trim` had last; -1 if Redis does not know it."""
    name = cast("bytes | None", client.get(_collected(project, table).decode()))
    return -1 if name is None else _place(name)


def holds(client: Client, project: str, table: str, place: int) -> bool:
    """Whether the entry of a place is there."""
    return bool(client.xrange(stream(project, table), _id(place), _id(place)))


def restore(client: Client, project: str, table: str, place: int, seen: int) -> None:
    """Makes a stream that was lost go on from a place, with an entry without a row: later ids are greater.

    Only if nothing has come after the place that was `seen` last, or -1: what came has to be brought first.
    """
    arguments = [b"" if seen < 0 else _id(seen).encode(), _id(place).encode()]
    with suppress(redis.ResponseError):  # The stream is older than it says, and takes greater ids alone.
        run(client, _RESTORE, arguments, [([stream(project, table)], [])])


def moment(place: int) -> int:
    """When an entry was appended by the clock of Redis, microseconds since 1970 UTC."""
    return (place >> _SEQUENCE) * 1000


def _id(place: int) -> str:
    return f"{place >> _SEQUENCE}-{place & ((1 << _SEQUENCE) - 1)}"


def _place(name: bytes) -> int:
    milliseconds, _, count = name.partition(b"-")
    if int(count) >> _SEQUENCE:
        raise ValueError(name)
    return int(milliseconds) << _SEQUENCE | int(count)
