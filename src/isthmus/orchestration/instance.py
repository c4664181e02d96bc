"""The project's own Dagster instance: its runs, events and settings, in `.isthmus/dagster`."""

from pathlib import Path

from isthmus.features.files import write_atomically
from isthmus.orchestration.project import Project

_INSTANCE = b"""\
# Written by isthmus. Nothing is sent to anyone; waiting runs are looked at every second, and run one at a time.
telemetry:
  enabled: false
nux:
  enabled: false
run_coordinator:
  module: dagster.core.run_coordinator
  class: QueuedRunCoordinator
  config:
    max_concurrent_runs: 1
    dequeue_interval_seconds: 1
"""


def dagster_home(project: Project) -> Path:
    """The folder of the instance, with its settings written."""
    home = project.state / "dagster"
    write_atomically(home / "dagster.yaml", _INSTANCE)
    return home
