"""The project as a whole: to begin one, to see where it stands, to run it."""

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

import click
import typer

from isthmus.orchestration.cli.options import JsonOption, ProjectOption, open_project
from isthmus.orchestration.cli.screens.terminal import present, progress, write_json
from isthmus.orchestration.scaffold import EXAMPLES

verbs = typer.Typer()


@verbs.command()
def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[PATH]", help="A new or empty folder; the project has its name.")
    ] = Path(),
    example: Annotated[
        str, typer.Option(click_type=click.Choice(EXAMPLES), help="What to begin with; empty has made-up rows.")
    ] = "empty",
    as_json: JsonOption = False,
) -> None:
    """Write a new project that passes its own tests."""
    from isthmus.orchestration.scaffold import init as run

    made = run(folder, example)
    if as_json:
        write_json(made.as_dict())
        return
    there = made.folder == Path.cwd()
    typer.echo(f"{made.name}: {len(made.files)} files in {made.folder}\n\nNext:\n")
    for line in [*([] if there else [f"cd {shlex.quote(str(folder))}"]), *made.next]:
        typer.echo(f"    {line}")


@verbs.command()
def status(
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure expectations and drift, which reads the tables.")
    ] = True,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the project stands: tables, online rows, drift, models, verdicts, deployments and last runs."""
    from isthmus.orchestration.status import status as run

    with progress() as bar:
        opened = open_project(project)
        found = run(opened, measure=measure, progress=bar)
    # The server shows what was found last.
    found.write(opened.state)
    from isthmus.orchestration.cli.screens.status import show_status

    present(found.as_dict(), partial(show_status, found), as_json=as_json)


@verbs.command()
def dev(project: ProjectOption = None) -> None:
    """Run the Dagster UI over the project, and the API beside it."""
    from isthmus.orchestration.dev import dev as run

    raise typer.Exit(run(open_project(project)))


@verbs.command()
def demo(project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Run the whole project once, from raw data to predictions by the running API, and show what came of it."""
    from isthmus.orchestration.cli.screens.steps import show
    from isthmus.orchestration.demo import demo as run

    with progress() as bar:
        outcome = run(open_project(project), progress=bar)
    present(outcome, partial(show, outcome), as_json=as_json)
