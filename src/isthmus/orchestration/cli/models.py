"""Verbs for models: training, export, and analyses that need no server."""

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.features.errors import RequestError
from isthmus.orchestration.cli.options import (
    TARGET,
    JsonOption,
    NameArgument,
    OutOption,
    ProjectOption,
    local,
    open_project,
)
from isthmus.orchestration.cli.screens.terminal import judge, present, progress, say
from isthmus.orchestration.models.launch import end_with_launcher, launch

if TYPE_CHECKING:
    from isthmus.features.days import Days

verbs = typer.Typer()
model = typer.Typer()
answers = typer.Typer()
infra = typer.Typer()
package = typer.Typer()


@verbs.command()
def distill(
    name: NameArgument = None,
    again: Annotated[bool, typer.Option("--again", help="Train even if nothing has changed.")] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes on this machine that train together, each on its share of a batch.")
    ] = 1,
    parallel: Annotated[
        int,
        typer.Option(min=1, help="Processes that train students and controls side by side, with the same figures."),
    ] = 1,
    part: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="Train part K of N, from 0, of students and controls; the last one reports."),
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train teacher and student on the latest training set, and the models that the student is compared with.

    These are a control without the teacher and, for tables and for texts with a label, a reference. Skipped if nothing
    has changed.
    """
    opened = open_project(project)
    if (processes > 1) + (parallel > 1) + (part is not None) > 1 or (part and again):
        found = "--processes, --parallel and --part cannot be combined, nor --again and --part"
        raise RequestError("command line", found, expected="one of them")
    share = re.fullmatch(r"(\d{1,4})/(\d{1,4})", part or "0/1")
    if share is None or int(share[1]) >= int(share[2]):
        raise RequestError("command line", f"--part {part}", expected="K/N with K from 0 to N - 1, such as 0/6")
    if (count := max(processes, parallel)) > 1:
        options = [*([name] if name else []), *["--again"] * again, *["--json"] * as_json]
        launch(opened.root, ["distill", *options], count, side_by_side=parallel > 1)
        return
    from isthmus.orchestration.models.students import distill as run

    end_with_launcher()
    with progress() as bar:
        report = run(
            opened, name, again=again, progress=bar, part=(int(share[1]), int(share[2])) if part is not None else None
        )
    if not report.leads:
        return
    from isthmus.orchestration.cli.screens.models import distillation_blocks

    plain = report.as_dict()
    present(plain, partial(distillation_blocks, plain), as_json=as_json)


@model.command()
def search(
    name: NameArgument = None,
    trials: Annotated[
        int | None,
        typer.Option(help="Total number of students, including earlier runs (default: as declared)."),
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search for the best student within the budget, and write a page. Exit code 1 if none fits."""
    from isthmus.orchestration.models.students import search as run

    with progress() as bar:
        report = run(open_project(project), name, trials=trials, progress=bar)
    from isthmus.distill.search.search import require_fit
    from isthmus.orchestration.cli.screens.models import search_blocks

    plain = report.as_dict()
    judge(plain, partial(search_blocks, plain), partial(require_fit, report.data), as_json=as_json)


