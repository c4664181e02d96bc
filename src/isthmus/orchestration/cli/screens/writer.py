"""Print documents to the terminal with rich."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from isthmus.features.document import blocks
from isthmus.features.document.blocks import ABSENT, Block, Figure, StyledText, TableBlock, Text
from isthmus.features.errors import escape_unprintable

_STYLES = {"good": "green", "bad": "red", "strong": "bold", "aside": "dim"}
_NUMBER = 32  # maximum characters of a number
_NAME, _FIRST = 40, 56  # maximum widths of unwrapped columns, and of the first column, which has the row names
_FIELD = 16
_GAP = 2  # characters between two columns
_WIDE = 110  # width without a terminal


def show(blocks: Iterable[Block]) -> None:
    console = Console()
    wraps = console.is_terminal or "COLUMNS" in os.environ
    console = console if wraps else Console(width=_WIDE)
    for part in chain.from_iterable(_parts(block, console.width) for block in blocks):
        if not isinstance(part, RichText):
            console.print(part, highlight=False)
            continue
        for line in _lines(part, console.width) if wraps else [part]:
            console.print(line, highlight=False, soft_wrap=True)


def _lines(text: RichText, width: int) -> Iterator[RichText]:
    """Wrap a text and align its lines with its first word. A word longer than a line, such as a path, stays whole."""
    for line in text.split("\n", allow_blank=True):
        indent = next(iter(re.findall(r"^(?: *\S.*?  | *\* ?)?", line.plain)))
        begins, length = list[int](), 0
        for word in re.finditer(r"\s*\S+", line.plain):
            if length > len(indent) and length + len(word.group()) > width:
                begins.append(word.end() - len(word.group().lstrip()))
                length = len(indent) + len(word.group().lstrip())
            else:
                length += len(word.group())
        first, *rest = line.divide(begins) or [line]
        for part in (first, *(RichText(" " * len(indent)).append_text(part) for part in rest)):
            part.rstrip()
            yield part


def _parts(block: Block, width: int) -> Iterator[RichText | RichTable]:
    match block:
        case TableBlock():
            yield from _tables(block, width)
        case blocks.BlockGroup(_, parts, title):
            if title:
                yield _styled(title)
            yield from chain.from_iterable(_parts(part, width) for part in parts)
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
            longest = max([_FIELD, *(len(name) for name, _ in rows)])
            indent = f"\n{'':>{longest + 2}}"
            for name, value in rows:
                line = RichText(f"{name:>{longest}}", "dim").append("  ", "not dim")
                yield line.append_text(RichText(indent).join(_styled(value).split("\n", allow_blank=True)))


def _tables(table: TableBlock, width: int) -> Iterator[RichTable]:
    """Split a table to fit the width without wrapping names and numbers; skip empty columns and drawings."""
    columns = [[row[n] for row in table.rows] for n in range(len(table.columns))]
    shown = [
        n
        for n, cells in enumerate(columns)
        if not blocks.only_figures(cells) and not (n and cells and all(map(_empty, cells)))
    ]
    for is_narrow in (False, True):
        made = [_Column(table, n, [_cell(each, table, n, is_narrow) for each in columns[n]]) for n in shown]
        if _least(made) <= width:
            break
    parts = [made[:1]]
    for column in made[1:]:
        if len(parts[-1]) > 1 and _least([*parts[-1], column]) > width:
            parts.append(made[:1])
        parts[-1].append(column)
    yield from (_drawn_table(part, width) for part in parts)


class _Column:
    def __init__(self, table: TableBlock, n: int, cells: Sequence[RichText]) -> None:
        self.name, self.cells = escape_unprintable(table.columns[n]), cells
        self.is_number = table.columns[n] in table.numbers
        lines = [line for cell in cells for line in cell.plain.splitlines()]
        is_whole = n == 0 or self.is_number or table.columns[n] in table.code
        words = [*self.name.split(), *(lines if is_whole else (word for line in lines for word in line.split()))]
        self.full = max(map(cell_len, [self.name, *lines]))
        self.least = min(max(map(cell_len, words), default=0), _NAME if n else _FIRST)


def _least(columns: Sequence[_Column]) -> int:
    return sum(column.least + _GAP for column in columns)


def _drawn_table(columns: Sequence[_Column], width: int) -> RichTable:
    rich, room = RichTable(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0)), max(width - _least(columns), 0)
    for column in columns:
        more = min(max(column.full - column.least, 0), room)
        room -= more
        rich.add_column(
            RichText(column.name), justify="right" if column.is_number else "left", overflow="fold",
            width=max(column.least + more, 1),
        )  # fmt: skip
    for row in zip(*(column.cells for column in columns), strict=True):
        rich.add_row(*row)
    return rich


def _cell(cell: Text, table: TableBlock, n: int, is_narrow: bool) -> RichText:
    if (
        is_narrow
        and isinstance(cell, tuple)
        and cell
        and isinstance(cell[-1], StyledText)
        and cell[-1].style == "aside"
    ):
        return RichText("\n").join(
            [_cell(cell[:-1], table, n, False), RichText(escape_unprintable(cell[-1].text), "dim")]
        )
    text = _styled(cell)
    if table.columns[n] in table.numbers:
        text.truncate(_NUMBER, overflow="ellipsis")
    return text


def _empty(text: Text) -> bool:
    return blocks.plain(text).strip() in ("", ABSENT)


def _styled(text: Text, style: str = "") -> RichText:
    """Convert a text for rich. Markup and control codes are disabled, because the text may quote untrusted files."""
    match text:
        case str():
            return RichText(escape_unprintable(text), style)
        case StyledText(words, kind):
            return RichText(escape_unprintable(f" ({words})" if kind == "aside" else words), _STYLES.get(kind, style))
        case Figure():
            return RichText()
    return RichText().join([_styled(part, style) for part in text])
