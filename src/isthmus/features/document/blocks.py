"""The parts of a document. All text in them is plain; the HTML and Markdown writers escape it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Literal

ABSENT = "-"
_TINY, _HUGE = 1e-7, 1e15
Style = Literal["good", "bad", "strong", "code", "absent", "aside"]


@dataclass(frozen=True, slots=True)
class StyledText:
    """Styled text. `absent` replaces a missing value; `aside` follows a number, for example its interval."""

    text: str
    style: Style


@dataclass(frozen=True, slots=True)
class Figure:
    """An SVG drawing, as a block or in a table cell. Cells do not show the `caption`.

    `content` is SVG elements without the `<svg>` around them, and is not escaped. `label` is for screen readers.
    """

    content: str
    label: str
    caption: str
    width: int
    height: int


Text = str | StyledText | Figure | tuple["Text", ...]

good = partial(StyledText, style="good")
bad = partial(StyledText, style="bad")
strong = partial(StyledText, style="strong")
code = partial(StyledText, style="code")
absent = partial(StyledText, style="absent")
aside = partial(StyledText, style="aside")


@dataclass(frozen=True, slots=True)
class Heading:
    text: Text
    level: int = 2


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph of a page, or a line on a terminal. An error is a paragraph of one `bad` text."""

    text: Text


@dataclass(frozen=True, slots=True)
class Bullets:
    items: Sequence[Text]


@dataclass(frozen=True, slots=True)
class Code:
    """A text to copy into a file, shown below the name of the file."""

    text: str
    file: str


@dataclass(frozen=True, slots=True)
class Fields:
    """A table of names and values: two columns without a header."""

    rows: Sequence[tuple[str, Text]]


@dataclass(frozen=True, slots=True)
class Legend:
    """The meaning of colors in figures. Each entry is a color (`charts.Color`), its name and an explanation."""

    entries: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table. `numbers` are right-aligned columns, `code` monospaced columns; `layout` is a CSS class for phones."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Text]]
    numbers: Collection[str] = ()
    code: Collection[str] = ()
    layout: str = ""


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Blocks that belong together: side by side, in a card, or collapsed under a title (`details`)."""

    layout: Literal["card", "details", "halves", "plots"]
    blocks: "Sequence[Block]"
    title: Text = ""


Block = Heading | Paragraph | Bullets | Code | Fields | Legend | TableBlock | Figure | BlockGroup


def only_figures(cells: Sequence[Text]) -> bool:
    return bool(cells) and all(isinstance(cell, Figure) for cell in cells)


def plain(text: Text) -> str:
    match text:
        case str():
            return text
        case StyledText():
            return text.text
        case Figure():
            return ""
    return "".join(map(plain, text))


def cell(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ABSENT}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(cell, value)) or "none"
    return decimal(value) if isinstance(value, float) else str(value)


def decimal(value: float, digits: int = 4, sign: str = "") -> str:
    """Format a number for a report with `digits` significant digits. Never round digits before the decimal point.

    Numbers below 1e-7 or from 1e15 may have an exponent, others never do. With `sign` "+", positive numbers get a plus
    sign.
    """
    text = f"{value:{sign},.{digits}g}"
    if "e" not in text or not _TINY <= abs(value) < _HUGE:
        return text
    return f"{value:{sign},.0f}" if abs(value) >= 1 else f"{Decimal(text):{sign}f}"
