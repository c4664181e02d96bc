"""Verbs for definitions, tables, the online store and training sets."""

import signal
import sys
import threading
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from msgspec import to_builtins

from isthmus.orchestration.cli.options import HtmlOption, JsonOption, NameArgument, ProjectOption, local, open_project
from isthmus.orchestration.cli.screens.terminal import judge, present, progress, say

verbs = typer.Typer()
features = typer.Typer()
pushes = typer.Typer()
answers = typer.Typer()
MOMENTS = ["%Y-%m-%d", "%Y-%m-%d %H:%M:%S", *(f"%Y-%m-%dT%H:%M:%S{end}" for end in ("", "%z", ".%f%z"))]
"""Formats of moments on the command line; the last two are the ones that a replay shows."""
ViewsArgument = Annotated[list[str] | None, typer.Argument(help="Feature views (default: all).")]


@verbs.command()
def apply(
    diff: Annotated[
        bool, typer.Option("--diff", help="Only show what would be rebuilt or become stale; change nothing.")
    ] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check definitions, write the contract, and register Feast objects.

    Servers use a changed view after `build` and `materialize`, and its old version until then. Deletes device snapshots
    with features that devices may no longer have.
    """
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
    first: Annotated[str | None, typer.Option("--from", help="First day to build, in UTC.")] = None,
    end: Annotated[str | None, typer.Option("--to", help="Day after the last to build (default: tomorrow).")] = None,
    catch_up: Annotated[
        bool, typer.Option("--catch-up", help="Continue each table from its last day, minus the view's lateness.")
    ] = False,
    step: Annotated[int | None, typer.Option(help="Days written per commit, for a range of days.")] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the transforms and replace the offline tables, in full or for a range of days. Pushed rows stay."""
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
    full: Annotated[
        bool,
        typer.Option("--full", help="Also overwrite newer rows that differ, and delete newer rows whose key is gone."),
    ] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Collect pushed rows, write the latest row of every key to Redis, and switch servers to a changed contract.

    Deletes keys that the tables no longer have, and the rows of replaced contracts.
    """
    from isthmus.orchestration.tables.materialize import materialize as run

    with progress() as bar:
        written = run(open_project(project), views, full=full, progress=bar)
    present({name: counts.as_dict() for name, counts in written.items()}, as_json=as_json)


@verbs.command()
def stream(
    views: Annotated[list[str] | None, typer.Argument(help="Feature views (default: all that read a stream).")] = None,
    once: Annotated[bool, typer.Option("--once", help="Stop when all events were read.")] = False,
    skip_expired: Annotated[
        bool, typer.Option("--skip-expired", help="Continue although events expired before they were read.")
    ] = False,
    retry_unreadable: Annotated[
        bool, typer.Option("--retry-unreadable", help="First decode the events again that could not be read before.")
    ] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read the events of streams, and keep the tables and Redis up to date with them until stopped."""
    from isthmus.orchestration.cli.screens.report import stream_blocks
    from isthmus.orchestration.streams import stream as run

    opened = open_project(project)
    statuses = run.stream(
        opened, views, once=once, skip_expired=skip_expired, retry=retry_unreadable, say=say,
        stopped=_stopped_by_signals(),
    )  # fmt: skip
    report = {name: status.as_dict() for name, status in statuses.items()}
    present(report, partial(stream_blocks, report), as_json=as_json)


@verbs.command()
def maintain(project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Merge small files of tables, and remove old versions and caches that are no longer needed. No value changes."""
    from isthmus.orchestration.cli.screens.report import maintenance_blocks
    from isthmus.orchestration.maintenance import maintain as maintenance

    with progress() as bar:
        result = maintenance.maintain(open_project(project), progress=bar)
    report = to_builtins(result)
    judge(report, partial(maintenance_blocks, report), partial(maintenance.require_done, result), as_json=as_json)


def _stopped_by_signals() -> threading.Event:
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if stopped.is_set() and number == signal.SIGINT:  # the second time: do not wait for a build
            signal.default_int_handler(number, frame)
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopped


@pushes.command()
def collect(
    follow: Annotated[
        bool, typer.Option("--follow", help="Repeat every `[stores] history_seconds` until stopped.")
    ] = False,
    again: Annotated[bool, typer.Option("--again", help="Retry rows that could not be read before.")] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move rows that were pushed to the API into the offline tables."""
    from isthmus.orchestration.server import collect as run

    opened = open_project(project)
    if follow:
        run.follow(opened, say)
    with progress() as bar:
        collected = run.collect(opened, again=again, progress=bar)
    present({name: asdict(counts) for name, counts in collected.items()}, as_json=as_json)


@answers.command("collect")
def recorded(
    follow: Annotated[
        bool, typer.Option("--follow", help="Repeat every `[stores] history_seconds` until stopped.")
    ] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move recorded answers from the servers' spool folder into the table of recorded answers.

    Deletes answers older than `keep_days`, and sets damaged files aside.
    """
    from isthmus.orchestration.recording import collect as run

    opened = open_project(project)
    if follow:
        run.follow(opened, say)
    with progress() as bar:
        collected = run.collect(opened, progress=bar)
    present(asdict(collected), as_json=as_json)


@answers.command()
def replay(
    identity: Annotated[
        str | None, typer.Argument(metavar="ID", help="Id of one answer, from its `isthmus-answer` header.")
    ] = None,
    first: Annotated[
        datetime | None,
        typer.Option("--from", metavar="TIME", help="All answers from this moment on, in UTC.", formats=MOMENTS),
    ] = None,
    end: Annotated[
        datetime | None,
        typer.Option("--to", metavar="TIME", help="Only answers before this moment, in UTC.", formats=MOMENTS),
    ] = None,
    package: Annotated[
        Path | None, typer.Option(**local("Package to use instead of the one that gave the answer."))
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute recorded answers from history and packages. Exit code 1 if one differs or cannot be recomputed."""
    from isthmus.orchestration.cli.screens.replay import replay_blocks
    from isthmus.orchestration.recording import replay as run

    with progress() as bar:
        report = run.replay(open_project(project), identity, first=first, end=end, package=package, progress=bar)
    judge(report.as_dict(), partial(replay_blocks, report), partial(run.require_same, report), as_json=as_json)


@features.command()
def snapshot(
    service: Annotated[
        str | None, typer.Argument(help="A feature service with `device`. Optional if there is only one.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", **local("Copy the snapshot and its deltas to this folder, for a file host.")),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Write the first snapshot without asking.")] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a service's stored features as a signed file for devices. On a terminal, asks first if some are new."""
    from isthmus.orchestration.snapshots import create as run

    opened = open_project(project)
    if to:
        run.require_hostable(opened, service)  # before anything is written
    lines = run.newly_disclosed_features(opened, service)
    for line in lines:
        say(f"anyone who can fetch the snapshot gets {line}")
    if lines and not yes and sys.stdin.isatty():
        typer.confirm("Write it?", abort=True, err=True)
    with progress() as bar:
        written = run.snapshot(opened, service, progress=bar)
    if to:
        run.copy(opened, service, to)
    present(written.as_dict(), as_json=as_json)


@features.command()
def lookup(
    name: Annotated[str, typer.Argument(help="A feature service, or a list of features: view:feature,…")],
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Join keys and request fields as key=value. Repeat a key for several rows."),
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show features for some keys, exactly as the API returns them. Needs Redis, but no running server."""
    from isthmus.features.document.blocks import TableBlock
    from isthmus.orchestration.server.lookup import lookup as run
    from isthmus.orchestration.server.lookup import table

    answer = run(open_project(project), name, keys or [])
    present(answer, lambda: [TableBlock(*table(answer, keys or []))], as_json=as_json)


@features.command()
def quality(
    views: ViewsArgument = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            "--from",
            help="Compare rows with event times after this one, in UTC (default: after the current training set).",
        ),
    ] = None,
    until: Annotated[datetime | None, typer.Option("--to", help="Last event time to compare, in UTC.")] = None,
    html: HtmlOption = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the offline tables, their expectations and drift. Exit code 1 if a check fails."""
    from isthmus.orchestration.quality.measure import quality as run
    from isthmus.orchestration.quality.measure import require_quality
    from isthmus.orchestration.quality.page import page, quality_blocks

    with progress() as bar:
        report = run(open_project(project), views, since=since, until=until, progress=bar)
    if html:
        from isthmus.features.files import write_atomically

        write_atomically(html, page(report).encode())
    judge(report.as_dict(), partial(quality_blocks, report), partial(require_quality, report), as_json=as_json)


@features.command("training-set")
def training_set(
    name: NameArgument = None,
    spine: Annotated[
        str | None,
        typer.Option(**local("Rows to join: a Parquet or CSV file, or a SELECT over the views.", text=True)),
    ] = None,
    features: Annotated[
        str | None,
        typer.Option(help="For --spine: a service, or view:feature,… (a view alone: all its features)."),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(help="Reproduce this training set, byte for byte: its folder or URL, record or id."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="For --spine and --like: the folder or URL to write.")] = None,
    status: Annotated[
        bool,
        typer.Option("--status/--no-status", help="For --spine: add a column per view with its lookup status."),
    ] = True,
    as_served: Annotated[
        bool,
        typer.Option("--as-served", help="Use the values that serving returned at each time, with delays."),
    ] = False,
    join: Annotated[
        str, typer.Option(help="Where to join: embedded (this process) or engine (the one in isthmus.toml).")
    ] = "embedded",
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a training set: point-in-time features for the spine of a distillation, or for your own rows.

    The next training of the distillation uses it. --like without --out rewrites that training set in place.
    """
    from isthmus.orchestration.cli.screens.report import training_set_blocks
    from isthmus.orchestration.training.set import write_training_set

    with progress() as bar:
        report = write_training_set(
            open_project(project), name=name, spine=spine, features=features, like=like, out=out, status=status,
            as_served=as_served, join=join, progress=bar,
        ).as_dict()  # fmt: skip
    present(report, partial(training_set_blocks, report), as_json=as_json)
