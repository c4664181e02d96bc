"""`isthmus stream`: read the events of sources, and keep the rows of their views up to date until stopped."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from threading import Event as Signal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from isthmus.features import clock
from isthmus.features.clock import MICROSECOND
from isthmus.features.contract.schema import Contract
from isthmus.features.days import DAY, FIRST, LAST, Days
from isthmus.features.definition.spec import FeatureView, Source
from isthmus.features.definition.streams import FileStream
from isthmus.features.errors import ContractMismatch, DataError, DependencyError, RequestError, one_of
from isthmus.features.files import scratch_folder
from isthmus.features.online.store import OnlineStore
from isthmus.features.projectstatus import StreamStatus
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.features.streams.events import EventLog, ReadUntil
from isthmus.features.streams.formats import Decoder, Event, Unreadable
from isthmus.features.streams.readers import StreamReader, open_reader
from isthmus.features.values.arrow import micros
from isthmus.orchestration.frames import event_log, read_sources, view_names
from isthmus.orchestration.project import Project
from isthmus.orchestration.streams.lane import ViewLane
from isthmus.orchestration.tables.build import build
from isthmus.orchestration.tables.materialize import materialize
from isthmus.transforms import engine
from isthmus.transforms.views.events import columns_of, events_of, latest
from isthmus.transforms.views.streamable import streamed

BATCH = 20_000
"""Most events of a micro-batch."""
_LINGER_SECONDS = 0.1
"""Longest wait for the events of a micro-batch."""
_IDLE_SECONDS = 1.0
"""Shortest silence after which a partition no longer holds back the watermark."""
_RETRY_SECONDS = 2.0
_UNSAVED = 200_000
"""Rows that are written online before the table is written early."""
_AHEAD = int(timedelta(minutes=5) / MICROSECOND)
"""How far the clock of an event's producer may be ahead of ours."""


class _ChangedError(Exception):
    """The definitions, the table or Redis were changed by another process. The stream starts again from them."""


class _StorageError(Exception):
    """A table cannot be written at the moment."""


def stream_views(project: Project, views: Sequence[str] | None = None) -> list[FeatureView]:
    """Return the views with these names (default: all) that read a stream. Raise RequestError for any other name."""
    declared = project.definitions.views
    streaming = [view.name for view in declared.values() if streamed(view)]
    wrong = [name for name in view_names(project, views) if name not in streaming] if views else []
    if wrong or not streaming:
        raise RequestError(
            f"view {wrong[0]}" if wrong else "streams", "none of its sources has a stream" if wrong else
            "no source of a view declares one",
            expected=one_of(streaming) if streaming else "", remedy="declare stream= in a source",
        )  # fmt: skip
    return [declared[name] for name in views or streaming]


def stream(
    project: Project, views: Sequence[str] | None = None, *, once: bool = False, skip_expired: bool = False,
    say: Callable[[str], None] = lambda _text: None, stopped: Signal | None = None,
) -> dict[str, StreamStatus]:  # fmt: skip
    """Read the streams of views (default: all views with one) until `stopped` is set, and return the final status.

    Appends events to the tables of events, and writes the rows that they change to Redis and the offline tables. First
    builds tables that do not have the current definitions, and writes their latest rows to Redis. With `once`, ends
    when all events were read. Starts again by itself when the definitions, a table or Redis change, or if Redis, the
    broker or the storage fails; `say` gets the reason. With `once`, such failures are raised.

    Raises:
        ContractMismatch: the definitions have not been applied.
        DataError: the topic does not exist, or events expired before they were read. With `skip_expired`, the second
            is no error.
        RequestError: a view has no stream, or another process reads the stream of its source.
    """
    stopped, problem = stopped or Signal(), ""
    while True:
        try:
            return _Run(project, stream_views(project, views), skip_expired, say).run(once, stopped)
        except _ChangedError as change:
            say(f"starting again: {change}")
            project = Project(project.root)
        except (_StorageError, DependencyError) as error:
            if once:
                raise error.__cause__ or error if isinstance(error, _StorageError) else error from None
            if str(error) != problem:
                say(f"{error}; trying again every {_RETRY_SECONDS:g} seconds")
            problem = str(error)
            if stopped.wait(_RETRY_SECONDS):
                return {}


