"""From the definitions to the tables, the online store and training sets."""

import sys
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from isthmus.orchestration.cli.options import HtmlOption, JsonOption, NameArgument, ProjectOption, local, open_project
from isthmus.orchestration.cli.screens.terminal import judge, present, progress, say

verbs = typer.Typer()
ViewsArgument = Annotated[list[str] | None, typer.Argument(help="Views; by default all.")]


@verbs.command()
def apply(
    diff: Annotated[
        bool, typer.Option("--diff", help="Only show what would be rebuilt and what would become stale.")
    ] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the definitions, compile the contract, register the Feast objects."""
    if diff:
        from isthmus.features.document.blocks import Paragraph
        from isthmus.orchestration.apply.diff import apply_diff

        changes = apply_diff(open_project(project))
        present(changes, lambda: map(Paragraph, changes.lines()), as_json=as_json)
        return
    from isthmus.orchestration.apply.apply import apply as run
    from isthmus.orchestration.cli.screens.report import apply_blocks

    report = asdict(run(open_project(project)))
    present(report, partial(apply_blocks, report), as_json=as_json)


@verbs.command()
def build(
    views: ViewsArgument = None,
    first: Annotated[str | None, typer.Option("--from", help="Only from this day on, in UTC.")] = None,
    end: Annotated[str | None, typer.Option("--to", help="Only before this day; by default through today.")] = None,
    catch_up: Annotated[
        bool, typer.Option("--catch-up", help="Only from where each table ends, less the view's lateness, to now.")
    ] = False,
    step: Annotated[int | None, typer.Option(help="Days of a range that are written in one commit.")] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the transforms and write the offline tables: whole, or a range of days."""
    from isthmus.orchestration.tables import build as tables

    opened = open_project(project)
    days = tables.day_range(opened, first, end, step, catch_up=catch_up)
    with progress() as bar:
        if days is None and not catch_up:
            built = tables.build(opened, views, progress=bar)
        else:
            built = tables.build_range(opened, views, within=days, step=step or tables.STEP, progress=bar)
    present({name: asdict(written) for name, written in built.items()}, as_json=as_json)


@verbs.command()
def materialize(
    views: ViewsArgument = None,
    full: Annotated[bool, typer.Option("--full", help="Replace whatever differs in Redis, also newer rows.")] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the latest row of every key to Redis."""
    from isthmus.orchestration.tables.materialize import materialize as run

    with progress() as bar:
        written = run(open_project(project), views, full=full, progress=bar)
    present({name: counts.as_dict() for name, counts in written.items()}, as_json=as_json)


@verbs.command()
def collect(
    follow: Annotated[
        bool, typer.Option("--follow", help="Again and again, every `[stores] history_seconds`, until it is ended.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Try rows again that could not be read before.")] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring the rows that were pushed to the API into the offline tables."""
    from isthmus.orchestration.server import collect as run

    opened = open_project(project)
    if follow:
        run.follow(opened, say)
    with progress() as bar:
        collected = run.collect(opened, again=again, progress=bar)
    present({name: asdict(counts) for name, counts in collected.items()}, as_json=as_json)


@verbs.command()
def recorded(
    follow: Annotated[
        bool, typer.Option("--follow", help="Again and again, every `[stores] history_seconds`, until it is ended.")
    ] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring what servers recorded of their answers into its table."""
    from isthmus.orchestration.recording import collect as run

    opened = open_project(project)
    if follow:
        run.follow(opened, say)
    with progress() as bar:
        collected = run.collect(opened, progress=bar)
    present(asdict(collected), as_json=as_json)


@verbs.command()
def replay(
    identity: Annotated[
        str | None, typer.Argument(metavar="ID", help="Of an answer, from its `isthmus-answer`.")
    ] = None,
    between: Annotated[
        tuple[datetime, datetime] | None,
        typer.Option(
            help="All answers from the first moment on and before the second, in UTC unless they have a zone.",
            # The last two are what a replay itself shows.
            formats=["%Y-%m-%d", "%Y-%m-%d %H:%M:%S", *(f"%Y-%m-%dT%H:%M:%S{end}" for end in ("", "%z", ".%f%z"))],
        ),
    ] = None,
    package: Annotated[
        Path | None, typer.Option(**local("Package to answer with, instead of the one that answered."))
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute recorded answers again, from the history and the packages. Exit code 1 if one differs."""
    from isthmus.orchestration.cli.screens.replay import replay_blocks
    from isthmus.orchestration.recording import replay as run

    with progress() as bar:
        report = run.replay(open_project(project), identity, between, package=package, progress=bar)
    judge(report.as_dict(), partial(replay_blocks, report), partial(run.require_same, report), as_json=as_json)


@verbs.command()
def snapshot(
    service: Annotated[
        str | None, typer.Argument(help="A feature service with `device`; by default the only one.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", **local("Copy it and the differences to this folder, for a host of files."))
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before the first one is written.")] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the stored features that devices keep, as a signed file."""
    from isthmus.orchestration.snapshots import create as run

    opened = open_project(project)
    if to:
        run.require_hostable(opened, service)  # before anything is written
    lines = run.undisclosed(opened, service)
    for line in lines:
        say(f"whoever fetches the snapshot gets {line}")
    if lines and not yes and sys.stdin.isatty():
        typer.confirm("Write it?", abort=True, err=True)
    with progress() as bar:
        written = run.snapshot(opened, service, progress=bar)
    if to:
        run.copy(opened, service, to)
    present(written.as_dict(), as_json=as_json)


@verbs.command()
def lookup(
    name: Annotated[str, typer.Argument(help="A feature service; or features, as view:feature,…")],
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Join keys and request fields, as key=value; a key that stands twice asks for two rows."),
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the features of a service for some keys, as the API answers them; no server is needed."""
    from isthmus.features.document.blocks import TableBlock
    from isthmus.orchestration.server.lookup import lookup as run
    from isthmus.orchestration.server.lookup import table

    answer = run(open_project(project), name, keys or [])
    present(answer, lambda: [TableBlock(*table(answer, keys or []))], as_json=as_json)


@verbs.command()
def quality(
    views: ViewsArgument = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            help="New rows are those with later event times (UTC); by default than those of the training set in use."
        ),
    ] = None,
    until: Annotated[datetime | None, typer.Option(help="The last event time of new rows (UTC).")] = None,
    html: HtmlOption = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the offline tables, their expectations and their drift. Exit code 1 if one is broken or exceeded."""
    from isthmus.orchestration.quality.measure import quality as run
    from isthmus.orchestration.quality.measure import require_quality
    from isthmus.orchestration.quality.page import page, quality_blocks

    with progress() as bar:
        report = run(open_project(project), views, since=since, until=until, progress=bar)
    if html:
        from isthmus.features.files import write_atomically

        write_atomically(html, page(report).encode())
    judge(report.as_dict(), partial(quality_blocks, report), partial(require_quality, report), as_json=as_json)


@verbs.command("training-set")
def training_set(
    name: NameArgument = None,
    spine: Annotated[
        str | None,
        typer.Option(**local("Rows of your own: a path to Parquet or CSV, or a SELECT over the views.", text=True)),
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="For --spine: a service, or view:feature,… ; a view alone stands for all it has.")
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(**local("Make this training set again, to the byte: its folder, record or id.", text=True)),
    ] = None,
    out: Annotated[Path | None, typer.Option(**local("For --spine and --like: the folder to make."))] = None,
    status: Annotated[
        bool, typer.Option("--status/--no-status", help="For --spine: a column per view that says what it answered.")
    ] = True,
    as_served: Annotated[
        bool, typer.Option("--as-served", help="What serving answered at each moment, not what could have been known.")
    ] = False,
    join: Annotated[
        str, typer.Option(help="Where to join: embedded (in this process), or engine (by the one in isthmus.toml).")
    ] = "embedded",
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Join the views to the spine of a distillation, or to rows of your own, point in time."""
    from isthmus.orchestration.cli.screens.report import training_set_blocks
    from isthmus.orchestration.training.set import write_training_set

    with progress() as bar:
        report = write_training_set(
            open_project(project), name=name, spine=spine, features=features, like=like, out=out, status=status,
            as_served=as_served, join=join, progress=bar,
        ).as_dict()  # fmt: skip
    present(report, partial(training_set_blocks, report), as_json=as_json)
