"""Markdown (CommonMark with GitHub's tables) of texts that may hold anything."""

import re
from collections.abc import Iterable, Sequence

# An underscore within a word is none: `late_arrival` stays readable.
_MARKS = re.compile(r"""[\\`*\[\]<>|#&~!$]|_(?![^\W_])""")
_SPACE = re.compile(r"\s+")
_START = re.compile(r"^([-+=]+|\d+[.)])(?=\s|$)")


def text(value: str) -> str:
    """A text that stands within a line of Markdown as it is: without markup, links or HTML."""
    return _MARKS.sub(r"\\\g<0>", _SPACE.sub(" ", value).strip())


def paragraph(value: str) -> str:
    """A text that begins a line, and no list there."""
    return _START.sub(lambda found: found[0][:-1] + "\\" + found[0][-1], text(value))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column holds words, and whose others hold numbers; cells are Markdown."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