def follow(project: Project, say: Callable[[str], None], stopped: Signal | None = None) -> None:
    """Read the streams of all views until `stopped` is set, beside other work. Calls `say` with errors, raises none."""
    stopped, problem = stopped or Signal(), ""
    while not stopped.is_set():
        try:
            stream(Project(project.root), say=say, stopped=stopped)
        except Exception as error:  # noqa: BLE001 - the user may correct the cause while the others work
            if str(error) != problem:
                say(f"the stream stopped: {error}")
            problem = str(error)
            stopped.wait(_RETRY_SECONDS)


class _Run:
    """A run between two starts: all readers, tables of events and views."""

    def __init__(
        self, project: Project, views: Sequence[FeatureView], skip_expired: bool, say: Callable[[str], None]
    ) -> None:
        self._project, self._views, self._say, self._skip = project, views, say, skip_expired
        self._contract = project.applied()
        self._sources = {source.name: source for view in views for source in streamed(view)}

    def run(self, once: bool, stopped: Signal) -> dict[str, StreamStatus]:
        project = self._project
        with ExitStack() as stack:
            for name in sorted(self._sources):
                stack.enter_context(_only_reader(project, name))
            url = stack.enter_context(project.redis())
            self._prepare(url)
            client = stack.enter_context(connect(url))
            folder = stack.enter_context(scratch_folder(project.state, "streams"))
            spark = stack.enter_context(
                engine.session(project.settings.engine, project.settings.profiles.training.threads)
            )
            stack.enter_context(project.importing())
            stack.enter_context(translate_errors(url))
            online = OnlineStore(client, self._contract)
            lanes = [_Source(project, self._contract, source, spark, folder, online, url, self._skip)
                     for source in self._sources.values()]  # fmt: skip
            for lane in lanes:
                stack.callback(lane.reader.close)
                lane.open([view for view in self._views if streamed(view)[0].name == lane.source.name])
            self._say(f"reading {', '.join(self._sources)}; press Ctrl-C to stop" if not once else "reading events")
            self._loop(lanes, once, stopped)
            return {lane.source.name: lane.status() for lane in lanes}

    def _prepare(self, url: str) -> None:
        """Build tables that lack the current definitions, and write their rows to Redis."""
        project, names = self._project, [view.name for view in self._views]
        offline = project.offline_store()
        commits = {name: offline.commit(self._contract.views[name]) for name in names}
        missing = [
            name for name, commit in commits.items()
            if commit is None or commit.contract != self._contract.views[name].hash or commit.days is None
        ]  # fmt: skip
        if missing:
            self._say(f"building {', '.join(missing)}")
            build(project, missing)
        materialize(project, names)
        with connect(url) as client, translate_errors(url):
            online = OnlineStore(client, self._contract)
            stamped = [
                name for name in names if (record := online.published(self._contract.views[name])) and record.stamp
            ]
        if stamped:  # one time for all unchanged rows; streamed rows have their own
            materialize(project, stamped, full=True)

    def _loop(self, lanes: Sequence["_Source"], once: bool, stopped: Signal) -> None:
        saved = looked = time.monotonic()
        while not stopped.is_set():
            events = sum(lane.turn(_LINGER_SECONDS / len(lanes)) for lane in lanes)
            now = time.monotonic()
            drained = not events and all(lane.drained for lane in lanes)
            if once and drained:
                break
            if now - looked > 1:
                looked = now
                self._require_unchanged(lanes)
                for lane in lanes:
                    lane.report()
            if (
                now - saved > self._project.settings.stores.history_seconds
                or max(lane.unsaved for lane in lanes) > _UNSAVED
            ):
                saved = now
                for lane in lanes:
                    lane.save(wait=False)
        for lane in lanes:
            if once:
                lane.flush()
            lane.save(wait=True)
            lane.report()

    def _require_unchanged(self, lanes: Sequence["_Source"]) -> None:
        with suppress(ContractMismatch):
            if self._project.last_applied().hash != self._contract.hash:
                raise _ChangedError("the definitions were applied again")
        for lane in lanes:
            lane.require_unchanged()


