"""The step that maintains tables and caches."""

from isthmus.orchestration.steps.outline import Outline
from isthmus.orchestration.steps.step import Asset, Results, Step, Work


def _maintain(work: Work) -> Results:
    from isthmus.orchestration.maintenance.maintain import maintain, require_done

    result = maintain(work.project, progress=work.progress)
    require_done(result)
    tables = result.tables.values()
    figures = {"bytes": sum(table.space.bytes for table in tables), "freed bytes": sum(table.freed for table in tables)}
    # No asset depends on this one, so its content needs no version.
    yield "maintained", {**figures, "merged files": sum(table.merged for table in tables), **work.metadata({})}


# No dependencies: tables change on their own.
MAINTENANCE = Asset(
    "maintenance", Outline, lambda _project: "Merges small files, removes old versions and trims caches, every night.",
    library="deltalake", follows=False,
)  # fmt: skip
STEPS = (Step("maintain", "serve", _maintain, (MAINTENANCE,)),)
