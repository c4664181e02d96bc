"""The command line. Every verb calls the function its Dagster asset calls; nothing here has logic of its own.

Exit codes: 0 done, 1 a gate or verdict failed or data were refused, 2 bad usage or configuration, 3 a dependency
(Redis, Java, an engine, an optional library) is not available, 130 and 143 stopped by SIGINT or SIGTERM.
"""

import errno
import os
import shlex
import sys
import traceback
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from isthmus.features.errors import DependencyError, IsthmusError, RequestError
from isthmus.orchestration.options import JsonOption, ProjectOption
from isthmus.orchestration.packages import package
from isthmus.orchestration.scaffold import EXAMPLES
from isthmus.orchestration.terminal import judge, progress, say, write_json

if TYPE_CHECKING:
    from isthmus.orchestration.project import Project

_INTERRUPTED = 130
"""What typer makes of Ctrl-C."""

app = typer.Typer(
    name="isthmus",
    help="A feature store and distillation framework: one definition, one contract, one verdict.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing the rich help costs more than everything else together
)

ViewsArgument = Annotated[list[str] | None, typer.Argument(help="Views; by default all.")]
NameArgument = Annotated[str | None, typer.Argument(help="Distillation; may be left out where there is only one.")]


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """A feature store and distillation framework: one definition, one contract, one verdict."""


@app.command()
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