@contextmanager
def _only_reader(project: Project, source: str) -> Iterator[None]:
    try:
        with project.locked(f"stream-{source}", wait=False):
            yield
    except BlockingIOError:
        raise RequestError(
            f"source {source}", "another `isthmus stream` reads it",
            remedy="stop it first; one process reads all views of a source",
        ) from None  # fmt: skip


class _Source:
    """A stream's reader, its table of events, and the views that it feeds."""

    def __init__(  # noqa: PLR0913 - the parts of a run
        self, project: Project, contract: Contract, source: Source, spark: Any, folder: Path,
        online: OnlineStore, url: str, skip_expired: bool,
    ) -> None:  # fmt: skip
        assert source.stream is not None  # noqa: S101 - only such sources
        assert source.timestamp is not None  # noqa: S101 - checked with the declarations
        self.source, self._project, self._contract = source, project, contract
        self._spark, self._folder, self._online, self._offline = spark, folder, online, project.offline_store()
        self._known = source.known or source.timestamp
        self._lateness = int(source.lateness / MICROSECOND)
        self.reader: StreamReader = open_reader(source.name, source.stream, project.root, url)
        self._log: EventLog = event_log(project, source)
        self._archive = read_sources(project, spark, [source], folder)[source.name]
        self._decoder = _decoder(project, source, columns_of(self._archive))
        self.reader.seek(self._log.read_until().offsets, skip_expired=skip_expired)
        self._partitions = self.reader.partitions()
        self._heard = dict.fromkeys(self._partitions, time.monotonic())
        self._lanes: list[ViewLane] = []
        self._events, self._rows = 0, dict[str, int]()
        self._rate: list[tuple[float, int]] = []
        self._unreadable = len(self._log.unreadable())
        self.drained = False

    def open(self, views: Sequence[FeatureView]) -> None:
        """Open the views, and process the events that their tables lack."""
        read = self._log.read_until()
        for view in views:
            others = read_sources(
                self._project, self._spark, [each for each in view.sources if each.stream is None], self._folder
            )
            compiled = self._contract.views[view.name]
            lane = ViewLane(view, compiled, self.source, self._offline, self._online, self._project.now)
            commit = self._offline.commit(compiled)
            position = commit.origin.position if commit is not None else None
            watermark = self._newest(read) if position is None or position.watermark is None else position.watermark
            lane.open(self._spark, others, self.load, watermark)
            offsets = {} if position is None else position.offsets.get(self.source.name, {})
            if offsets != read.offsets and self._log.open() is not None:
                left = self._log.after(offsets, self._decoder.schema.names)
                lane.add(left.select(self._decoder.schema.names).cast(self._decoder.schema))
                lane.emit(read.watermark)
            self._lanes.append(lane)
            self._rows[view.name] = 0

    def _newest(self, read: ReadUntil) -> int:
        last = latest(self._archive, self._known)
        return min(self._project.now(), max(FIRST if last is None else last, *read.known.values(), FIRST) + 1)

    def load(self, first: int) -> pa.Table:
        """Return all events from a time on, of the source's data and of the stream."""
        schema, name = self._decoder.schema, self.source.timestamp or ""
        archived = events_of(self._archive, self.source, first).cast(schema)
        start = pa.scalar(first, pa.timestamp("us", "UTC"))
        batches = [] if first >= LAST else list(self._log.rows(schema.names, Days(first // DAY, LAST // DAY + 1)))
        events = pa.Table.from_batches([batch.select(schema.names).cast(schema) for batch in batches], schema)
        return pa.concat_tables([archived, events.filter(pc.greater_equal(events[name], start))])

    @property
    def unsaved(self) -> int:
        return max(lane.unsaved for lane in self._lanes)

    def turn(self, seconds: float) -> int:
        """Process a micro-batch, and return its number of events."""
        events = self.reader.poll(BATCH, seconds)
        now = time.monotonic()
        if events:
            self._heard |= dict.fromkeys({event.partition for event in events}, now)
            rows, places, unreadable = _read(self._project, self.source, self._decoder, events)
            with _storing():
                self._log.append(rows, places, unreadable, self._project.now(), self._watermark)
            self._unreadable += len(unreadable)
            self._events += len(events)
            self._rate = [*self._rate[-200:], (now, len(events))]
            for lane in self._lanes:
                lane.add(rows)
                self._rows[lane.view.name] += lane.emit(self._log.read_until().watermark)
        self.drained = not events and self.reader.ended() >= set(self._partitions)
        if self.drained and now - max(self._heard.values(), default=0.0) > self._idle_seconds:
            self.flush()
        return len(events)

    def flush(self) -> None:
        for lane in self._lanes:
            self._rows[lane.view.name] += lane.flush()

    @property
    def _idle_seconds(self) -> float:
        return max(_IDLE_SECONDS, self._lateness / 1e6)

    def _watermark(self, known: Mapping[str, int]) -> int:
        times = list(known.values())
        if not isinstance(self.source.stream, FileStream):
            ended, now = self.reader.ended(), time.monotonic()
            waiting = [name for name in self._partitions
                       if name not in ended or now - self._heard.get(name, now) < self._idle_seconds]  # fmt: skip
            times = [min(known.get(name, FIRST) for name in waiting)] if waiting else times
        return max(FIRST, max(times, default=FIRST) - self._lateness)

    def save(self, *, wait: bool) -> None:
        offsets = self._log.read_until().offsets
        for lane in self._lanes:
            try:
                # Not while a build or `isthmus pushes collect` writes the table: then the rows wait.
                with self._project.adding_to(lane.contract.table, wait=wait), _storing():
                    lane.require_own_table()
                    lane.save(offsets)
            except BlockingIOError:
                continue
            except ContractMismatch as error:
                raise _ChangedError(str(error)) from error
            if lane.incomplete:
                raise _ChangedError(f"a late event removed the latest row of a key of {lane.view.name}")

    def require_unchanged(self) -> None:
        for lane in self._lanes:
            record = self._online.published(lane.contract)
            if record is None or record.contract != lane.contract.hash or record.stamp is not None:
                raise _ChangedError(f"the rows of {lane.view.name} in Redis were replaced")

    def status(self) -> StreamStatus:
        read, now = self._log.read_until(), time.monotonic()
        recent = [(at, count) for at, count in self._rate if now - at < 10]
        rate = sum(count for _, count in recent) / max(1.0, now - recent[0][0]) if recent else 0.0
        newest = {lane.view.name: lane.newest for lane in self._lanes if lane.newest is not None}
        return StreamStatus(
            at=clock.now(), watermark=read.watermark, late=read.late, unreadable=self._unreadable, events=self._events,
            lag=self.reader.lag(), events_per_second=round(rate, 1), rows=dict(self._rows), newest=newest,
        )  # fmt: skip

    def report(self) -> None:
        self.status().write(self._project.state, self.source.name)


def _decoder(project: Project, source: Source, schema: pa.Schema) -> Decoder:
    assert source.stream is not None  # noqa: S101 - only such sources
    required = [name for name in (source.timestamp, source.known) if name is not None]
    return Decoder(source.name, schema, required, source.stream.format, project.root)


def _read(
    project: Project, source: Source, decoder: Decoder, events: Sequence[Event]
) -> tuple[pa.Table, list[Event], list[Unreadable]]:
    rows, places, unreadable = decoder.rows(events)
    # A single event from the year 2099 would move the watermark past all others.
    known = source.known or source.timestamp or ""
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
        raise _StorageError(str(error)) from error


def retry_unreadable(project: Project, views: Sequence[str] | None = None) -> dict[str, tuple[int, int]]:
    """Decode the unreadable events of streams again, and move those that are readable now to the table of events.

    Returns, by source, the number of moved events, and of those that remain. The next start of `stream` adds the rows
    of the moved events, like those of late events. Raises RequestError if another process reads a stream.
    """
    counts = {}
    sources = {source.name: source for view in stream_views(project, views) for source in streamed(view)}
    for name, source in sources.items():
        with _only_reader(project, name):
            log = event_log(project, source)
            aside = log.unreadable()
            events = [
                Event(*row)
                for row in zip(*(aside[column].to_pylist() for column in aside.column_names[:3]), strict=True)
            ]
            schema = log.schema()
            if schema is None or not events:
                counts[name] = (0, len(events))
                continue
            rows, places, unreadable = _read(project, source, _decoder(project, source, schema), events)
            moved = log.retry(rows, places)
            counts[name] = (moved, len(unreadable))
    return counts
