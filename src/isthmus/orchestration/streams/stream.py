"""`isthmus stream`: read the events of sources, and keep the rows of their views up to date until stopped."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from threading import Event as Signal

from isthmus.features.definition.spec import FeatureView
from isthmus.features.errors import ContractMismatch, DependencyError, RequestError, one_of
from isthmus.features.files import scratch_folder
from isthmus.features.online.store import OnlineStore
from isthmus.features.projectstatus import StreamStatus
from isthmus.features.redis.connection import connect, translate_errors
from isthmus.features.streams.formats import Unreadable
from isthmus.features.streams.readers import open_reader
from isthmus.orchestration.frames import view_names
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.collect import run_every
from isthmus.orchestration.streams.source import ChangedError, SourceUpdater, StorageError
from isthmus.orchestration.tables.build import build, outdated_views
from isthmus.orchestration.tables.materialize import materialize
from isthmus.transforms import engine

_LINGER_SECONDS = 0.1
"""Longest wait for the events of a micro-batch."""
_RETRY_SECONDS = 2.0
_SWITCH_SECONDS = 0.0005
"""Seconds until a thread that reads ahead yields to other Python threads, a tenth of Python's default."""
_UNSAVED = 200_000
"""Rows that are written online before the table is written early."""


def stream_views(project: Project, views: Sequence[str] | None = None) -> list[FeatureView]:
    """Return the views with these names (default: all) that read a stream. Raise RequestError for any other name."""
    declared = project.definitions.views
    streaming = [view.name for view in declared.values() if view.streams]
    wrong = [name for name in view_names(project, views) if name not in streaming] if views else []
    if wrong or not streaming:
        raise RequestError(
            f"view {wrong[0]}" if wrong else "streams", "none of its sources has a stream" if wrong else
            "no source of a view declares one",
            expected=one_of(streaming) if streaming else "", remedy="declare stream= in a source",
        )  # fmt: skip
    return [declared[name] for name in views or streaming]


def stream(  # noqa: PLR0913 - the options of the command
    project: Project, views: Sequence[str] | None = None, *, once: bool = False, skip_expired: bool = False,
    retry: bool = False, say: Callable[[str], None] = lambda _text: None, stopped: Signal | None = None,
) -> dict[str, StreamStatus]:  # fmt: skip
    """Read the streams of views (default: all views with one) until `stopped` is set, and return the final status.

    Appends events to the tables of events, and writes the rows that they change to Redis and the offline tables. First
    builds tables that do not have the current definitions, and writes the latest rows of the views to Redis. With
    `once`, ends when all events were read, and also writes the rows that would wait for later events. Starts again when
    the definitions, a table or Redis change. If Redis, the broker or a table fails, tries again every two seconds, and
    calls `say` with the reason; with `once`, raises the error. Returns an empty dict if it is stopped meanwhile. With
    `retry`, first decodes the unreadable events again, and calls `say` with their number.

    Raises:
        ContractMismatch: the definitions have not been applied.
        DataError: the topic does not exist, or events expired before they were read. `skip_expired` ignores events
            that expired before the start.
        RequestError: a view has no stream, or another process reads the stream of its source.
    """
    stopped, problem = stopped or Signal(), ""
    while True:
        try:
            return _Run(project, stream_views(project, views), skip_expired, retry, say).run(once, stopped)
        except ChangedError as change:
            say(f"starting again: {change}")
            retry = skip_expired = False
            project = Project(project.root)
        except (StorageError, DependencyError, OSError) as error:
            if once:
                raise (error.__cause__ if isinstance(error, StorageError) and error.__cause__ else error) from None
            if str(error) != problem:
                say(f"{error}; trying again every {_RETRY_SECONDS:g} seconds")
            problem = str(error)
            if stopped.wait(_RETRY_SECONDS):
                return {}


def follow(project: Project, say: Callable[[str], None], stopped: Signal | None = None) -> None:
    """Read the streams of all views until `stopped` is set. Pass errors to `say`, and start again after each."""

    def turn() -> str:
        stream(Project(project.root), say=say, stopped=stopped)
        return ""

    run_every(turn, _RETRY_SECONDS, say, stopped)


