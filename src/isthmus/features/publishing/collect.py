"""Collects pushed rows: from their stream in Redis to the history of their view.

In this order, a lot at a time: the log of pushes gets the rows, then the table of the view, then the stream loses them.
Each step changes nothing where it is done already, so a run that was killed at any moment is finished by the next one.

The last row that was brought stays in the stream. If it is gone, Redis was emptied, has evicted the stream or has come
back with an older state: what waited there is lost, and a run says so.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from isthmus.features.contract.contract import ViewContract
from isthmus.features.errors import DataError
from isthmus.features.offline.canonical import declared_schema
from isthmus.features.offline.pushes import ACCEPTED, CONTRACT, PushLog
from isthmus.features.offline.store import OfflineStore
from isthmus.features.online import pushes
from isthmus.features.online.pushes import Entry
from isthmus.features.redis.pipeline import Client
from isthmus.features.values.arrow import to_arrow
from isthmus.features.values.columns import from_python
from isthmus.features.values.entitykey import decode_values, key_prefix
from isthmus.features.values.rows import RowCodec

LOT = 1 << 17
"""Rows of a commit at most: what is in memory at once."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The counts of a run for a table.

    Attributes:
        rows: pushed rows that were read from Redis.
        logged: of these, those that no run had brought before.
        added: rows that the table has more than before.
        lost_after: if Redis has lost the stream, from when on pushed rows may be lost, microseconds since 1970 UTC.
    """

    rows: int = 0
    logged: int = 0
    added: int = 0
    lost_after: int | None = None


def collect(
    client: Client, project: str, offline: OfflineStore, table: str, definitions: Sequence[ViewContract], lot: int = LOT
) -> Collected:
    """Brings all rows that were pushed for a table by now into the history; `definitions` are all that they may be of.

    Raises:
        DataError: a table cannot be read or written, or a row is of an unknown definition. Nothing is lost.
        redis.RedisError: Redis does not answer, or refuses. Likewise.
    """
    rows = logged = added = 0
    seen = -1
    log = PushLog(offline.root, table, offline.storage_options)
    last = before = log.last()
    while not (intact := last < 0 or pushes.holds(client, project, table, last)) and (later := log.last()) != last:
        last = before = later  # Another machine's run has brought more, and removed what was last.
    # What comes meanwhile is for the next run: builds wait for this one. Of a lost stream the last row must be known.
    end = pushes.newest(client, project, table) if intact else None
    entries = pushes.waiting(client, project, table, lot, until=end)
    if intact and entries and entries[0].place == last == pushes.collected(client, project, table):
        del entries[0]  # The run that brought it has come to its end.
    while entries:
        parts = [
            (stored(project, view, [entries[place] for place in places]), places)
            for view, places in _by_definition(table, entries, definitions)
        ]
        order = np.argsort(np.concatenate([places for _, places in parts]))
        whole = pa.concat_tables([part for part, _ in parts], promote_options="default").take(pa.array(order))
        logged += log.append(whole, np.array([entry.place for entry in entries], np.int64), intact=intact)
        added += _extend(offline, log, definitions, whole)
        seen = entries[-1].place
        pushes.trim(client, project, table, seen)
        rows += len(entries)
        entries = pushes.waiting(client, project, table, lot, seen, end)
    if not intact and (last := log.last()) > seen:
        pushes.restore(client, project, table, last, seen)
    return Collected(rows, logged, added, None if intact else pushes.moment(before))


def _extend(offline: OfflineStore, log: PushLog, definitions: Sequence[ViewContract], rows: pa.Table) -> int:
    """Adds rows to the table, in the form of the definition that it was built for."""
    commit = offline.commit(definitions[0])
    for view in definitions:
        if commit is not None and commit.contract == view.hash:
            return offline.extend(view, log.formed(view, rows))
    # There is no table yet, or it is of a definition that is gone: the next build reads the log.
    return 0


def stored(project: str, view: ViewContract, entries: Sequence[Entry]) -> pa.Table:
    """Rows of the stream in the form of the log, in their order.

    Raises:
        DataError: a row is damaged.
    """
    codec, packed = RowCodec(view), [entry.row for entry in entries]
    block = codec.decode(packed)
    if not codec.intact(packed, block).all():
        raise DataError(f"pushed rows of {view.table}", "a row is not what was pushed", remedy=_REMEDY)
    prefix = key_prefix(project, view.keys)
    try:
        keys = list(zip(*(decode_values(entry.name.removeprefix(prefix)) for entry in entries), strict=True))
    except (ValueError, struct.error, IndexError) as error:
        raise DataError(f"pushed rows of {view.table}", "a key is not what was pushed", remedy=_REMEDY) from error
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


_REMEDY = "see which program writes to that stream: nothing was removed from it"


def _by_definition(
    table: str, entries: Sequence[Entry], definitions: Iterable[ViewContract]
) -> Iterable[tuple[ViewContract, "np.ndarray[tuple[int], np.dtype[np.int64]]"]]:
    """The entries of each definition, by their places."""
    known = {view.prefix: view for view in definitions}
    prefixes = [entry.row[1:9] for entry in entries]
    for prefix in dict.fromkeys(prefixes):
        if prefix not in known:
            raise DataError(
                f"pushed rows of {table}", f"{prefixes.count(prefix):,} are of contract {prefix.hex()}, which is gone",
                expected=" or ".join(view.prefix.hex() for view in known.values()),
                remedy="apply the definitions that they were pushed to, then run `isthmus collect`",
            )  # fmt: skip
        yield known[prefix], np.array([n for n, mine in enumerate(prefixes) if mine == prefix])
