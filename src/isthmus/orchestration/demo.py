"""`demo`: the whole project once, through its Dagster assets, then asked through its running API."""

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import msgspec
import numpy as np

from isthmus.features.errors import DependencyError, GateFailed, IsthmusError
from isthmus.features.progress import Progress, silent
from isthmus.features.values.columns import micros
from isthmus.orchestration.api.server import serving
from isthmus.orchestration.artifacts import last_training_set
from isthmus.orchestration.graph import build_definitions
from isthmus.orchestration.graph.events import Made
from isthmus.orchestration.graph.instance import dagster_home
from isthmus.orchestration.graph.nodes import Graph
from isthmus.orchestration.graph.outline import compiled
from isthmus.orchestration.graph.resource import Context, Results, asked
from isthmus.orchestration.graph.steps import work
from isthmus.orchestration.project import Project

_STEPS = {
    "contract": "apply",
    "offline": "build",
    "online": "materialize",
    "training_set": "training-set",
    "student": "distill",
    "package": "export",
    "verdict": "verify",
    "deployment": "deploy",
}
_READY_SECONDS = 20.0
EXAMPLES = 2


def demo(project: Project, *, progress: Progress = silent) -> dict[str, Any]:
    """Runs every step as Dagster runs it, in this process, and asks the API for two rows.

    Args:
        project: the project; it must have exactly one distillation.
        progress: told what is being done and the share of that step that is done.

    Returns:
        The machine-readable summary: seconds, views, training_set, materialize, verdict, distillation, package,
        lookups, predictions.

    Raises:
        IsthmusError: what the first failing step raised.
    """
    started = time.perf_counter()
    declared = project.distillation()
    with project.redis():
        reports, seconds = _run(project, progress)
        progress("asking the API", 0.0)
        begun = time.perf_counter()
        lookups, predictions = _ask(project)
        seconds["serve"] = round(time.perf_counter() - begun, 3)
    seconds["total"] = round(time.perf_counter() - started, 3)
    package, verdict = reports["package"][declared.name], reports["verdict"]["verdict"]
    return {
        "project": project.name,
        "contract": reports["contract"]["contract"]["contract"],
        "seconds": seconds,
        "views": reports["offline"],
        "training_set": reports["training_set"][declared.name],
        "materialize": reports["online"],
        "verdict": verdict,
        "distillation": reports["student"][declared.name],
        "package": package,
        "deployment": reports["deployment"][declared.name],
        "lookups": lookups,
        "predictions": predictions,
    }


@dataclass(frozen=True)
class _Here:
    """Steps in this process: what is heavy to load is loaded once, and errors come back as they are."""

    project: Project
    progress: Progress

    def run(self, context: Context, step: str, nodes: Mapping[dg.AssetKey, str]) -> Results:
        keys = {node: key for key, node in nodes.items()}
        for event in work(self.project, asked(context, step, nodes), self.progress):
            metadata = {
                name: getattr(dg.MetadataValue, value["type"])(value["raw_value"]) if isinstance(value, dict) else value
                for name, value in event.metadata.items()
            }
            if isinstance(event, Made):
                yield dg.MaterializeResult(
                    asset_key=keys[event.node], data_version=dg.DataVersion(event.version), metadata=metadata
                )
            else:
                yield dg.AssetCheckResult(
                    passed=event.passed, asset_key=keys[event.node], check_name=event.check,
                    description=event.found or None, metadata=metadata,
                )  # fmt: skip


def _run(project: Project, progress: Progress) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """The reports of all assets and checks by kind and name, and the seconds of each step."""
    # Tables are built whole: days are for those who come back.
    whole = msgspec.structs.replace(compiled(project), days=None)
    definitions, named = build_definitions(whole, resource=_Here(project, progress)), Graph(whole).named
    job = definitions.resolve_implicit_global_asset_job_def()
    reports: dict[str, dict[str, Any]] = {}
    seconds: dict[str, float] = {}
    with dg.DagsterInstance.from_config(str(dagster_home(project))) as instance:
        # Dagster's own lines would bury the progress: errors come back as exceptions.
        quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
        try:
            result = job.execute_in_process(instance=instance, run_config=quiet, raise_on_error=True)
        except dg.DagsterError as error:
            # A check that did not pass is no exception of ours: Dagster names the checks, in lines of their own.
            failed = "; ".join(line.strip(" -") for line in str(error).splitlines()[1:] if line.strip())
            if error.__cause__ is not None or not failed:
                raise
            raise GateFailed(
                "demo", f"a blocking check did not pass ({failed})", remedy="look at the checks with `isthmus dev`"
            ) from error
    for event in result.get_asset_materialization_events():
        materialization = event.step_materialization_data.materialization
        kind, _, name = named[materialization.asset_key].partition("/")
        # Teacher and control are in the student's report.
        if kind in _STEPS:
            _take(kind, name or kind, materialization.metadata, reports, seconds)
    for evaluation in result.get_asset_check_evaluations():
        if "report" in evaluation.metadata:
            _take("verdict", evaluation.check_name, evaluation.metadata, reports, seconds)
    return reports, {step: seconds[step] for step in _STEPS.values()}


def _take(kind: str, name: str, metadata: Any, reports: dict[str, dict[str, Any]], seconds: dict[str, float]) -> None:
    reports.setdefault(kind, {})[name] = metadata["report"].value
    seconds[_STEPS[kind]] = metadata["seconds"].value


def _ask(project: Project) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Looks up and predicts the next examples after the project's present through the API, as a client would."""
    declared = project.distillation()
    contract = project.applied()
    rows = last_training_set(project, declared).table()
    coming = int(np.searchsorted(micros(rows["event_timestamp"]), project.now()))
    rows = rows.slice(min(coming, len(rows) - EXAMPLES), EXAMPLES)
    service = declared.student.name
    keys = {key.name for view, _ in contract.read(service) for key in contract.views[view].keys}
    fields = {column.name for column in contract.given(service) if column.available == "request"} - keys
    taken = {column.name for transform in contract.used(service) for column in transform.request}
    lookups, predictions = [], []
    port = _free_port()
    log = project.state / "logs" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file, serving(project, port=port, log=file, private=True) as server:
        url = f"http://127.0.0.1:{port}"
        _await(url, server, log)
        for row in rows.to_pylist():
            entities = {name: [row[name]] for name in sorted(keys)}
            moment = entities | {name: [row[name]] for name in sorted(taken - keys)}
            asked = {"feature_service": declared.student.name, "entities": moment, "full_feature_names": True}
            lookups.append({"request": asked, "answer": _post(f"{url}/get-online-features", asked)})
            asked = {"model": declared.name, "entities": entities, "request": {n: [row[n]] for n in sorted(fields)}}
            predictions.append({"request": asked, "answer": _post(f"{url}/predict", asked)})
    return lookups, predictions


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - a server of ours on loopback
            result: dict[str, Any] = json.load(answer)
            return result
    except urllib.error.HTTPError as error:
        raise IsthmusError(url, f"answered {error.code}: {error.read().decode(errors='replace')}") from error


def _await(url: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=2):  # noqa: S310 - a server of ours on loopback
                return
        except OSError:
            time.sleep(0.05)
    raise DependencyError("the API", f"was not ready within {_READY_SECONDS:.0f} s", remedy=f"see {log}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
