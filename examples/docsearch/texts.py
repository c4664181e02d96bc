"""Write unlabelled texts, the sentences of all installed docstrings, to data/texts.parquet: `python texts.py`.

Sources are parsed, never imported. The texts stay on this machine; packages contain only weights trained on them.
"""

import ast
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from corpus import cleaned

FILE = Path(__file__).parent / "data" / "texts.parquet"
WORDS = range(3, 33)
PROSE = 0.75  # minimum share of letters and spaces; below it a sentence is a table or a formula
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


class Text(NamedTuple):
    """A sentence of a docstring, or its whole first paragraph.

    `question` is the first paragraph: if it is a test question, all sentences of the docstring are left out.
    """

    text: str
    question: str
    first: bool


def sentences(folder: Path) -> Iterator[Text]:
    """Yield the sentences of all docstrings in a folder by file and line, including tests and private names."""
    for file in sorted(folder.rglob("*.py")):
        if "site-packages" in file.relative_to(folder).parts:  # inside the standard library; read separately
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escape sequences
                tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, RecursionError):  # a template, or for another Python version
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _of(ast.get_docstring(node) or "")


def _of(docstring: str) -> Iterator[Text]:
    first, _, rest = docstring.partition("\n\n")
    question = cleaned(first)
    yield Text(question, question, True)
    for paragraph in rest.split("\n\n"):
        if ">>>" not in paragraph:
            for sentence in _END.split(cleaned(paragraph)):
                yield Text(sentence, question, False)


def texts(folders: list[Path]) -> pa.Table:
    """Return all texts with the length of a question, without duplicates; first paragraphs come first."""
    found: dict[str, Text] = {}
    for folder in folders:
        for one in sentences(folder):
            prose = sum(letter.isalpha() or letter == " " for letter in one.text)
            if len(one.text.split()) in WORDS and prose >= PROSE * len(one.text):
                found.setdefault(one.text, one)
    kept = sorted(found.values(), key=lambda one: not one.first)
    return pa.Table.from_pylist([one._asdict() for one in kept])


if __name__ == "__main__":
    table = texts([Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))])
    FILE.parent.mkdir(exist_ok=True)
    pq.write_table(table, FILE)
    sys.stdout.write(f"{table.num_rows:,} texts in {FILE}\n")
