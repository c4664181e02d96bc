"""Sources of a project as DataFrames of its engine."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from isthmus.features.contract.schema import Column, Contract
from isthmus.features.definition.spec import FeatureView, Source, Spine
from isthmus.features.errors import RequestError, did_you_mean, one_of
from isthmus.features.files import is_url, scratch_folder
from isthmus.features.streams.events import EventLog
from isthmus.orchestration.project import Project
from isthmus.transforms import engine, sources
from isthmus.transforms.sources import Landed
from isthmus.transforms.tables.stored import Store
from isthmus.transforms.tables.table import Within
from isthmus.transforms.views.compute import Frames


def view_names(project: Project, views: Sequence[str] | None) -> list[str]:
    known = list(project.definitions.views)
    unknown = [name for name in views or () if name not in known]
    if unknown:
        problem = f"is not declared{did_you_mean(unknown[0], known)}"
        raise RequestError(f"view {unknown[0]!r}", problem, expected=one_of(known))
    return list(views) if views else known


@contextmanager
def copy_sources(
    project: Project, declarations: Sequence[FeatureView | Spine], within: Mapping[str, tuple[int, int]] | None = None
) -> Iterator[Mapping[str, Landed]]:
    """Copy the sources that the engine cannot read by itself to local files, and yield the copies by source name.

    Used before views are built from the sources of `declarations`. These are tables, queries, and the events of
    streams. The copies are deleted after the block. `within` limits a source, by its name, to a first and a last time
    in microseconds since 1970 UTC. Sources that it does not name are copied in full.
    """
    cluster = project.cluster
    tables = {
        name: each
        for name, each in _sources(declarations).items()
        if each.stream is not None or sources.needs_copy(each, cluster=cluster)
    }
    if not tables:
        yield {}
        return
    with scratch_folder(project.state, "landed") as folder:
        yield {name: _copy(project, each, (within or {}).get(name), folder, cluster) for name, each in tables.items()}


def _copy(project: Project, source: Source, within: Within, folder: Path, cluster: bool) -> Landed:
    options = project.storage_options
    if sources.needs_copy(source, cluster=cluster):
        landed = sources.land(source, project.root, within, folder, options)
    else:
        landed = Landed(None, sources.content(source, project.root, options))
    if source.stream is None:
        return landed
    log = event_log(project, source)
    offsets = log.read_until().offsets
    return replace(landed, events=sources.land_events(source, log, within, folder), offsets=offsets)


def read_sources(project: Project, spark: Any, declared: Iterable[Source], folder: Path) -> dict[str, Any]:
    """Return a DataFrame of each source by name, without the events of streams. Copies are written to `folder`."""
    cluster = project.cluster
    frames = {}
    for source in declared:
        copied = sources.needs_copy(source, cluster=cluster)
        landed = sources.land(source, project.root, None, folder, project.storage_options) if copied else None
        frames[source.name] = sources.read(spark, source, project.root, project.state / "sources", landed)
    return frames


def event_log(project: Project, source: Source) -> EventLog:
    """Return the table of the events of a source with a stream."""
    assert source.timestamp is not None  # noqa: S101 - checked with the declarations
    return EventLog(project.offline, source.name, source.timestamp, source.known_column, project.storage_options)


@contextmanager
def source_frames(
    project: Project, declarations: Sequence[FeatureView | Spine], landed: Mapping[str, Landed] | None = None
) -> Iterator[Frames]:
    """Start a session of the project's engine for the block, and yield a DataFrame of each source by name.

    Used to run transforms. Opens the sources that `declarations` read. `landed` has the copies from `copy_sources`;
    None makes copies that are deleted after the block. Functions of the definitions can import modules from the
    project's folder. CSV files are converted, and the converted files stay in the state folder.
    """
    settings = project.settings
    with ExitStack() as stack:
        if landed is None:
            landed = stack.enter_context(copy_sources(project, declarations))
        threads, memory = settings.profiles.training.threads, settings.engine_memory
        spark = stack.enter_context(engine.session(settings.engine, threads, memory))
        stack.enter_context(project.importing())
        staging, store = project.state / "sources", None
        if project.cluster:
            # Executors may not see this machine's disk.
            whole = Store(project.offline, project.storage_options if is_url(project.offline) else {})
            store = stack.enter_context(whole.scratch("_sources"))
        yield {
            name: sources.read(spark, source, project.root, staging, landed.get(name), store)
            for name, source in _sources(declarations).items()
        }


def _sources(declarations: Sequence[FeatureView | Spine]) -> dict[str, Source]:
    return {source.name: source for declaration in declarations for source in declaration.sources}


def spine_columns(contract: Contract, name: str) -> list[Column]:
    spine = contract.spines[name]
    return list({column.name: column for column in (*spine.keys, *spine.request, spine.label)}.values())
