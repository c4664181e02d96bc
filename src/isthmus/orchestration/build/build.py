"""`build`: runs the transforms and writes their results to the offline tables."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
import pyarrow as pa

from isthmus.features.clock import MICROSECOND
from isthmus.features.contract.contract import ViewContract
from isthmus.features.days import DAY, Days, day_name, day_of
from isthmus.features.definition.spec import FeatureView
from isthmus.features.errors import DataError, RequestError
from isthmus.features.files import write_atomically
from isthmus.features.offline.commits import Commit, Origin
from isthmus.features.offline.spool import Spool
from isthmus.features.offline.store import OfflineStore, Prepared, Written
from isthmus.features.progress import Progress, silent
from isthmus.features.quality.validation import Finding
from isthmus.orchestration.build import lookback
from isthmus.orchestration.frames import source_frames, view_names
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality import gate
from isthmus.transforms import sources
from isthmus.transforms.views.compute import Frames, stream_view

STEP = 30
"""Days of a range that are written in one commit, unless a step is named."""
CHECKED = 2
"""Steps of a range whose first day is computed with a longer lookback, too: nothing may lie before the first of all."""


def build(project: Project, views: Sequence[str] | None = None, *, progress: Progress = silent) -> dict[str, Written]:
    """Computes views and makes the results their offline tables. The same input a second time changes nothing.

    Args:
        project: the project, applied.
        views: names of the views, or None for all.
        progress: told the view at hand and the share that is done.

    Raises:
        GateFailed: rows break an expectation of their view; nothing was written.
    """
    contract = project.applied()
    chosen = [project.definitions.views[name] for name in view_names(project, views)]
    store, now = OfflineStore(project.offline), project.now()
    contents = _contents(project, chosen)
    with ExitStack() as held:
        # Everything is computed and checked before the first table changes: a bad view leaves all of them as they were.
        prepared: dict[str, Prepared] = {}
        found: list[Finding] = []
        with source_frames(project, chosen) as frames:
            for n, view in enumerate(chosen):
                progress(f"computing {view.name}", n / len(chosen))
                compiled, origin = contract.views[view.name], _origin(view, frames, contents)
                with _spooled(_computed(store, view, compiled, frames, origin)) as rows:
                    ready = held.enter_context(store.prepare(compiled, rows, origin=origin, now=now))
                    found += gate.findings(project, view.name, pa.concat_tables(rows.groups()))
                _tell_ahead(ready, progress, n / len(chosen))
                prepared[view.name] = ready
        gate.require(found)
        built = {name: store.write(ready) for name, ready in prepared.items()}
        for name, ready in prepared.items():
            made = _Built(ready.view.hash, ready.commit.fingerprint, ready.commit.origin.content)
            write_atomically(_note(project, name), msgspec.json.encode(made))
    progress("all tables are written", 1.0)
    return built


def outdated_views(project: Project, views: Sequence[str] | None = None) -> list[str]:
    """Of some views those whose table is not, for every day, made of what sources and definitions are now.

    A source elsewhere, whose content nobody can tell, makes its views outdated always.
    """
    contract, store = project.applied(), OfflineStore(project.offline)
    found = []
    for name in view_names(project, views):
        view, commit = project.definitions.views[name], store.commit(contract.views[name])
        try:
            built = msgspec.json.decode(_note(project, name).read_bytes(), type=_Built)
        except (OSError, msgspec.MsgspecError):
            built = None
        content = _content(view, _contents(project, [view]))
        if commit is None or not content or built != _Built(contract.views[name].hash, commit.fingerprint, content):
            found.append(name)
    return found


class _Built(msgspec.Struct, frozen=True):
    """What a table was made whole of: hash of the view's contract, fingerprint of the rows, content of the sources.

    Beside the project and not in the table: the same rows of another content make no new version of it.
    """

    contract: str
    fingerprint: str
    content: str


def _note(project: Project, view: str) -> Path:
    return project.state / "built" / f"{view}.json"


def build_range(
    project: Project,
    views: Sequence[str] | None = None,
    *,
    within: Days | None = None,
    step: int = STEP,
    progress: Progress = silent,
) -> dict[str, Written]:
    """Computes views for a range of days, step by step, and replaces exactly those days in their offline tables.

    Each step is one commit. What was built from the same definition and the same source files before is not computed
    again: a run that was killed goes on where it was. A day for which the transform has no row has none in the table.

    Args:
        project: the project, applied.
        views: names of the views, or None for all.
        within: the days; None for those from the end of each table, less the view's `lateness`, up to today. A view
            that has no table yet is then built whole.
        step: days of a commit.
        progress: told the view and the step at hand, and the share that is done.

    Raises:
        ContractMismatch: a table was built under another contract; the days outside of the range would stay so.
        DataError: as in `build`, or a column of a source has another type than when the table was built, or a view
            reaches further than its lookback.
        RequestError: there is no such view.
    """
    contract = project.applied()
    chosen = [project.definitions.views[name] for name in view_names(project, views)]
    store, now = OfflineStore(project.offline), project.now()
    # Every table is opened before the first one changes.
    commits = {view.name: store.extendable(contract.views[view.name]) for view in chosen}
    ranges: dict[str, Days] = {}
    for view in chosen:
        if (days := within or _new_days(view, commits[view.name], now)) is not None:
            ranges[view.name] = days
    whole = [view.name for view in chosen if view.name not in ranges]
    built = build(project, whole, progress=progress) if whole else {}
    parts = [view for view in chosen if view.name in ranges]
    if not parts:
        return built
    contents = _contents(project, parts)
    with source_frames(project, parts) as frames:
        for n, view in enumerate(parts):
            run = _Run(project, view, contract.views[view.name], _origin(view, frames, contents), now)
            built[view.name] = run.build(frames, ranges[view.name], step, _share(progress, n, len(parts)))
    progress("all tables are written", 1.0)
    return {view.name: built[view.name] for view in chosen}


class _Run:
    """The build of a range of one view."""

    def __init__(self, project: Project, view: FeatureView, compiled: ViewContract, origin: Origin, now: int) -> None:
        self.project, self.view, self.compiled, self.origin, self.now = project, view, compiled, origin, now
        self.store = OfflineStore(project.offline)

    def build(self, frames: Frames, within: Days, step: int, progress: Progress) -> Written:
        """Computes and writes what is left of the range."""
        before = self.store.extendable(self.compiled)
        _refuse_retyped(self.view, before, self.origin)
        same = before is not None and self.origin.content and before.origin.content == self.origin.content
        done = before.done if before is not None and same else ()
        left = [part for rest in within.without(done) for part in rest.steps(step)]
        days, total = 0, sum(map(len, left))
        unchanged: list[Days] = []
        written, changed = None, False
        for turn, parts in enumerate(_passes(self.view, left)):
            progress(f"computing {self.view.name}, {Days(parts[0].first, parts[-1].end)}", days / total)
            with _spooled(self._compute(frames, Days(parts[0].first, parts[-1].end))) as rows:
                if turn < CHECKED:
                    lookback.require_enough(self.view, self.compiled, frames, rows)
                for part in parts:
                    gate.require(gate.findings(self.project, self.view.name, _within(rows, part), part=True), part)
                    with self.store.prepare(
                        self.compiled, rows, part, origin=self.origin, done=unchanged, now=self.now
                    ) as ready:
                        _tell_ahead(ready, progress, days / total)
                        written = self.store.write(ready)
                    # A step that changed nothing made no commit: the next one that is made says that it is done.
                    unchanged = [] if written.changed else [*unchanged, part]
                    changed |= written.changed
                    days += len(part)
                    progress(f"{self.view.name}, {part}: {written.rows} rows in all", days / total)
        rows_before = before.rows if before else 0
        if written is None:
            return Written(rows_before, 0, self.store.history(self.compiled).version, changed=False)
        return Written(written.rows, written.rows - rows_before, written.version, changed=changed)

    def _compute(self, frames: Frames, days: Days) -> Iterator[pa.Table]:
        if (reach := self.compiled.lookback) is not None:
            frames = lookback.narrowed(self.view, frames, days, reach)
        within = (days.first * DAY, days.end * DAY)
        return _computed(self.store, self.view, self.compiled, frames, self.origin, within)


def _passes(view: FeatureView, parts: Sequence[Days]) -> Iterator[Sequence[Days]]:
    """Which steps are computed together: a view that reads all of its sources anyway reads them once."""
    if view.lookback is not None:
        yield from ([part] for part in parts)
    elif parts:
        yield parts


def _new_days(view: FeatureView, commit: Commit | None, now: int) -> Days | None:
    """From the end of a table, less how late rows may arrive, up to today; None if it has no day that has begun."""
    begun = [day for day in (commit.days if commit else None) or () if day * DAY <= now]
    if commit is None or not begun:
        return None
    # Rows may be sparse, so that the last one lies before the last build; or lie in the future, and so behind it.
    end = min(max(begun) * DAY, commit.until or now)
    return Days(day_of(end - view.lateness // MICROSECOND), day_of(now) + 1)


def _refuse_retyped(view: FeatureView, before: Commit | None, origin: Origin) -> None:
    """Rows that were computed from columns of other types may mean something else: a table holds one kind of them."""
    for source, types in origin.schemas.items():
        known = before.origin.schemas.get(source, {}) if before else {}
        for column, dtype in types.items():
            if (was := known.get(column, dtype)) != dtype:
                raise DataError(
                    f"source {source}, column {column}", f"has type {dtype} and had {was} when {view.name} was built",
                    expected=was, remedy=f"correct the source, or run `isthmus build {view.name}` without a range",
                )  # fmt: skip


def _computed(
    store: OfflineStore,
    view: FeatureView,
    contract: ViewContract,
    frames: Frames,
    origin: Origin,
    within: tuple[int, int] | None = None,
) -> Iterator[pa.Table]:
    """The rows of a view. A column that the engine misses is named with its source, if the table was built from it."""
    try:
        yield from stream_view(view, contract, frames, within)
    except DataError as error:
        for source, column, dtype in _gone(store, contract, origin):
            if column in error.found:
                found = f"is gone; {error.where}: {error.found}"
                raise DataError(f"source {source}, column {column}", found, remedy=error.remedy,
                                expected=f"{dtype}, as when {view.name} was built") from error  # fmt: skip
        raise


def _gone(store: OfflineStore, view: ViewContract, origin: Origin) -> Iterator[tuple[str, str, str]]:
    """The columns of sources that were there when the table was built and are no more, with their types."""
    with suppress(DataError):
        before = store.commit(view)
        for source, types in before.origin.schemas.items() if before else ():
            for column in types.keys() - origin.schemas.get(source, types).keys():
                yield source, column, types[column]


def _contents(project: Project, views: Iterable[FeatureView]) -> Mapping[str, str | None]:
    """The content of each source, looked at before it is read: what changes later is then taken for new."""
    return {source.name: sources.content(source, project.root) for view in views for source in view.sources} | {
        "": project.settings.engine
    }


def _origin(view: FeatureView, frames: Frames, contents: Mapping[str, str | None]) -> Origin:
    """What the rows of a view are computed from."""
    names = sorted(source.name for source in view.sources)
    return Origin({name: dict(frames[name].dtypes) for name in names}, _content(view, contents))


def _content(view: FeatureView, contents: Mapping[str, str | None]) -> str:
    """Hash of what the sources of a view hold, and of the engine; empty if nobody can say it."""
    names = sorted(source.name for source in view.sources)
    held = [contents[name] for name in ["", *names]]
    return "" if None in held else hashlib.sha256(json.dumps([names, held]).encode()).hexdigest()


def _within(rows: Spool, part: Days) -> pa.Table | None:
    """The rows of some days; None if there is none."""
    groups = list(rows.groups(part))
    return pa.concat_tables(groups) if groups else None


@contextmanager
def _spooled(tables: Iterable[pa.Table]) -> Iterator[Spool]:
    with Spool() as rows:
        for table in tables:
            rows.add(table)
        yield rows


def _tell_ahead(ready: Prepared, progress: Progress, done: float) -> None:
    if ready.ahead:
        progress(f"{ready.view.name} has {ready.ahead} rows of the future, which answer from their time on", done)


def _share(progress: Progress, n: int, count: int) -> Progress:
    """The progress of the n-th of several."""
    return lambda text, done: progress(text, (n + done) / count)


def day_range(project: Project, first: str | None, end: str | None, step: int | None, *, catch_up: bool) -> Days | None:
    """The range that the options of a command line ask for; None if they ask for none.

    Raises:
        RequestError: they contradict each other, or one of them is no day.
    """
    if catch_up and (first or end):
        raise RequestError("--catch-up", "together with a range", expected="one of both")
    if end and not first:
        raise RequestError(f"--to {end}", "without --from", expected="both, or --from alone")
    if step is not None and not (first or catch_up):
        raise RequestError(f"--step {step}", "without a range", expected="--from or --catch-up beside it")
    if step is not None and step < 1:
        raise RequestError(f"--step {step}", "is no number of days", expected="at least 1")
    return Days.parse(first, end or day_name(day_of(project.now()) + 1)) if first else None
