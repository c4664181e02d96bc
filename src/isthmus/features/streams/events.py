"""The table of a stream's events (the bronze table), whose commits have the offsets, and the unreadable events."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from isthmus.features.days import DAY, FIRST, Days
from isthmus.features.errors import DataError, IsthmusError
from isthmus.features.offline.delta import StoredTable, TableErrors
from isthmus.features.offline.partitions import DAY_COLUMN, dataset, files_by_day
from isthmus.features.streams.formats import StreamEvent, Unreadable
from isthmus.features.values.arrow import micros

FOLDER, UNREADABLE = "_streams", "_unreadable"
"""Folders of the tables of events. The underscore cannot clash with a view's name."""
PARTITION, OFFSET = pa.field("_partition", pa.string(), nullable=False), pa.field("_offset", pa.int64(), nullable=False)
"""Position of an event in its stream. These column names are reserved."""
RETRIED = "/retried"
"""Partition of the events that were unreadable at first. No topic or folder has a partition of this name."""

_METADATA = "isthmus.read"
_COMMITS = 20
"""Commits to search for the last commit of events; a compaction makes up to three others."""
_TARGET_BYTES = 64 << 20
"""Files of this size are not compacted again."""
_FILES = 128
"""New files, beyond one per day, after which a table is compacted."""
_UNREADABLE_SCHEMA = pa.schema(
    [PARTITION, OFFSET, pa.field("event", pa.binary()), pa.field("reason", pa.string()),
     pa.field("read_at", pa.timestamp("us", "UTC"))]
)  # fmt: skip
_CONFLICT = (
    "another process wrote to it at the same moment",
    "run only one `isthmus stream` per source; no event is lost or read twice",
)


@dataclass(frozen=True, slots=True)
class ReadUntil:
    """How far a stream was read. Times are in microseconds since 1970 UTC.

    Attributes:
        offsets: next offset of each partition.
        known: latest known time of each partition's events.
        watermark: time before which all events were expected to have been read.
        late: number of events that were read after the watermark had passed their known time.
        stream: name of the stream that was read.
        generation: number of times that the source got another stream. Later streams have partitions `GENERATION/NAME`.
        passed: number of entries of a Redis stream before the next offset, as its reader counts them.
    """

    offsets: Mapping[str, int] = field(default_factory=dict)
    known: Mapping[str, int] = field(default_factory=dict)
    watermark: int = FIRST
    late: int = 0
    stream: str = ""
    generation: int = 0
    passed: int | None = None

    def partition(self, name: str) -> str:
        """Return the name in the table of a partition of the stream that is read now."""
        return f"{self.generation}/{name}" if self.generation else name

    def of_stream(self, times: Mapping[str, int]) -> dict[str, int]:
        """Keep the entries of the stream that is read now, by the names of its own partitions."""
        prefix = self.partition("")
        own = {name: value for name, value in times.items() if self.generation == 0 or name.startswith(prefix)}
        return {name.removeprefix(prefix): value for name, value in own.items() if name != RETRIED}


