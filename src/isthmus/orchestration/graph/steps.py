"""All steps of a project, for Dagster, the demo, and the processes that run steps."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from isthmus.features.errors import ContractMismatch
from isthmus.features.progress import Progress
from isthmus.orchestration.apply import steps as apply
from isthmus.orchestration.attribution import steps as attribution
from isthmus.orchestration.maintenance import steps as maintenance
from isthmus.orchestration.models import steps as models
from isthmus.orchestration.monitoring import steps as monitoring
from isthmus.orchestration.quality import steps as quality
from isthmus.orchestration.recording import steps as recording
from isthmus.orchestration.snapshots import steps as snapshots
from isthmus.orchestration.steps.step import REPORT, Asset, Kind, NodeCheck, NodeMaterialization, Step, StepRequest
from isthmus.orchestration.streams import steps as streams
from isthmus.orchestration.tables import steps as tables
from isthmus.orchestration.training import steps as training
from isthmus.orchestration.verification import steps as verification

if TYPE_CHECKING:
    from isthmus.orchestration.project import Project

ROOMS = (
    apply, tables, streams, quality, snapshots, recording, training, models, verification, attribution, monitoring,
    maintenance,
)  # fmt: skip
STEPS: Mapping[str, Step] = {step.name: step for room in ROOMS for step in room.STEPS}
ASSETS: Mapping[Kind, Asset[Any]] = {asset.kind: asset for step in STEPS.values() for asset in step.assets}
_HIDDEN = {REPORT, "format", "name", "more"}  # report entries that are not useful as asset metadata


def run_step(project: "Project", request: StepRequest, progress: Progress) -> Iterator[NodeMaterialization | NodeCheck]:
    """Run the requested part of a step of the project, and yield an event per materialized asset and finished check.

    The step runs only while the caller iterates. A step with `Step.applies` first applies changed definitions. A step
    with `Step.changes_status` writes the project's status file after each asset and each failed check. Raise an
    IsthmusError if the step fails.
    """
    step = STEPS[request.step]
    if step.applies:
        _apply_changes(project, progress)
    for event in step.events(project, request, progress):
        # The report goes last, because it is long and hides everything below it.
        report = {name: value for name, value in event.metadata.items() if name == REPORT}
        yield replace(event, metadata={**{n: v for n, v in event.metadata.items() if n not in _HIDDEN}, **report})
        if step.changes_status and not (isinstance(event, NodeCheck) and event.passed):
            from isthmus.orchestration import status

            status.write_status(project)


def _apply_changes(project: "Project", progress: Progress) -> None:
    from isthmus.orchestration.apply.apply import apply

    try:
        project.applied()
    except ContractMismatch as error:
        progress(f"applying the definitions: {error.found}", 0.0)
        apply(project)
