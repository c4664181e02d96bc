"""The command line. Verbs parse options, call one function and print its report.

Exit codes: 0 success, 1 a gate or verdict failed or data were refused, 2 bad usage or configuration, 3 a dependency
(Redis, Java, an engine, an optional library) is not available, 130 and 143 stopped by SIGINT or SIGTERM.
"""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from isthmus.features.errors import DependencyError, IsthmusError, RequestError, missing_extra
from isthmus.orchestration.cli import contracts, features, keys, models, packages, project, releases
from isthmus.orchestration.cli.help import WIDTH, CommandGroup
from isthmus.orchestration.cli.options import ProjectOption
from isthmus.orchestration.cli.screens.terminal import say, write_json
from isthmus.orchestration.models.launch import ERRORS, write_error

_INTERRUPTED = 130  # typer's exit code for Ctrl-C
# The base class of typer's usage errors: click's class, or typer's copy of it.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="isthmus",
    cls=CommandGroup,
    help="A feature store and distillation framework: one definition, one contract, one verdict.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing the rich help takes longer than all other imports together
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
)
for part in (project, features, models, releases):
    app.add_typer(part.verbs)
for name, about, parts in (
    ("features", "Look features up, measure them, and write training sets and snapshots.", [features.features]),
    ("pushes", "Collect rows that were pushed to the API.", [features.pushes]),
    ("model", "Search, export and examine students.", [models.model]),
    ("package", "Check a package, or write its page.", [packages.verbs, models.package]),
    ("deploy", "", [releases.deployments]),
    ("answers", "Collect, replay, explain and measure recorded answers.", [features.answers, models.answers]),
    ("infra", "Plan hardware, and write Kubernetes manifests.", [models.infra, releases.infra]),
    ("keys", "", [keys.verbs]),
    ("contract", "", [contracts.verbs]),
):
    group = typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None) if about else parts.pop()
    for commands in parts:
        group.add_typer(commands)
    app.add_typer(group, name=name, cls=CommandGroup)


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        typer.echo(version("isthmus"))
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
    project: ProjectOption = None,
) -> None:
    """A feature store and distillation framework: one definition, one contract, one verdict."""


def main() -> None:
    code = run(sys.argv[1:])
    if {"dagster", "pyarrow.dataset"} & sys.modules.keys():
        # Skip the interpreter's shutdown. With Dagster and torch loaded, DuckDB's binding prints pages about leaks, and
        # a scan of object storage that Arrow is still closing aborts the process (apache/arrow#36389). All of our
        # files and connections are closed by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    try:
        code = app(_ordered(arguments), prog_name="isthmus", standalone_mode=False)
        if code == _INTERRUPTED:
            say("stopped; unfinished work was not written")
    except IsthmusError as error:
        code = _failed(arguments, error)
    except _UsageError as error:
        if error.ctx and error.message == error.ctx.get_help():
            error.show()
            return error.exit_code
        remedy = f"see `{error.ctx.command_path if error.ctx else 'isthmus'} --help`"
        # Newer typer versions prefix messages with pydantic's error class.
        message, _, meant = error.format_message().replace("Value error, ", "").partition(" Did you mean ")
        usage = RequestError("command line", message.rstrip("."), expected=meant.partition("?")[0], remedy=remedy)
        code = _failed(arguments, usage)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        code = _failed(arguments, missing)
    except OSError as error:
        # A full disk or a missing permission is the user's to fix, so it gets a message and not a traceback.
        trouble = DependencyError(
            str(error.filename or "file system"), error.strerror or str(error),
            remedy="free some space and run the same command again" if error.errno == errno.ENOSPC else "",
        )  # fmt: skip
        code = _failed(arguments, trouble)
    return code if isinstance(code, int) else 0


def _ordered(arguments: Sequence[str]) -> list[str]:
    """Reorder arguments for typer, so that `--debug` works anywhere and `--project` also works before the verb."""
    command = [argument for argument in arguments if argument != "--debug"]
    if command[:1] == ["--project"] and len(command) > 2:
        return [*command[2:], *command[:2]]
    if command and command[0].startswith("--project="):
        return [*command[1:], command[0]]
    return command


def _failed(arguments: Sequence[str], error: IsthmusError) -> int:
    if folder := os.environ.get(ERRORS):
        write_error(Path(folder), error)
        return error.exit_code
    if "--debug" in arguments:
        traceback.print_exc()
    if "--json" in arguments:
        write_json(error.as_dict())
    say(str(error))
    return error.exit_code
