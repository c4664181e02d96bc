"""Steps that build the offline tables, and write their latest rows to Redis."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from isthmus.orchestration.steps.outline import ViewOutline
from isthmus.orchestration.steps.step import Asset, Results, Step, Work

if TYPE_CHECKING:
    from isthmus.features.offline.history import ViewHistory
    from isthmus.features.offline.store import TableWrite


def _build(work: Work) -> Results:
    from isthmus.features.days import Days
    from isthmus.orchestration.tables.build import build, build_range

    days = work.request.days
    if days is None or work.request.everything:
        built = build(work.project, work.names, progress=work.progress)
    else:
        built = build_range(work.project, work.names, within=Days.parse(*days), progress=work.progress)
    yield from _tables(work, built)


def _complete(work: Work) -> Results:
    from isthmus.orchestration.tables.build import build, outdated_views

    late = outdated_views(work.project, work.names)
    yield from _tables(work, build(work.project, late, progress=work.progress) if late else {})


def _tables(work: Work, built: "Mapping[str, TableWrite]") -> Results:
    for name in work.names:
        history = _history(work, name)
        metadata = {"dagster/row_count": history.rows()}
        if name in built:
            metadata |= work.metadata(asdict(built[name]), ["added"])
        yield history.fingerprint, metadata


def _history(work: Work, name: str) -> "ViewHistory":
    return work.project.offline_store().history(work.project.definitions.contract.views[name])


def _materialize(work: Work) -> Results:
    from isthmus.orchestration.tables.materialize import materialize

    reports = materialize(work.project, work.names, progress=work.progress)
    for name in work.names:
        # Every key has a row online, including the keys that did not change.
        rows = {"dagster/row_count": reports[name].compared}
        yield _history(work, name).fingerprint, rows | work.metadata(reports[name].as_dict(), ["written"])


DAYS = Asset(
    "build", ViewOutline,
    lambda view: f"Days of {view.name}, computed by its PySpark transform and written to the offline table.",
    library="pyspark", version=lambda view: view.code, deps=lambda view: map("source/{}".format, view.sources),
    follows=False,
)  # fmt: skip
OFFLINE = Asset(
    "offline", ViewOutline, lambda view: view.description or f"The full history of {view.name}.",
    library="pyspark deltalake", version=lambda view: view.code,
    deps=lambda view: [*map("source/{}".format, view.sources), f"build/{view.name}"],
)  # fmt: skip
ONLINE = Asset(
    "online", ViewOutline, lambda view: f"The latest row of every key of {view.name}, in Redis.",
    library="redis", version=lambda view: view.code, deps=lambda view: [f"offline/{view.name}"],
)  # fmt: skip
STEPS = (
    Step(
        "build", "engine", _build, (DAYS,), op="build_days", select=lambda node: node.outline.days is not None,
        together=True, daily=True, applies=True,
    ),
    # In a project without daily partitions, the step that completes a table must build it.
    Step(
        "whole", "engine", _complete, (OFFLINE,), op="build", together=True, without_days="build", applies=True,
    ),
    Step("materialize", "serve", _materialize, (ONLINE,), together=True),
)  # fmt: skip
