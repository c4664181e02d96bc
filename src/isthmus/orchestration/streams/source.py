"""Keep the views of a source up to date: read its stream, keep the events, and update the views."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features import clock
from isthmus.features.clock import MICROSECOND
from isthmus.features.contract.schema import Contract
from isthmus.features.days import DAY, FIRST, LAST, Days
from isthmus.features.definition.spec import FeatureView, Source
from isthmus.features.definition.streams import FileStream
from isthmus.features.errors import ConfigurationError, ContractMismatch, DataError
from isthmus.features.offline.commits import StreamPosition
from isthmus.features.online.store import OnlineStore
from isthmus.features.projectstatus import StreamStatus
from isthmus.features.streams.events import ReadUntil
from isthmus.features.streams.formats import EventDecoder, StreamEvent, Unreadable
from isthmus.features.streams.readers import StreamReader
from isthmus.features.values.arrow import micros
from isthmus.orchestration.frames import event_log, read_sources
from isthmus.orchestration.project import Project
from isthmus.orchestration.streams.ahead import Decoded, EventBatch, ReadAhead
from isthmus.orchestration.streams.computation import EventFrames
from isthmus.orchestration.streams.updater import ViewUpdater
from isthmus.transforms.views.compute import Frames, stream_view, tile_events
from isthmus.transforms.views.events import columns_of, events_frame, events_of, latest
from isthmus.transforms.views.streamable import event_decoder, stream_problems

BATCH = 60_000
"""Most events of a micro-batch."""
_PROBES = 10_000
"""Events with which nulls in keys are tried."""
_IDLE_SECONDS = 1.0
"""Shortest silence after which a partition no longer holds back the watermark."""
_AHEAD = int(timedelta(minutes=5) / MICROSECOND)
"""How far the clock of an event's producer may be ahead of ours."""


class ChangedError(Exception):
    """The definitions, the table or Redis were changed by another process. The stream starts again from them."""


class StorageError(Exception):
    """A table could not be written. The stream tries again."""


