"""Verbs for the project as a whole: create it, show its status, run it."""

import shlex
import shutil
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from isthmus.features.files import write_atomically
from isthmus.orchestration.cli.options import HtmlOption, JsonOption, ProjectOption, local, open_project
from isthmus.orchestration.cli.screens.terminal import judge, present, progress, say, write_json
from isthmus.orchestration.scaffold import Example

verbs = typer.Typer()


@verbs.command()
def init(
    path: Annotated[Path, typer.Argument(**local("New or empty folder. The project gets its name."))] = Path(),
    example: Annotated[Example, typer.Option(help="Template; empty has a few generated rows.")] = "empty",
    from_feast: Annotated[
        Path | None,
        typer.Option("--from-feast", **local("Feast repository whose entities, views and services to convert.")),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a new project with passing tests, or one for the views of a Feast repository."""
    from isthmus.orchestration.scaffold import init as run

    left_out: list[str] = []
    if from_feast is None:
        project = run(path, example)
    else:
        from isthmus.orchestration.audit.convert import init_from_feast

        project, left_out = init_from_feast(path, from_feast)
    if as_json:
        write_json(project if from_feast is None else {**asdict(project), "left_out": left_out})
        return
    for note in left_out:
        say(f"left out: {note}")
    enter = [] if project.folder == Path.cwd() else [f"cd {shlex.quote(str(path))}"]
    if shutil.which("isthmus") is None and (activate := Path(sys.prefix) / "bin" / "activate").exists():
        enter.insert(0, f". {shlex.quote(str(activate))}")
    typer.echo(f"{project.name}: {len(project.files)} files in {project.folder}\n\nNext:\n")
    for line in [*enter, *project.next]:
        typer.echo(f"    {line}")


@verbs.command()
def audit(
    repository: Annotated[Path, typer.Argument(**local("Folder with a feature_store.yaml."))],
    sample: Annotated[int | None, typer.Option(min=1, help="Keys to compare per view (default: all keys).")] = None,
    view: Annotated[list[str] | None, typer.Option(help="Only this view. May be repeated.")] = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the values that a Feast repository serves with its sources, and explain each difference. Read only."""
    from isthmus.orchestration.audit.audit import audit as run
    from isthmus.orchestration.audit.page import page, screen

    with progress() as bar:
        report = run(repository, sample=sample, views=view or (), progress=bar)
    if html:
        write_atomically(html, page(report).encode())
    judge(report.as_dict(), partial(screen, report), report.require, as_json=as_json)


@verbs.command()
def status(
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure expectations and drift; reads all tables.")
    ] = True,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show and save the state of tables, online rows, models and runs. Exit code 3 if Redis has lost rows."""
    from isthmus.orchestration.status import require_rows
    from isthmus.orchestration.status import status as run

    with progress() as bar:
        opened = open_project(project)
        report = run(opened, measure=measure, progress=bar)
    report.write(opened.state)
    judge(report.as_dict(), report.screen, partial(require_rows, report), as_json=as_json)


@verbs.command()
def dev(
    host: Annotated[str, typer.Option(help="Address of the Dagster UI. It has no login.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the Dagster UI (default: [dev] port).")
    ] = None,
    project: ProjectOption = None,
) -> None:
    """Run the Dagster UI and the API of the project until Ctrl-C."""
    from isthmus.orchestration.dev import dev as run

    raise typer.Exit(run(open_project(project), host=host, port=port))


@verbs.command(hidden=True)
def demo(project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Run the whole project once, from raw data to predictions from a running API, and show the results."""
    from isthmus.orchestration.demo import demo as run

    with progress() as bar:
        outcome = run(open_project(project), progress=bar)
    from isthmus.orchestration.cli.screens.demo import demo_blocks

    present(outcome, partial(demo_blocks, outcome), as_json=as_json)
