"""What a command writes: one JSON document on stdout, sentences and progress on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from isthmus.features.errors import IsthmusError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def write_json(report: object) -> None:
    """One document; NaN and the infinities, which JSON does not know, are null."""
    import orjson

    text = orjson.dumps(report, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    sys.stdout.write(text.decode() + "\n")


def say(text: str) -> None:
    """A sentence."""
    sys.stderr.write(f"isthmus: {harmless(text)}\n")


def harmless(text: str) -> str:
    """A text without what a terminal would obey: it may quote a stranger's file."""
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def present(report: Any, show: Callable[[], None] | None = None, *, as_json: bool) -> None:
    """Writes a report as JSON, or shows it: in the way made for it, or else as a table or lines."""
    if as_json:
        write_json(report)
        return
    if show:
        show()
        return
    from isthmus.orchestration.cli.screens.steps import show_report

    show_report(report)


def judge(report: object, show: Callable[[], None], require: Callable[[], object], *, as_json: bool) -> None:
    """Shows what was found, and ends with the error's exit code if it is refused.

    Raises:
        IsthmusError: it is refused, and nobody asked for JSON: then the report is the one document on stdout.
    """
    import typer  # assets show nothing, and do without

    if not as_json:
        show()
        require()
        return
    write_json(report)
    try:
        require()
    except IsthmusError as error:
        say(str(error))
        raise typer.Exit(error.exit_code) from error


def new_console() -> "Console":
    """Stdout: as wide as the terminal; wide enough for every table where there is none, and without colors there."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=110)


def new_table(*columns: str, words: bool = False) -> "Table":
    """A table whose first column holds words, and whose others hold numbers unless they are `words`, too."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for n, column in enumerate(columns):
        table.add_column(column, justify="left" if words or n == 0 else "right", no_wrap=True)
    return table


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr while a step runs, if stderr is a terminal; the step's lines otherwise."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text, done: say(f"{done:4.0%} {text}")
        return
    columns = (
        BarColumn(20),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda text, done: bar.update(task, description=text, completed=done)
