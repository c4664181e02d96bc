"""`isthmus demo`: run every asset of a project once, then send two requests to its API."""

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import dagster as dg
import msgspec
import numpy as np

from isthmus.features.errors import GateFailed
from isthmus.features.progress import Progress, silent
from isthmus.features.values.arrow import micros
from isthmus.orchestration import status
from isthmus.orchestration.artifacts import Artifacts
from isthmus.orchestration.graph.assets import build_definitions
from isthmus.orchestration.graph.instance import dagster_home
from isthmus.orchestration.graph.outline import compile_outline
from isthmus.orchestration.graph.resource import Context, Results, selection
from isthmus.orchestration.graph.steps import run_step
from isthmus.orchestration.project import Project
from isthmus.orchestration.server.serve import serving
from isthmus.orchestration.steps.step import REPORT, NodeMaterialization, display_metadata
from isthmus.orchestration.verification.client import Client

EXAMPLES = 2


def demo(project: Project, *, progress: Progress = silent) -> dict[str, Any]:
    """Run every step of a project in this process, from raw data to predictions, and return all reports.

    Builds the tables, publishes them to Redis, trains a student, exports and deploys it, and sends two rows to the API.
    The project must have exactly one distillation. Starts the project's Redis if it is embedded, and a server on a free
    port. The run also shows up in the project's Dagster instance. Raise GateFailed if a blocking check fails.
    """
    started = time.perf_counter()
    name, steps = project.distillation().name, _Here(project, progress)
    with project.redis():
        _run(steps)
        progress("calling the API", 0.0)
        begun = time.perf_counter()
        lookups, predictions = _ask(project)
        serve = round(time.perf_counter() - begun, 3)
    total, reports = round(time.perf_counter() - started, 3), steps.reports
    return {
        "project": project.name,
        "contract": reports["apply"]["contract"]["contract"],
        "seconds": {**steps.seconds, "serve": serve, "total": total},
        "views": reports["build"],
        "training_set": reports["training-set"][name],
        "materialize": reports["materialize"],
        "verdict": reports["verify"][name],
        "distillation": reports["distill"][name],
        "package": reports["export"][name],
        "deployment": reports["deploy"][name],
        "lookups": lookups,
        "predictions": predictions,
    }


@dataclass(frozen=True)
class _Here:
    """Runs steps in this process, so that heavy libraries are loaded once and errors arrive unchanged."""

    project: Project
    progress: Progress
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, context: Context, step: str, nodes: Mapping[dg.AssetKey, str]) -> Results:
        keys = {node: key for key, node in nodes.items()}
        for event in run_step(self.project, selection(context, step, nodes), self.progress):
            # Teacher and control have no report of their own; the student's report includes them.
            if REPORT in event.metadata:
                kind, _, name = event.node.partition("/")
                self.reports.setdefault(step, {})[name or kind] = event.metadata[REPORT]["raw_value"]
                self.seconds[step] = event.metadata["seconds"]
            metadata = {
                name: getattr(dg.MetadataValue, value["type"])(value["raw_value"]) if isinstance(value, dict) else value
                for name, value in display_metadata(event).items()
            }
            if isinstance(event, NodeMaterialization):
                yield dg.MaterializeResult(
                    asset_key=keys[event.node], data_version=dg.DataVersion(event.version), metadata=metadata
                )
            else:
                yield dg.AssetCheckResult(
                    passed=event.passed, asset_key=keys[event.node], check_name=event.check,
                    description=event.message or None, metadata=metadata,
                )  # fmt: skip


def _run(steps: _Here) -> None:
    # Build complete tables instead of daily partitions. One process gains nothing from parts of a training.
    outline = msgspec.structs.replace(compile_outline(steps.project), days=None, parallel=1)
    job = build_definitions(outline, resource=steps).resolve_implicit_global_asset_job_def()
    with dg.DagsterInstance.from_config(str(dagster_home(steps.project))) as instance:
        # Dagster's log would bury the progress bar. Errors still arrive as exceptions.
        quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
        try:
            job.execute_in_process(instance=instance, run_config=quiet, raise_on_error=True)
            # The last step wrote the status before the run ended, so write it again.
            status.write_status(steps.project)
        except dg.DagsterError as error:
            # A failed check raises Dagster's error, which lists one check per line.
            failed = "; ".join(line.strip(" -") for line in str(error).splitlines()[1:] if line.strip())
            if error.__cause__ is not None or not failed:
                raise
            raise GateFailed(
                "demo", f"a blocking check failed ({failed})", remedy="run `isthmus dev` to see the checks"
            ) from error


def _ask(project: Project) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    declared = project.distillation()
    contract = project.applied()
    rows = Artifacts(project, declared).current_training_set().table()
    coming = int(np.searchsorted(micros(rows["event_timestamp"]), project.now()))
    rows = rows.slice(min(coming, len(rows) - EXAMPLES), EXAMPLES)
    service = declared.student.name
    keys = {key.name for view, _ in contract.stored_features(service) for key in contract.views[view].keys}
    fields = {column.name for column in contract.raw_inputs(service) if column.available == "request"} - keys
    request_fields = {column.name for transform in contract.transforms_of(service) for column in transform.request}
    lookups, predictions = [], []
    log = project.state / "logs" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("wb") as file,
        serving(project, port=0, log=file, private=True) as server,
        closing(Client(contract, server, log)) as client,
    ):
        for row in rows.to_pylist():
            entities = {name: [row[name]] for name in sorted(keys)}
            moment = entities | {name: [row[name]] for name in sorted(request_fields - keys)}
            lookup = {"feature_service": service, "entities": moment, "full_feature_names": True}
            lookups.append({"request": lookup, "answer": client.answer("/get-online-features", lookup)})
            request = {name: [row[name]] for name in sorted(fields)}
            predict = {"model": declared.name, "entities": entities, "request": request}
            predictions.append({"request": predict, "answer": client.answer("/predict", predict)})
    return lookups, predictions
