"""Texts for tokenizers: docstrings of the standard library, and letters of all kinds."""

import ast
import random
import sysconfig
from functools import cache
from pathlib import Path

# U+09FE is left out: NFC of the library tokenizers is that of Unicode 9, for which it is no mark yet.
_RANGES = ((0x20, 0x7F), (0x20, 0x7F), (0x80, 0x250), (0x300, 0x370), (0x370, 0x600), (0x900, 0x9FE), (0xE00, 0xE80),
           (0x1100, 0x1200), (0x2000, 0x2070), (0x3000, 0x30FF), (0x4E00, 0x5000), (0xAC00, 0xAD00), (0xFE00, 0xFF00),
           (0x1D400, 0x1D500), (0x1F300, 0x1F700), (0x00, 0x20))  # fmt: skip
_WORDS = (
    "  ",
    "\n\n",
    "'s",
    "'LL",
    " 1234567",
    "\r\n",
    "\u00a0",
    "\u0085",
    "\ufeff",
    "e\u0301",
    "\t",
    " <|end|>",
    "<|be-gin|>",
)


@cache
def docstrings(folders: tuple[str, ...] = ("email", "json", "http", "unittest", "asyncio", "concurrent")) -> list[str]:
    """The paragraphs of the docstrings of some packages of the standard library."""
    library, found = Path(sysconfig.get_paths()["stdlib"]), dict[str, None]()
    for file in sorted(path for folder in folders for path in (library / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                found |= dict.fromkeys((ast.get_docstring(node) or "").split("\n\n"))
    return [text for text in found if text.strip()]


@cache
def texts(count: int = 10_000) -> list[str]:
    """Docstrings, and texts that nobody would write."""
    draw = random.Random(7)
    made = [text[:300] for text in docstrings()][: count // 2]
    while len(made) < count:
        parts = []
        for _ in range(draw.randint(1, 12)):
            low, high = draw.choice(_RANGES)
            parts += [chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 4))]
            if draw.random() < 0.3:
                parts.append(draw.choice(_WORDS))
        made.append("".join(parts))
    return made