class EventLog:
    """The Delta table with all events of a source, each once per offset, partitioned by the day of the event.

    `root` is the folder or URL of the offline store. `timestamp` and `known` are the columns with the time of an event
    and the time from which it could be used. Methods raise DataError if the table is damaged or another process writes
    to it, and DependencyError if object storage does not answer.
    """

    def __init__(
        self, root: str | Path, source: str, timestamp: str, known: str, options: Mapping[str, str] | None = None
    ) -> None:
        self.source, self._timestamp, self._known = source, timestamp, known
        errors = TableErrors(
            f"events of {source}", damaged="restore that folder; without it, builds lose the streamed events",
            conflict=_CONFLICT, unwritten="no event is lost: fix the cause, then run `isthmus stream` again",
        )  # fmt: skip
        self._stored = StoredTable(root, f"{FOLDER}/{source}", options, errors)
        self._unreadable = StoredTable(root, f"{FOLDER}/{UNREADABLE}/{source}", options, errors)
        self._table: DeltaTable | None = None
        self._read: ReadUntil | None = None
        self._compared = False
        self._compacted = 0

    def open(self) -> DeltaTable | None:
        """Return the table at its newest version, or None if it does not exist."""
        if self._table is None:
            self._table = self._stored.open(check=False)
        else:
            with self._stored.reading():
                self._table.update_incremental()
        return self._table

    def read_until(self) -> ReadUntil:
        """Return how far the stream has been read, as recorded with the last commit of events."""
        if self._read is None:
            self._read = ReadUntil()
            with self._stored.reading():
                table = self.open()
                for count in range(_COMMITS):
                    if table is None:
                        break
                    entries = self._stored.commits(table, count + 1)
                    if len(entries) <= count:
                        break
                    if (text := entries[-1].get(_METADATA)) is not None:
                        self._read = ReadUntil(**json.loads(str(text)))
                        break
                else:
                    raise OSError(f"the last {_COMMITS} commits are not those of `isthmus stream`")
        return self._read

    def append(
        self, rows: pa.Table, events: Sequence[StreamEvent], unreadable: Sequence[Unreadable], now: int,
        watermark: Callable[[Mapping[str, int]], int], passed: int | None = None,
    ) -> None:  # fmt: skip
        """Append events in one commit with their offsets, so that each is stored once.

        May also merge small files, and delete files that were merged more than an hour ago. `rows` are the rows of
        `events`, the readable ones. Unreadable events go to a table of their own first; their offsets
        count as read, too. `now` is the time of reading, in microseconds since 1970 UTC. `watermark` computes the new
        watermark from the latest known time of each partition; it never goes back. `passed` is stored for the reader.
        """
        before = self.read_until()
        aside = [event for event, _ in unreadable]
        names = {name: before.partition(name) for name in {event.partition for event in (*events, *aside)}}
        if unreadable:
            moved = [msgspec.structs.replace(event, partition=names[event.partition]) for event in aside]
            self._set_aside([Unreadable(event, why) for event, (_, why) in zip(moved, unreadable, strict=True)], now)
        offsets, known = dict(before.offsets), dict(before.known)
        places = _places((*events, *aside), names)
        for name, offset in _latest(places[PARTITION.name], places[OFFSET.name]):
            offsets[name] = max(offsets.get(name, 0), offset + 1)
        places = places.slice(0, len(events))
        times = micros(rows[self._known])
        for name, time in _latest(places[PARTITION.name], pa.array(times)):
            known[name] = max(known.get(name, time), time)
        late = before.late + int(np.count_nonzero(times < before.watermark))
        mark = max(before.watermark, watermark(before.of_stream(known)))
        read = replace(before, offsets=offsets, known=known, watermark=mark, late=late, passed=passed)
        self._commit(self._with_positions(rows, places), read)
        self._compact()

    def follow(self, stream: str) -> ReadUntil:
        """Return how far the stream with this name was read. Another stream than before is read from its beginning."""
        read = self.read_until()
        if read.stream and read.stream != stream:
            read = replace(read, generation=read.generation + 1, passed=None)
        self._read = replace(read, stream=stream)
        return self._read

    def _commit(self, rows: pa.Table, read: ReadUntil) -> None:
        options = {"schema_mode": "merge"} if self._table is not None else {"partition_by": [DAY_COLUMN.name]}
        try:
            self._stored.commit(self._table, rows, {_METADATA: json.dumps(asdict(read))}, mode="append", **options)
        except IsthmusError:
            self._table = self._read = None
            raise
        self._read = read

    def _with_positions(self, rows: pa.Table, places: pa.Table) -> pa.Table:
        days = pa.array((micros(rows[self._timestamp]) // DAY).astype(np.int32)).cast(DAY_COLUMN.type)
        for name in (PARTITION, OFFSET):
            rows = rows.append_column(name, places[name.name])
        return rows.append_column(DAY_COLUMN, days)

    def _compact(self) -> None:
        # Readers keep the files of their version: nothing is deleted before the retention of a vacuum.
        table, enough = self.open(), self._compacted + _FILES
        if table is None or len(table.file_uris()) < enough or _extra_files(table) < enough:
            return
        with self._stored.writing():
            table.optimize.compact(target_size=_TARGET_BYTES)
            table.vacuum(retention_hours=1, dry_run=False, enforce_retention_duration=False)
        self._compacted = _extra_files(table)

    def rows(self, schema: pa.Schema, days: Days | None = None) -> Iterator[pa.RecordBatch]:
        """Yield all events, or those on `days`, in the columns of `schema`. Columns that the table lacks are null."""
        for batch in self._batches(schema.names, days):
            yield self._in_schema(batch, schema)

    def after(self, offsets: Mapping[str, int], schema: pa.Schema) -> pa.Table:
        """Return the events from these offsets on, and all events of other partitions, in the columns of `schema`."""
        names, ends = pa.array(list(offsets), pa.string()), pa.array(list(offsets.values()), pa.int64())
        found = []
        for batch in self._batches([*schema.names, PARTITION.name, OFFSET.name]):
            # Partitions without an offset have no index, and null is not less than it.
            end = ends.take(pc.index_in(batch[PARTITION.name], names))
            seen = pc.fill_null(pc.less(batch[OFFSET.name], end), False)
            found.append(self._in_schema(batch.filter(pc.invert(seen)), schema))
        return pa.Table.from_batches(found, schema)

    def _batches(self, names: Sequence[str], days: Days | None = None) -> Iterator[pa.RecordBatch]:
        with self._stored.reading():
            table = self.open()
            if table is None:
                return
            only = None if days is None else {day for day in files_by_day(table) if day in days}
            data = dataset(table, self._stored.path, only)
            yield from data.to_batches(columns=[name for name in names if name in data.schema.names])

    @staticmethod
    def _in_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        none = {field.name: pa.nulls(len(batch), field.type) for field in schema}
        columns = [batch[name] if name in batch.schema.names else none[name] for name in schema.names]
        return pa.RecordBatch.from_arrays(columns, schema.names).cast(schema)

    def schema(self) -> pa.Schema | None:
        table = self.open()
        if table is None:
            return None
        own = {PARTITION.name, OFFSET.name, DAY_COLUMN.name}
        return pa.schema([field for field in pa.schema(table.schema().to_arrow()) if field.name not in own])

    def unreadable(self) -> pa.Table:
        """Return the unreadable events: partition, offset, bytes, reason and the time at which they were read."""
        with self._unreadable.reading():
            table = self._unreadable.open(check=False)
            return _UNREADABLE_SCHEMA.empty_table() if table is None else table.to_pyarrow_table()

    def _set_aside(self, unreadable: Sequence[Unreadable], now: int) -> None:
        # A killed process may have set them aside without their offsets.
        known = _UNREADABLE_SCHEMA.empty_table() if self._compared else self.unreadable()
        self._compared = True
        pairs = set(zip(known[PARTITION.name].to_pylist(), known[OFFSET.name].to_pylist(), strict=True))
        new = [each for each in unreadable if (each.event.partition, each.event.offset) not in pairs]
        rows = [
            {PARTITION.name: event.partition, OFFSET.name: event.offset, "event": event.value, "reason": reason,
             "read_at": now}
            for event, reason in new
        ]  # fmt: skip
        if rows:
            self._unreadable.append(pa.Table.from_pylist(rows, _UNREADABLE_SCHEMA))

    def retry(self, rows: pa.Table, events: Sequence[StreamEvent]) -> None:
        """Move events that were unreadable, and are readable now, to the table of events. `rows` are their rows.

        If the call is interrupted, a second one may add events again, which changes no row: equal rows are one event.
        """
        if not len(rows):
            return
        read = self.read_until()
        first = read.offsets.get(RETRIED, 0)
        places = _places([StreamEvent(RETRIED, first + n, b"") for n in range(len(rows))], {RETRIED: RETRIED})
        offsets = {**read.offsets, RETRIED: first + len(rows)}
        self._commit(self._with_positions(rows, places), replace(read, offsets=offsets))
        table = self._unreadable.open(check=False)
        if table is None:
            raise DataError(f"events of {self.source}", "the table of unreadable events is gone")
        moved = {(event.partition, event.offset) for event in events}
        left = [row for row in self.unreadable().to_pylist() if (row[PARTITION.name], row[OFFSET.name]) not in moved]
        self._unreadable.commit(table, pa.Table.from_pylist(left, _UNREADABLE_SCHEMA), {}, mode="overwrite")


def _extra_files(table: DeltaTable) -> int:
    """Count the files beyond one per day."""
    days = files_by_day(table)
    return sum(days.values()) - len(days)


def _places(events: Sequence[StreamEvent], names: Mapping[str, str]) -> pa.Table:
    """Return the positions of events, with other names of the partitions."""
    partitions = [names[event.partition] for event in events]
    return pa.table([partitions, [event.offset for event in events]], pa.schema([PARTITION, OFFSET]))


def _latest(partitions: pa.ChunkedArray, numbers: pa.Array | pa.ChunkedArray) -> Iterator[tuple[str, int]]:
    """Yield the largest number of each partition."""
    groups = pa.table([partitions, numbers], ["name", "number"]).group_by("name").aggregate([("number", "max")])
    yield from zip(groups["name"].to_pylist(), groups["number_max"].to_pylist(), strict=True)
