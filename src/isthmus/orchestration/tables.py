"""`build`: runs the transforms and writes their results to the offline tables."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from isthmus.features.errors import RequestError
from isthmus.features.offline import OfflineStore, Written
from isthmus.features.spec import FeatureView, Source, Spine
from isthmus.orchestration import gate
from isthmus.orchestration.project import Project
from isthmus.transforms import engine, sources
from isthmus.transforms.compute import Frames, compute_view

Progress = Callable[[str, float], None]


def silent(text: str, done: float) -> None:
    """A progress that nobody watches."""


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
    chosen = [project.definitions.views[name] for name in selected(project, views)]
    store = OfflineStore(project.offline)
    with reading(project, chosen) as frames:
        # Everything is computed and checked before the first table changes: a bad view leaves all of them as they were.
        prepared = {}
        for n, view in enumerate(chosen):
            progress(f"computing {view.name}", n / len(chosen))
            rows = compute_view(view, contract.views[view.name], frames)
            prepared[view.name] = store.prepare(contract.views[view.name], rows)
    gate.require_expectations(project, {name: rows.rows for name, rows in prepared.items()})
    built = {name: store.write(rows) for name, rows in prepared.items()}
    progress("all tables are written", 1.0)
    return built


def selected(project: Project, views: Sequence[str] | None) -> list[str]:
    """The named views, or all of them.

    Raises:
        RequestError: there is no such view.
    """
    known = list(project.definitions.views)
    unknown = [name for name in views or () if name not in known]
    if unknown:
        raise RequestError(f"view {unknown[0]!r}", "is not declared", expected="one of " + ", ".join(known))
    return list(views) if views else known


@contextmanager
def reading(project: Project, declarations: Sequence[FeatureView | Spine]) -> Iterator[Frames]:
    """A DataFrame per source of the declarations, in a session that ends with the block."""
    needed: dict[str, Source] = {s.name: s for declaration in declarations for s in declaration.sources}
    settings = project.settings
    with engine.session(settings.engine, settings.profiles.training.threads) as spark:
        staging = project.state / "sources"
        yield {name: sources.read(spark, source, project.root, staging) for name, source in needed.items()}
