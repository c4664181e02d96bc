"""A step in a process of its own, told by Dagster Pipes what to do: `python -m isthmus.orchestration.graph.child`.

Where it runs is nothing to it: a subprocess beside Dagster, or a pod with the same image.
"""

import sys
from pathlib import Path

import msgspec
from dagster_pipes import PipesContext, open_dagster_pipes

from isthmus.features.errors import DependencyError, IsthmusError
from isthmus.orchestration.graph.events import FAILED, Asked, Checked, Failed, Made
from isthmus.orchestration.graph.steps import work
from isthmus.orchestration.project import Project


def main() -> int:
    """Does what it is told. What it cannot do it says; the exit code is of other errors, and of signals."""
    with open_dagster_pipes() as pipes:
        told, keys = pipes.get_extra("asked"), pipes.get_extra("keys")
        try:
            project = Project(Path(pipes.get_extra("root")))
            for event in work(project, msgspec.convert(told, Asked), lambda text, done: _tell(pipes, text, done)):
                _report(pipes, event, keys[event.node])
        except IsthmusError as error:
            passes = isinstance(error, DependencyError) and error.passes
            pipes.report_custom_message(msgspec.to_builtins({FAILED: Failed(str(error), passes)}))
    return 0


def _tell(pipes: PipesContext, text: str, done: float) -> None:
    pipes.log.info(f"{text} ({done:.0%})")


def _report(pipes: PipesContext, event: Made | Checked, key: str) -> None:
    if isinstance(event, Made):
        pipes.report_asset_materialization(metadata=event.metadata, data_version=event.version, asset_key=key)
        return
    found = {"found": event.found} if event.found else {}
    pipes.report_asset_check(
        event.check, event.passed, "ERROR" if event.blocking else "WARN", {**found, **event.metadata}, key
    )


if __name__ == "__main__":
    sys.exit(main())
