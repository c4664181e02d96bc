"""Command output: text or one JSON document on stdout, messages and progress on stderr."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from isthmus.features.errors import IsthmusError, escape_unprintable

if TYPE_CHECKING:
    from isthmus.features.document.blocks import Block


def write_json(report: object) -> None:
    import orjson

    text = orjson.dumps(report, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    sys.stdout.write(text.decode() + "\n")


def say(text: str) -> None:
    sys.stderr.write(f"isthmus: {escape_unprintable(text)}\n")


def present(report: Any, blocks: "Callable[[], Iterable[Block]] | None" = None, *, as_json: bool) -> None:
    if as_json:
        write_json(report)
        return
    from isthmus.orchestration.cli.screens.report import report_blocks
    from isthmus.orchestration.cli.screens.writer import show

    show(blocks() if blocks else report_blocks(report))


def judge(
    report: object, blocks: "Callable[[], Iterable[Block]]", require: Callable[[], object], *, as_json: bool
) -> None:
    """Print the report of a command that checks something, then fail if a check failed.

    `blocks` returns the report as text for a terminal; with `as_json`, the report is printed as JSON instead. `require`
    raises an IsthmusError for a failed check. With `as_json`, its message goes to stderr and it becomes a `typer.Exit`,
    so that stdout has exactly one JSON document.
    """
    present(report, blocks, as_json=as_json)
    try:
        require()
    except IsthmusError as error:
        if not as_json:
            raise
        say(str(error))
        raise typer.Exit(error.exit_code) from error


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text, done: say(f"{done:4.0%} {text}")
        return
    # The default color, red, looks like a failure.
    columns = (
        BarColumn(20, complete_style="green"),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda text, done: bar.update(task, description=text, completed=done)
