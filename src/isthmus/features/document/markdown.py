"""Write a document in Markdown: CommonMark with GitHub's tables. Text is escaped, and figures are left out."""

import re
from collections.abc import Iterable

from isthmus.features.document import blocks
from isthmus.features.document.blocks import Block, Figure, StyledText, TableBlock, Text, only_figures

# An underscore inside a word is not markup: `late_arrival` stays readable.
_MARKUP = re.compile(r"""[\\`*\[\]<>|#&~!$]|_(?![^\W_])""")
_SPACE = re.compile(r"\s+")
_LIST = re.compile(r"^([-+=]+|\d+[.)])(?=\s|$)")


def to_markdown(blocks: Iterable[Block]) -> str:
    return "\n\n".join(filter(None, map(_block, blocks))) + "\n"


def _block(block: Block) -> str:
    match block:
        case blocks.Heading(text, level):
            return f"{'#' * level} {_inline(text)}"
        case blocks.Paragraph(text):
            return _paragraph(text)
        case blocks.Bullets(items):
            return "\n".join(f"* {_paragraph(item)}" for item in items)
        case blocks.Code(text, file):
            return f"{_paragraph(file)}\n\n```\n{text}\n```"
        case blocks.Fields(rows):
            return _table(TableBlock(["", " "], rows, numbers=[" "]))
        case blocks.Legend(entries):
            return "\n".join(f"* {_paragraph(f'{name}: {about}')}" for _, name, about in entries)
        case TableBlock():
            return _table(block)
        case blocks.BlockGroup(_, parts, title):
            return "\n\n".join(filter(None, (_paragraph(title), *map(_block, parts))))
    return ""


def _table(table: TableBlock) -> str:
    columns = [n for n in range(len(table.columns)) if not only_figures([row[n] for row in table.rows])]
    rules = ["---:" if name in table.numbers else "---" for name in table.columns]
    lines = [[*map(_inline, table.columns)], rules, *([*map(_inline, row)] for row in table.rows)]
    return "\n".join(f"| {' | '.join(line[n] for n in columns)} |" for line in lines)


def _paragraph(text: Text) -> str:
    """Write a text that starts a line; escape a dash or number that would begin a list."""
    return _LIST.sub(lambda match: match[0][:-1] + "\\" + match[0][-1], _inline(text))


def _inline(text: Text) -> str:
    return _styled(text).strip()


def _styled(text: Text) -> str:
    match text:
        case str():
            return _MARKUP.sub(r"\\\g<0>", _SPACE.sub(" ", text))
        case StyledText(words, "aside"):
            return f" ({_inline(words)})"
        case StyledText(words, "absent"):
            return f"*{_inline(words)}*"
        case StyledText(words, "strong"):
            return f"**{_inline(words)}**"
        case StyledText(words):
            return _inline(words)
        case Figure():
            return ""
    return "".join(map(_styled, text))
