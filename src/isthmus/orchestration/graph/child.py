"""Run one step in a process started by Dagster Pipes: `python -m isthmus.orchestration.graph.child`."""

import os
import signal
import sys
from pathlib import Path

import msgspec
from dagster_pipes import PipesContext, open_dagster_pipes

from isthmus.features.errors import DependencyError, IsthmusError
from isthmus.orchestration.graph.steps import run_step
from isthmus.orchestration.project import Project
from isthmus.orchestration.steps.step import (
    FAILED,
    NodeCheck,
    NodeMaterialization,
    StepFailure,
    StepRequest,
    display_metadata,
)
from isthmus.serving.process import end_with_parent


def main(parent: int | None = None) -> int:
    """Run the step that Dagster requested of this process, report the results to Dagster, and return 0.

    A step that fails with an IsthmusError also returns 0: the error is sent to Dagster as a message. Any other exit
    code means a bug or a signal. The system kills this process when the process with the id `parent` ends (default: the
    process that started this one). Otherwise a killed run would free its slot while its step still runs.
    """
    # Dagster gives SIGTERM the handler of SIGINT, and shells ignore SIGINT in background jobs.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(os.getppid() if parent is None else parent)
    with open_dagster_pipes() as pipes:
        request, keys = msgspec.convert(pipes.get_extra("asked"), StepRequest), pipes.get_extra("keys")
        try:
            project = Project(Path(pipes.get_extra("root")))
            for event in run_step(project, request, lambda text, done: pipes.log.info(f"{text} ({done:.0%})")):
                _report(pipes, event, keys[event.node])
        except IsthmusError as error:
            passes = isinstance(error, DependencyError) and error.passes
            pipes.report_custom_message(msgspec.to_builtins({FAILED: StepFailure(str(error), passes)}))
    return 0


def _report(pipes: PipesContext, event: NodeMaterialization | NodeCheck, key: str) -> None:
    if isinstance(event, NodeMaterialization):
        pipes.report_asset_materialization(metadata=display_metadata(event), data_version=event.version, asset_key=key)
        return
    pipes.report_asset_check(
        event.check, event.passed, "ERROR" if event.blocking else "WARN", display_metadata(event), key
    )


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
