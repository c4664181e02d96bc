"""Command output: text or one JSON document on stdout, messages and progress on stderr."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from isthmus.features.errors import IsthmusError, harmless

if TYPE_CHECKING:
    from isthmus.features.document.blocks import Block


def write_json(report: object) -> None:
    """Print a JSON document to stdout. NaN and infinities become null."""
    import orjson

    text = orjson.dumps(report, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    sys.stdout.write(text.decode() + "\n")


def say(text: str) -> None:
    sys.stderr.write(f"isthmus: {harmless(text)}\n")


def present(report: Any, blocks: "Callable[[], Iterable[Block]] | None" = None, *, as_json: bool) -> None:
    """Print a report to stdout: as JSON, or as the blocks that `blocks` returns (default: the report's entries)."""
    if as_json:
        write_json(report)
        return
    from isthmus.orchestration.cli.screens.report import report_blocks
    from isthmus.orchestration.cli.screens.writer import show

    show(blocks() if blocks else report_blocks(report))


def judge(
    report: object, blocks: "Callable[[], Iterable[Block]]", require: Callable[[], object], *, as_json: bool
) -> None:
    """Print a report, then fail if it does not pass: `require` raises an IsthmusError for a failed check.

    With `as_json`, the error goes to stderr and becomes a `typer.Exit`, so that stdout has one document.
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
    """Yield a callback that shows a message and the finished share (0 to 1) on stderr; on a terminal, as a bar."""
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
