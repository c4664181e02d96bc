"""`isthmus keys`: API keys and their scopes."""

from typing import Annotated

import typer

from isthmus.orchestration.cli.options import JsonOption, ProjectOption, open_project
from isthmus.orchestration.cli.screens.terminal import present

verbs = typer.Typer(help="Create, list and revoke API keys.", no_args_is_help=True, rich_markup_mode=None)
KeyArgument = Annotated[str, typer.Argument(help="Name of the key, such as its owner.")]


@verbs.command("create")
def create(
    name: KeyArgument,
    scope: Annotated[
        list[str],
        typer.Option(
            help="read:SERVICE, push:VIEW, predict:MODEL, snapshot:SERVICE or snapshot:SERVICE/VALUE; * for any name; "
            "status:* for /status, /metrics and /models. Can be repeated."
        ),
    ],
    project: ProjectOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key and print it. It is never shown again. From now on, servers reject requests without a key."""
    from isthmus.orchestration.server.keys import create as run

    present(run(open_project(project), name, scope), as_json=as_json)


@verbs.command("list")
def list_(project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """List the names and scopes of all keys."""
    from isthmus.orchestration.server.keys import describe as run

    present(run(open_project(project)), as_json=as_json)


@verbs.command("revoke")
def revoke(name: KeyArgument, project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Remove a key. Running servers reject it from the next request on. Without any key, they reject all requests."""
    from isthmus.orchestration.server.keys import revoke as run

    present(run(open_project(project), name), as_json=as_json)


@verbs.command("open")
def open_(project: ProjectOption = None, as_json: JsonOption = False) -> None:
    """Let servers on loopback answer without a key, unless `require_keys` is set. Revoke all keys first."""
    from isthmus.orchestration.server.keys import allow_without_key as run

    present(run(open_project(project)), as_json=as_json)