@model.command()
def export(name: NameArgument = None, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Export the last student as a package for the API and for devices, and measure it. Fails if a gate fails."""
    from isthmus.orchestration.cli.screens.report import export_blocks
    from isthmus.orchestration.models.students import export as run

    with progress() as bar:
        report = run(open_project(project), name, progress=bar).as_dict()
    present(report, partial(export_blocks, report), as_json=as_json)


@model.command()
def ladder(name: NameArgument = None, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Compare the latest package in each runtime with its PyTorch student. Exit code 1 if one deviates."""
    from isthmus.orchestration.cli.packages import ladder_blocks
    from isthmus.orchestration.models.students import ladder as run
    from isthmus.orchestration.runtimes.products import RUNTIMES

    rungs = run(open_project(project), name, runtimes=RUNTIMES)
    judge(rungs.as_dict(), partial(ladder_blocks, rungs), rungs.require, as_json=as_json)


@model.command()
def benchmark_device(
    on: Annotated[str, typer.Option(metavar="TARGET", help=f"Device: {TARGET}")],
    name: NameArgument = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check and time the latest package on a device, and sign the result. Exit code 1 if a bound is exceeded."""
    from isthmus.orchestration.cli.screens.models import device_blocks
    from isthmus.orchestration.models.devices import benchmark_device as run
    from isthmus.orchestration.models.devices import require_device_bounds
    from isthmus.package.device.target import Target

    report = run(open_project(project), name, Target.parse(on))
    plain, require = report.as_dict(), partial(require_device_bounds, report.name, report.bounds)
    judge(plain, partial(device_blocks, plain), require, as_json=as_json)


@model.command()
def attribute(
    name: NameArgument = None,
    first: Annotated[
        str | None, typer.Option("--from", help="First day of the training-set or recorded rows, in UTC.")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", help="Day after the last, in UTC.")] = None,
    fed: Annotated[
        Path | None,
        typer.Option(**local("Parquet or Arrow file of model inputs, with join keys and event_timestamp.")),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="Precision of the model file (default: as served).")] = None,
    runtime: Annotated[
        str | None,
        typer.Option(help="Runtime of the model: ort (default, as in the API), web, executorch, litert or coreml."),
    ] = None,
    recorded: Annotated[bool, typer.Option("--recorded", help="Use answers that servers recorded.")] = False,
    against: Annotated[
        tuple[str, str] | None,
        typer.Option(help="First day and day after the last of an earlier period, to attribute the change since then."),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option(help="With --against: column that defines segments (default: the join keys)."),
    ] = None,
    package_against: Annotated[
        Path | None, typer.Option(**local("With --against: package of the earlier period (default: the latest)."))
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Attribute the package's prediction error to stages such as stale data and precision, and write a page.

    Uses the rows of the test part by default. With --against, attributes the change between two periods to population,
    features, contract and model. Exit code 1 if a bound of the distillation is exceeded.
    """
    from isthmus.orchestration.attribution.attribute import attribute as run
    from isthmus.orchestration.attribution.attribute import day_range, reject_combined

    days = day_range(first, end)
    if against is not None:
        reject_combined({"--fed": fed, "--precision": precision, "--runtime": runtime}, "--against")
        _change(name, days, against, by or [], package_against, recorded, project, as_json)
        return
    reject_combined({"--by": by, "--package-against": package_against}, "attribute without --against")
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


@answers.command()
def monitor(
    name: NameArgument = None,
    follow: Annotated[bool, typer.Option("--follow", help="Repeat every hour until stopped.")] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure recorded answers against the labels known by now, and the drift of served features.

    Collects recorded answers first, writes a page, and rolls the deployment back if it loses more quality than allowed.
    Exit code 1 if a bound of the distillation is exceeded.
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


@answers.command()
def explain(
    identity: Annotated[
        str, typer.Argument(metavar="ID", help="Id of a prediction, from its `isthmus-answer` header.")
    ],
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain why a recorded prediction differs from the ideal one, by stage and feature, and write a page.

    The ideal prediction is the teacher's, from the features known at its time.
    """
    from isthmus.orchestration.attribution.explain import explain as run

    with progress() as bar:
        result = run(open_project(project), identity, progress=bar)
    from isthmus.orchestration.attribution.explain import explanation_blocks

    present(result.as_dict(), partial(explanation_blocks, result), as_json=as_json)


@infra.command()
def plan(
    name: Annotated[str | None, typer.Argument(help="Distillation (default: all).")] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Requests per second to serve (default: capacity of one device)."),
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate time and cost of training and serving on each device, and compare with measurements on this host."""
    from isthmus.orchestration.planning.plan import plan as run

    with progress() as bar:
        report = run(open_project(project), name, rate=rate, progress=bar)
    from isthmus.orchestration.cli.screens.plan import plan_blocks

    present(report, partial(plan_blocks, report), as_json=as_json)


@package.command()
def page(
    name: NameArgument = None, out: OutOption = Path("site"), project: ProjectOption = None, as_json: JsonOption = False
) -> None:
    """Write a static web page that runs the latest package in the browser. Replaces an earlier page.

    May install onnxruntime-web with npm, and create the project's signing key.
    """
    from isthmus.orchestration.snapshots.site import api_path, site

    written = site(open_project(project), name, out)
    report = {"page": str(written), "open": f"python -m http.server --directory {written} 8080"}
    if path := api_path(written):
        report["note"] = f"forward {path} to the API: a static host has no per-user features"
    present(report, as_json=as_json)
