"""Find problems that would make a build fail, without computing a row."""

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


def build_problems(project: Project) -> tuple[list[Problem], str]:
    """Return the problems of sources and functions, and a digest of definitions, sources and engine.

    Not checked: URLs, queries, Iceberg tables, empty sources, and functions that read these. Functions are checked only
    with Sail, because other engines start slowly. If the digest was passed to `remember`, nothing is checked again.
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
    present = [source for source in local if source.name in contents]
    return problems + _engine_problems(project, declarations, present), digest


def local_sources(project: Project) -> list[Source]:
    """Return the local sources of views and spines, each once. Reading their columns needs no connection."""
    definitions = project.definitions
    declarations: list[FeatureView | Spine] = [*definitions.views.values(), *definitions.spines.values()]
    return [*{source.name: source for each in declarations for source in each.sources if source.local}.values()]


def remember(project: Project, digest: str) -> None:
    """Store the digest from `build_problems`, so that the same inputs are not checked again."""
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