class SourceUpdater:
    """Reads the stream of a source, keeps its events, and updates the views that read it."""

    def __init__(  # noqa: PLR0913 - the parts of a run
        self, project: Project, contract: Contract, source: Source, reader: StreamReader, spark: Any, folder: Path,
        online: OnlineStore,
    ) -> None:  # fmt: skip
        assert source.stream is not None  # noqa: S101 - only such sources
        assert source.timestamp is not None  # noqa: S101 - checked with the declarations
        self.source, self.name, self._project, self._contract = source, source.name, project, contract
        self._spark, self._folder, self._online, self._offline = spark, folder, online, project.offline_store()
        self._known = source.known_column
        self._lateness = int(source.lateness / MICROSECOND)
        self.reader, self._log = reader, event_log(project, source)
        self._archive = read_sources(project, spark, [source], folder)[source.name]
        self._columns = columns_of(self._archive)
        self._decoder = event_decoder(source, self._columns, project.root)
        self._last_event = dict[str, float]()
        self._frames = dict[str, EventFrames]()
        self._records = dict[str, bytes | None]()
        self.recovered = False
        self._updaters: list[ViewUpdater] = []
        self._events, self._rows = 0, dict[str, int]()
        self._rate: list[tuple[float, int]] = []
        self._unreadable = len(self._log.unreadable())
        self._ahead: ReadAhead | None = None
        self._batch = EventBatch(0, (self._columns.empty_table(), [], []), [])

    def open(
        self, views: Sequence[FeatureView], seconds: float, *, skip_expired: bool,
        retry: Callable[[int, list[Unreadable]], None] | None,
    ) -> None:  # fmt: skip
        """Open the views, process the events that their tables lack, and go to the first event that was not read.

        Events that arrive within `seconds` are processed together.

        With `retry`, first decodes the unreadable events again, and calls it with the number of events that are
        readable now, and those that are not.
        """
        assert self.source.stream is not None  # noqa: S101 - only such sources
        self._require_types()
        read = self._log.follow(self.source.stream.name)
        self.reader.passed = read.passed
        self.reader.seek(read.of_stream(read.offsets), skip_expired=skip_expired)
        self._decoder = event_decoder(self.source, self._columns, self._project.root, self._required_keys())
        # Read the first events while the views are opened.
        self._ahead = ReadAhead(
            self.reader, partial(read_events, self._project, self.source, self._decoder), BATCH, seconds
        )
        for view in views:
            each = ViewUpdater(
                view, self._contract.views[view.name], self.source, self._offline, self._online, self._project.now
            )
            position = self._position(each)
            watermark = self._start(read) if position is None or position.watermark is None else position.watermark
            each.open(self._frames_of(view), self.load, watermark)
            self._updaters.append(each)
            self._rows[view.name] = 0
        if retry is not None:
            retry(*self._retry())
        offsets = self._log.read_until().offsets
        for each in self._updaters:
            position = self._position(each)
            done = {} if position is None else position.offsets.get(self.source.name, {})
            left = self._log.after(done, self._columns) if done != offsets else self._columns.empty_table()
            self.recovered |= bool(len(left))
            for start in range(0, len(left), BATCH):
                each.add(left.slice(start, BATCH))
            each.emit(read.watermark)

    def _position(self, each: ViewUpdater) -> StreamPosition | None:
        commit = self._offline.commit(each.contract)
        return commit.origin.position if commit is not None else None

    def _require_types(self) -> None:
        """Raise DataError if a column's type differs from that of the stored events, which would lose values."""
        stored = self._log.schema()
        types = {} if stored is None else {column.name: column.type for column in stored}
        for column in self._columns:
            if (was := types.get(column.name, column.type)) != column.type:
                raise DataError(
                    f"source {self.name}, column {column.name}",
                    f"has type {column.type}, and its events were stored as {was}",
                    expected=str(was), remedy="keep the type, and cast it in the transform; or rename the source",
                )  # fmt: skip

    def _required_keys(self) -> list[str]:
        """Return the join keys that events must have: builds would fail for nulls that a view does not filter."""
        required = set[str]()
        times = [self.source.timestamp, self._known]
        events = self._archive.dropna(subset=times).limit(_PROBES).toArrow().cast(self._columns)
        if not len(events):
            first = islice((batch for batch in self._log.rows(self._columns) if len(batch)), 1)
            events = pa.Table.from_batches(first, self._columns).slice(0, _PROBES)
        for view in self._project.definitions.views.values():
            if self.source not in view.sources:
                continue
            compiled, frames = self._contract.views[view.name], self._frames_of(view)
            for name in (key.name for key in compiled.keys):
                nulls = pa.nulls(len(events), events[name].type)
                blank = events.set_column(events.column_names.index(name), name, nulls)
                try:
                    with frames(blank, blank.slice(0, 0)) as own:
                        if view.tiling is not None:
                            tile_events(view, compiled, own)
                        else:
                            deque(stream_view(view, compiled, own, (FIRST, LAST)), 0)
                except DataError:
                    required.add(name)
                if not len(events):
                    required.add(name)
        return sorted(required)

    def _retry(self) -> tuple[int, list[Unreadable]]:
        """Move the unreadable events that are readable now to the table of events; their rows are then late ones."""
        aside = self._log.unreadable()
        columns = [aside[column].to_pylist() for column in aside.column_names[:3]]
        events = [StreamEvent(*place) for place in zip(*columns, strict=True)]
        rows, readable, unreadable = read_events(self._project, self.source, self._decoder, events)
        self._log.retry(rows, readable)
        self._unreadable = len(unreadable)
        return len(readable), unreadable

    def _frames_of(self, view: FeatureView) -> EventFrames:
        if view.name in self._frames:
            return self._frames[view.name]
        static = [source for source in view.sources if source.stream is None]
        others = read_sources(self._project, self._spark, static, self._folder)
        self._require_streamable(view, others)

        @contextmanager
        def frames(events: pa.Table, without: pa.Table) -> Iterator[Frames]:
            with events_frame(self._spark, events, self._folder, without) as frame:
                yield {**others, self.source.name: frame}

        self._frames[view.name] = frames
        return frames

    def _require_streamable(self, view: FeatureView, others: Frames) -> None:
        # With Sail, `apply` has checked views whose sources are all local.
        if self._project.settings.engine != "sail" or not all(source.path and source.local for source in view.sources):
            frames = {**others, self.source.name: self._archive}
            contract = self._contract.views[view.name]
            if problems := list(stream_problems(self._spark, view, contract, frames, self._project.root)):
                raise ConfigurationError("definitions.py", problems)

    def _start(self, read: ReadUntil) -> int:
        """Return the watermark of a table that was built: just after the latest known time of all events."""
        last = latest(self._archive, self._known)
        return min(self._project.now(), max(FIRST if last is None else last, *read.known.values(), FIRST) + 1)

    def load(self, first: int, known: int | None) -> pa.Table:
        """Return the events from a time on, of the source's data and of the stream, and those known from `known` on."""
        name = self.source.timestamp or ""
        tables = [events_of(self._archive, self.source, first)]
        if first < LAST:
            wanted = _at_least(name, first)
            if known is not None:
                tables.append(self._archive.where(self._archive[self._known] >= clock.moment(known)).toArrow())
                wanted = pc.or_(wanted, _at_least(self._known, known))
            days = None if known is not None else Days(first // DAY, LAST // DAY + 1)
            batches = self._log.rows(self._columns, days)
            tables += [pa.Table.from_batches([batch]).filter(wanted) for batch in batches]
        events = pa.concat_tables([table.cast(self._columns) for table in tables])
        return events.filter(pc.is_valid(events[name]))

    @property
    def unsaved(self) -> int:
        return max(each.unsaved for each in self._updaters)

    def process(self) -> int:
        """Append a micro-batch to the table of events, and update the views. Return the number of its events."""
        assert self._ahead is not None  # noqa: S101 - after `open`
        self._batch = batch = self._ahead.batch()
        now = batch.at
        for name in batch.partitions:
            self._last_event.setdefault(name, now)
        if batch.count:
            rows, places, unreadable = batch.decoded
            self._last_event |= dict.fromkeys({event.partition for event in places}, now)
            self._last_event |= dict.fromkeys({each.event.partition for each in unreadable}, now)
            with _storing():
                self._log.append(rows, places, unreadable, self._project.now(), self._watermark, batch.passed)
            self._unreadable += len(unreadable)
            self._events += batch.count
            self._rate = [*self._rate[-200:], (now, batch.count)]
            for each in self._updaters:
                each.add(rows)
                self._rows[each.view.name] += each.emit(self._log.read_until().watermark)
                self._require_complete(each)
        if batch.drained and now - max(self._last_event.values(), default=0.0) > self._idle_seconds:
            self.flush()
        return batch.count

    @property
    def drained(self) -> bool:
        return self._batch.drained

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def flush(self, *, wait: bool = False) -> None:
        for each in self._updaters:
            self._rows[each.view.name] += each.flush(partial(self._save, each, wait=wait))

    def _require_complete(self, each: ViewUpdater) -> None:
        if each.incomplete:
            # Not saved: the next start processes the event again, and then compares all rows with Redis.
            raise ChangedError(f"a late event removed the latest row of a key of {each.view.name}")

    def publish_due(self) -> None:
        for each in self._updaters:
            each.publish_due()

    @property
    def _idle_seconds(self) -> float:
        return max(_IDLE_SECONDS, self._lateness / 1e6)

    def _watermark(self, known: Mapping[str, int]) -> int:
        times = list(known.values())
        if not isinstance(self.source.stream, FileStream):
            ended, now = self._batch.ended, self._batch.at
            waiting = [name for name in self._batch.partitions
                       if name not in ended or now - self._last_event.get(name, now) < self._idle_seconds]  # fmt: skip
            times = [min(known.get(name, FIRST) for name in waiting)] if waiting else times
        return max(FIRST, max(times, default=FIRST) - self._lateness)

    def save(self, *, wait: bool, last: bool = False) -> None:
        for each in self._updaters:
            self._save(each, wait=wait, last=last)

    def _save(self, each: ViewUpdater, *, wait: bool, last: bool = False) -> bool:
        """Commit the rows of a view to its table. Return False, unless `wait`, if another process writes it."""
        try:
            # Not while a build or `isthmus pushes collect` writes the table: then the rows wait.
            with self._project.adding_to(each.contract.table, wait=wait), _storing():
                each.refresh_table()
                each.save(self._log.read_until().offsets, last=last)
        except BlockingIOError:
            return False
        except ContractMismatch as error:
            raise ChangedError(str(error)) from error
        return True

    def note_records(self) -> None:
        """Remember the last materialization of each view, to notice another one. It has all rows of the tables."""
        for each in self._updaters:
            each.incomplete = False
        self._records = {each.view.name: self._online.record_text(each.contract) for each in self._updaters}

    def require_unchanged(self) -> None:
        for each in self._updaters:
            if self._online.record_text(each.contract) != self._records[each.view.name]:
                self.save(wait=True)  # with the times at which rows were readable until now
                raise ChangedError(f"the rows of {each.view.name} in Redis were replaced")

    def status(self) -> StreamStatus:
        read, now = self._log.read_until(), time.monotonic()
        recent = [(at, count) for at, count in self._rate if now - at < 10]
        rate = sum(count for _, count in recent) / max(1.0, now - recent[0][0]) if recent else 0.0
        newest = {each.view.name: each.newest for each in self._updaters if each.newest is not None}
        return StreamStatus(
            at=clock.now(), watermark=read.watermark, late=read.late, unreadable=self._unreadable, events=self._events,
            lag=self._ahead.lag() if self._ahead else {}, events_per_second=round(rate, 1), rows=dict(self._rows),
            newest=newest,
        )  # fmt: skip

    def report(self) -> None:
        self.status().write(self._project.state, self.source.name)


def _at_least(column: str, time: int) -> pc.Expression:
    return pc.field(column) >= pa.scalar(time, pa.timestamp("us", "UTC"))


def read_events(project: Project, source: Source, decoder: EventDecoder, events: Sequence[StreamEvent]) -> Decoded:
    rows, places, unreadable = decoder.rows(events)
    # A single event from the year 2099 would move the watermark past all others.
    known = source.known_column
    future = micros(rows[known]) > project.now() + _AHEAD
    if future.any():
        unreadable += [Unreadable(places[n], f"{known} is in the future") for n in future.nonzero()[0]]
        rows, places = rows.filter(pa.array(~future)), [places[n] for n in (~future).nonzero()[0]]
    return rows, places, unreadable


@contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise StorageError(str(error)) from error
