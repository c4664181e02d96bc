"""The sources of a project as DataFrames of its engine."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from isthmus.features.contract.contract import Column, Contract
from isthmus.features.definition.spec import FeatureView, Source, Spine
from isthmus.features.errors import RequestError, nearest, one_of
from isthmus.features.types import TYPES
from isthmus.orchestration.project import Project
from isthmus.transforms import engine, sources
from isthmus.transforms.views.compute import Frames


def view_names(project: Project, views: Sequence[str] | None) -> list[str]:
    """The named views, or all of them.

    Raises:
        RequestError: there is no such view.
    """
    known = list(project.definitions.views)
    unknown = [name for name in views or () if name not in known]
    if unknown:
        problem = f"is not declared{nearest(unknown[0], known)}"
        raise RequestError(f"view {unknown[0]!r}", problem, expected=one_of(known))
    return list(views) if views else known


@contextmanager
def source_frames(project: Project, declarations: Sequence[FeatureView | Spine]) -> Iterator[Frames]:
    """A DataFrame per source of the declarations, whose functions are called in the block: its session ends with it."""
    needed: dict[str, Source] = {s.name: s for declaration in declarations for s in declaration.sources}
    settings = project.settings
    with engine.session(settings.engine, settings.profiles.training.threads) as spark, project.importing():
        staging = project.state / "sources"
        yield {name: sources.read(spark, source, project.root, staging) for name, source in needed.items()}


def spine_columns(contract: Contract, name: str) -> list[Column]:
    """Keys, request fields and label of a spine. A request field named like a key is that key."""
    spine = contract.spines[name]
    columns = {name: (dtype, *size) for name, dtype, *size in (*spine["keys"], *spine["request"], spine["label"])}
    return [Column(name, TYPES[dtype], size=next(iter(size), None)) for name, (dtype, *size) in columns.items()]
