"""From a training set to a package, and everything about it that needs no server."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.orchestration.cli.options import JsonOption, NameArgument, OutOption, ProjectOption, local, open_project
from isthmus.orchestration.cli.screens.terminal import judge, present, progress, say

if TYPE_CHECKING:
    from isthmus.features.days import Days

verbs = typer.Typer()


@verbs.command()
def distill(
    name: NameArgument = None,
    again: Annotated[
        bool, typer.Option("--again", help="Train also if nothing has changed since the last time.")
    ] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train teacher, reference, student and control, unless nothing has changed since they were trained."""
    from isthmus.orchestration.models.students import distill as run

    with progress() as bar:
        report = run(open_project(project), name, again=again, progress=bar).as_dict()
    from isthmus.orchestration.cli.screens.models import distillation_blocks

    present(report, partial(distillation_blocks, report), as_json=as_json)


@verbs.command()
def search(
    name: NameArgument = None,
    trials: Annotated[
        int | None,
        typer.Option(help="How many students in all, those of earlier calls included; by default as declared."),
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try students of other shapes and precisions under the budget. Exit code 1 if none keeps to it."""
    from isthmus.orchestration.models.students import search as run

    with progress() as bar:
        report = run(open_project(project), name, trials=trials, progress=bar)
    from isthmus.distill.search.search import require_fit
    from isthmus.orchestration.cli.screens.models import search_blocks

    plain = report.as_dict()
    judge(plain, partial(search_blocks, plain), partial(require_fit, report.data), as_json=as_json)


@verbs.command()
def export(name: NameArgument = None, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Turn the student into a package for the API and the device."""
    from isthmus.orchestration.cli.screens.report import export_blocks
    from isthmus.orchestration.models.students import export as run

    with progress() as bar:
        report = run(open_project(project), name, progress=bar).as_dict()
    present(report, partial(export_blocks, report), as_json=as_json)


@verbs.command()
def ladder(name: NameArgument = None, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Compare the last package, in each runtime, with its student in torch. Exit code 1 names the first that breaks."""
    from isthmus.orchestration.cli.packages import ladder_blocks
    from isthmus.orchestration.models.students import ladder as run
    from isthmus.orchestration.runtimes.products import RUNTIMES

    rungs = run(open_project(project), name, runtimes=RUNTIMES)
    judge(rungs.as_dict(), partial(ladder_blocks, rungs), rungs.require, as_json=as_json)


@verbs.command()
def attribute(
    name: NameArgument = None,
    first: Annotated[
        str | None, typer.Option("--from", help="Rows of the last training set, or recorded, from this day on, in UTC.")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", help="Only before this day.")] = None,
    fed: Annotated[
        Path | None,
        typer.Option(**local("Parquet or Arrow with what the model was fed: join keys, event_timestamp, inputs.")),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Of the file that answers; by default as it is served.")] = None,
    runtime: Annotated[
        str | None,
        typer.Option(help="That answers: ort, as the API does, web, executorch, litert or coreml; by default ort."),
    ] = None,
    recorded: Annotated[bool, typer.Option("--recorded", help="Rows that servers recorded, as they answered.")] = False,
    against: Annotated[
        tuple[str, str] | None,
        typer.Option(help="An earlier period, from a day on and before another: splits the change since then."),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(help="With --against, a column whose values are segments; by default the join keys."),
    ] = None,
    package_against: Annotated[
        Path | None, typer.Option(**local("The package of the earlier period; by default the last one, too."))
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Split what the package's answers differ by from the ideal ones: stale, skewed, distilled, rounded, run elsewhere.

    By default of the rows of the test part. With --against, split what changed between two periods: the population,
    its features, the contract, the model. Exit code 1 if a bound of the distillation does not hold.
    """
    from isthmus.orchestration.attribution.attribute import attribute as run
    from isthmus.orchestration.attribution.attribute import day_range, refuse

    days = day_range(first, end)
    if against is not None:
        refuse({"--fed": fed, "--precision": precision, "--runtime": runtime}, "--against")
        _change(name, days, against, by or [], package_against, recorded, project, as_json)
        return
    refuse({"--by": by, "--package-against": package_against}, "attribute without --against")
    with progress() as bar:
        result = run(
            open_project(project), name, days=days, fed=fed, precision=precision, runtime=runtime,
            recorded=recorded, progress=bar,
        )  # fmt: skip
    from isthmus.orchestration.attribution.page import screen
    from isthmus.orchestration.attribution.report import require_bounds

    judge(result.as_dict(), partial(screen, result), partial(require_bounds, result), as_json=as_json)


def _change(
    name: str | None, days: "Days | None", against: tuple[str, str], by: list[str], package: Path | None,
    recorded: bool, project: Path | None, as_json: bool,
) -> None:  # fmt: skip
    from isthmus.features.days import Days
    from isthmus.orchestration.attribution.periods.change import change as run

    with progress() as bar:
        result = run(
            open_project(project), name, days=days, against=Days.parse(*against), by=by, package=package,
            recorded=recorded, progress=bar,
        )  # fmt: skip
    from isthmus.orchestration.attribution.periods.page import change_blocks

    present(result.as_dict(), partial(change_blocks, result), as_json=as_json)


@verbs.command()
def monitor(
    name: NameArgument = None,
    follow: Annotated[bool, typer.Option("--follow", help="Again and again, every hour, until it is ended.")] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure recorded answers by the labels that are known by now, and how far what was served has drifted.

    Exit code 1 if a bound of the distillation is broken.
    """
    from isthmus.orchestration.monitoring import monitor as run

    opened = open_project(project)
    if follow:
        run.follow(opened, name, say)
    with progress() as bar:
        result = run.monitor(opened, name, progress=bar)
    from isthmus.features.production import production_file
    from isthmus.orchestration.monitoring.bounds import require_bounds
    from isthmus.orchestration.monitoring.page import page_file, screen

    file = production_file(opened.state, result.model)
    require = partial(require_bounds, result, page_file(file))
    judge(run.plain(opened, result), partial(screen, result, file), require, as_json=as_json)


@verbs.command()
def explain(
    identity: Annotated[str, typer.Argument(metavar="ID", help="Of a recorded prediction, from its `isthmus-answer`.")],
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Split what a recorded prediction differs by from the ideal one, and show its features beside the ideal ones."""
    from isthmus.orchestration.attribution.recordings.explain import explain as run

    with progress() as bar:
        result = run(open_project(project), identity, progress=bar)
    from isthmus.orchestration.attribution.recordings.explanation import explanation_blocks

    present(result.as_dict(), partial(explanation_blocks, result), as_json=as_json)


@verbs.command()
def plan(
    name: Annotated[str | None, typer.Argument(help="Distillation; by default all.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second to answer; by default what one device does.")
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Work out what training and serving take and cost on which device, and measure this host beside it."""
    from isthmus.orchestration.planning.plan import plan as run

    with progress() as bar:
        report = run(open_project(project), name, rate=rate, progress=bar)
    from isthmus.orchestration.cli.screens.plan import plan_blocks

    present(report, partial(plan_blocks, report), as_json=as_json)


@verbs.command()
def page(
    name: NameArgument = None, out: OutOption = Path("site"), project: ProjectOption = None, as_json: JsonOption = False
) -> None:
    """Write a folder of files that runs the last package in a browser, from any server of files."""
    from isthmus.orchestration.snapshots.site import api_path, site

    written = site(open_project(project), name, out)
    report = {"page": str(written), "open": f"python -m http.server --directory {written} 8080"}
    if path := api_path(written):
        report["note"] = f"pass {path} on to the API: a server of files has no features of one user"
    present(report, as_json=as_json)