@app.command()
def apply(
    diff: Annotated[
        bool, typer.Option("--diff", help="Only show what would be rebuilt and what would become stale.")
    ] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the definitions, compile the contract, register the Feast objects."""
    if diff:
        from isthmus.orchestration.difference import difference

        found = difference(_project(project))
        if as_json:
            write_json(found.as_dict())
        else:
            typer.echo("\n".join(found.lines()))
        return
    from isthmus.orchestration.registration import apply as run

    _report(run(_project(project)).as_dict(), as_json=as_json)


@app.command()
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
    from isthmus.orchestration import tables

    opened = _project(project)
    days = tables.asked(opened, first, end, step, catch_up=catch_up)
    with progress() as bar:
        if days is None and not catch_up:
            built = tables.build(opened, views, progress=bar)
        else:
            built = tables.build_range(opened, views, within=days, step=step or tables.STEP, progress=bar)
    _report({name: written.as_dict() for name, written in built.items()}, as_json=as_json)


@app.command()
def materialize(
    views: ViewsArgument = None,
    full: Annotated[bool, typer.Option("--full", help="Replace whatever differs in Redis, also newer rows.")] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the latest row of every key to Redis."""
    from isthmus.orchestration.materialization import materialize as run

    with progress() as bar:
        done = run(_project(project), views, full=full, progress=bar)
    _report({name: counts.as_dict() for name, counts in done.items()}, as_json=as_json)


@app.command()
def quality(
    views: ViewsArgument = None,
    since: Annotated[
        datetime | None,
        typer.Option(
            help="New rows are those with later event times (UTC); by default than those of the training set in use."
        ),
    ] = None,
    until: Annotated[datetime | None, typer.Option(help="The last event time of new rows (UTC).")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page that needs no network.")] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the offline tables, their expectations and their drift. Exit code 1 if one is broken or exceeded."""
    from isthmus.orchestration.quality import quality as run
    from isthmus.orchestration.quality import require_quality

    with progress() as bar:
        report = run(_project(project), views, since=since, until=until, progress=bar)
    if html:
        from isthmus.features.files import write_atomically
        from isthmus.orchestration.qualitypage import page

        write_atomically(html, page(report).encode())
    from isthmus.orchestration.summary import show_quality

    judge(report.as_dict(), partial(show_quality, report), partial(require_quality, report), as_json=as_json)


@app.command("training-set")
def training_set(
    name: NameArgument = None,
    spine: Annotated[
        str | None, typer.Option(help="Rows of your own: a path to Parquet or CSV, or a SELECT over the views.")
    ] = None,
    features: Annotated[
        str | None, typer.Option(help="For --spine: a service, or view:feature,… ; a view alone stands for all it has.")
    ] = None,
    like: Annotated[
        str | None, typer.Option(help="Make this training set again, to the byte: its folder, record or id.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="For --spine and --like: the folder to make.")] = None,
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
    from isthmus.orchestration.trainingset import chosen as run

    with progress() as bar:
        made = run(
            _project(project), name, spine=spine, features=features, like=like, out=out, status=status,
            as_served=as_served, join=join, progress=bar,
        )  # fmt: skip
    if as_json:
        write_json(made.as_dict())
    else:
        from isthmus.orchestration.summary import show_training_set

        show_training_set(made.as_dict())


@app.command()
def distill(
    name: NameArgument = None,
    again: Annotated[
        bool, typer.Option("--again", help="Train also if nothing has changed since the last time.")
    ] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train teacher, reference, student and control, unless nothing has changed since they were trained."""
    from isthmus.orchestration.models import distill as run

    with progress() as bar:
        report = run(_project(project), name, again=again, progress=bar)
    if as_json:
        write_json(report.as_dict())
        return
    from isthmus.orchestration.summary import show_distillation

    show_distillation(report.as_dict())


@app.command()
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
    from isthmus.orchestration.models import require_fit
    from isthmus.orchestration.models import search as run

    with progress() as bar:
        report = run(_project(project), name, trials=trials, progress=bar)
    from isthmus.orchestration.summary import show_search

    found = report.as_dict()
    judge(found, partial(show_search, found), partial(require_fit, report), as_json=as_json)


@app.command()
def export(name: NameArgument = None, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Turn the student into a package for the API and the device."""
    from isthmus.orchestration.models import export as run

    with progress() as bar:
        report = run(_project(project), name, progress=bar)
    if as_json:
        write_json(report.as_dict())
        return
    from isthmus.orchestration.summary import show_export

    show_export(report.as_dict())


@app.command()
def ladder(name: NameArgument = None, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Compare the last package, in each runtime, with its student in torch. Exit code 1 names the first that breaks."""
    from isthmus.orchestration.models import ladder as run
    from isthmus.orchestration.packages import RUNTIMES, show_ladder

    found = run(_project(project), name, runtimes=RUNTIMES)
    judge(found.as_dict(), partial(show_ladder, found), found.require, as_json=as_json)


@app.command()
def plan(
    name: Annotated[str | None, typer.Argument(help="Distillation; by default all.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second to answer; by default what one device does.")
    ] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Work out what training and serving take and cost on which device, and measure this host beside it."""
    from isthmus.orchestration.plan import plan as run

    with progress() as bar:
        found = run(_project(project), name, rate=rate, progress=bar)
    if as_json:
        write_json(found)
        return
    from isthmus.orchestration.plansummary import show_plan

    show_plan(found)


@app.command()
def page(
    name: NameArgument = None,
    out: Annotated[Path, typer.Option(help="Where to write; what this command wrote there before is replaced.")] = Path(
        "site"
    ),
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a folder of files that runs the last package in a browser, from any server of files."""
    from isthmus.orchestration.site import site

    written = site(_project(project), name, out)
    _report({"page": str(written), "open": f"python -m http.server --directory {written} 8080"}, as_json=as_json)


@app.command()
def verify(
    name: NameArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Compare every key, not a sample.")] = False,
    html: Annotated[Path | None, typer.Option(help="Also write the page here, which needs no network.")] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare offline, API, request transforms and package, value by value. Exit code 1 if anything differs."""
    from isthmus.orchestration.verification import page_file, require_passed
    from isthmus.orchestration.verification import verify as run

    opened = _project(project)
    with progress() as bar:
        verdict = run(opened, name, every=every, progress=bar)
    written = page_file(opened, name)
    if html:
        from isthmus.features.files import write_atomically

        write_atomically(html, written.read_bytes())
    from isthmus.orchestration.summary import show_verdict

    judge(
        verdict.as_dict(), partial(show_verdict, verdict, html or written), partial(require_passed, verdict),
        as_json=as_json,
    )  # fmt: skip


@app.command()
def deploy(
    name: NameArgument = None,
    shadow: Annotated[
        bool, typer.Option("--shadow", help="Beside what is deployed: answers are compared, never returned.")
    ] = False,
    canary: Annotated[
        float | None, typer.Option(help="Beside what is deployed: answers this share of requests, 0.1 for a tenth.")
    ] = None,
    promote: Annotated[bool, typer.Option("--promote", help="Put what is tried so far in its place.")] = False,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put the package behind the API. Refused without a passing verdict."""
    from isthmus.orchestration import release

    if shadow + promote + (canary is not None) > 1 or (promote and name is not None):
        raise click.UsageError("--shadow, --canary and --promote exclude each other, and --promote takes no name")
    if canary is not None and not 0 < canary < 1:
        raise click.UsageError(f"--canary is {canary:g}, and must be above 0 and below 1")
    opened = _project(project)
    share = 0.0 if shadow else canary
    done = release.promote(opened) if promote else release.deploy(opened, name, share=share)
    _released(done.as_dict(), as_json=as_json)


@app.command()
def rollback(
    to: Annotated[str | None, typer.Option(help="How the digest begins; by default of the deployment before.")] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drop the candidate, or put the deployment before this one behind the API again.

    Refused where what its model reads has changed.
    """
    from isthmus.orchestration.release import rollback as run

    _released(run(_project(project), to).as_dict(), as_json=as_json)


@app.command()
def history(project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """List what was deployed and rolled back, the newest first."""
    from isthmus.orchestration.release import history as run

    events = run(_project(project))
    if as_json:
        write_json(events)
    else:
        from isthmus.orchestration.summary import show_history

        show_history(events)


@app.command()
def serve(
    port: Annotated[int | None, typer.Option(help="Port; by default that of isthmus.toml.")] = None,
    project: ProjectOption = None,
) -> None:
    """Run the API: online lookups and predictions."""
    from isthmus.orchestration.server import serve as run

    raise typer.Exit(run(_project(project), port=port))


@app.command()
def fleet(
    out: Annotated[Path, typer.Option(help="Where to write; what this command wrote there before is replaced.")] = Path(
        "fleet"
    ),
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write what runs the project on two fleets: Kubernetes manifests, an accelerate configuration, Dockerfiles."""
    from isthmus.orchestration.fleet.files import fleet as run

    written = run(_project(project), out)
    _report({"fleet": str(out), "files": written} if as_json else {"fleet": str(out), "files": len(written)},
            as_json=as_json)  # fmt: skip


keys = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(keys, name="keys")
KeyArgument = Annotated[str, typer.Argument(help="Whose key it is.")]


@keys.command("create")
def keys_create(
    name: KeyArgument,
    scope: Annotated[
        list[str], typer.Option(help="read:SERVICE, push:VIEW or predict:MODEL; * for any name. May be repeated.")
    ],
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key and show it, this once."""
    from isthmus.orchestration.keys import create as run

    _report(run(_project(project), name, scope), as_json=as_json)


@keys.command("list")
def keys_list(project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """List the keys by name."""
    from isthmus.orchestration.keys import describe as run

    _report(run(_project(project)), as_json=as_json)


@keys.command("revoke")
def keys_revoke(name: KeyArgument, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Remove a key: a running server refuses it from the next request on."""
    from isthmus.orchestration.keys import revoke as run

    _report(run(_project(project), name), as_json=as_json)


contract = typer.Typer(
    help="Explain a contract, or what changed between two.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(contract, name="contract")
app.add_typer(package, name="package")
_CONTRACT = "A contract.json, the folder of a package or of a project, applied or definitions"


@contract.command("show")
def contract_show(
    name: Annotated[str, typer.Argument(metavar="[A]", help=_CONTRACT + ".")] = "applied",
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Explain a contract: views, request transforms, services, sources, spines and hashes."""
    from isthmus.orchestration.contracts import find

    found = find(name, lambda: _project(project))
    if as_json:
        write_json(found.as_dict())
        return
    from isthmus.orchestration.contractsummary import show_contract

    show_contract(found)


@contract.command("diff")
def contract_diff(
    before: Annotated[str, typer.Argument(metavar="[A]", help=_CONTRACT + ".")] = "applied",
    after: Annotated[str, typer.Argument(metavar="[B]", help="The same.")] = "definitions",
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what changed from A to B, and which services keep working."""
    from isthmus.orchestration.contracts import compare, find

    found = compare(*(find(name, lambda: _project(project)) for name in (before, after)))
    if as_json:
        write_json(found.as_dict())
        return
    from isthmus.orchestration.contractsummary import show_contract_difference

    show_contract_difference(found)


@app.command()
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
        opened = _project(project)
        found = run(opened, measure=measure, progress=bar)
    # The server shows what was found last.
    found.write(opened.state)
    if as_json:
        write_json(found.as_dict())
        return
    from isthmus.orchestration.statusscreen import show_status

    show_status(found)


@app.command()
def dev(project: ProjectOption = None) -> None:
    """Run the Dagster UI over the project, and the API beside it."""
    from isthmus.orchestration.dev import dev as run

    raise typer.Exit(run(_project(project)))


@app.command()
def demo(project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Run the whole project once, from raw data to predictions by the running API, and show what came of it."""
    from isthmus.orchestration.demo import demo as run
    from isthmus.orchestration.summary import show

    with progress() as bar:
        outcome = run(_project(project), progress=bar)
    if as_json:
        _report(outcome, as_json=True)
    else:
        show(outcome)


def main() -> None:
    """The console script: turns errors into one sentence and an exit code."""
    # `--debug` is taken wherever it stands: people add it to the end of the line that failed.
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = app(arguments, prog_name="isthmus", standalone_mode=False)
        if code == _INTERRUPTED:
            say("stopped; what was not finished was not written")
    except IsthmusError as error:
        code = _failed(error.as_dict(), str(error), error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = error.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        remedy = f"see `{context.command_path if context else 'isthmus'} --help`"
        found, _, meant = error.format_message().partition(" Did you mean ")
        usage = RequestError("command line", found.rstrip("."), expected=meant.partition("?")[0], remedy=remedy)
        code = _failed(usage.as_dict(), str(usage), 2)
    except OSError as error:
        # A full disk, a folder that may not be written: the user's to mend.
        trouble = DependencyError(
            str(error.filename or "file system"), error.strerror or str(error),
            remedy="make room there, and run the same command again" if error.errno == errno.ENOSPC else "",
        )  # fmt: skip
        code = _failed(trouble.as_dict(), str(trouble), trouble.exit_code)
    code = code if isinstance(code, int) else 0
    if "dagster" in sys.modules:
        # With Dagster and torch in one process, DuckDB's binding prints pages about its own leaks while the interpreter
        # is taken apart. Everything of ours is closed by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _failed(report: dict[str, object], sentence: str, code: int) -> int:
    """Shows the error at hand as it was asked for; returns the exit code."""
    if "--debug" in sys.argv:
        traceback.print_exc()
    if "--json" in sys.argv:
        write_json(report)
    say(sentence)
    return code


def _project(folder: Path | None) -> "Project":
    from isthmus.orchestration.project import Project

    return Project(folder) if folder else Project.find(Path.cwd())


def _released(report: dict[str, Any], *, as_json: bool) -> None:
    if not as_json:
        report["seconds"] = ", ".join(f"{stage} {taken:.3f}" for stage, taken in report["seconds"].items())
    _report(report, as_json=as_json)


def _report(report: Any, *, as_json: bool) -> None:
    if as_json:
        write_json(report)
        return
    from isthmus.orchestration.summary import show_report

    show_report(report)
