"""`isthmus apply`: compile the definitions, write the contract and register the Feast objects."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from isthmus.features import clock
from isthmus.features.contract.diff import differences
from isthmus.features.contract.generations import Generations
from isthmus.features.contract.schema import Column, Contract, sha256
from isthmus.features.definition.spec import FeatureView, Source, Spine
from isthmus.features.errors import (
    ConfigurationError,
    ContractMismatch,
    DataError,
    DependencyError,
    IsthmusError,
    Problem,
)
from isthmus.features.files import write_atomically
from isthmus.features.offline.log import MaterializationLog
from isthmus.orchestration.apply.switch import register
from isthmus.orchestration.frames import spine_columns
from isthmus.orchestration.project import Project
from isthmus.package.snapshot.selection import exposed_features, kept_views
from isthmus.package.snapshot.store import SnapshotFolder
from isthmus.transforms import engine, sources
from isthmus.transforms.views.compute import analyze
from isthmus.transforms.views.streamable import stream_problems


@dataclass(frozen=True)
class Applied:
    """The report of `apply`.

    Attributes:
        contract: hash of the new contract (the compiled definitions).
        changes: one sentence for each change from the previous contract.
        registered: names of the registered Feast objects; empty until servers use the new contract.
        current: hash of the contract that servers use. If it differs from `contract`, servers switch after `build` and
            `materialize` have written the new rows.
        sources: column types of each local source.
        streams: views that `isthmus stream` keeps up to date.
    """

    contract: str
    changes: list[str]
    registered: list[str]
    current: str
    sources: dict[str, dict[str, str]]
    streams: list[str] = field(default_factory=list)


def apply(project: Project) -> Applied:
    """Check the project's definitions, and make them the applied contract: the schema that all other steps use.

    If no view is new or changed, or no row was ever materialized, servers use the contract at once, and Feast's objects
    are registered. Otherwise servers keep the current contract until `build` and `materialize` have written the new
    rows. This waits for other processes that change contracts. It deletes device snapshots that disclose more features
    than the new definitions allow, and writes converted copies of local sources to the state folder.

    Raises:
        ConfigurationError: definitions, freshness objectives, sources or functions have problems, or a feature's type
            differs from its table. All problems are listed, and the previous contract stays.
        DependencyError: feast is not installed. The previous contract stays.
    """
    definitions = project.definitions
    project.require_objectives_of(definitions.contract.views)
    problems, digest = build_problems(project)
    types = (
        {} if problems else {source.name: sources.columns(source, project.root) for source in local_sources(project)}
    )
    with project.locked("contract"):
        unreadable = False
        try:
            generations = project.generations()
        except ContractMismatch:
            generations, unreadable = Generations(), True
        before, contract = generations.newest(), generations.with_slots(definitions.contract)
        changes = differences(before, contract) if before else []
        if unreadable:
            changes = ["the previous contract cannot be read"]
        problems += _retyped(project, contract)
        if problems:
            raise ConfigurationError(f"{project.settings.project.definitions}.py", problems)
        if _has_rows(project, generations, contract):
            registered = register(project, contract)
            generations = generations.switch(contract, clock.now())
        else:
            registered = []
            generations = generations.prepare(contract, clock.now())
        # Write this file last: it makes the contract the applied one.
        generations.write(project.contract_file)
    remember(project, digest)
    _withdraw(project, contract)
    current = generations.current or contract
    streams = [view.name for view in definitions.views.values() if view.streams]
    return Applied(contract.hash, changes, registered, current.hash, types, streams)


def _withdraw(project: Project, contract: Contract) -> None:
    """Delete device snapshots that disclose more than the contract allows; servers would keep offering them."""
    for folder in project.snapshots.glob("*/"):
        service, shelf = project.definitions.services.get(folder.name), SnapshotFolder(folder)
        device = None if service is None else service.device
        allowed = exposed_features(kept_views(contract, folder.name), device) if device else ()
        # A snapshot that is being written may still use the previous contract, so take its lock.
        with shelf.locked():
            before = shelf.latest_or_none()
            if device is None or (before is not None and not {*before.discloses} <= {*allowed}):
                shelf.clear()


def _has_rows(project: Project, generations: Generations, contract: Contract) -> bool:
    """Return True if servers can use a contract now: its views are unchanged, or no row was ever materialized."""
    current = generations.current
    if current is None or all(view in current.views.values() for view in contract.views.values()):
        return True
    served = MaterializationLog(project.offline, project.storage_options).contracts()
    return not served.intersection(view.hash for before in generations.contracts() for view in before.views.values())


def _retyped(project: Project, contract: Contract) -> list[Problem]:
    store, problems = project.offline_store(), []
    for view in contract.views.values():
        # Damaged tables are reported by the steps that read them.
        with suppress(DataError):
            problems += store.type_problems(view)
    return problems


def build_problems(project: Project) -> tuple[list[Problem], str]:
    """Find problems of sources and functions that would make a build fail, without computing rows.

    Only views that read a stream are computed, from few events, to check that `isthmus stream` can serve them.

    Return the problems and a digest of the checked definitions and sources. Pass the digest to `remember` if there is
    no problem: the next call with the same digest then checks nothing. Converted copies of local sources are written to
    the state folder. Functions are checked only with the engine Sail, because other engines start slowly. URLs,
    queries, Iceberg tables, empty sources, and functions that read these are not checked.
    """
    definitions = project.definitions
    declarations: list[FeatureView | Spine] = [*definitions.views.values(), *definitions.spines.values()]
    problems: list[Problem] = []
    contents: dict[str, list[str | None]] = {}
    local = local_sources(project)
    for source in local:
        with _collecting(problems):
            content = sources.content(source, project.root, project.storage_options)
            contents[source.name] = [source.place, content, *([repr(source.stream)] if source.stream else [])]
    parts = {"contract": definitions.contract.hash, "engine": project.settings.engine, "sources": contents}
    digest = sha256(parts)
    with suppress(OSError):
        if _note(project).read_text(encoding="utf-8") == digest and not problems:
            return [], digest
    present = [source for source in local if source.name in contents]
    return problems + _engine_problems(project, declarations, present), digest


def local_sources(project: Project) -> list[Source]:
    definitions = project.definitions
    declarations: list[FeatureView | Spine] = [*definitions.views.values(), *definitions.spines.values()]
    return [*{source.name: source for each in declarations for source in each.sources if source.local}.values()]


def remember(project: Project, digest: str) -> None:
    write_atomically(_note(project), digest.encode())


def _note(project: Project) -> Path:
    return project.state / "analysis"


def _engine_problems(
    project: Project, declarations: Sequence[FeatureView | Spine], present: Sequence[Source]
) -> list[Problem]:
    contract, staging = project.definitions.contract, project.state / "sources"
    problems: list[Problem] = []
    frames: dict[str, Any] = {}
    with ExitStack() as stack:
        spark = None
        with suppress(DependencyError):
            if project.settings.engine == "sail":
                spark = stack.enter_context(engine.session("sail"))
        for source in present:
            # Columns of an empty CSV file have no types yet.
            with _collecting(problems), suppress(sources.NoRowsError):
                if spark is None:
                    sources.require_readable(source, project.root, staging)
                else:
                    frames[source.name] = sources.read(spark, source, project.root, staging)
        stack.enter_context(project.importing())
        for declaration in declarations if spark else ():
            if all(source.name in frames for source in declaration.sources):
                with _collecting(problems):
                    analyze(spark, declaration, _columns(contract, declaration), frames)
                    if spark and isinstance(declaration, FeatureView) and declaration.streams:
                        problems += stream_problems(
                            spark, declaration, contract.views[declaration.name], frames, project.root
                        )
    return problems


def _columns(contract: Contract, declaration: FeatureView | Spine) -> list[Column]:
    if isinstance(declaration, Spine):
        return spine_columns(contract, declaration.name)
    view = contract.views[declaration.name]
    return [*view.keys, *view.fields]


@contextmanager
def _collecting(problems: list[Problem]) -> Iterator[None]:
    try:
        yield
    except ConfigurationError as error:
        problems += [replace(problem, remedy=problem.remedy or error.remedy) for problem in error.problems]
    except IsthmusError as error:
        problems.append(Problem(error.where, error.found, error.expected, error.remedy))
