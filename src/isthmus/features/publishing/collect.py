"""Move pushed rows from their stream in Redis to the log of pushes and the table of their view."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from isthmus.features import clock
from isthmus.features.contract.schema import ViewContract
from isthmus.features.errors import DataError, first_line
from isthmus.features.offline.canonical import declared_schema
from isthmus.features.offline.pushes import ACCEPTED, CONTRACT, PushLog
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online import pushes
from isthmus.features.online.pushes import Entry
from isthmus.features.redis.pipeline import Client
from isthmus.features.values.arrow import to_arrow
from isthmus.features.values.columns import Ints, from_python
from isthmus.features.values.entitykey import decode_values, key_prefix
from isthmus.features.values.rows import RowCodec

# Each step of a run can be repeated safely: append rows to the log, add them to the table, remove them from the stream.
# So the next run completes a killed run.
#
# The last collected row stays in the stream. If it is missing, Redis was emptied, has evicted the stream or was
# restored to an older state. The rows that waited there are lost, and the run reports it.

LOT = 1 << 17
"""Maximum rows per commit, which are in memory at once."""


@dataclass(frozen=True, slots=True)
class CollectedPushes:
    """The counts of a run of `collect` for a table.

    Attributes:
        rows: number of pushed rows that were read from Redis.
        logged: number of those rows that no earlier run had read.
        added: growth of the table, in rows.
        lost_after: time after which pushed rows may be lost, in microseconds since 1970 UTC; None without a loss.
        aside: number of unreadable entries that this run moved to a separate stream in Redis.
        why: problem with the last of these entries; empty without any.
    """

    rows: int = 0
    logged: int = 0
    added: int = 0
    lost_after: int | None = None
    aside: int = 0
    why: str = ""


def collect(
    client: Client, project: str, offline: OfflineStore, table: str, definitions: Sequence[ViewContract], lot: int = LOT
) -> CollectedPushes:
    """Move pushed rows of one offline table from Redis to its log of pushes and to the table, and return the counts.

    `isthmus pushes collect` runs this. If the table was built under none of `definitions`, rows go only to the log,
    which the next build reads. Entries that are unreadable, or of an unknown definition, go to a separate stream in
    Redis. Raises DataError or DependencyError if a table cannot be read or written, and redis.RedisError if Redis
    fails. No error loses rows: the next run completes this one.

    Args:
        client: connection to Redis.
        project: name of the project, which prefixes its keys in Redis.
        offline: offline store that has the log and the table.
        table: name of the offline table.
        definitions: all definitions of views with this table that rows may have been pushed under; at least one.
        lot: maximum number of rows per commit, which are in memory at once.
    """
    rows = logged = added = set_aside = 0
    seen, why = -1, ""
    log = PushLog(offline.root, table, offline.storage_options)
    last = before = log.last_position()
    while (
        not (intact := last < 0 or pushes.holds(client, project, table, last))
        and (later := log.last_position()) != last
    ):
        last = before = later  # Another run has collected more, and trimmed the stream.
    # Leave newer rows to the next run, since builds wait for this one. A lost stream is read to its end, to restore it.
    end = pushes.newest(client, project, table) if intact else None
    entries = pushes.waiting(client, project, table, lot, until=end)
    if intact and entries and entries[0].place == last == pushes.collected(client, project, table):
        del entries[0]  # The run that collected it has completed.
    while entries:
        parts, wrong = _parts(project, entries, definitions)
        if wrong:
            pushes.set_aside(client, project, table, [entries[n] for n in sorted(wrong)])
            set_aside, why = set_aside + len(wrong), wrong[max(wrong)]
        if parts:
            positions = np.concatenate([part_positions for _, part_positions in parts])
            whole = pa.concat_tables([part for part, _ in parts], promote_options="default")
            whole, positions = whole.take(pa.array(np.argsort(positions))), np.sort(positions)
            logged += log.append(whole, np.array([entries[n].place for n in positions], np.int64), intact=intact)
            added += _extend(offline, log, definitions, whole)
            rows += len(positions)
        seen = entries[-1].place
        pushes.trim(client, project, table, seen)
        entries = pushes.waiting(client, project, table, lot, seen, end)
    if not intact and (last := log.last_position()) > seen:
        pushes.restore(client, project, table, last, seen)
    return CollectedPushes(rows, logged, added, None if intact else pushes.appended_at(before), set_aside, why)


def _extend(offline: OfflineStore, log: PushLog, definitions: Sequence[ViewContract], rows: pa.Table) -> int:
    commit = offline.commit(definitions[0])
    for view in definitions:
        if commit is not None and commit.contract == view.hash:
            return offline.extend(view, log.to_view(view, rows))
    # Without a table, or with a table of a retired contract, the next build reads the log.
    return 0


def decode_entries(project: str, view: ViewContract, entries: Sequence[Entry]) -> pa.Table:
    codec, packed = RowCodec(view), [entry.row for entry in entries]
    block = codec.decode(packed)
    if not codec.intact(packed, block).all():
        raise DataError(f"pushed rows of {view.table}", "a row differs from the pushed row", remedy=_REMEDY)
    if not ((block.event >= _FIRST) & (block.event <= _LAST) & (block.known >= _FIRST) & (block.known <= _LAST)).all():
        raise DataError(f"pushed rows of {view.table}", "a row has a time outside the years 1 to 9999", remedy=_REMEDY)
    prefix = key_prefix(project, view.keys)
    try:
        keys = list(zip(*(decode_values(entry.name.removeprefix(prefix)) for entry in entries), strict=True))
    except (ValueError, struct.error, IndexError) as error:
        raise DataError(f"pushed rows of {view.table}", "a key differs from the pushed key", remedy=_REMEDY) from error
    ordered = sorted(column.name for column in view.keys)
    columns = {
        **{c.name: to_arrow(from_python(keys[ordered.index(c.name)], c.dtype), c.dtype) for c in view.keys},
        "event_timestamp": pa.array(block.event),
        "known_at": pa.array(block.known),
        **{column.name: to_arrow(block.columns[column.name], column.dtype) for column in view.fields},
        "content_hash": pa.array(block.columns.packed["content"].astype(np.int64)),
        ACCEPTED.name: pa.array(np.array([entry.accepted for entry in entries], np.int64)),
        CONTRACT.name: pa.array([view.hash] * len(entries)),
    }
    schema = declared_schema(view).append(pa.field("content_hash", pa.int64(), nullable=False))
    schema = schema.append(ACCEPTED).append(CONTRACT)
    return pa.table([columns[field.name].cast(field.type) for field in schema], schema)


_REMEDY = "find out which program writes to that stream; nothing was removed from it"
_FIRST, _LAST = (clock.micros(datetime(*day, tzinfo=UTC)) for day in ((1, 1, 1), (9999, 12, 31)))

_Parts = list[tuple[pa.Table, Ints]]


def _parts(
    project: str, entries: Sequence[Entry], definitions: Iterable[ViewContract]
) -> tuple[_Parts, dict[int, str]]:
    known, parts, wrong = {view.prefix: view for view in definitions}, _Parts(), dict[int, str]()
    groups: dict[bytes, list[int]] = {}
    for n, entry in enumerate(entries):
        groups.setdefault(entry.row[1:9], []).append(n)
    left = list(groups.items())
    while left:
        prefix, own = left.pop()
        if prefix not in known:
            wrong |= dict.fromkeys(own, f"has the unknown contract {prefix.hex()}" if prefix else "is not a row")
            continue
        try:
            parts.append((decode_entries(project, known[prefix], [entries[n] for n in own]), np.array(own)))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - one bad row must not block others
            half = len(own) // 2
            left += [(prefix, own[:half]), (prefix, own[half:])] if half else []
            wrong |= {} if half else {own[0]: error.found if isinstance(error, DataError) else first_line(error)}
    return parts, wrong
