"""The project's own Dagster instance in `.isthmus/dagster`: runs, events and settings."""

import os
import time
from pathlib import Path

import dagster as dg

from isthmus.features.errors import ConfigurationError, Problem
from isthmus.features.files import write_atomically
from isthmus.orchestration.graph.assets import record_source_versions
from isthmus.orchestration.project import Project

INSTANCE = b"""\
# Written by isthmus. Telemetry is off. The queue is checked every second. [orchestration.pools] in isthmus.toml limits
# how many steps run at once.
telemetry:
  enabled: false
nux:
  enabled: false
freshness:
  enabled: true
concurrency:
  pools:
    granularity: op
    default_limit: 1
  runs:
    max_concurrent_runs: 3
run_coordinator:
  module: dagster.core.run_coordinator
  class: QueuedRunCoordinator
  config:
    dequeue_interval_seconds: 1
run_monitoring:
  enabled: true
  start_timeout_seconds: 180
  cancel_timeout_seconds: 120
  poll_interval_seconds: 20
  free_slots_after_run_end_seconds: 1
"""

_CLOCKS = 2.0  # seconds by which the clocks of processes and events may disagree


def dagster_home(project: Project) -> Path:
    """Prepare the folder of the project's Dagster instance and return it. Call it before Dagster is started or used.

    Writes the settings and pool limits of the instance, marks runs whose process is gone as failed, and records the
    current version of each source, so that only later changes trigger builds. Raise ConfigurationError if the path
    contains a question mark, and an IsthmusError if the definitions are invalid.
    """
    home = project.state / "dagster"
    if "?" in str(home):
        problem = Problem("path", f"{home} contains a ?, and Dagster cuts the paths of its databases there")
        raise ConfigurationError("project", [problem], remedy="rename the folder")
    write_atomically(home / "dagster.yaml", INSTANCE)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        for pool, limit in project.settings.orchestration.pools.model_dump().items():
            limit = max(limit, project.settings.profiles.training.parallel) if pool == "train" else limit
            instance.event_log_storage.set_concurrency_slots(pool, limit)
        _end_killed_runs(instance)
        record_source_versions(instance, project.root)
    return home


def _end_killed_runs(instance: dg.DagsterInstance) -> None:
    """Fail the runs whose process is gone, and free their slots, which would otherwise block every later run."""
    for run in instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING])):
        starts = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.RUN_START)
        event = starts[-1].dagster_event if starts else None
        if event is None or event.pid is None or _lives(event.pid, starts[-1].timestamp):
            continue
        instance.report_run_failed(run, "The process of this run is gone, most likely because it was killed.")
        instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)


def _lives(pid: int, moment: float) -> bool:
    """Return True if the process that had this id at `moment` (seconds since 1970 UTC) is still running."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return fields[0] != "Z" and time.time() - age < moment + _CLOCKS
