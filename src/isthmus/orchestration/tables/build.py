"""`isthmus build`: run the transforms and write the offline tables."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import msgspec
import pyarrow as pa

from isthmus.features.clock import MICROSECOND
from isthmus.features.contract.diff import rebuild_reasons
from isthmus.features.contract.schema import Contract, ViewContract
from isthmus.features.days import DAY, FIRST, LAST, Days, day_name, day_of
from isthmus.features.definition.spec import FeatureView
from isthmus.features.errors import DataError, RequestError
from isthmus.features.files import write_atomically
from isthmus.features.offline.commits import Commit, RowSources, StreamPosition
from isthmus.features.offline.dayfiles import DayFiles
from isthmus.features.offline.history import table_schema
from isthmus.features.offline.partitions import dataset_of
from isthmus.features.offline.spool import DaySpool
from isthmus.features.offline.store import Prepared, TableWrite
from isthmus.features.progress import Progress, silent
from isthmus.features.quality.validation import Finding
from isthmus.features.types import SCALARS, String
from isthmus.orchestration.frames import copy_sources, source_frames, view_names
from isthmus.orchestration.project import Project
from isthmus.orchestration.quality import gate
from isthmus.orchestration.tables import lookback
from isthmus.orchestration.tables.memory import write_days
from isthmus.transforms import sources
from isthmus.transforms.sources import Landed
from isthmus.transforms.views import executorbuild
from isthmus.transforms.views.compute import Frames, stream_view

STEP = 30  # default number of days per commit


def build(
    project: Project, views: Sequence[str] | None = None, *, progress: Progress = silent
) -> dict[str, TableWrite]:
    """Compute views (default: all) from their sources and write their complete offline tables.

    Does not write unchanged rows again. Returns for each view the counts of rows and the table's version. Rows
    that came only from pushes stay in the tables. During a build, no pushed rows are collected into its tables.

    Raises:
        ContractMismatch: the definitions have not been applied.
        DataError: a source cannot be read, rows do not match the contract, or another process wrote to a table.
        GateFailed: rows break an expectation of their view; nothing was written.
        RequestError: a view is unknown.
    """
    contract = project.applied()
    selected = [project.definitions.views[name] for name in view_names(project, views)]
    store, now = project.offline_store(), project.now()
    tables = [contract.views[view.name].table for view in selected]
    # The lock comes first: no streamed row may be added between the copy of the events and the commit.
    with project.building(tables), copy_sources(project, selected) as landed, ExitStack() as stack:
        contents = _contents(project, selected, landed)
        # Compute and check all views before writing, so that a bad view leaves every table unchanged.
        findings: list[Finding] = []
        prepared: dict[str, Prepared] = {}
        for name, before in _same_rows(project, selected, contents).items():
            findings += gate.findings(project, name, store.history(before).data)
            prepared[name] = stack.enter_context(store.prepare_relabel(contract.views[name]))
        missing = [view for view in selected if view.name not in prepared]
        nothing: AbstractContextManager[Frames] = nullcontext({})
        with source_frames(project, missing, landed) if missing else nothing as frames:
            for n, view in enumerate(missing):
                progress(f"computing {view.name}", n / len(selected))
                run = _Run(project, view, frames, contents, now, landed)
                with run.rows(progress=_share(progress, n, len(selected))) as rows:
                    ready = stack.enter_context(store.prepare(run.compiled, rows, origin=run.origin, now=now))
                    findings += run.findings(rows)
                _report(ready, progress, n / len(selected))
                prepared[view.name] = ready
        gate.require(findings)
        built = {name: store.write(ready) for name, ready in prepared.items()}
        for name, ready in prepared.items():
            record = _BuildRecord(ready.view.hash, ready.base, ready.commit.origin.content)
            write_atomically(_record_file(project, name), msgspec.json.encode(record))
    progress("all tables are written", 1.0)
    return built


def _same_rows(
    project: Project, views: Sequence[FeatureView], contents: Mapping[str, str | None]
) -> dict[str, ViewContract]:
    """Find views whose definition changed although their stored rows stay valid. Return the earlier definition by view.

    For example, a new `ttl` changes only how rows are read.
    """
    contract, store, known = project.definitions.contract, project.offline_store(), project.generations().views()
    same = {}
    for view in views:
        compiled, commit = contract.views[view.name], store.commit(contract.views[view.name])
        before = known.get(commit.contract) if commit and commit.days is not None else None
        if commit and before and before != compiled and not rebuild_reasons(before, compiled):
            content = _content(view, contents)
            if content and _record(project, view.name) == _BuildRecord(commit.contract, commit.base, content):
                same[view.name] = before
    return same


def outdated_views(project: Project, views: Sequence[str] | None = None) -> list[str]:
    """Return the names of the views (default: all are checked) whose tables have to be built again.

    A view is outdated if it was never built completely, or if its table, its sources, its definition or the engine
    changed since. Views of remote files, and of queries without `version_sql`, are always outdated. The definitions
    must be applied.
    """
    contract, store = project.applied(), project.offline_store()
    outdated = []
    for name in view_names(project, views):
        view, commit = project.definitions.views[name], store.commit(contract.views[name])
        content = _content(view, _contents(project, [view]))
        current = commit and content and _BuildRecord(contract.views[name].hash, commit.base, content)
        if not current or _record(project, name) != current:
            outdated.append(name)
    return outdated


class _BuildRecord(msgspec.Struct, frozen=True):
    """Record of the last complete build of a view: contract hash, fingerprint of the rows, hash of the sources."""

    # In the project and not in the table: changed sources with the same rows write no new table version.
    contract: str
    fingerprint: str
    content: str


def _record(project: Project, view: str) -> _BuildRecord | None:
    try:
        return msgspec.json.decode(_record_file(project, view).read_bytes(), type=_BuildRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def _record_file(project: Project, view: str) -> Path:
    return project.state / "built" / f"{view}.json"


def build_range(
    project: Project,
    views: Sequence[str] | None = None,
    *,
    within: Days | None = None,
    step: int = STEP,
    progress: Progress = silent,
) -> dict[str, TableWrite]:
    """Compute views (default: all) for a range of days, and replace exactly those days in their tables.

    Returns a report by view. `within` is the range. Without it, each view is built from the last day of its table, or
    from its last build if that is earlier, minus the `lateness` that the view declares, through today; a table without
    rows is built completely. Skips days that were built from the same definition and sources, so the next run continues
    a killed run. Commits `step` days at a time; after an error, earlier commits stay.

    Checks only expectations on single rows, and raises GateFailed if one is broken. Raises ContractMismatch if a table
    has another contract. Raises DataError if a source column changed its type, or if a view reads further back than its
    declared lookback.
    """
    contract = project.applied()
    names = view_names(project, views)
    store, now = project.offline_store(), project.now()
    # Open every table before changing the first, to find errors early.
    commits = {name: store.extendable(contract.views[name]) for name in names}
    declared = project.definitions.views
    new_days = {name: within or _new_days(declared[name], commits[name], now) for name in names}
    ranges = {name: days for name, days in new_days.items() if days is not None}
    missing = [name for name in names if name not in ranges]
    built = build(project, missing, progress=progress) if missing else {}
    if not ranges:
        return built
    selected = [declared[name] for name in ranges]
    with ExitStack() as stack:
        streaming = [view.name for view in selected if any(source.stream is not None for source in view.sources)]
        stack.enter_context(project.building([contract.views[name].table for name in streaming]))
        landed = stack.enter_context(copy_sources(project, selected, _within(selected, contract, ranges)))
        contents = _contents(project, selected, landed)
        frames = stack.enter_context(source_frames(project, selected, landed))
        for n, view in enumerate(selected):
            run = _Run(project, view, frames, contents, now, landed)
            built[view.name] = run.build(ranges[view.name], step, _share(progress, n, len(selected)))
    progress("all tables are written", 1.0)
    return {name: built[name] for name in names}


class _Run:
    def __init__(
        self, project: Project, view: FeatureView, frames: Frames, contents: Mapping[str, str | None], now: int,
        landed: Mapping[str, Landed],
    ) -> None:  # fmt: skip
        self.project, self.view, self.frames, self.now = project, view, frames, now
        self.store, self.compiled = project.offline_store(), project.definitions.contract.views[view.name]
        self.before: Commit | None = None
        with suppress(DataError):  # of a damaged table, which other code reports
            self.before = self.store.commit(self.compiled)
        schemas = {name: dict(frames[name].dtypes) for name in sorted(source.name for source in view.sources)}
        read = {source.name: landed[source.name].offsets for source in view.sources if source.stream is not None}
        self.origin = RowSources(schemas, _content(view, contents), StreamPosition(None, read) if read else None)
        _require_types(view, self.before, schemas)

    def build(self, within: Days, step: int, progress: Progress) -> TableWrite:
        before = self.store.extendable(self.compiled)
        _refuse_retyped(self.view, before, self.origin)
        same = before is not None and self.origin.content and before.origin.content == self.origin.content
        if before is not None and self.origin.position is not None:
            known = before.origin.position
            same = same and known is not None and known.offsets == self.origin.position.offsets
        done = before.done if before is not None and same else ()
        left = [part for rest in within.without(done) for part in rest.steps(step)]
        days, total = 0, sum(map(len, left))
        unchanged: list[Days] = []
        written, changed, pushed, replaced = None, False, 0, 0
        # A view without a lookback reads complete sources, so compute all steps in one pass.
        passes = [left] if left and self.view.lookback is None else [[part] for part in left]
        for turn, parts in enumerate(passes):
            span = Days(parts[0].first, parts[-1].end)
            progress(f"computing {self.view.name}, {span}", days / total)
            with self.rows(span, _share(progress, days, total)) as rows:
                if turn < lookback.CHECKED:
                    lookback.require_enough(self.view, self.compiled, self.frames, rows)
                for part in parts:
                    gate.require(self.findings(rows, part), part)
                    with (
                        self.project.building([self.compiled.table]),
                        self.store.prepare(
                            self.compiled, rows, part, origin=self.origin, done=unchanged, now=self.now
                        ) as ready,
                    ):
                        _report(ready, progress, days / total)
                        written = self.store.write(ready)
                    # A step without changes writes no commit; the next commit records it as done.
                    unchanged = [] if written.changed else [*unchanged, part]
                    changed |= written.changed
                    pushed, replaced = pushed + written.pushed, replaced + written.replaced
                    days += len(part)
                    progress(f"{self.view.name}, {part}: {written.rows} rows in total", days / total)
        rows_before = before.rows if before else 0
        if written is None:
            return TableWrite(rows_before, 0, self.store.history(self.compiled).version, changed=False)
        return TableWrite(written.rows, written.rows - rows_before, written.version, changed, pushed, replaced)

    @contextmanager
    def rows(self, days: Days | None = None, progress: Progress = silent) -> Iterator[DaySpool | DayFiles]:
        """Compute the rows of days (default: all) for the block: in memory, or into files, by steps or by executors."""
        within = None if days is None else (days.first * DAY, days.end * DAY)
        frames, reach = self.frames, self.compiled.lookback
        if days is not None and reach is not None:
            frames = lookback.limit_sources(self.view, frames, days, reach)
        memory = self.project.settings.engine_memory
        if not self.project.cluster and memory is None:
            with self._explained(), _spooled(stream_view(self.view, self.compiled, frames, within)) as rows:
                yield rows
            return
        # The files have the pushed rows, too: none may be added to the table until the commit.
        with self.project.building([self.compiled.table]), ExitStack() as stack:
            target = self.store.day_target(self.compiled, days, self.now)
            self._target = stack.enter_context(target.probed())
            with self._explained():
                if self.project.cluster or memory is None:
                    files = executorbuild.write_days(self.view, frames, self._target, within)
                else:
                    files = write_days(self.view, self.frames, self.store, self._target, days, memory, progress)
            yield files

    def findings(self, rows: DaySpool | DayFiles, part: Days | None = None) -> list[Finding]:
        name, check = self.view.name, partial(gate.findings, self.project, part=part is not None)
        if isinstance(rows, DaySpool):
            groups = list(rows.groups(part))
            return check(name, pa.concat_tables(groups) if groups else None)
        files = self.store.day_paths(self.compiled, rows if part is None else rows.part(part))
        if not self.project.cluster:
            data = dataset_of(files, table_schema(self.compiled), self._target.files())
            return check(name, data if files else None)
        spark = next(iter(self.frames.values())).sparkSession
        return check(name, files or None, check=partial(executorbuild.check_files, spark, self._target))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except DataError as error:
            for source, column, dtype in self._missing_columns():
                if column in error.found:
                    problem = f"no longer exists; {error.where}: {error.found}"
                    raise DataError(f"source {source}, column {column}", problem, remedy=error.remedy,
                                    expected=f"{dtype}, as when {self.view.name} was built") from error  # fmt: skip
            raise

    def _missing_columns(self) -> Iterator[tuple[str, str, str]]:
        for source, types in self.before.origin.schemas.items() if self.before else ():
            for column in types.keys() - self.origin.schemas.get(source, types).keys():
                yield source, column, types[column]


def _new_days(view: FeatureView, commit: Commit | None, now: int) -> Days | None:
    begun = [day for day in (commit.days if commit else None) or () if day * DAY <= now]
    if commit is None or not begun:
        return None
    # The last row may be older than the last build (sparse rows) or newer (rows in the future); take the earlier.
    end = min(max(begun) * DAY, commit.until or now)
    return Days(day_of(end - view.lateness // MICROSECOND), day_of(now) + 1)


def _require_types(view: FeatureView, before: Commit | None, schemas: Mapping[str, Mapping[str, str]]) -> None:
    for source in view.sources:
        was, now = before.origin.schemas.get(source.name, {}) if before else {}, schemas[source.name]
        guessed = {
            column: kind
            for column, kind in was.items()
            if source.csv and kind != "string" == now.get(column) and column not in source.types
        }
        if guessed:
            kinds = ", ".join(f"{column} ({kind})" for column, kind in guessed.items())
            types = {column: next((t for t in SCALARS if t.spark == kind), String) for column, kind in guessed.items()}
            raise DataError(
                f"source {source.name}", f"{kinds} had types when {view.name} was built, and are read as text now",
                expected="declared types for the columns of a CSV file that are not text",
                remedy=f"write types={types} in the source, with String for columns that should be text",
            )  # fmt: skip


def _refuse_retyped(view: FeatureView, before: Commit | None, origin: RowSources) -> None:
    for source, types in origin.schemas.items():
        types_before = before.origin.schemas.get(source, {}) if before else {}
        for column, dtype in types.items():
            if (was := types_before.get(column, dtype)) != dtype:
                raise DataError(
                    f"source {source}, column {column}", f"has type {dtype} and had {was} when {view.name} was built",
                    expected=was, remedy=f"fix the source, or run `isthmus build {view.name}` without a range",
                )  # fmt: skip


def _within(views: Iterable[FeatureView], contract: Contract, ranges: Mapping[str, Days]) -> dict[str, tuple[int, int]]:
    read: dict[str, list[tuple[int, int]]] = {}
    for view in views:
        days, part = ranges[view.name], (FIRST, LAST)
        if (reach := contract.views[view.name].lookback) is not None:
            part = (days.first * DAY - lookback.source_reach(reach), days.end * DAY + lookback.source_reach(reach))
        for source in view.sources:
            read.setdefault(source.name, []).append(part)
    spans = {name: (min(first for first, _ in parts), max(end for _, end in parts)) for name, parts in read.items()}
    return {name: span for name, span in spans.items() if span != (FIRST, LAST)}


def _contents(
    project: Project, views: Iterable[FeatureView], landed: Mapping[str, Landed] | None = None
) -> Mapping[str, str | None]:
    """Return the hash of each source, and the engine under "". Call this before reading the sources."""
    known = {name: each.content for name, each in (landed or {}).items()}
    declared = {source.name: source for view in views for source in view.sources}
    contents = {
        name: known[name] if name in known else sources.content(source, project.root, project.storage_options)
        for name, source in declared.items()
    }
    return contents | {"": project.settings.engine}


def _content(view: FeatureView, contents: Mapping[str, str | None]) -> str:
    names = sorted(source.name for source in view.sources)
    parts = [contents[name] for name in ["", *names]]
    return "" if None in parts else hashlib.sha256(json.dumps([names, parts]).encode()).hexdigest()


@contextmanager
def _spooled(tables: Iterable[pa.Table]) -> Iterator[DaySpool]:
    with DaySpool() as rows:
        for table in tables:
            rows.add(table)
        yield rows


def _report(ready: Prepared, progress: Progress, done: float) -> None:
    if any(ready.pushes):
        only, replaced = ready.pushes
        progress(f"{ready.view.name} keeps {only} rows that only a push knew, and replaces {replaced} others", done)
    if ready.ahead:
        progress(f"{ready.view.name} has {ready.ahead} rows in the future, which are used from their time on", done)


def _share(progress: Progress, n: int, count: int) -> Progress:
    return lambda text, done: progress(text, (n + done) / count)


def day_range(project: Project, first: str | None, end: str | None, step: int | None, *, catch_up: bool) -> Days | None:
    if catch_up and (first or end):
        raise RequestError("--catch-up", "cannot be used with --from or --to")
    if end and not first:
        raise RequestError(f"--to {end}", "needs --from")
    if step is not None and not (first or catch_up):
        raise RequestError(f"--step {step}", "needs --from or --catch-up")
    if step is not None and step < 1:
        raise RequestError(f"--step {step}", "is not a number of days", expected="at least 1")
    return Days.parse(first, end or day_name(day_of(project.now()) + 1)) if first else None
