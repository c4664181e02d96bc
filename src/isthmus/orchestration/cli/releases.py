"""Verbs for releases: verification, deployment, servers."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.features.errors import RequestError
from isthmus.orchestration.cli.options import (
    DISTILLATION,
    HtmlOption,
    JsonOption,
    NameArgument,
    OutOption,
    ProjectOption,
    open_project,
)
from isthmus.orchestration.cli.screens.terminal import judge, present, progress

verbs = typer.Typer()
deployments = typer.Typer()
infra = typer.Typer()


@verbs.command()
def verify(
    name: NameArgument = None,
    all_keys: Annotated[bool, typer.Option("--all", help="Compare every key instead of a sample.")] = False,
    html: HtmlOption = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare offline tables, API, request transforms and package value by value. Exit code 1 if one differs.

    Collects pushed rows first, starts a private server for the comparison, and writes the verdict and its page.
    """
    from isthmus.orchestration.artifacts import page_file
    from isthmus.orchestration.verification.verify import require_passed
    from isthmus.orchestration.verification.verify import verify as run

    opened = open_project(project)
    with progress() as bar:
        verdict = run(opened, name, all_keys=all_keys, progress=bar)
    written = page_file(opened, name)
    if html:
        from isthmus.features.files import write_atomically

        write_atomically(html, written.read_bytes())
    from isthmus.orchestration.verification.page import screen

    judge(
        verdict.as_dict(), partial(screen, verdict, html or written), partial(require_passed, verdict),
        as_json=as_json,
    )  # fmt: skip


@deployments.callback(invoke_without_command=True)
def deploy(
    context: typer.Context,
    model: Annotated[str | None, typer.Option("--model", help=DISTILLATION)] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deploy the latest package to all requests. Replaces the deployed one and a candidate; needs a passing verdict.

    During its probation, a server that finds it worse than the previous package restores that one.
    """
    if context.invoked_subcommand is None:
        _deploy(model, None, project, as_json=as_json)
    elif model or project or as_json:
        raise RequestError("command line", "options come after the command", remedy="see `isthmus deploy --help`")


@deployments.command()
def shadow(name: NameArgument = None, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Run the latest package beside the deployed one, without returning its answers.

    Replaces a candidate, and ends the deployed package's probation. Needs a passing verdict.
    """
    _deploy(name, 0.0, project, as_json=as_json)


@deployments.command()
def canary(
    share: Annotated[float, typer.Argument(help="Share of the requests that the package answers, 0.1 for a tenth.")],
    name: NameArgument = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let the latest package answer a share of the requests, beside the deployed one.

    Replaces a candidate, and ends the deployed package's probation. Needs a passing verdict.
    """
    if not 0 < share < 1:
        raise RequestError("command line", f"the share is {share:g}", expected="a number above 0 and below 1")
    _deploy(name, share, project, as_json=as_json)


@deployments.command()
def promote(project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Put the candidate in the place of the deployed package, on probation: servers may roll it back."""
    from isthmus.orchestration.models.release import promote as run

    _released(run(open_project(project)).as_dict(), as_json=as_json)


def _deploy(name: str | None, share: float | None, project: Path | None, *, as_json: bool) -> None:
    from isthmus.orchestration.models.release import deploy as run

    _released(run(open_project(project), name, share=share).as_dict(), as_json=as_json)


@deployments.command()
def rollback(
    to: Annotated[str | None, typer.Option(help="Digest prefix of a deployment (default: the previous one).")] = None,
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove the candidate, or restore the previous deployment if there is no candidate. With --to, do both.

    Fails if a feature that the previous model reads has changed.
    """
    from isthmus.orchestration.models.release import rollback as run

    _released(run(open_project(project), to).as_dict(), as_json=as_json)


@deployments.command()
def history(project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """List deployments and rollbacks, newest first."""
    from isthmus.features.clock import moment
    from isthmus.features.document.blocks import TableBlock
    from isthmus.features.projectstatus import short
    from isthmus.orchestration.models.release import history as run

    events = run(open_project(project))
    rows = [
        [
            moment(event["at"]).isoformat(timespec="seconds"), event["action"], event["model"],
            short(event["digest"]), short(event["contract"]), event["precision"], event["why"],
        ]
        for event in events
    ]  # fmt: skip
    table = TableBlock(["at", "action", "model", "package", "contract", "precision", "why"], rows)
    present(events, lambda: [table], as_json=as_json)


@verbs.command()
def serve(
    port: Annotated[int | None, typer.Option(help="Port (default: from isthmus.toml).")] = None,
    project: ProjectOption = None,
) -> None:
    """Run the API for feature lookups and predictions, until it is stopped. Starts Redis if it is embedded."""
    from isthmus.orchestration.server.serve import serve as run

    raise typer.Exit(run(open_project(project), port=port))


@infra.command()
def fleet(out: OutOption = Path("fleet"), project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Write Kubernetes manifests for serving and training, Dockerfiles and an accelerate configuration."""
    from isthmus.orchestration.fleet.files import fleet as run
    from isthmus.orchestration.server.secret import read_or_create_secret

    opened = open_project(project)
    written = run(opened, out)
    if (record := opened.recording()) and record.private:
        read_or_create_secret(opened)  # the servers and the readers of recorded answers share this key
    present({"fleet": str(out), "files": written if as_json else len(written)}, as_json=as_json)


def _released(report: dict[str, Any], *, as_json: bool) -> None:
    if not as_json:
        from isthmus.features.clock import moment
        from isthmus.features.projectstatus import short

        if limits := report["verdict"].pop("limits", ()):
            report["not verified"] = "; ".join(limits)
        report["seconds"] = ", ".join(f"{stage} {value:.3f}" for stage, value in report["seconds"].items())
        if probation := report["probation"]:
            until = moment(probation["until"]).isoformat(timespec="seconds")
            report["probation"] = f"until {until}; falls back to {short(probation['before']['digest'])}"
    present(report, as_json=as_json)
