"""The command line: its verbs and exit codes. Neither this module nor a verb has logic of its own.

Exit codes: 0 done, 1 a gate or verdict failed or data were refused, 2 bad usage or configuration, 3 a dependency
(Redis, Java, an engine, an optional library) is not available, 130 and 143 stopped by SIGINT or SIGTERM.
"""

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from isthmus.features.errors import DependencyError, IsthmusError, RequestError, missing_extra
from isthmus.orchestration.cli import contracts, features, keys, models, packages, project, releases
from isthmus.orchestration.cli.help import WIDTH, CommandGroup
from isthmus.orchestration.cli.options import ProjectOption
from isthmus.orchestration.cli.screens.terminal import say, write_json

_INTERRUPTED = 130
"""What typer makes of Ctrl-C."""
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""The base of typer's errors about wrong usage, which is click's own or typer's copy of it."""

app = typer.Typer(
    name="isthmus",
    cls=CommandGroup,
    help="A feature store and distillation framework: one definition, one contract, one verdict.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing the rich help costs more than everything else together
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
)
for part in (project, features, models, releases):
    app.add_typer(part.verbs)
for name, part in (("keys", keys), ("contract", contracts), ("package", packages)):
    app.add_typer(part.verbs, name=name, cls=CommandGroup)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("isthmus"))
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version.")
    ] = False,
    project: ProjectOption = None,
) -> None:
    """A feature store and distillation framework: one definition, one contract, one verdict."""


def main() -> None:
    """The console script."""
    code = run(sys.argv[1:])
    if {"dagster", "pyarrow.dataset"} & sys.modules.keys():
        # While the interpreter shuts down, DuckDB's binding prints pages about its own leaks, if Dagster and torch are
        # there; and a scan of object storage that Arrow still takes apart ends the process with an abort
        # (apache/arrow#36389). Everything of ours is closed by now.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs a command; turns errors into a sentence and the exit code."""
    try:
        code = app(_ordered(arguments), prog_name="isthmus", standalone_mode=False)
        if code == _INTERRUPTED:
            say("stopped; what was not finished was not written")
    except IsthmusError as error:
        code = _failed(arguments, error)
    except _UsageError as error:
        if error.ctx and error.message == error.ctx.get_help():
            error.show()
            return error.exit_code
        remedy = f"see `{error.ctx.command_path if error.ctx else 'isthmus'} --help`"
        # Newer typer quotes pydantic, which begins with the class of the error.
        message, _, meant = error.format_message().replace("Value error, ", "").partition(" Did you mean ")
        usage = RequestError("command line", message.rstrip("."), expected=meant.partition("?")[0], remedy=remedy)
        code = _failed(arguments, usage)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        code = _failed(arguments, missing)
    except OSError as error:
        # A full disk, a folder that may not be written: the user's to mend.
        trouble = DependencyError(
            str(error.filename or "file system"), error.strerror or str(error),
            remedy="make room there, and run the same command again" if error.errno == errno.ENOSPC else "",
        )  # fmt: skip
        code = _failed(arguments, trouble)
    return code if isinstance(code, int) else 0


def _ordered(arguments: Sequence[str]) -> list[str]:
    """The arguments as typer wants them: `--debug` counts anywhere, and `--project` also before the verb."""
    command = [argument for argument in arguments if argument != "--debug"]
    if command[:1] == ["--project"] and len(command) > 2:
        return [*command[2:], *command[:2]]
    if command and command[0].startswith("--project="):
        return [*command[1:], command[0]]
    return command


def _failed(arguments: Sequence[str], error: IsthmusError) -> int:
    """Shows an error as `--debug` and `--json` say; returns the exit code."""
    if "--debug" in arguments:
        traceback.print_exc()
    if "--json" in arguments:
        write_json(error.as_dict())
    say(str(error))
    return error.exit_code
