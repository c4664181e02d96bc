"""What a command writes: one JSON document on stdout, sentences and progress on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def write_json(report: object) -> None:
    """One document; NaN and the infinities, which JSON does not know, are null."""
    import orjson

    text = orjson.dumps(report, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
    sys.stdout.write(text.decode() + "\n")


def say(text: str) -> None:
    """A sentence."""
    sys.stderr.write(f"isthmus: {text}\n")


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
