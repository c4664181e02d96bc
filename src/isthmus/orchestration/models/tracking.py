"""Students in MLflow, where `MLFLOW_TRACKING_URI` names a tracking server or a database."""

import os
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from isthmus.features.progress import Progress, silent
from isthmus.orchestration.artifacts import Artifacts

STUDENT, PACKAGE = "isthmus.student", "isthmus.package"
"""Tags of a student's run: its id, and the digest of its package."""
_UNNAMEABLE = re.compile(r"[^\w\-. :/]")
"""Characters that a metric's name cannot have, such as the brackets of a lambda."""
_MOST = 1000
"""Metrics that MLflow takes in one request."""


def track(artifacts: Artifacts, *, package: str | None = None, progress: Progress = silent) -> None:
    """Write the settings, evaluations and figures of the last student to MLflow, unless it has them; then `package`.

    Each training is a child of the student's run. Without `MLFLOW_TRACKING_URI`, do nothing. If MLflow is not installed
    or does not answer, call `progress` with a warning; the next call writes what is missing.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        return
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # by default a dead server takes minutes
    try:
        from mlflow import MlflowClient

        client = MlflowClient()
        run = _tracked(client, artifacts, artifacts.last_report())
        if package is not None:
            client.set_tag(run, PACKAGE, package)
    except Exception as error:  # noqa: BLE001 - MLflow and its stores raise errors of many libraries
        remedy = "install isthmus[mlflow]" if isinstance(error, ImportError) else "the same command tries again"
        progress(f"not tracked in MLflow: {' '.join(str(error).split())[:300]}; {remedy}", 1.0)


def _tracked(client: Any, artifacts: Artifacts, report: Mapping[str, Any]) -> str:
    """Return the run of a student. Create it if there is none."""
    project, declared = artifacts.project, artifacts.declared
    name = f"{project.name}/{declared.name}"
    known = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if known is None else known.experiment_id
    if found := client.search_runs([experiment], f"tags.`{STUDENT}` = '{report['id']}'"):
        return str(found[0].info.run_id)
    settings = declared.training_settings(project.settings.profiles.training, report["rows"]["train"]).identity()
    runs = [str(client.create_run(experiment, run_name=report["id"]).info.run_id)]
    try:
        for part in report["runs"]:
            label, tags = f"{part['model']}-{part['seed']}", {"mlflow.parentRunId": runs[0]}
            runs.append(client.create_run(experiment, run_name=label, tags=tags).info.run_id)
            _log(client, runs[-1], {**settings, "seed": part["seed"], "planned": part["planned"]}, part["history"])
        models = report["models"].items()
        figures = {f"{model}.{key}": value for model, of in models for key, value in of["quality"].items()}
        gains = {key: (report[key] or {}).get("value") for key in ("taught", "gap_closed")}
        _log(client, runs[0], settings, [{**figures, **gains, **report["measures"]}])
        client.set_tag(runs[0], STUDENT, report["id"])  # last: an incomplete run is written again
    except Exception:
        for run in runs:
            client.set_terminated(run, "FAILED")
        raise
    return runs[0]


def _log(client: Any, run: str, settings: Mapping[str, Any], history: Iterable[Mapping[str, Any]]) -> None:
    from mlflow.entities import Metric, Param

    now = int(time.time() * 1000)
    values = [
        (entry.get("step", 0), _UNNAMEABLE.sub("_", key), value)
        for entry in history
        for key, value in entry.items()
        if key != "step"
    ]
    metrics = [Metric(key, value, now, step) for step, key, value in values if value is not None]
    client.log_batch(run, params=[Param(key, str(value)) for key, value in settings.items()])
    for start in range(0, len(metrics), _MOST):
        client.log_batch(run, metrics[start : start + _MOST])
    client.set_terminated(run)
