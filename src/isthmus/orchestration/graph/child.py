"""A step in its own process, which Dagster Pipes starts: `python -m isthmus.orchestration.graph.child`.

It runs anywhere: as a subprocess beside Dagster, or in a pod with the same image. It ends with the process that has
started it: a run that was killed gives back its place, and the next must not run beside it.
"""

import os
import signal
import sys
from pathlib import Path

import msgspec
from dagster_pipes import PipesContext, open_dagster_pipes

from isthmus.features.errors import DependencyError, IsthmusError
from isthmus.orchestration.graph.events import FAILED, Checked, Failed, Materialized, Request, shown
from isthmus.orchestration.graph.steps import run_step
from isthmus.orchestration.project import Project
from isthmus.serving.process import end_with


def main(parent: int | None = None) -> int:
    """Runs the step. A failure is a message; the exit code is for defects and signals.

    `parent` is the process with which it ends; without one, that which is its parent now.
    """
    # Dagster gives SIGTERM the handler of SIGINT, which shells ignore for what they start in the background.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with(os.getppid() if parent is None else parent)
    with open_dagster_pipes() as pipes:
        request, keys = msgspec.convert(pipes.get_extra("asked"), Request), pipes.get_extra("keys")
        try:
            project = Project(Path(pipes.get_extra("root")))
            for event in run_step(project, request, lambda text, done: pipes.log.info(f"{text} ({done:.0%})")):
                _report(pipes, event, keys[event.node])
        except IsthmusError as error:
            passes = isinstance(error, DependencyError) and error.passes
            pipes.report_custom_message(msgspec.to_builtins({FAILED: Failed(str(error), passes)}))
    return 0


def _report(pipes: PipesContext, event: Materialized | Checked, key: str) -> None:
    if isinstance(event, Materialized):
        pipes.report_asset_materialization(metadata=shown(event), data_version=event.version, asset_key=key)
        return
    pipes.report_asset_check(event.check, event.passed, "ERROR" if event.blocking else "WARN", shown(event), key)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
