"""A document on the terminal, by rich."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from isthmus.features.document import blocks
from isthmus.features.document.blocks import ABSENT, Block, Figure, Span, Table, Text
from isthmus.features.errors import harmless

_STYLES = {"good": "green", "bad": "red", "strong": "bold", "aside": "dim"}
_NUMBER = 32
"""Characters of a number: the bytes of a token may have no end."""
_NAME = 40
"""Characters of a row's name that narrow terminals show."""
_FIELD = 16


def show(blocks: Iterable[Block]) -> None:
    """Prints a document to stdout.

    It is as wide as the terminal; elsewhere it is wide enough for every table, and has no colors.
    """
    console = Console()
    console = console if console.is_terminal else Console(width=110)
    for part in chain.from_iterable(map(_parts, blocks)):
        console.print(part, highlight=False, soft_wrap=isinstance(part, RichText))


def _parts(block: Block) -> Iterator[RichText | RichTable]:
    """The lines and tables of a block. Figures are left out."""
    match block:
        case Table():
            yield _table(block)
        case blocks.Group(_, parts, title):
            if title:
                yield _styled(title)
            yield from chain.from_iterable(map(_parts, parts))
        case blocks.Heading(text):
            yield RichText()
            yield _styled(text, "bold")
        case blocks.Paragraph(text):
            yield _styled(text)
        case blocks.Bullets(items):
            yield from (RichText("* ").append_text(_styled(item)) for item in items)
        case blocks.Code(text, file):
            yield _styled(f"{file}: {text}".replace("\n", f"\n{'':>{len(file) + 2}}"))
        case blocks.Legend(entries):
            yield from (_styled(f"{name}: {about}" if about else name) for _, name, about in entries)
        case blocks.Fields(all_rows):
            rows = [(name, value) for name, value in all_rows if not _empty(value)]
            width = max([_FIELD, *(len(name) for name, _ in rows)])
            indent = f"\n{'':>{width + 2}}"
            for name, value in rows:
                line = RichText(f"{name:>{width}}", "dim").append("  ", "not dim")
                yield line.append_text(RichText(indent).join(_styled(value).split("\n", allow_blank=True)))


def _table(table: Table) -> RichTable:
    """A table in which names and numbers do not wrap. Columns of figures are left out, and those without a value."""
    columns = [[row[n] for row in table.rows] for n in range(len(table.columns))]
    shown = [
        n for n, cells in enumerate(columns) if not _drawn(cells) and not (n and cells and all(map(_empty, cells)))
    ]
    rich = RichTable(box=box.SIMPLE, pad_edge=False)
    for n in shown:
        name = table.columns[n]
        number = name in table.numbers
        longest = max((len(blocks.plain(row[0])) for row in table.rows), default=0) if n == 0 else 0
        rich.add_column(
            RichText(harmless(name)), justify="right" if number else "left", min_width=min(longest, _NAME) or None,
            no_wrap=number or n == 0 or name in table.code, overflow="ellipsis" if number or n == 0 else "fold",
        )  # fmt: skip
    for row in table.rows:
        cells = [_styled(row[n]) for n in shown]
        for n, text in zip(shown, cells, strict=True):
            if table.columns[n] in table.numbers:
                text.truncate(_NUMBER, overflow="ellipsis")
        rich.add_row(*cells)
    return rich


def _empty(text: Text) -> bool:
    return blocks.plain(text).strip() in ("", ABSENT)


def _drawn(cells: Sequence[Text]) -> bool:
    return bool(cells) and all(isinstance(cell, Figure) for cell in cells)


def _styled(text: Text, style: str = "") -> RichText:
    """The text as rich prints it: a stranger's file may be quoted, so nothing in it is markup or a control code."""
    match text:
        case str():
            return RichText(harmless(text), style)
        case Span(words, kind):
            return RichText(harmless(f" ({words})" if kind == "aside" else words), _STYLES.get(kind, style))
        case Figure():
            return RichText()
    return RichText().join([_styled(part, style) for part in text])
