"""The project's own Dagster instance in `.isthmus/dagster`: runs, events and settings."""

from pathlib import Path

import dagster as dg

from isthmus.features.files import write_atomically
from isthmus.orchestration.graph.assets import observe
from isthmus.orchestration.project import Project

INSTANCE = b"""\
# Written by isthmus. Nothing is sent to anyone; waiting runs are looked at every second. What runs beside what is said
# by pools: [orchestration.pools] of isthmus.toml.
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
"""
"""The content of dagster.yaml."""


def dagster_home(project: Project) -> Path:
    """Writes the instance's settings and observes the sources; returns the instance's folder."""
    home = project.state / "dagster"
    write_atomically(home / "dagster.yaml", INSTANCE)
    with dg.DagsterInstance.from_config(str(home)) as instance:
        for pool, limit in project.settings.orchestration.pools.model_dump().items():
            instance.event_log_storage.set_concurrency_slots(pool, limit)
        observe(instance, project.root)
    return home
