"""What would make a build fail, as far as that can be seen before a row is computed."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from isthmus.features.contract.schema import Column, Contract, sha256
from isthmus.features.definition.spec import FeatureView, Source, Spine
from isthmus.features.errors import ConfigurationError, DependencyError, IsthmusError, Problem
from isthmus.features.files import write_atomically
from isthmus.orchestration.frames import spine_columns
from isthmus.orchestration.project import Project
from isthmus.transforms import engine, sources
from isthmus.transforms.views.compute import analyze


def unbuildable(project: Project) -> tuple[list[Problem], str]:
    """The problems of sources and functions that show without computing a row, all of them; and what was looked at.

    Not seen are URLs, queries, Iceberg tables, sources without a row, and what reads these; functions, unless the
    engine is Sail, since others take long to start; and functions that have rows computed themselves. What `remember`
    has is not looked at again: it is a digest of definitions, sources and engine.
    """
    definitions = project.definitions
    declarations: list[FeatureView | Spine] = [*definitions.views.values(), *definitions.spines.values()]
    problems: list[Problem] = []
    contents: dict[str, list[str | None]] = {}
    local = local_sources(project)
    for source in local:
        with _collecting(problems):
            contents[source.name] = [source.place, sources.content(source, project.root, project.storage_options)]
    parts = {"contract": definitions.contract.hash, "engine": project.settings.engine, "sources": contents}
    digest = sha256(parts)
    with suppress(OSError):
        if _note(project).read_text(encoding="utf-8") == digest and not problems:
            return [], digest
    return problems + _of_engine(project, declarations, [source for source in local if source.name in contents]), digest


def local_sources(project: Project) -> list[Source]:
    """Return the local sources of views and spines, each once. Reading their columns needs no connection."""
    definitions = project.definitions
    declarations: list[FeatureView | Spine] = [*definitions.views.values(), *definitions.spines.values()]
    return [*{source.name: source for each in declarations for source in each.sources if source.local}.values()]


def remember(project: Project, digest: str) -> None:
    """Keeps what was without a problem, by the digest that `unbuildable` returned."""
    write_atomically(_note(project), digest.encode())


def _note(project: Project) -> Path:
    return project.state / "analysis"


def _of_engine(
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
            # The columns of a CSV file without rows have no types yet.
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