class _Run:
    """One attempt to read all sources, until they are stopped, or something changes or fails."""

    def __init__(
        self, project: Project, views: Sequence[FeatureView], skip_expired: bool, retry: bool,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._project, self._views, self._say, self._skip, self._retry = project, views, say, skip_expired, retry
        self._contract = project.applied()
        self._sources = {source.name: source for view in views for source in view.streams}

    def run(self, once: bool, stopped: Signal) -> dict[str, StreamStatus]:
        project = self._project
        with ExitStack() as stack:
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(_SWITCH_SECONDS)
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
            sources = []
            for declared in self._sources.values():
                assert declared.stream is not None  # noqa: S101 - only such sources
                reader = open_reader(declared.name, declared.stream, project.root, url)
                stack.callback(reader.close)
                source = SourceUpdater(project, self._contract, declared, reader, spark, folder, online)
                stack.callback(source.close)
                source.open(
                    [view for view in self._views if view.streams[0].name == source.name],
                    _LINGER_SECONDS / len(self._sources), skip_expired=self._skip,
                    retry=partial(self._retried, source.name) if self._retry else None,
                )  # fmt: skip
                sources.append(source)
            if any(source.recovered for source in sources):
                # A killed process may have written rows online that its last events have removed.
                for source in sources:
                    source.save(wait=True)
                materialize(project, [view.name for view in self._views], full=True)
            for source in sources:
                source.note_records()
            self._say(f"reading {', '.join(self._sources)}; press Ctrl-C to stop" if not once else "reading events")
            self._loop(sources, once, stopped)
            return {source.name: source.status() for source in sources}

    def _retried(self, source: str, moved: int, left: list[Unreadable]) -> None:
        reason = f"; the last one: {left[-1].reason}" if left else ""
        self._say(f"{source}: {moved:,} unreadable events are readable now, {len(left):,} are not{reason}")

    def _prepare(self, url: str) -> None:
        """Build tables that lack the current definitions, and write their rows to Redis."""
        project, names = self._project, [view.name for view in self._views]
        offline = project.offline_store()
        commits = {name: offline.commit(self._contract.views[name]) for name in names}
        missing = [
            name for name, commit in commits.items()
            if commit is None or commit.contract != self._contract.views[name].hash or commit.days is None
        ]  # fmt: skip
        if self._skip:  # the missing events were added to the data
            missing = list(dict.fromkeys([*missing, *outdated_views(project, names)]))
        if missing:
            self._say(f"building {', '.join(missing)}")
            build(project, missing)
        materialize(project, names)
        with connect(url) as client, translate_errors(url):
            online = OnlineStore(client, self._contract)
            stamped = [
                name for name in names if (record := online.published(self._contract.views[name])) and record.stamp
            ]
        if stamped:  # Redis stores one time for all unchanged rows. Streamed rows need their own times.
            materialize(project, stamped, full=True)

    def _loop(self, sources: Sequence[SourceUpdater], once: bool, stopped: Signal) -> None:
        saved = looked = time.monotonic()
        while not stopped.is_set():
            events = sum(source.process() for source in sources)
            now = time.monotonic()
            drained = not events and all(source.drained for source in sources)
            if once and drained:
                break
            if now - looked > 1:
                looked = now
                self._require_unchanged(sources)
                for source in sources:
                    source.publish_due()
                    source.report()
            if (
                now - saved > self._project.settings.stores.history_seconds
                or max(source.unsaved for source in sources) > _UNSAVED
            ):
                saved = now
                for source in sources:
                    source.save(wait=False)
        for source in sources:
            if once:
                source.flush(wait=True)
            source.save(wait=True, last=True)
            source.report()

    def _require_unchanged(self, sources: Sequence[SourceUpdater]) -> None:
        with suppress(ContractMismatch):
            if self._project.last_applied().hash != self._contract.hash:
                raise ChangedError("the definitions were applied again")
        for source in sources:
            source.require_unchanged()


@contextmanager
def _only_reader(project: Project, source: str) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(project.locked(f"stream-{source}", wait=False))
        except BlockingIOError:
            raise RequestError(
                f"source {source}", "another `isthmus stream` reads it",
                remedy="stop it first; one process reads all views of a source",
            ) from None  # fmt: skip
        yield
